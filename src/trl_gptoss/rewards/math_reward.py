"""Reward for a correct final answer."""

from collections.abc import Callable
from typing import Any

from ..trajectory import Trajectory
from .answers import TAIL, compare_plain, gold_answer
from .checker import shared_checker


def final_texts(completions: list, trajectories: list[Trajectory] | None) -> list[str | None]:
    """What each policy said as its final answer: text of the final channel and nothing else; `None` where it said none.

    Args:
        completions (`list[str]` or `list[list[dict]]`): as TRL hands them to rewards.
        trajectories (`list[Trajectory]`, *optional*): one per completion; they win over `completions`.
    """
    if trajectories is not None:
        return [trajectory.final_text for trajectory in trajectories]
    texts: list[str | None] = []
    for completion in completions:
        if isinstance(completion, str):
            texts.append(completion)
            continue
        last = next((message for message in reversed(completion) if message.get("role") == "assistant"), {})
        content = last.get("content") if last.get("channel", "final") == "final" else None
        texts.append(content if isinstance(content, str) else None)
    return texts


def math_reward(
    completions: list,
    answer: list | None = None,
    solution: list | None = None,
    trajectories: list[Trajectory] | None = None,
    log_metric: Callable[[str, float], None] | None = None,
    **kwargs: Any,
) -> list[float | None]:
    r"""1.0 where the final answer is right, 0.0 where it is wrong or missing, `None` where the row has no usable answer.

    Plain numbers are compared directly, everything else by math-verify in a worker process. A comparison that takes
    more than 3 seconds of CPU time or crashes the worker gives 0.0 and is counted in the metric `math_reward/timeouts`.

    Args:
        completions (`list[str]` or `list[list[dict]]`): as TRL gives them.
        answer (`list`, *optional*): column with the right answers: a number, LaTeX, or a text ending in `#### 18`.
        solution (`list`, *optional*): used if there is no `answer`: also a solution with the answer in `\boxed{}`.
        trajectories (`list[Trajectory]`, *optional*): given by our trainer; only their final text is read.
        log_metric (`Callable`, *optional*): given by TRL.

    Raises:
        `ValueError`: the data set has neither column, or a row that is not text or a number.
    """
    golds = answer if answer is not None else solution
    if golds is None:
        raise ValueError(
            "math_reward found neither a column `answer` nor a column `solution` in the data set. Rename the column "
            "that holds the right answers."
        )
    texts = final_texts(completions, trajectories)
    rewards: list[float | None] = [0.0] * len(texts)
    waiting = []
    for i, (gold, text) in enumerate(zip(golds, texts, strict=True)):
        if gold is None:
            rewards[i] = None
            continue
        if isinstance(gold, bool) or not isinstance(gold, (str, int, float)):
            raise ValueError(f"math_reward needs text or numbers as right answers, row {i} has {gold!r}.")
        gold = gold_answer(str(gold))
        if not gold:
            rewards[i] = None
        elif text is not None and text.strip():
            verdict = compare_plain(gold, text)
            if verdict is None:
                waiting.append((i, gold, text[-TAIL:]))
            else:
                rewards[i] = float(verdict)
    verdicts = shared_checker.check([gold for _, gold, _ in waiting], [text for _, _, text in waiting])
    for (i, _, _), verdict in zip(waiting, verdicts, strict=True):
        rewards[i] = None if verdict.correct is None else float(verdict.correct)
    if log_metric is not None:
        log_metric("math_reward/timeouts", float(sum(v.timed_out or v.crashed for v in verdicts)))
    return rewards
