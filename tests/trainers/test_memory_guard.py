"""Out of memory in a step: explained, or tried again in smaller parts with the same result; measured against predicted."""

import pytest
import torch
from cpu_settings import ON_CPU
from datasets import Dataset
from tiny_policy import byte_tokenizer, tiny_model

from trl_gptoss.memory import GIB
from trl_gptoss.trainers import GptOssGRPOConfig, GptOssGRPOTrainer
from trl_gptoss.trainers.memory_guard import _Before, difference
from trl_gptoss.trainers.offload import CheckpointOffload
from trl_gptoss.trainers.sequence_options import _check_turns, check_corrected_parts

TOKENIZER = byte_tokenizer()
DATA = Dataset.from_list([{"prompt": [{"role": "user", "content": f"say {i}"}]} for i in range(64)])
ROWS = 4
# Adam divides a gradient by its own size, and with it the rounding of a gradient that is all but zero.
PLAIN_STEPS = {"optim": "sgd", "learning_rate": 0.1, "gradient_accumulation_steps": 2, "seed": 3}


def build(tmp_path, **settings):
    settings = {
        **ON_CPU,
        "gradient_checkpointing": True,
        "per_device_train_batch_size": ROWS,
        "num_generations": ROWS,
        "max_steps": 1,
        "max_rollout_tokens": 9,
        "learning_rate": 1e-2,
        "log_trajectories": 0,
        **settings,
    }
    model = tiny_model()
    model.set_attn_implementation("sink_fa3")
    return GptOssGRPOTrainer(
        model,
        lambda completion_ids, **_: [float(sum(ids) % 11) for ids in completion_ids],
        GptOssGRPOConfig(str(tmp_path), **settings),
        DATA,
        processing_class=TOKENIZER,
    )


def run_out(trainer, when) -> list[int]:
    """A model whose training forward fails where `when(tokens, number of the forward)` says so; returns the tokens seen."""
    seen: list[int] = []

    def limited(module, args, kwargs):
        if torch.is_grad_enabled() and module.training:
            seen.append(kwargs["input_ids"].numel())
            if when(seen[-1], len(seen)):
                raise torch.OutOfMemoryError(f"no room for {seen[-1]} tokens")

    trainer.model.model.register_forward_pre_hook(limited, with_kwargs=True)
    return seen


def weights_after(trainer) -> list[torch.Tensor]:
    trainer.train()
    return [p.detach().clone() for p in trainer.model.parameters()]


def test_a_second_try_gives_the_weights_of_a_run_with_room(tmp_path):
    settings = {**PLAIN_STEPS, "max_steps": 2}
    expected = weights_after(build(tmp_path / "a", **settings))
    trainer = build(tmp_path / "b", oom_retries=3, **settings)
    seen = run_out(trainer, lambda tokens, _: tokens > 150)
    found = weights_after(trainer)
    assert seen[0] > 150 and all(tokens <= 150 for tokens in seen[-2:])  # it did fail, and learned from it
    assert trainer.args.max_tokens_per_micro_batch <= 150
    for a, b in zip(expected, found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=5e-7)
    steps = [entry for entry in trainer.state.log_history if "reward" in entry]
    assert len(steps) == 2 and all(entry["reward"] is not None for entry in steps)  # None: logged without a value


def test_what_was_done_before_the_failure_does_not_count_twice(tmp_path):
    """The second of two parts fails once, behind the backward of the first."""
    settings = {**PLAIN_STEPS, "max_tokens_per_micro_batch": 150}
    expected = weights_after(build(tmp_path / "a", **settings))
    trainer = build(tmp_path / "b", oom_retries=1, **settings)
    seen = run_out(trainer, lambda _, number: number == 4)
    found = weights_after(trainer)
    assert len(seen) > 5
    for a, b in zip(expected, found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=5e-7)


