"""Where code of the policy runs: the seam between `PythonTool` and a sandbox."""

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable


@dataclass(frozen=True, kw_only=True, slots=True)
class ExecutionResult:
    """How one piece of code ended.

    text (`str`): standard output and error in order, the value of the last expression, the traceback; cut to the limit.
    failed (`bool`): it raised, exited non-zero, was killed or ran into a limit.
    timed_out (`bool`): it was stopped at the wall-clock or CPU limit (implies `failed`).
    seconds (`float`): wall-clock time.
    """

    text: str
    failed: bool = False
    timed_out: bool = False
    seconds: float = 0.0


class ExecutorUnavailable(RuntimeError):
    """The executor cannot isolate on this machine. The message says what was found and what to do."""


class Session(Protocol):
    """An interpreter that keeps its variables from one `run` to the next."""

    def run(self, code: str, *, timeout: float, output_limit: int) -> ExecutionResult: ...

    def close(self) -> None: ...


@runtime_checkable
class Executor(Protocol):
    """Runs Python code of the policy. Shared by all environments of a process; called from many threads at once.

    `run` never raises because of what the code does, returns within about `timeout` seconds, and leaves nothing behind.
    `session` is used by `PythonTool(stateful=True)` only.
    """

    def probe(self) -> None:
        """Raise `ExecutorUnavailable` if code cannot be run safely here."""
        ...

    def run(self, code: str, *, timeout: float, output_limit: int) -> ExecutionResult:
        """Run `code` in a fresh interpreter for at most `timeout` seconds; show at most `output_limit` characters."""
        ...

    def session(self) -> Session: ...

    def close(self) -> None: ...


_FACTORIES: dict[str, Callable[..., Executor]] = {}
_SHARED: dict[tuple, Executor] = {}
_LOCK = threading.Lock()


def register_executor(name: str, factory: Callable[..., Executor]) -> None:
    """Make `factory(**options)` available as `PythonTool(executor=name, **options)`."""
    _FACTORIES[name] = factory


def get_executor(executor: str | Executor, **options: Any) -> Executor:
    """The executor of this name and these options, made and probed on first use and then shared by the process.

    Args:
        executor (`str` or `Executor`): a registered name, or a ready instance (which takes no options).
        options: keyword arguments of the executor's constructor; hashable.

    Raises:
        `ValueError`: unknown name, or options together with an instance.
        `ExecutorUnavailable`: it cannot isolate on this machine.
    """
    if not isinstance(executor, str):
        if options:
            raise ValueError(
                f"Got the executor instance {executor!r} together with the options {sorted(options)}. Set them where "
                "the instance is made."
            )
        return executor
    if executor not in _FACTORIES:
        raise ValueError(f"Unknown executor {executor!r}. Known: {', '.join(sorted(_FACTORIES))}.")
    key = (executor, tuple(sorted(options.items())))
    with _LOCK:
        if key not in _SHARED:
            made = _FACTORIES[executor](**options)
            made.probe()
            _SHARED[key] = made
        return _SHARED[key]
