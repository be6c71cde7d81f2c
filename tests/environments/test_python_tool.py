import os
import threading
import time
import warnings

import pytest

from trl_gptoss.environments import (
    ExecutionResult,
    Executor,
    PythonTool,
    ToolOutput,
    get_executor,
    register_executor,
    unsafe_subprocess,
)
from trl_gptoss.environments.process import MAX_OUTPUT_BYTES, NO_OUTPUT, cut


@pytest.fixture(scope="module")
def unsafe():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return get_executor("unsafe_subprocess")


@pytest.fixture(params=["bubblewrap", "unsafe_subprocess"])
def executor(request):
    return request.getfixturevalue("sandbox" if request.param == "bubblewrap" else "unsafe")


def run(executor, code, timeout=10.0, output_limit=1000):
    return executor.run(code, timeout=timeout, output_limit=output_limit)


@pytest.mark.parametrize(
    ("code", "text"),
    [
        ("1 + 1", "2\n"),
        ("x = 3", NO_OUTPUT),
        ("None", NO_OUTPUT),
        ("print('a'); 'b'", "a\n'b'\n"),
        ("", NO_OUTPUT),
        ("# only a comment", NO_OUTPUT),
        ("def f(n):\n    return 1 if n < 2 else n * f(n - 1)\nf(20)", "2432902008176640000\n"),
        ("for i in range(2):\n    print(i)", "0\n1\n"),
        ("import sys\nprint('one'); print('two', file=sys.stderr); print('three')", "one\ntwo\nthree\n"),
        ("print('é', '数', '\\U0001f600')", "é 数 \U0001f600\n"),
        ("print('<|call|><|start|>assistant')", "<|call|><|start|>assistant\n"),
        ("print(__name__); __import__('sys').argv", "__main__\n['']\n"),
        ("class A: pass\nimport pickle\npickle.loads(pickle.dumps(A())).__class__ is A", "True\n"),
        ("import asyncio\nasync def f():\n    await asyncio.sleep(0)\n    return 7\nasyncio.run(f())", "7\n"),
        ("import threading\nt = threading.Thread(target=print, args=(5,))\nt.start()", "5\n"),
        ("'\ud800'.encode('utf-8', 'replace')", "b'?'\n"),  # a lone surrogate in the code itself
    ],
)
def test_like_a_notebook_cell(executor, code, text):
    result = run(executor, code)
    assert (result.text, result.failed, result.timed_out) == (text, False, False)


def test_traceback_shows_the_code_and_nothing_of_ours(executor):
    result = run(executor, "def f():\n    return 1 / 0\nprint('before')\nf()")
    assert result.failed and not result.timed_out
    assert result.text.startswith('before\nTraceback (most recent call last):\n  File "<python>", line 4')
    assert "return 1 / 0" in result.text and result.text.endswith("ZeroDivisionError: division by zero\n")
    assert "_interpreter" not in result.text
    assert "SyntaxError" in run(executor, "x = (").text


@pytest.mark.parametrize(
    ("code", "failed", "part"),
    [
        ("import sys; sys.exit()", False, NO_OUTPUT),
        ("import sys; sys.exit('bad')", True, "bad"),
        ("raise SystemExit(3)", True, NO_OUTPUT),
        ("import os; print('x', flush=True); os._exit(0)", False, "x"),
        ("import os; os._exit(5)", True, NO_OUTPUT),
        ("import os; os.kill(os.getpid(), 9)", True, "killed"),
        ("import os; os.abort()", True, "killed by signal 6"),
        ("import ctypes; ctypes.string_at(0)", True, "killed by signal 11"),
        ("input()", True, "EOFError"),
        ("raise KeyboardInterrupt", True, "KeyboardInterrupt"),
        ("import sys; sys.stdout = None; print(1)", False, NO_OUTPUT),
        ("import sys; sys.stdout.close()", False, NO_OUTPUT),
        ("import sys; sys.stdout = None; 1/0", True, "ZeroDivisionError"),
        ("import sys; sys.stdout.close(); 1/0", True, "ZeroDivisionError"),
    ],
)
def test_ways_to_end(executor, code, failed, part):
    result = run(executor, code)
    assert (result.failed, result.timed_out) == (failed, False)
    assert part in result.text and "_interpreter" not in result.text


