"""`freeze`: exactly the named parameters stay where they are, and what makes no sense is refused."""

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig
from tiny_policy import byte_tokenizer, tiny_model
from transformers import Qwen3Config, Qwen3ForCausalLM

from trl_gptoss.trainers import GptOssGRPOConfig, GptOssGRPOTrainer

TOKENIZER = byte_tokenizer()
DATA = Dataset.from_list([{"prompt": [{"role": "user", "content": f"say {i}"}]} for i in range(16)])

# Written by hand from the architecture: what each name freezes, as endings of parameter names.
PROJECTIONS = [f"self_attn.{p}_proj.{kind}" for p in "qkvo" for kind in ("weight", "bias")]
PARTS = {
    "attention": [*PROJECTIONS, "self_attn.sinks"],
    "sinks": ["self_attn.sinks"],
    "router": ["mlp.router.weight", "mlp.router.bias"],
    "experts": [f"mlp.experts.{p}{kind}" for p in ("gate_up_proj", "down_proj") for kind in ("", "_bias")],
    "embeddings": ["embed_tokens.weight", "lm_head.weight"],
}


def length_reward(completion_ids, **kwargs):
    return [float(sum(ids) % 11) for ids in completion_ids]


def build(tmp_path, model=None, peft_config=None, **settings):
    defaults = {
        "per_device_train_batch_size": 4, "num_generations": 4, "max_steps": 2, "max_rollout_tokens": 6,
        "learning_rate": 1e-2, "bf16": False, "use_cpu": True, "report_to": "none", "save_strategy": "no",
        "disable_tqdm": True, "log_trajectories": 0, "weight_decay": 0.1,
    }  # fmt: skip
    args = GptOssGRPOConfig(str(tmp_path), **{**defaults, **settings})
    model = tiny_model() if model is None else model
    return GptOssGRPOTrainer(model, length_reward, args, DATA, processing_class=TOKENIZER, peft_config=peft_config)


def moved(trainer):
    before = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
    trainer.train()
    return {name for name, p in trainer.model.named_parameters() if not torch.equal(p, before[name])}


@pytest.mark.parametrize(
    "names", [None, ["attention"], ["sinks"], ["router"], ["experts"], ["embeddings"], ["attention", "experts"]]
)
def test_exactly_these_parameters_stay(tmp_path, names):
    """With weight decay and activation checkpointing, which is the default: both could move or cut off too much."""
    trainer = build(tmp_path, freeze=names)
    everything = {name for name, _ in trainer.model.named_parameters()}
    endings = tuple(ending for name in names or [] for ending in PARTS[name])
    stay = {name for name in everything if endings and name.endswith(endings)}
    assert bool(stay) == bool(names)
    assert moved(trainer) == everything - stay


@pytest.mark.parametrize("names", [["atention"], ["attention", "attention"], "attention", ["attention", "lora"]])
def test_unknown_names_are_refused(tmp_path, names):
    with pytest.raises(ValueError, match="freeze is .*expected"):
        GptOssGRPOConfig(str(tmp_path), bf16=False, use_cpu=True, freeze=names)


def test_lora_conflicts_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"q_proj.*lora_target_modules"):
        build(tmp_path, peft_config=LoraConfig(r=2, target_modules=["q_proj"]), freeze=["attention"])


def test_freezing_everything_or_what_is_not_there_is_refused(tmp_path):
    config = Qwen3Config(
        vocab_size=300, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, head_dim=8, pad_token_id=257, eos_token_id=258,
    )  # fmt: skip
    with pytest.raises(ValueError, match="router are parts of GPT-OSS.*qwen3"):
        build(tmp_path, Qwen3ForCausalLM(config), freeze=["attention", "router"])
    trainer = build(tmp_path, Qwen3ForCausalLM(config), freeze=["attention"])
    trainable = {n for n, p in trainer.model.named_parameters() if p.requires_grad}
    assert trainable and not any("self_attn" in n for n in trainable)
