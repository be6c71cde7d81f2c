import asyncio
import threading
import time

import pytest
from trl.trainer.utils import start_event_loop_in_daemon

from trl_gptoss.environments import ToolOutput
from trl_gptoss.rollouts import ToolCall, ToolRunner, tools
from trl_gptoss.rollouts.tools import Toolbox, clip_output


@pytest.fixture(autouse=True)
def short_grace(monkeypatch):
    monkeypatch.setattr(tools, "GRACE", 0.1)


def call(name="tool", raw=False, raw_arguments="{}", **arguments):
    return ToolCall(name=name, arguments=None if raw else arguments, raw_arguments=raw_arguments, raw=raw)


def run_one(function, toolcall, timeout=None, limit=1000, loop=None):
    runner = ToolRunner(output_limit=limit, max_concurrent=4, event_loop=loop)
    toolbox = Toolbox(functions={"tool": function}, timeout=timeout)
    [[result]] = runner.run([(toolbox, [toolcall])])
    return result, toolbox


def test_rollouts_run_side_by_side():
    together = threading.Barrier(8)  # a call returns once all of them run
    boxes = [(Toolbox(functions={"tool": lambda: together.wait(20)}), [call()]) for _ in range(8)]
    results = ToolRunner(output_limit=100, max_concurrent=8).run(boxes)
    assert len(results) == 8 and not any(r.failed for [r] in results)


def test_calls_of_one_rollout_run_in_order_and_results_keep_it():
    seen = []

    def tool(n):
        time.sleep(0.05 * (3 - n))
        seen.append(n)
        return n

    runner = ToolRunner(output_limit=100, max_concurrent=8)
    [results] = runner.run([(Toolbox(functions={"tool": tool}), [call(n=n) for n in range(3)])])
    assert seen == [0, 1, 2]
    assert [r.text for r in results] == ["0", "1", "2"]
    assert [r.arguments for r in results] == [{"n": 0}, {"n": 1}, {"n": 2}]


def test_no_more_calls_at_once_than_allowed():
    lock, running, peak = threading.Lock(), [0], [0]

    def tool():
        with lock:
            running[0] += 1
            peak[0] = max(peak[0], running[0])
        time.sleep(0.05)
        with lock:
            running[0] -= 1

    ToolRunner(output_limit=100, max_concurrent=3).run([(Toolbox(functions={"tool": tool}), [call()])] * 9)
    assert peak[0] == 3


def raising(error):
    def tool():
        raise error

    return tool


@pytest.mark.parametrize("error", [ValueError("no"), SystemExit(1), KeyboardInterrupt(), RecursionError("deep")])
def test_a_tool_that_raises_is_a_failed_call(error):
    result, _ = run_one(raising(error), call())
    assert result.failed and not result.timed_out
    assert type(error).__name__ in result.text


def test_a_result_whose_str_raises_is_a_failed_call():
    class Bad:
        def __str__(self):
            raise ValueError("no text")

    result, _ = run_one(lambda: Bad(), call())
    assert result.failed and "no text" in result.text


def test_an_error_whose_str_raises_is_a_failed_call_and_no_hanging_one():
    class Broken(Exception):
        def __str__(self):
            return self.args[0]["detail"]

    def tool():
        raise Broken({})

    result, toolbox = run_one(tool, call(), timeout=5)
    assert result.text == "error: Broken (whose message raises KeyError)"
    assert result.failed and not result.timed_out and not toolbox.hung


def test_unknown_tool_wrong_arguments_and_broken_json_never_reach_the_tool():
    reached = []
    result, _ = run_one(lambda: reached.append(1), call(name="other"))
    assert result.failed and "other" in result.text and "tool" in result.text
    result, _ = run_one(lambda: reached.append(1), call(x=1))
    assert result.failed and "TypeError" in result.text
    broken = ToolCall(name="tool", arguments=None, raw_arguments='{"x": ')
    result, _ = run_one(lambda: reached.append(1), broken)
    assert result.failed and '{"x": ' in result.text and result.arguments == '{"x": '
    assert reached == []


def test_a_raw_call_gets_the_sampled_text():
    result, _ = run_one(lambda text: text.upper(), call(raw=True, raw_arguments='print("a")'))
    assert result.text == 'PRINT("A")' and result.arguments == 'print("a")' and not result.failed


