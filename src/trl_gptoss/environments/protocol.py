"""What an environment is: TRL's `environment_factory` contract, plus the few things a tool loop needs beyond it.

TRL makes a tool of **every public method** of an environment class except `reset` and `get_reward`. Helpers that the
model must not see are therefore marked with `not_a_tool`.
"""

from collections.abc import Callable
from types import MethodType
from typing import Any


class not_a_tool:
    """Marks a public method that TRL must not show to the model.

    TRL collects tools with `inspect.getmembers(type(env), inspect.isfunction)`. Looked up on the class, a marked method
    is this descriptor and no function; on an instance it is an ordinary bound method.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        self.__doc__ = function.__doc__
        self.__name__ = function.__name__

    def __get__(self, instance: Any, owner: type) -> Any:
        return self if instance is None else MethodType(self.function, instance)


class ToolOutput(str):
    """What a tool answers when it also wants to say how the call went.

    It is the text that the policy is shown; a tool that returns a plain `str` is taken to have succeeded. Tools of an
    environment need not raise to report a failure.

    Args:
        text (`str`): the text for the policy.
        failed (`bool`, *optional*, defaults to `False`): counts into `tools/failure_frequency`.
        timed_out (`bool`, *optional*, defaults to `False`): counts into `tools/timeout_frequency`; implies `failed`.
        seconds (`float`, *optional*, defaults to 0.0): wall-clock time of the call.
    """

    failed: bool
    timed_out: bool
    seconds: float

    def __new__(
        cls, text: str, *, failed: bool = False, timed_out: bool = False, seconds: float = 0.0
    ) -> "ToolOutput":
        output = super().__new__(cls, text)
        output.failed = failed or timed_out
        output.timed_out = timed_out
        output.seconds = seconds
        return output

    def __reduce__(self) -> tuple:
        return _restore_tool_output, (str(self), self.failed, self.timed_out, self.seconds)


def _restore_tool_output(text: str, failed: bool, timed_out: bool, seconds: float) -> ToolOutput:
    return ToolOutput(text, failed=failed, timed_out=timed_out, seconds=seconds)


class Environment:
    """Base class of environments that use more than TRL's contract. Any other class works as an environment too.

    One object serves one rollout at a time and is reused after `reset`. Its tools are called from worker threads, never
    two at once for the same object.

    Attributes:
        done (`bool`): set to `True` by a tool to end the episode after this call; `reset` sets it back.
        tool_timeout (`float` or `None`): seconds after which the rollout loop gives up on one call of a tool and goes
            on with a timeout as the result. `None`: the trainer's `tool_timeout`.
        tool_output_limit (`int` or `None`): most characters of one result that the policy is shown. `None`: the
            trainer's `tool_output_limit`.
        builtin_tools (`tuple[str, ...]`, class attribute): tools shown to Harmony models as builtin tools, which take
            one raw text argument instead of JSON (such as `python`).
    """

    builtin_tools: tuple[str, ...] = ()
    done: bool = False
    tool_timeout: float | None = None
    tool_output_limit: int | None = None

    def reset(self, **kwargs: Any) -> str | None:
        """Start a new rollout.

        Args:
            kwargs: the columns of the data set row. Do not put the answer where a tool could show it.

        Returns:
            `str` or `None`: text appended to the last user message.
        """
        self.done = False
        return None

    @not_a_tool
    def close(self) -> None:
        """Give back what the environment holds (processes, connections). It may be reset and used again."""