def test_what_an_attempt_has_changed_is_put_back(tmp_path):
    trainer = build(tmp_path, oom_retries=1)
    parameter = next(p for p in trainer.model.parameters() if p.requires_grad)
    parameter.grad = torch.ones_like(parameter)
    trainer._metrics["train"]["reward"].append(2.0)
    trainer._correction_rows, trainer._checked_at = ["first micro-batch"], 3
    trainer._prepared, trainer._before = (0, {}), _Before.of(trainer)
    expected = torch.get_rng_state()
    with trainer._undone_if_out_of_memory() as attempt:
        parameter.grad += 5
        trainer._metrics["train"]["reward"].append(1.0)
        trainer._metrics["train"]["loss_parts"].append(1.0)
        trainer._correction_rows.append("second")
        trainer._checked_at, trainer.entropy_coef = 4, 0.5
        trainer._scores = (parameter * 2, None, None)
        torch.rand(1)
        raise torch.OutOfMemoryError("no room\nfurther lines")
    assert attempt.error == "no room"
    assert torch.equal(parameter.grad, torch.ones_like(parameter))
    assert trainer._metrics["train"] == {"reward": [2.0]}
    assert trainer._correction_rows == ["first micro-batch"]
    assert (trainer._checked_at, trainer.entropy_coef) == (3, 0.0)
    assert trainer._scores is None  # its graph would take the room of the second try
    assert torch.equal(torch.get_rng_state(), expected)


def test_without_retries_the_error_says_what_to_change(tmp_path):
    trainer = build(tmp_path, activation_checkpointing=True)
    run_out(trainer, lambda tokens, _: tokens > 150)
    with pytest.raises(torch.OutOfMemoryError, match="no room for") as caught:
        trainer.train()
    text = str(caught.value)
    assert "tokens on this device" in text and "weights" in text and "Next: max_tokens_per_micro_batch" in text


def test_a_single_row_cannot_be_divided(tmp_path):
    trainer = build(tmp_path, oom_retries=9)
    run_out(trainer, lambda tokens, _: tokens > 3)
    with pytest.raises(torch.OutOfMemoryError, match="cannot be divided"):
        trainer.train()


def test_out_of_memory_while_generating_is_passed_on(tmp_path, monkeypatch):
    trainer = build(tmp_path, oom_retries=1)

    def generate(*args, **kwargs):
        raise torch.OutOfMemoryError("the cache")

    monkeypatch.setattr(trainer._engine.backend, "generate", generate)
    with pytest.raises(torch.OutOfMemoryError, match="^the cache$"):
        trainer.train()


def test_difference():
    assert difference(10 * GIB, 10.9 * GIB) is None
    assert "planner expected 10.0 GiB (-17%)" in difference(10 * GIB, 12 * GIB)
    assert difference(12 * GIB, 10 * GIB) is not None


@pytest.mark.parametrize(
    ("check", "settings"),
    [(_check_turns, {"entropy_coef": 0.1, "loss_type": "dapo"}), (check_corrected_parts, {"loss_type": "bnpo"})],
)
def test_what_parts_cannot_give_is_refused_before_the_first_retry(tmp_path, check, settings):
    args = GptOssGRPOConfig(str(tmp_path), oom_retries=1, bf16=False, use_cpu=True, **settings)
    with pytest.raises(ValueError, match="oom_retries=0"):
        check(args)
    args.oom_retries = 0
    check(args)


def test_bad_settings(tmp_path):
    with pytest.raises(ValueError, match="oom_retries is -1"):
        GptOssGRPOConfig(str(tmp_path), oom_retries=-1, bf16=False, use_cpu=True)
    with pytest.raises(ValueError, match="Remove padding_free"):
        GptOssGRPOConfig(str(tmp_path), oom_retries=1, padding_free=False, bf16=False, use_cpu=True)


def test_offloaded_checkpoints_give_the_same_weights(tmp_path, monkeypatch):
    made = []

    def small_tensors_too(model):
        made.append(CheckpointOffload(model, min_bytes=1))

    monkeypatch.setattr("trl_gptoss.trainers.grpo.CheckpointOffload", small_tensors_too)
    settings = {**PLAIN_STEPS, "activation_checkpointing": True, "max_steps": 2}
    expected = weights_after(build(tmp_path / "a", **settings))
    trainer = build(tmp_path / "b", activation_offloading=True, **settings)
    for a, b in zip(expected, weights_after(trainer), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=5e-7)
    assert len(made) == 1 and made[0]._free  # buffers that were used, and are free again
    assert trainer._setup(64).activation_offloading
    with pytest.raises(ValueError, match="activation_checkpointing is False"):
        GptOssGRPOConfig(str(tmp_path), activation_offloading=True, activation_checkpointing=False, use_cpu=True)
