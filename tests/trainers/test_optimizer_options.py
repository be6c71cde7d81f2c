"""8-bit AdamW: what it holds is what the planner says; refused where its kernels cannot read the parameters."""

from importlib.util import find_spec
from types import SimpleNamespace

import pytest
import torch
from datasets import Dataset
from tiny_policy import byte_tokenizer, tiny_model

from trl_gptoss.memory import ModelShape, TrainSetup, predict_memory
from trl_gptoss.plan_command import _settings, choose, load_shape
from trl_gptoss.trainers import GptOssGRPOConfig, GptOssGRPOTrainer
from trl_gptoss.trainers.optimizer_options import check_optimizer


@pytest.mark.parametrize(
    "optim", ["adamw_8bit", "adamw_bnb_8bit", "paged_adamw_8bit", "paged_adamw_32bit", "lion_8bit"]
)
def test_bitsandbytes_is_refused_with_fsdp2_only(optim, tmp_path):
    args = GptOssGRPOConfig(str(tmp_path), optim=optim, use_cpu=True, bf16=False)
    check_optimizer(args, SimpleNamespace(is_fsdp2=False))
    with pytest.raises(ValueError, match=f"optim='{optim}' with FSDP2.*adamw_torch_8bit"):
        check_optimizer(args, SimpleNamespace(is_fsdp2=True))


@pytest.mark.parametrize("optim", ["adamw_torch", "adamw_torch_fused", "adamw_torch_8bit", "adafactor", "sgd"])
def test_others_pass(optim, tmp_path):
    args = GptOssGRPOConfig(str(tmp_path), optim=optim, use_cpu=True, bf16=False)
    check_optimizer(args, SimpleNamespace(is_fsdp2=True))


def test_the_planner_tries_it_last_and_not_for_lora_or_fsdp2():
    shape = load_shape("openai/gpt-oss-20b")
    for change, last in (
        ({"method": "full"}, "adamw_8bit"),
        ({"method": "lora"}, "activation_offloading"),
        ({"method": "full", "num_gpus": 8, "sharding": "fsdp2"}, "activation_offloading"),
    ):
        setup, used = choose(shape, TrainSetup(tokens=32768, **change), room=0)
        assert used[-1] == last and _settings(setup).get("optim") == ("adamw_8bit" if last == "adamw_8bit" else None)


@pytest.mark.skipif(find_spec("bitsandbytes") is None, reason="needs the extra `fast`")
def test_states_have_the_bytes_that_the_planner_says(tmp_path):
    model = tiny_model(hidden_size=256, intermediate_size=256, head_dim=64, vocab_size=2048)
    args = GptOssGRPOConfig(
        str(tmp_path), optim="adamw_8bit", per_device_train_batch_size=2, num_generations=2, max_steps=2, learning_rate=1e-2,
        max_rollout_tokens=4, use_cpu=True, bf16=False, report_to="none", save_strategy="no", log_trajectories=0,
    )  # fmt: skip
    data = Dataset.from_list([{"prompt": [{"role": "user", "content": f"say {i}"}]} for i in range(8)])
    trainer = GptOssGRPOTrainer(
        model,
        lambda completion_ids, **_: [float(sum(ids) % 11) for ids in completion_ids],
        args,
        data,
        processing_class=byte_tokenizer(),
    )
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    trainer.train()
    changed = [name for name, p in model.named_parameters() if not torch.equal(p, before[name])]
    assert len(changed) > 0.9 * len(before)
    states = trainer.optimizer.optimizer.state.values()
    measured = sum(
        x.numel() * x.element_size() for s in states for n, x in s.items() if n.startswith(("state", "absmax"))
    )
    setup = trainer._setup(64)
    assert setup.optimizer == "adamw_8bit"
    predicted = predict_memory(ModelShape.from_config(model.config), setup).parts["optimizer"]
    assert predicted == pytest.approx(measured, rel=0.03)  # tensors below 4096 entries keep fp32 states
