"""Plain sums without a sandbox: the same answers, and nothing else is kept from the sandbox."""

import random

import pytest
from arithmetic import ArithmeticExecutor, register_arithmetic

from trl_gptoss.environments import ExecutionResult, get_executor

LIMITS = {"timeout": 10.0, "output_limit": 4096}


class Behind:
    def __init__(self):
        self.asked = []

    def run(self, code, *, timeout, output_limit):
        self.asked.append((code, timeout, output_limit))
        return ExecutionResult(text="from behind\n")


def test_sums_are_what_the_sandbox_prints():
    rng = random.Random(0)
    behind, sandbox = Behind(), get_executor("bubblewrap")
    fast = ArithmeticExecutor(behind)
    codes = ["0*0", "-0+0", "-7*8", "0-999999999999", "999999999999*999999999999"]
    codes += [f"{rng.randint(-99, 2000)}{rng.choice('+-*')}{rng.randint(0, 99)}" for _ in range(15)]
    for code in codes:
        ours, theirs = fast.run(code, **LIMITS), sandbox.run(code, **LIMITS)
        assert (ours.text, ours.failed, ours.timed_out) == (theirs.text, theirs.failed, theirs.timed_out), code
    assert behind.asked == []


@pytest.mark.parametrize(
    "code",
    ["", "1", "1+", "01+2", "1+02", " 1+2", "1+2 ", "1+2\n", "1 + 2", "1+2+3", "1--2", "1/2", "2**9", "1+a", "x=1+2",
     "print(1+2)", "1+2;3", "1_0+2", "0x1+2", "1.0+2", "٣+1", "1000000000000+1", "--1+2", "+1+2"],
)  # fmt: skip
def test_everything_else_goes_to_the_sandbox(code):
    behind = Behind()
    result = ArithmeticExecutor(behind).run(code, timeout=3.0, output_limit=99)
    assert result.text == "from behind\n" and behind.asked == [(code, 3.0, 99)]


def test_it_is_found_under_its_name():
    name = register_arithmetic("bubblewrap")
    executor = get_executor(name)
    assert isinstance(executor, ArithmeticExecutor) and executor.behind is get_executor("bubblewrap")
    assert executor.run("print(46 + 17)", **LIMITS).text == "63\n"
    only_sums = get_executor(register_arithmetic("none"))
    assert only_sums.run("3*4", **LIMITS).text == "12\n" and only_sums.run("print(1)", **LIMITS).failed
    with pytest.raises(ValueError, match="Unknown executor"):
        register_arithmetic("chalk")
