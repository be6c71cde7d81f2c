"""Penalty for turns that are not well-formed or were cut off."""

from typing import Any

from ..trajectory import StopReason, Trajectory

_CUT_OFF = (StopReason.TRUNCATED, StopReason.MAX_TURNS, StopReason.MAX_TOKENS, StopReason.MAX_SECONDS)


def format_reward(
    completions: list | None = None, trajectories: list[Trajectory] | None = None, **kwargs: Any
) -> list[float]:
    """0.0 for a clean rollout, minus the share of its turns in which the parser had to repair or drop something, and
    -1.0 for a rollout that was cut off (token or turn budget) and so gave no answer of its own.

    Models without Harmony have no trajectories; there it is 0.0 for a completion that ends with an answer in words, and
    -1.0 for one that ends with nothing, with a call, or with the result of a tool.

    Scale it with `reward_weights`.

    Args:
        completions (`list[str]` or `list[list[dict]]`, *optional*): as TRL gives them; read where there are no
            trajectories.
        trajectories (`list[Trajectory]`, *optional*): given by our trainer for Harmony models.

    Raises:
        `ValueError`: neither was given.
    """
    if trajectories is not None:
        return [_score(trajectory) for trajectory in trajectories]
    if completions is None:
        raise ValueError("format_reward needs `completions` or `trajectories`, as the trainers hand them to rewards.")
    return [0.0 if _ends_with_an_answer(completion) else -1.0 for completion in completions]


def _ends_with_an_answer(completion: str | list[dict[str, Any]]) -> bool:
    if isinstance(completion, str):
        return bool(completion.strip())
    last = completion[-1] if completion else {}
    content = last.get("content")
    return last.get("role") == "assistant" and isinstance(content, str) and bool(content.strip())


def _score(trajectory: Trajectory) -> float:
    if trajectory.stop_reason in _CUT_OFF or not trajectory.turns:
        return -1.0
    return -sum(bool(turn.anomalies) for turn in trajectory.turns) / len(trajectory.turns)
