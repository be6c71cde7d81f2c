"""What the trainer writes in each `save_format`, with and without adapters; which weights sample; resuming adapters."""

import functools
import json
import logging

import pytest
import torch
from cpu_settings import ON_CPU
from datasets import Dataset
from peft import LoraConfig, PeftModel
from tiny_policy import byte_tokenizer, tiny_model
from transformers import GptOssForCausalLM, Mxfp4Config

from trl_gptoss import save_pretrained_mxfp4
from trl_gptoss.hub.adapters import merged_weights
from trl_gptoss.trainers import GptOssGRPOConfig, GptOssGRPOTrainer
from trl_gptoss.trainers.rollout_weights import quantised
from trl_gptoss.trainers.saving import recipe

TOKENIZER = byte_tokenizer()
LORA = LoraConfig(
    r=4,
    target_modules=["q_proj", "v_proj"],
    target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj", "mlp.router.weight"],
)
IDS = torch.tensor([[5, 77, 99, 3, 3, 142, 210, 7, 64, 31, 12, 8]])


def length_reward(completion_ids, **kwargs):
    return [float(sum(ids) % 11) for ids in completion_ids]


def build(output_dir, peft_config=None, model=None, **settings):
    settings = {
        **ON_CPU,
        "per_device_train_batch_size": 4,
        "num_generations": 4,
        "max_steps": 2,
        "max_rollout_tokens": 6,
        "learning_rate": 1e-2,
        "save_strategy": "steps",
        "save_steps": 1,
        "on_policy_check_steps": 1,
        **settings,
    }
    data = Dataset.from_list([{"prompt": [{"role": "user", "content": f"say {i}"}]} for i in range(16)])
    args = GptOssGRPOConfig(str(output_dir), **settings)
    model = tiny_model() if model is None else model
    return GptOssGRPOTrainer(model, length_reward, args, data, processing_class=TOKENIZER, peft_config=peft_config)


def logits(model):
    model.eval()
    with torch.no_grad():
        return model(IDS).logits


def load_quantised(folder):
    return GptOssForCausalLM.from_pretrained(folder, quantization_config=Mxfp4Config(dequantize=True))


@pytest.mark.slow
def test_bf16_and_mxfp4_side_by_side(tmp_path):
    trainer = build(tmp_path, save_format="both")
    trainer.train()
    trainer.save_model()
    for folder in (tmp_path / "checkpoint-2", tmp_path):
        assert torch.equal(logits(GptOssForCausalLM.from_pretrained(folder)), logits(trainer.model))
        with merged_weights(trainer.model, quantised):
            expected = logits(trainer.model)
        torch.testing.assert_close(logits(load_quantised(folder / "mxfp4")), expected, rtol=0, atol=1e-6)
        assert (folder / "mxfp4/tokenizer.json").is_file()
    trainer.save_model()  # a second time over the first


@pytest.mark.slow
def test_mxfp4_alone_takes_the_place_of_the_weights_but_not_in_checkpoints(tmp_path):
    trainer = build(tmp_path, save_format="mxfp4")
    trainer.save_model()
    trainer.args.save_format = "bf16"
    trainer.save_model()
    assert torch.equal(logits(GptOssForCausalLM.from_pretrained(tmp_path)), logits(trainer.model))
    trainer.args.save_format = "mxfp4"
    trainer.train()
    trainer.save_model()
    assert json.loads((tmp_path / "config.json").read_text())["quantization_config"]["quant_method"] == "mxfp4"
    assert not (tmp_path / "mxfp4").exists() and (tmp_path / "tokenizer.json").is_file()
    with merged_weights(trainer.model, quantised):
        torch.testing.assert_close(logits(load_quantised(tmp_path)), logits(trainer.model), rtol=0, atol=1e-6)
    resumed = build(tmp_path, save_format="mxfp4", max_steps=3)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))  # trained weights, not quantised ones
    assert resumed.state.global_step == 3


