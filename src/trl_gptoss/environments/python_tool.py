"""The Python tool: one environment per rollout, code of the policy in a sandbox."""

import math
from collections.abc import Sequence
from typing import Any

from .executor import ExecutionResult, Executor, Session, get_executor, register_executor
from .protocol import Environment, ToolOutput, not_a_tool


def _bubblewrap(**options: Any) -> Executor:
    from .bubblewrap import BubblewrapExecutor

    return BubblewrapExecutor(**options)


def _unsafe_subprocess(**options: Any) -> Executor:
    from .unsafe_subprocess import UnsafeSubprocessExecutor

    return UnsafeSubprocessExecutor(**options)


register_executor("bubblewrap", _bubblewrap)
register_executor("unsafe_subprocess", _unsafe_subprocess)

MINIMUM_OUTPUT_LIMIT = 128  # characters; the longest notices have room in it


class PythonTool(Environment):
    """A Python interpreter for the policy. Pass the class, or `functools.partial(PythonTool, ...)`, as
    `environment_factory`.

    Args:
        stateful (`bool`, *optional*, defaults to `False`): keep variables between the calls of one rollout. Otherwise
            every call starts from nothing.
        executor (`str` or `Executor`, *optional*, defaults to `"bubblewrap"`): where the code runs.
        tool_timeout (`float`, *optional*, defaults to 10.0): seconds of wall-clock and of CPU time for one call.
        tool_output_limit (`int`, *optional*, defaults to 8192): most characters of one result, notices included.
        packages (`Sequence[str]`, *optional*): installed distributions that the code may import besides the standard
            library. An option of the executor: set it there if `executor` is an instance.
        memory_limit_mb (`int`, *optional*): memory of one interpreter, in MiB; the executor's 1024 if not given. An
            option of the executor, too.

    Raises:
        `ValueError`: a limit is too small, or options together with an executor instance.
        `ExecutorUnavailable`: the executor cannot isolate on this machine.
    """

    builtin_tools = ("python",)

    def __init__(
        self,
        *,
        stateful: bool = False,
        executor: str | Executor = "bubblewrap",
        tool_timeout: float = 10.0,
        tool_output_limit: int = 8192,
        packages: Sequence[str] = (),
        memory_limit_mb: int | None = None,
    ) -> None:
        if not 0 < tool_timeout < math.inf:  # refuses NaN, too
            raise ValueError(f"tool_timeout is {tool_timeout}; it must be a positive, finite number of seconds.")
        if tool_output_limit < MINIMUM_OUTPUT_LIMIT:
            raise ValueError(
                f"tool_output_limit is {tool_output_limit} characters; it must be at least {MINIMUM_OUTPUT_LIMIT}."
            )
        if isinstance(packages, str):
            raise ValueError(
                f"packages is the string {packages!r}; pass a sequence of names, such as ({packages!r},)."
            )
        options: dict[str, Any] = {}  # an executor of the user's own need not know any
        if packages:
            options["packages"] = tuple(packages)
        if memory_limit_mb is not None:
            options["memory_limit_mb"] = memory_limit_mb
        self.stateful = stateful
        self.tool_timeout = tool_timeout
        self.tool_output_limit = tool_output_limit
        self._executor = get_executor(executor, **options)
        self._session: Session | None = None

    def reset(self, **kwargs: Any) -> str | None:
        """Forget the variables of the last rollout."""
        self.close()
        return super().reset(**kwargs)

    def python(self, code: str) -> str:
        """Run Python code and return what it prints, followed by the value of its last expression.

        Args:
            code: The Python code to run.
        """
        result = self.execute(code)
        return ToolOutput(result.text, failed=result.failed, timed_out=result.timed_out, seconds=result.seconds)

    @not_a_tool
    def execute(self, code: str) -> ExecutionResult:
        """Run `code` like the tool does; never raises because of what the code does."""
        limits = {"timeout": self.tool_timeout, "output_limit": self.tool_output_limit}
        if not self.stateful:
            return self._executor.run(code, **limits)
        if self._session is None:
            self._session = self._executor.session()
        return self._session.run(code, **limits)

    @not_a_tool
    def close(self) -> None:
        """End the interpreter of this rollout, if there is one."""
        if self._session is not None:
            self._session.close()
            self._session = None
