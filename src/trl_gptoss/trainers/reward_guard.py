"""A reward function that fails costs its batch, not the run; one that keeps failing ends the run."""

import functools
import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from accelerate.logging import get_logger
from trl.trainer.utils import is_async_callable

logger = get_logger(__name__)

MAX_FAILURES_IN_A_ROW = 3
# Marks rows whose reward could not be computed. It survives TRL's gather over the ranks, and no reward can be it.
FAILED = -math.inf


class RewardGuard:
    """Counts the failures in a row of one reward function.

    Args:
        name (`str`): the name TRL logs the function under.
        give_up (`Callable[[Exception], None]`): called with the error that ends the run; raises it, now or later.
    """

    def __init__(self, name: str, give_up: Callable[[Exception], None]) -> None:
        self.name = name
        self.give_up = give_up
        self.failures = 0

    def passed(self, kwargs: dict[str, Any]) -> None:
        self.failures = 0
        kwargs["log_metric"](f"rewards/{self.name}/failure_frequency", 0.0)

    def failed(self, error: Exception, kwargs: dict[str, Any]) -> list[float]:
        """Log `error` and give the rewards of a failed batch; give up if it was one too many in a row."""
        self.failures += 1
        kwargs["log_metric"](f"rewards/{self.name}/failure_frequency", 1.0)
        logger.error(
            f"The reward function {self.name!r} raised {type(error).__name__}: {error}. Its batch is not trained on "
            f"(failure {self.failures} in a row; the run stops at {MAX_FAILURES_IN_A_ROW}).",
            exc_info=error,
        )
        if self.failures >= MAX_FAILURES_IN_A_ROW:
            message = (
                f"The reward function {self.name!r} failed {self.failures} times in a row, last with "
                f"{type(error).__name__}: {error}. Fix it and resume from the last checkpoint."
            )
            failure = RuntimeError(message)
            failure.__cause__ = error
            self.give_up(failure)
        return [FAILED] * len(kwargs["prompts"])


def checked(rewards: Iterable[float | None], count: int) -> list[float | None]:
    """What a reward function returned, as `count` numbers or `None`.

    Raises:
        TypeError: it is no sequence, or holds something that is no number.
        ValueError: it has another length, or holds an infinite number.
    """
    expected = f"expected a list of {count} numbers (None where the function does not apply), one per completion"
    if rewards is None or isinstance(rewards, (str, bytes, float, int)):
        raise TypeError(f"it returned {rewards!r}; {expected}")
    values = list(rewards)
    if len(values) != count:
        raise ValueError(f"it returned {len(values)} rewards; {expected}")
    for value in values:
        if isinstance(value, (str, bytes)):
            raise TypeError(f"it returned {value!r} as a reward; {expected}")
    numbers = [None if value is None else float(value) for value in values]
    if any(number is not None and math.isinf(number) for number in numbers):  # no group has a mean with it
        raise ValueError(f"it returned an infinite reward; {expected}")
    return numbers


def guard(function: Callable[..., Any], name: str, give_up: Callable[[Exception], None]) -> Callable[..., Any]:
    """Wrap a reward function (plain or coroutine) in a [`RewardGuard`]."""
    state = RewardGuard(name, give_up)
    if is_async_callable(function):

        async def guarded(**kwargs: Any) -> list[float | None]:
            try:
                rewards = checked(await function(**kwargs), len(kwargs["prompts"]))
            except (
                Exception
            ) as error:  # foreign code at a boundary: any failure is reported, none ends the run at once
                return state.failed(error, kwargs)
            state.passed(kwargs)
            return rewards

    else:

        def guarded(**kwargs: Any) -> list[float | None]:
            try:
                rewards = checked(function(**kwargs), len(kwargs["prompts"]))
            except Exception as error:  # see above
                return state.failed(error, kwargs)
            state.passed(kwargs)
            return rewards

    return functools.update_wrapper(guarded, function, assigned=("__doc__",), updated=())


def discard_failed_rows(rewards_NF: torch.Tensor) -> torch.Tensor:
    """Make rows in which any function failed unscorable: all NaN, which TRL gives no advantage.

    Without this a failed correctness reward would leave the format reward alone to decide about the update.

    Args:
        rewards_NF (`torch.Tensor`): (rollouts of all ranks, reward functions), NaN where a function does not apply.
    """
    failed_N = torch.isinf(rewards_NF).any(dim=1)
    return rewards_NF.masked_fill(failed_N.unsqueeze(1), torch.nan)
