"""PPO that was stopped goes on as if it had not been: policy, critic, both optimizers, schedules, KL coefficient."""

import shutil
from pathlib import Path

import pytest
import torch
from logged_curves import curves
from ppo_run import CRITICS, build, critic_weights, policy_weights
from tiny_policy import tiny_model
from transformers import TrainerCallback

from trl_gptoss.trainers.critic_checkpoint import load_critic

# Step 3 of 6: inside of the second epoch of the first generation batch, one step after the warm-up.
SETTINGS = {
    "save_strategy": "steps",
    "save_steps": 3,
    "steps_per_generation": 2,
    "ppo_epochs": 2,
    "critic_warmup_steps": 2,
    "critic_learning_rate": 2e-2,
    "lr_scheduler_type": "linear",
}


def straight_and_resumed(tmp_path, **settings):
    settings = {**SETTINGS, **settings}
    straight = build(tmp_path / "straight", **settings)
    straight.train()
    (tmp_path / "resumed").mkdir()
    shutil.copytree(tmp_path / "straight/checkpoint-3", tmp_path / "resumed/checkpoint-3")
    resumed = build(tmp_path / "resumed", **settings)
    torch.manual_seed(12345)
    return straight, resumed


@pytest.mark.parametrize("critic", CRITICS)
def test_three_steps_and_three_more_are_six(tmp_path, critic):
    straight, resumed = straight_and_resumed(tmp_path, critic=critic)
    resumed.train(resume_from_checkpoint=True)
    assert curves(resumed) == curves(straight)
    for weights in (policy_weights, critic_weights):
        for name, value in weights(straight).items():
            assert torch.equal(value, weights(resumed)[name]), name


def test_passes_of_the_critic_are_resumed(tmp_path):
    passes = {"gradient_accumulation_steps": 2, "critic_epochs": 2, "critic_mini_batches": 2}
    settings = {**passes, "steps_per_generation": 4, "per_device_train_batch_size": 2}
    straight, resumed = straight_and_resumed(tmp_path, critic="separate", **settings)
    resumed.train(resume_from_checkpoint=True)
    assert curves(resumed) == curves(straight)
    for name, value in critic_weights(straight).items():
        assert torch.equal(value, critic_weights(resumed)[name]), name


def test_without_the_critic_the_curves_would_part(tmp_path, monkeypatch):
    """The control."""
    straight, resumed = straight_and_resumed(tmp_path, critic="separate")
    monkeypatch.setattr("trl_gptoss.trainers.ppo.load_critic", lambda *args: None)
    resumed.train(resume_from_checkpoint=True)
    assert curves(resumed)[3:] != curves(straight)[3:]


@pytest.mark.slow
def test_the_kl_coefficient_is_resumed(tmp_path):
    tiny_model().save_pretrained(tmp_path / "model")
    model = {"model": str(tmp_path / "model"), "model_init_kwargs": {"dtype": "float32"}}
    settings = {
        **model,
        "beta": 0.1,
        "kl_controller": "adaptive",
        "kl_target": 1e-4,
        "kl_horizon": 8,
        "critic": "lora",
    }
    straight, resumed = straight_and_resumed(tmp_path, **settings)
    resumed.train(resume_from_checkpoint=True)
    assert curves(resumed) == curves(straight)
    assert resumed.kl_term.coef == straight.kl_term.coef != 0.1


def test_a_failure_between_steps_loses_nothing_of_the_critic(tmp_path):
    calls = [0]

    def reward(completion_ids, **kwargs):
        calls[0] += 1
        if calls[0] == 2:  # for the fifth step
            raise KeyboardInterrupt
        return [float(sum(ids) % 11) / 10 for ids in completion_ids]

    settings = {**SETTINGS, "save_steps": 100}
    failing = build(tmp_path, reward=reward, **settings)
    with pytest.raises(KeyboardInterrupt):
        failing.train()
    [checkpoint] = tmp_path.glob("checkpoint-*")
    assert checkpoint.name == "checkpoint-4" and (checkpoint / "critic/critic_state.pt").is_file()
    resumed = build(tmp_path, **settings)
    resumed.train(resume_from_checkpoint=True)
    straight = build(tmp_path / "straight", **settings)
    straight.train()
    for name, value in critic_weights(straight).items():
        assert torch.equal(value, critic_weights(resumed)[name]), name


def test_a_checkpoint_without_or_with_another_critic_is_refused(tmp_path):
    straight = build(tmp_path, critic="shared", max_steps=3, save_strategy="steps", save_steps=3)
    straight.train()
    other = build(tmp_path, critic="separate", max_steps=6)
    with pytest.raises(ValueError, match="a critic of another kind"):
        other.train(resume_from_checkpoint=True)
    shutil.rmtree(Path(tmp_path) / "checkpoint-3/critic")
    with pytest.raises(FileNotFoundError, match="has no critic"):
        load_critic(tmp_path / "checkpoint-3", None, None, None)


def test_a_trainer_whose_run_was_broken_off_resumes_it_itself(tmp_path):
    """Between two micro-batches: gradients of the critic and rows of the next log are there already."""

    class FailOnce(TrainerCallback):
        failed = False

        def on_substep_end(self, args, state, control, **kwargs):
            if state.global_step == 2 and not self.failed:
                self.failed = True
                raise OSError("disk full")

    settings = {"gradient_accumulation_steps": 2, "steps_per_generation": 4, "critic": "separate"}
    straight = build(tmp_path / "straight", **settings)
    straight.train()
    failing = build(tmp_path / "failing", callbacks=[FailOnce()], **settings)
    with pytest.raises(OSError, match="disk full"):
        failing.train()
    failing.train(resume_from_checkpoint=True)
    assert curves(failing) == curves(straight)
    for name, value in critic_weights(straight).items():
        assert torch.equal(value, critic_weights(failing)[name]), name
