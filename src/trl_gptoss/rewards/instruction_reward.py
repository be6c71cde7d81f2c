"""Reward for following verifiable instructions."""

import json
from collections.abc import Callable
from typing import Any

from ..trajectory import Trajectory
from .instruction_checker import shared_instruction_checker
from .math_reward import final_texts


def asked(prompt: Any) -> str:
    """The last user message of a prompt, as text."""
    if isinstance(prompt, str):
        return prompt
    content = next((m["content"] for m in reversed(prompt) if m.get("role") == "user"), "")
    if isinstance(content, str):
        return content
    return "".join(part["text"] for part in content if part.get("text"))  # a part that is an image has None


def instruction_reward(
    prompts: list,
    completions: list,
    constraints: list[str] | None = None,
    benchmark: list[str] | None = None,
    trajectories: list[Trajectory] | None = None,
    log_metric: Callable[[str, float], None] | None = None,
    **kwargs: Any,
) -> list[float | None]:
    """The share of its constraints that the final answer follows, by the strict verdict; `None` for a row without any.

    1.0 therefore means that it follows all of them (IFEval's prompt-level strict accuracy). A checker that raises, hangs
    or crashes on an answer counts as not followed, and in the metric `instruction_reward/checker_errors`.

    Args:
        prompts (`list`): as TRL gives them; some checkers compare with the last user message.
        completions (`list[str]` or `list[list[dict]]`): as TRL gives them.
        constraints (`list[str]`): column with JSON: `[{"id": "punctuation:no_comma", "kwargs": {}}, ...]`.
        benchmark (`list[str]`): column, `"ifeval"` or `"ifbench"`: whose checkers the ids name.
        trajectories (`list[Trajectory]`, *optional*): given by our trainer; only their final text is read.
        log_metric (`Callable`, *optional*): given by TRL.

    Raises:
        `ValueError`: the data set has no such columns.
        `ModuleNotFoundError`: the extra `tasks` is not installed.
    """
    if constraints is None or benchmark is None:
        raise ValueError(
            "instruction_reward needs the columns `constraints` and `benchmark`; trl_gptoss.tasks.verify_if makes them."
        )
    texts = final_texts(completions, trajectories)
    wanted = [json.loads(each) if each else [] for each in constraints]
    rewards: list[float | None] = [0.0 if each else None for each in wanted]
    answered = [i for i, text in enumerate(texts) if wanted[i] and text is not None and text.strip()]
    checked = shared_instruction_checker.check(
        [benchmark[i] for i in answered],
        [asked(prompts[i]) for i in answered],
        [wanted[i] for i in answered],
        [texts[i] for i in answered],
    )
    for i, result in zip(answered, checked, strict=True):
        rewards[i] = sum(result.strict) / len(result.strict)
    if log_metric is not None:
        errors = sum(error is not None for result in checked for error in result.errors)
        log_metric("instruction_reward/checker_errors", float(errors))
    return rewards
