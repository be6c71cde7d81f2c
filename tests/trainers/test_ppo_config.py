"""What the configuration of PPO accepts, and what it says about the rest."""

import pytest
from ppo_run import settings_of
from trl import GRPOConfig

from trl_gptoss.trainers import GptOssPPOConfig


def test_a_group_of_one_is_enough(tmp_path):
    args = settings_of(tmp_path)
    assert args.num_generations == 1 and type(args.num_generations) is int
    assert settings_of(tmp_path, per_device_train_batch_size=1).generation_batch_size == 1
    assert settings_of(tmp_path, num_generations=4).num_generations == 4
    with pytest.raises(ValueError, match="at least 2 generations"):  # the check that is passed in one place
        GRPOConfig(str(tmp_path), num_generations=1, bf16=False, use_cpu=True)
    with pytest.raises(ValueError, match="divisible by num_generations"):  # TRL's other checks still hold
        settings_of(tmp_path, num_generations=3)


def test_epochs_are_iterations(tmp_path):
    assert settings_of(tmp_path, ppo_epochs=3).num_iterations == 3
    assert settings_of(tmp_path, num_iterations=3).ppo_epochs == 3
    with pytest.raises(ValueError, match="Set only one"):
        settings_of(tmp_path, ppo_epochs=2, num_iterations=3)


def test_every_field_is_explained():
    own = set(GptOssPPOConfig.__dataclass_fields__) - set(GptOssPPOConfig.__mro__[1].__dataclass_fields__)
    assert own >= {"critic", "critic_warmup_steps", "gae_gamma", "gae_lambda", "ppo_epochs", "value_clip", "dual_clip"}
    for name in own:
        assert GptOssPPOConfig.__dataclass_fields__[name].metadata["help"]
        assert f"        {name} (`" in GptOssPPOConfig.__doc__


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"loss_type": "grpo"}, "loss_normalization"),
        ({"delta": 3.0}, "dual_clip"),
        ({"scale_rewards": "none"}, "whiten_advantages"),
        ({"num_generations": 2, "importance_sampling_level": "sequence"}, "no effect in PPO"),
        ({"use_adaptive_entropy": True}, "entropy_coef is constant"),
        ({"gae_gamma": 1.5}, "gae_gamma is 1.5"),
        ({"gae_lambda": float("nan")}, "gae_lambda is nan"),
        ({"value_clip": 0.0}, "value_clip is 0.0"),
        ({"dual_clip": 1.2}, "dual_clip=1.2 is not above"),
        (
            {"lr_scheduler_type": "reduce_lr_on_plateau", "eval_strategy": "steps"},
            "'reduce_lr_on_plateau' goes by a metric",
        ),
        ({"lr_scheduler_type": "greedy", "eval_strategy": "steps"}, "'greedy' goes by a metric"),
        (
            {"loss_normalization": "fixed_length", "max_rollout_tokens": None, "max_completion_length": None},
            "divides by max_rollout_tokens",
        ),
        ({"critic": "linear"}, "expected one of None, 'separate'"),
        ({"critic_warmup_steps": -1}, "critic_warmup_steps"),
        ({"critic_learning_rate": 0.0}, "critic_learning_rate"),
        ({"critic_epochs": 0}, "critic_epochs is 0"),
        ({"critic_epochs": 2, "critic": "shared"}, "reads the policy's"),
        ({"critic_mini_batches": 2}, "does not divide the gradient_accumulation_steps=1"),
        ({"value_coef": 0.5}, "Set critic_learning_rate"),
        ({"critic": "shared", "critic_detach": True, "value_coef": 0.5}, "value_coef"),
        ({"critic_detach": True}, "critic_detach"),
        ({"critic": "shared", "critic_model_name_or_path": "x"}, "no backbone of its own"),
        ({"beta": 0.1, "kl_estimator": "k1"}, "penalises nothing"),
        ({"beta": 0.1, "kl_controller": "adaptive"}, "needs a target"),
        ({"beta": 0.1, "kl_target": 0.1}, "the fixed one has none"),
        ({"kl_controller": "adaptive", "kl_target": 0.1}, "Set beta > 0"),
        ({"beta": 0.1, "kl_controller": "adaptive", "kl_target": 0.1, "kl_horizon": 0}, "too short"),
        ({"gradient_accumulation_steps": 2, "steps_per_generation": 3}, "whole number"),
        ({"gradient_accumulation_steps": 4, "steps_per_generation": 2}, "whole number"),
        ({"ppo_epochs": 2, "on_policy": "force"}, "on_policy='force'"),
        ({"ppo_epochs": 0}, "at least 1"),
    ],
)
def test_what_makes_no_sense_is_refused(tmp_path, settings, message):
    with pytest.raises(ValueError, match=message):
        settings_of(tmp_path, **settings)


def test_the_estimator_follows_its_place(tmp_path):
    assert settings_of(tmp_path).kl_estimator == "k3"
    assert settings_of(tmp_path, kl_placement="reward").kl_estimator == "k1"
    assert settings_of(tmp_path, kl_estimator="k2").kl_estimator == "k2"
