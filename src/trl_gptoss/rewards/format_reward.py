"""Penalty for turns that are not well-formed or were cut off."""

from typing import Any

from ..trajectory import StopReason, Trajectory

_CUT_OFF = (StopReason.TRUNCATED, StopReason.MAX_TURNS, StopReason.MAX_TOKENS, StopReason.MAX_SECONDS)


def format_reward(
    completions: list | None = None, trajectories: list[Trajectory] | None = None, **kwargs: Any
) -> list[float]:
    """0.0 for a clean rollout, minus the share of its turns in which the parser had to repair or drop something, and
    -1.0 for a rollout that was cut off (token or turn budget) and so gave no answer of its own.

    Scale it with `reward_weights`.

    Args:
        completions (`list`, *optional*): not read.
        trajectories (`list[Trajectory]`): given by our trainer.

    Raises:
        `ValueError`: no trajectories: the trainer is not one of ours.
    """
    if trajectories is None:
        raise ValueError(
            "format_reward needs the rollouts' trajectories, which GptOssGRPOTrainer hands to reward functions. With "
            "another trainer, pass `trajectories=[...]` yourself."
        )
    return [_score(trajectory) for trajectory in trajectories]


def _score(trajectory: Trajectory) -> float:
    if trajectory.stop_reason in _CUT_OFF or not trajectory.turns:
        return -1.0
    return -sum(bool(turn.anomalies) for turn in trajectory.turns) / len(trajectory.turns)
