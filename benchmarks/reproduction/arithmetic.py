"""The sums of the tool task without a sandbox for each: an executor in front of another one.

A rollout of this task calls Python once a step, with code such as `46+17`; a thousand sandboxes a step are more work than the
training. One whole number, an operator (+, - or *) and another whole number are computed here, and shown as the
interpreter shows them. Everything else goes to the executor behind, a sandbox.
"""

import re

from trl_gptoss.environments.executor import ExecutionResult, Executor, Session, get_executor, register_executor
from trl_gptoss.tasks.retool import compute

# No leading zeros and no spaces, which Python may refuse; few enough digits that the output limit is never reached.
SUM = re.compile(r"(-?(?:0|[1-9][0-9]{0,11}))([+*-])((?:0|[1-9][0-9]{0,11}))")


class ArithmeticExecutor:
    """An [`~trl_gptoss.environments.Executor`] that computes plain sums itself.

    Args:
        behind ([`~trl_gptoss.environments.Executor`]): runs all other code.
    """

    def __init__(self, behind: Executor) -> None:
        self.behind = behind

    def probe(self) -> None:
        self.behind.probe()

    def run(self, code: str, *, timeout: float, output_limit: int) -> ExecutionResult:
        found = SUM.fullmatch(code)
        if found is None:
            return self.behind.run(code, timeout=timeout, output_limit=output_limit)
        a, operator, b = found.groups()
        return ExecutionResult(text=f"{compute(int(a), operator, int(b))}\n")

    def session(self) -> Session:
        return self.behind.session()

    def close(self) -> None:
        """Nothing of its own; the executor behind is shared by the process."""


class NothingElse:
    """An executor for machines that allow no sandbox: it runs no code at all."""

    def probe(self) -> None:
        """It needs nothing."""

    def run(self, code: str, *, timeout: float, output_limit: int) -> ExecutionResult:
        return ExecutionResult(text="only a+b, a-b and a*b can be computed here\n", failed=True)

    def session(self) -> Session:
        raise NotImplementedError("there is no interpreter that could keep its variables")

    def close(self) -> None:
        """Nothing is open."""


def register_arithmetic(behind: str) -> str:
    """Register an [`ArithmeticExecutor`] in front of the executor of the name `behind` (`"none"`: of [`NothingElse`]), and
    return its own name.

    Raises:
        `ExecutorUnavailable`: what is behind it cannot isolate on this machine.
    """
    name = f"arithmetic+{behind}"
    executor = NothingElse() if behind == "none" else get_executor(behind)
    register_executor(name, lambda: ArithmeticExecutor(executor))
    return name