def test_gathered_weights_of_a_model_from_mxfp4_are_saved_in_both_formats(tmp_path):
    """transformers empties the state dict of such a model; the quantised one must not be made of the model's own shards."""
    save_pretrained_mxfp4(tiny_model(), tmp_path / "base")
    model = load_quantised(tmp_path / "base")
    trainer = build(tmp_path / "run", save_format="both", model=model)
    gathered = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    gathered["model.norm.weight"] *= 2
    trainer._save(str(tmp_path / "out"), gathered)
    saved = logits(GptOssForCausalLM.from_pretrained(tmp_path / "out"))
    assert torch.equal(logits(load_quantised(tmp_path / "out/mxfp4")), saved)
    assert not torch.allclose(saved, logits(model)) and len(gathered) == len(model.state_dict())


def test_a_checkpoint_survives_weights_that_cannot_be_quantised(tmp_path, caplog):
    trainer = build(tmp_path, save_format="both")
    trainer.model.model.layers[0].mlp.experts.down_proj.data[0, 0, 0] = float("nan")
    with caplog.at_level(logging.ERROR):
        trainer.save_model(str(tmp_path / "checkpoint-1"), _internal_call=True)
    assert "was not quantised as well" in caplog.text and (tmp_path / "checkpoint-1/model.safetensors").is_file()
    trainer.args.save_format = "mxfp4"
    with pytest.raises(ValueError, match="NaN"):
        trainer.save_model()
    assert (tmp_path / "model.safetensors").is_file()  # not lost


def test_adapters_with_sinks_and_their_quantised_model(tmp_path):
    trainer = build(tmp_path, LORA, save_format="mxfp4", train_sinks=True)
    trainer.train()
    trainer.save_model()
    moved = (
        trainer.model.get_base_model().model.layers[0].self_attn.sinks - tiny_model().model.layers[0].self_attn.sinks
    )
    assert moved.abs().max() > 0
    assert (tmp_path / "adapter_model.safetensors").is_file() and not (tmp_path / "model.safetensors").exists()
    plain = PeftModel.from_pretrained(tiny_model(), tmp_path)
    assert torch.equal(logits(plain), logits(trainer.model))
    with merged_weights(trainer.model, quantised):
        expected = logits(trainer.model)
    torch.testing.assert_close(logits(load_quantised(tmp_path / "mxfp4")), expected, rtol=0, atol=1e-6)


def test_resuming_adapters_and_sinks_is_exact(tmp_path):
    straight = build(tmp_path, LORA, train_sinks=True, max_steps=4, save_steps=2)
    straight.train()
    resumed = build(tmp_path, LORA, train_sinks=True, max_steps=4, save_steps=2)
    torch.manual_seed(12345)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    rewards = [[e.get("reward") for e in t.state.log_history] for t in (straight, resumed)]
    assert rewards[0] == rewards[1]
    for (name, a), (_, b) in zip(straight.model.named_parameters(), resumed.model.named_parameters(), strict=True):
        assert torch.equal(a, b) and a.requires_grad == b.requires_grad, name


def test_quantised_rollouts_sample_the_shipped_model_and_train_the_other(tmp_path, monkeypatch):
    trainer = build(tmp_path, LORA, rollout_weights="mxfp4", save_strategy="no")
    sampled, trained = [], []
    base = trainer.model.get_base_model()
    original = type(base).generate

    def generate(self, *args, **kwargs):
        sampled.append(logits(self))
        return original(self, *args, **kwargs)

    monkeypatch.setattr(type(base), "generate", generate)
    before = logits(trainer.model)
    with merged_weights(trainer.model, quantised):
        shipped = logits(trainer.model)
    trainer.model.train()
    step = trainer.training_step

    def training_step(model, inputs, *args):
        trained.append(logits(model))
        model.train()
        return step(model, inputs, *args)

    monkeypatch.setattr(trainer, "training_step", training_step)
    trainer.train()
    assert torch.equal(sampled[0], shipped) and not torch.equal(shipped, before)
    assert torch.equal(trained[0], before)
    logged = trainer.state.log_history[0]
    assert logged["on_policy/max_log_ratio"] == 0.0 and logged["on_policy/forced"] == 1.0
    assert logged["rollout_weights/abs_log_ratio"] > 1e-4 and logged["rollout_weights/kl"] > 0