def test_a_tool_that_hangs_is_abandoned_and_its_rollout_gets_no_further_calls():
    release = threading.Event()
    box = Toolbox(functions={"tool": lambda: release.wait(20)}, timeout=0.2)
    other = Toolbox(functions={"tool": lambda: "fine"}, timeout=0.2)
    start = time.perf_counter()
    [[hung, refused], [fine]] = ToolRunner(output_limit=100, max_concurrent=1).run(
        [(box, [call(), call()]), (other, [call()])]
    )
    assert time.perf_counter() - start < 5
    assert hung.timed_out and hung.failed and "0.2 s" in hung.text
    assert refused.failed and not refused.timed_out
    assert box.hung and not other.hung
    assert fine.text == "fine"  # the abandoned call gave its slot back
    release.set()


@pytest.mark.parametrize("timeout", [0, -1.0, float("nan")])
def test_a_limit_that_leaves_no_time_is_refused(timeout):
    with pytest.raises(ValueError, match="tool_timeout is .* must be positive"):
        Toolbox(timeout=timeout)


def test_a_limit_beyond_what_a_thread_can_wait_is_none(event_loop):
    async def slow():
        return "fine"

    for tool in (lambda: "fine", slow):
        result, box = run_one(tool, call(), timeout=float("inf"), loop=event_loop)
        assert (result.text, result.failed, box.timeout) == ("fine", False, None)


def test_a_call_that_cannot_be_started_is_answered(monkeypatch):
    """Nobody would wake a rollout whose call was never answered."""
    start = threading.Thread.start

    def refuse(thread):
        if thread._target.__name__ == "_call_into":
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refuse)
    runner = ToolRunner(output_limit=1000, max_concurrent=1)
    [results] = runner.run([(Toolbox(functions={"tool": lambda: "fine"}), [call(), call()])])
    assert [r.text for r in results] == ["error: tool could not run: RuntimeError: can't start new thread"] * 2
    assert all(r.failed for r in results)


def test_a_tool_that_reports_its_own_timeout():
    result, box = run_one(lambda: ToolOutput("partial", timed_out=True), call(), timeout=5)
    assert (result.text, result.failed, result.timed_out, box.hung) == ("partial", True, True, False)
    result, _ = run_one(raising(TimeoutError("slow")), call())
    assert result.timed_out
    result, _ = run_one(lambda: ToolOutput("exit 1", failed=True), call())
    assert result.failed and not result.timed_out


@pytest.fixture(scope="module")
def event_loop():
    thread, loop, ready = start_event_loop_in_daemon(name="test")
    ready.wait()
    yield loop
    loop.call_soon_threadsafe(loop.stop)


def test_coroutines_run_on_the_shared_loop(event_loop):
    async def tool(x: int):
        assert asyncio.get_running_loop() is event_loop
        await asyncio.sleep(0)
        return x + 1

    result, _ = run_one(tool, call(x=1), loop=event_loop)
    assert result.text == "2" and not result.failed
    result, _ = run_one(tool, call(x=1))
    assert result.failed and "event loop" in result.text


def test_a_coroutine_is_cancelled_at_its_limit(event_loop):
    cancelled = threading.Event()

    async def tool():
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            cancelled.set()
            raise

    result, box = run_one(tool, call(), timeout=0.1, loop=event_loop)
    assert result.timed_out and not box.hung
    assert cancelled.wait(5)


@pytest.mark.parametrize("length", [0, 99, 100, 101, 100_000])
def test_output_is_cut_to_the_limit_with_a_notice(length):
    text = "x" * length
    cut = clip_output(text, 100)
    assert len(cut) <= 100
    assert (cut == text) == (length <= 100)
    assert length <= 100 or str(length) in cut
    assert clip_output(cut, 100) == cut


def test_results_can_be_encoded_and_stored():
    """A lone surrogate has no UTF-8 form: TRL's table of completions could not be written."""
    result, _ = run_one(lambda: "a\ud800b \ud83d\ude80", call())
    assert result.text == "a\ufffdb \U0001f680"


def test_error_texts_are_cut_too():
    result, _ = run_one(raising(ValueError("y" * 5000)), call(), limit=200)
    assert len(result.text) <= 200 and result.failed
    result, _ = run_one(lambda: 1, call(name="z" * 5000), limit=200)
    assert len(result.text) <= 200