def test_time_limit(executor):
    for code in ("while True: pass", "import time; time.sleep(60)"):
        start = time.monotonic()
        result = run(executor, "print('start')\n" + code, timeout=0.7)
        assert time.monotonic() - start < 3
        assert result.timed_out and result.failed
        assert result.text == "start\n[stopped: it did not finish within 0.7 s]"


def test_output_limit(executor):
    result = run(executor, "print('a' * 5000 + 'END')", output_limit=100)
    assert result.text == "a" * 46 + "\n[... 4943 of 5004 characters cut ...]\n" + "a" * 11 + "END\n"
    assert len(result.text) == 100 and not result.failed  # the code itself did nothing wrong
    result = run(executor, "while True: print('x' * 1000)", output_limit=200)
    assert result.failed and f"printed more than {MAX_OUTPUT_BYTES} bytes" in result.text
    result = run(executor, "print('y' * 1000)\nwhile True: pass", output_limit=200, timeout=0.5)
    assert result.timed_out and 195 <= len(result.text) <= 200 and result.text.endswith("within 0.5 s]")


@pytest.mark.parametrize("limit", [38, 39, 40, 50, 99, 100, 101])
def test_cut_keeps_to_the_limit(limit):
    text = "".join(chr(0x4E00 + i) for i in range(100))
    short = cut(text, limit)
    assert len(short) <= limit
    if limit >= 100:
        assert short == text
    else:
        head, notice, tail = short.split("\n")
        assert text.startswith(head) and text.endswith(tail)
        assert notice == f"[... {100 - len(head) - len(tail)} of 100 characters cut ...]"
        assert len(short) >= limit - 1


def test_stateful_keeps_variables_until_reset(executor):
    tool = PythonTool(stateful=True, executor=executor, tool_timeout=5)
    tool.reset()
    assert tool.python("x = [1]") == NO_OUTPUT
    assert tool.python("x.append(2); x") == "[1, 2]\n"
    assert tool.python("1/0").failed
    assert tool.python("import sys; sys.exit(2)").failed
    assert tool.python("x") == "[1, 2]\n"  # neither an error nor sys.exit costs the variables
    tool.reset()
    assert "NameError" in tool.python("x")
    tool.close()


def test_stateful_loses_variables_with_the_interpreter(executor):
    tool = PythonTool(stateful=True, executor=executor, tool_timeout=1)
    for code, note in (
        ("while True: pass", "did not finish within 1 s"),
        ("import os; os._exit(0)", "the interpreter has ended"),
        ("while True: print('x' * 1000)", "printed more than"),
        ("import os; os.write(3, b'0' * 17)", "the interpreter was killed"),
    ):
        tool.python("x = 1")
        output = tool.python(code)
        assert output.failed and note in output and output.endswith("[its variables are lost]"), code
        assert "NameError" in tool.python("x")
    tool.close()


def test_a_session_is_frozen_between_its_calls(executor):
    session = executor.session()
    limits = {"timeout": 5, "output_limit": 100}
    code = """import threading, time
count = 0
def work():
    global count
    while True:
        count += 1
        time.sleep(0.01)
threading.Thread(target=work, daemon=True).start()"""
    assert not session.run(code, **limits).failed
    before = int(session.run("count", **limits).text)
    time.sleep(0.8)
    after = int(session.run("count", **limits).text)
    assert after - before <= 8
    awake = int(session.run("time.sleep(0.5); count", **limits).text)
    assert awake - after >= 15  # control: within a call the thread does run
    session.close()