def test_without_quantisation_there_is_no_such_metric(tmp_path):
    trainer = build(tmp_path, max_steps=1, save_strategy="no")
    trainer.train()
    assert not any(name.startswith("rollout_weights/") for entry in trainer.state.log_history for name in entry)


def test_what_is_refused(tmp_path):
    with pytest.raises(ValueError, match="save_format is 'fp8', expected one of 'bf16', 'mxfp4', 'both'"):
        build(tmp_path, save_format="fp8")
    with pytest.raises(ValueError, match="rollout_weights is 'int4'"):
        build(tmp_path, rollout_weights="int4")
    with pytest.raises(ValueError, match="intermediate_size divisible by 32, found 48"):
        build(tmp_path, save_format="mxfp4", model=tiny_model(intermediate_size=48))
    with pytest.raises(
        ValueError, match="rollout_weights='mxfp4' needs a intermediate_size.*Use rollout_weights='trained'"
    ):
        build(tmp_path, rollout_weights="mxfp4", model=tiny_model(intermediate_size=48))
    with pytest.raises(ValueError, match="train_sinks=True does not go with beta=0.1"):
        build(tmp_path, LORA, train_sinks=True, beta=0.1)
    with pytest.raises(ValueError, match="no adapters"):
        build(tmp_path).merge_and_push("me/model")


def test_the_recipe_is_what_was_set(tmp_path):
    trainer = build(tmp_path, seed=7, hub_token="hf_secret")
    found = recipe(trainer.args)
    assert found["seed"] == 7 and found["learning_rate"] == 1e-2 and found["max_rollout_tokens"] == 6
    assert not {"output_dir", "hub_token", "report_to", "use_cpu", "logging_steps", "save_steps"} & set(found)


class Counter:
    """An environment that counts."""

    def reset(self, **kwargs) -> None:
        self.count = 0

    def increment(self, by: int) -> int:
        """Add to the counter.

        Args:
            by: how much.
        """
        self.count += by
        return self.count


def test_the_card_names_the_environment_also_after_the_run(tmp_path):
    data = Dataset.from_list([{"prompt": [{"role": "user", "content": "count"}]}] * 4)
    args = GptOssGRPOConfig(
        str(tmp_path), use_cpu=True, bf16=False, report_to="none", max_turns=3, max_rollout_tokens=9
    )
    factory = functools.partial(Counter)
    trainer = GptOssGRPOTrainer(
        tiny_model(), length_reward, args, data, processing_class=TOKENIZER, environment_factory=factory
    )
    trainer._end_environments()
    trainer.create_model_card()
    card = (tmp_path / "README.md").read_text()
    assert "Multi-turn rollouts; environment Counter;" in card
    assert "; at most 3 turns; at most 9 tokens after the prompt." in card


def test_the_card_counts_the_problems_of_each_evaluation(tmp_path):
    trainer = build(tmp_path)
    rows = trainer.train_dataset
    trainer.eval_dataset = {"easy": rows.select(range(4)), "hard": rows.select(range(12))}
    log = trainer.evaluate()
    found = {row["evaluation"]: row["problems"] for row in trainer._evaluations()}
    assert found == {"easy: length_reward": 4, "hard: length_reward": 12}
    assert trainer._evaluations()[1]["mean"] == log["eval_rewards/length_reward/mean"]  # the last one is "hard"
    trainer.eval_dataset = rows.select(range(8))
    trainer.evaluate()
    assert [(row["evaluation"], row["problems"]) for row in trainer._evaluations()] == [("length_reward", 8)]
