"""Which answers to which problems were right: measured by the trainer's own rollouts, so training and evaluation agree.

The trainer samples, runs tools and scores as in training; a reward function that is wrapped here also writes down what it
gave each rollout of an evaluation. Every answer has a name (problem, number), because a sampler over several processes
may hand out a row twice to fill its last batch.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

from accelerate.utils import gather_object
from datasets import Dataset
from trl import GRPOTrainer
from trl.trainer.utils import is_async_callable

from ..intervals import accuracy_interval, pass_at

PROBLEM, ANSWER = "evaluation_problem", "evaluation_answer"  # columns


def repeated(problems: Dataset, answers: int) -> Dataset:
    """`problems`, each row `answers` times, with the columns that name an answer."""
    order = [i for i in range(len(problems)) for _ in range(answers)]
    rows = problems.select(order)
    return rows.add_column(PROBLEM, order).add_column(ANSWER, [k % answers for k in range(len(order))])


class Outcomes:
    """Wraps the reward function that decides whether an answer is right, and measures with it.

    Args:
        reward (`Callable`): in TRL's signature, plain or async. An answer is right if its reward is 1, and wrong otherwise.

    Attributes:
        reward (`Callable`): hand this to the trainer instead: the same values under the same name, written down for rows
            of an evaluation.
    """

    def __init__(self, reward: Callable[..., list[float | None]]) -> None:
        self._seen: dict[tuple[int, int], float] = {}

        def names_in(kwargs: dict[str, Any]) -> list[tuple[int, int]]:
            return list(zip(kwargs.pop(PROBLEM, []), kwargs.pop(ANSWER, [])))

        def written_down(names: list[tuple[int, int]], values: list[float | None]) -> list[float | None]:
            for name, value in zip(names, values):
                if value is not None and not math.isnan(value):  # both are no verdict
                    self._seen[name] = value
            return values

        if is_async_callable(reward):

            @functools.wraps(reward)
            async def recorded(*args: Any, **kwargs: Any) -> list[float | None]:
                return written_down(names_in(kwargs), await reward(*args, **kwargs))

        else:

            @functools.wraps(reward)
            def recorded(*args: Any, **kwargs: Any) -> list[float | None]:
                return written_down(names_in(kwargs), reward(*args, **kwargs))

        self.reward = recorded

    def evaluate(self, trainer: GRPOTrainer, problems: Dataset, answers: int = 1) -> dict[str, Any]:
        """Sample `answers` answers to each problem with the trainer's rollouts. Every process must call it.

        Args:
            trainer ([`~trl.GRPOTrainer`]): was given `reward`.
            problems (`Dataset`): rows as for training.
            answers (`int`, *optional*, defaults to 1): per problem.

        Returns:
            `dict`: `problems`, `answers` (per problem), `correct` (answers), `accuracy` (pass@1 = avg@n), `low`, `high`,
            `interval` (the method), and `pass@k` for k = 2, 4, ... up to `answers`, over the problems with k
            verdicts. `unscored` counts answers that got
            no verdict (a reward function that failed, a row without a usable reference) and are left out.

        Raises:
            `ValueError`: the trainer samples several answers to each row by itself.
            `RuntimeError`: no answer got a verdict.
        """
        self._seen.clear()
        per_prompt = trainer.num_generations_eval
        if per_prompt != 1:
            raise ValueError(f"num_generations_eval is {per_prompt}; set it to 1: `answers` says how many are sampled")
        trainer.evaluate(repeated(problems, answers))
        everywhere = gather_object(list(self._seen.items()))
        return summary(dict(everywhere), len(problems), answers)


def summary(seen: dict[tuple[int, int], float], problems: int, answers: int) -> dict[str, Any]:
    """A row of evaluation.json, see [`Outcomes.evaluate`].

    Args:
        seen (`dict[tuple[int, int], float]`): the reward of each (problem, number).
        problems (`int`): how many were asked.
        answers (`int`): how many answers to each.
    """
    right: dict[int, list[float]] = {}
    for (problem, _), value in sorted(seen.items()):
        right.setdefault(problem, []).append(float(value >= 1.0))
    if not right:
        raise RuntimeError(
            "no answer of the evaluation got a verdict: the reward function failed on all of them (see the log), or no row "
            "has a reference that it can use"
        )
    outcomes = list(right.values())
    interval = accuracy_interval(outcomes)
    row: dict[str, Any] = {
        "problems": problems,
        "answers": answers,
        "correct": int(sum(map(sum, outcomes))),
        "accuracy": sum(sum(each) / len(each) for each in outcomes) / len(outcomes),
        "low": interval.low,
        "high": interval.high,
        "interval": interval.method,
        "unscored": problems * answers - len(seen),
    }
    k = 2
    while k <= answers:
        complete = [each for each in outcomes if len(each) >= k]
        if complete:  # a reward function that failed may have left every problem with fewer
            row[f"pass@{k}"] = sum(pass_at(int(sum(each)), len(each), k) for each in complete) / len(complete)
        k *= 2
    return row