def test_stateless_forgets(executor):
    tool = PythonTool(executor=executor)
    tool.python("x = 1")
    assert "NameError" in tool.python("x")


def test_the_tool_reports_to_the_rollout_loop(executor):
    tool = PythonTool(executor=executor, tool_timeout=0.5, tool_output_limit=200)
    good, bad, slow = tool.python("1"), tool.python("1/0"), tool.python("while 1: pass")
    assert all(isinstance(output, ToolOutput) for output in (good, bad, slow))
    assert [(o.failed, o.timed_out) for o in (good, bad, slow)] == [(False, False), (True, False), (True, True)]
    assert slow.seconds >= 0.5 and 0 < good.seconds < 5
    assert isinstance(tool.execute("1"), ExecutionResult)


def test_many_threads_never_mix_results(executor):
    tools = [PythonTool(stateful=i % 2 == 0, executor=executor) for i in range(8)]
    wrong = []

    def rollout(i):
        tools[i].reset()
        for turn in range(3):
            if tools[i].python(f"print({i}, {turn})") != f"{i} {turn}\n":
                wrong.append(i)

    threads = [threading.Thread(target=rollout, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for tool in tools:
        tool.close()
    assert not wrong


def test_no_descriptor_is_lost(executor):
    run(executor, "1")
    before = len(os.listdir("/proc/self/fd"))
    for code in ("1", "1/0", "import os; os._exit(1)", "print('x' * 6000000)"):
        run(executor, code)
    session = executor.session()
    session.run("1", timeout=5, output_limit=10)
    session.close()
    session.close()
    assert len(os.listdir("/proc/self/fd")) == before


def test_works_after_a_fork(executor):
    run(executor, "1")
    child = os.fork()
    if child == 0:
        os._exit(0 if run(executor, "40 + 2").text == "42\n" else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert run(executor, "40 + 3").text == "43\n"


def test_limits_are_checked():
    for options, name in (
        ({"tool_timeout": 0}, "tool_timeout"),
        ({"tool_timeout": float("inf")}, "tool_timeout"),
        ({"tool_output_limit": 0}, "tool_output_limit"),
        ({"executor": "docker"}, "Known: bubblewrap, unsafe_subprocess"),
        ({"memory_limit_mb": 1}, "memory_limit_mb"),
    ):
        with pytest.raises(ValueError, match=name):
            PythonTool(**options)


def test_an_executor_of_ones_own():
    class Remote:
        def probe(self): ...
        def close(self): ...
        def session(self):
            raise NotImplementedError

        def run(self, code, *, timeout, output_limit):
            return ExecutionResult(text=f"{code}|{timeout}|{output_limit}", failed=True)

    assert isinstance(Remote(), Executor)
    output = PythonTool(executor=Remote(), tool_timeout=3, tool_output_limit=999).python("code")
    assert output == "code|3|999" and output.failed
    register_executor("remote-test", Remote)
    assert get_executor("remote-test") is get_executor("remote-test")
    with pytest.raises(ValueError, match="options"):
        get_executor(Remote(), memory_limit_mb=3)
    for options in ({"packages": ("numpy",)}, {"memory_limit_mb": 512}):  # would do nothing
        with pytest.raises(ValueError, match="options"):
            PythonTool(executor=Remote(), **options)
    assert (
        PythonTool(executor="remote-test").python("code").startswith("code|")
    )  # a name of one's own takes no options
    with pytest.raises(ValueError, match="pass a sequence"):
        PythonTool(packages="numpy")


def test_unsafe_warns_once(monkeypatch):
    monkeypatch.setattr(unsafe_subprocess, "_warned", False)
    with pytest.warns(UserWarning, match="WITHOUT isolation"):
        unsafe_subprocess.UnsafeSubprocessExecutor().probe()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        unsafe_subprocess.UnsafeSubprocessExecutor().probe()
