"""Running tool calls: rollouts side by side, the calls of one rollout in order, nothing able to stop the run.

A Python thread cannot be killed. A call that outlives its limit by `GRACE` is therefore abandoned: the policy is told
that it timed out, its thread is left behind as a daemon, and the rollout's toolbox is marked `hung` so that the
environment behind it is not used again. Coroutines are cancelled at the limit, and tools that can stop their own work
at the same limit (a sandbox that kills its process) have the time of `GRACE` to say so themselves.
"""

import asyncio
import inspect
import queue
import threading
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

from ..environments import ToolOutput
from ..harmony.vocabulary import well_formed
from ..trajectory import ToolResult

GRACE = 1.0  # seconds


@dataclass(kw_only=True, slots=True)
class ToolCall:
    """One call the policy asked for.

    name (`str`): name of the tool, without a namespace.
    arguments (`dict` or `None`): parsed arguments; `None` if they are not a JSON object.
    raw_arguments (`str`): the text as it was sampled.
    raw (`bool`): the tool takes `raw_arguments` as its only argument (Harmony's built-in tools).
    source (`Any`): whatever the turn format needs to render the result.
    """

    name: str
    arguments: dict[str, Any] | None
    raw_arguments: str
    raw: bool = False
    source: Any = None


@dataclass(kw_only=True, slots=True)
class Toolbox:
    """The tools of one rollout.

    functions (`dict[str, Callable]`): by name; plain functions or coroutine functions.
    declared (`list`): the same tools in the form in which the turn format declares them to the policy.
    timeout (`float` or `None`): wall-clock limit of one call in seconds, `None` for no limit.
    output_limit (`int` or `None`): most characters of one result, `None` for the runner's limit.
    hung (`bool`): set once a call was abandoned; later calls are refused.
    """

    functions: dict[str, Callable[..., Any]] = field(default_factory=dict)
    declared: list[Any] = field(default_factory=list)
    timeout: float | None = None
    output_limit: int | None = None
    hung: bool = False

    def __post_init__(self) -> None:
        if self.timeout is None:
            return
        if not self.timeout > 0:  # refuses NaN, too
            raise ValueError(
                f"tool_timeout is {self.timeout} seconds, it must be positive; an environment may say None."
            )
        if self.timeout > threading.TIMEOUT_MAX - GRACE:  # `inf`: no thread can wait so long
            self.timeout = None


def clip_output(text: str, limit: int) -> str:
    """Cut `text` to `limit` characters, notice included. Text within the limit comes back unchanged."""
    if len(text) <= limit:
        return text
    notice = f"\n[output cut: {len(text)} characters, limit {limit}]"
    return text[: max(0, limit - len(notice))] + notice


class ToolRunner:
    """Runs the pending calls of many rollouts at once.

    Args:
        output_limit (`int`): most characters of one result that the policy is shown, where its toolbox sets no limit.
        max_concurrent (`int`): most calls that run at the same time.
        event_loop (`asyncio.AbstractEventLoop`, *optional*): a running loop for coroutine functions; needed only if
            a toolbox has any.
    """

    def __init__(
        self, output_limit: int, max_concurrent: int, event_loop: asyncio.AbstractEventLoop | None = None
    ) -> None:
        self.output_limit = output_limit
        self.max_concurrent = max_concurrent
        self.event_loop = event_loop
        self._slots = threading.Semaphore(max_concurrent)

    def session(self) -> "ToolSession":
        """Where the calls of one batch of rollouts are started and their results are picked up."""
        return ToolSession(self)

    def run(self, pending: list[tuple[Toolbox, list[ToolCall]]]) -> list[list[ToolResult]]:
        """Run all calls and wait for them. Results are in the order of `pending`; never raises because of a tool."""
        session = self.session()
        for key, (toolbox, calls) in enumerate(pending):
            session.start(key, toolbox, calls)
        done = dict(session.finished(first=None, rest=None))
        return [done[key] for key in range(len(pending))]

    def run_one(self, toolbox: Toolbox, call: ToolCall, deadline: float | None = None) -> ToolResult:
        """Run one call in this thread's time.

        Args:
            deadline (`float`, *optional*): `time.monotonic()` at which nobody waits for the result any more.
        """
        shown = call.raw_arguments if call.raw or call.arguments is None else call.arguments
        limit = self.output_limit if toolbox.output_limit is None else toolbox.output_limit
        refusal = self._refuse(toolbox, call)
        if refusal is not None:
            return ToolResult(name=call.name, arguments=shown, text=clip_output(refusal, limit), failed=True)
        box: list[ToolResult] = []
        worker = threading.Thread(target=self._call_into, args=(box, toolbox, call, shown), daemon=True)
        if not self._slots.acquire(timeout=_until(deadline)):
            text = f"error: {call.name} did not run: the time of the rollout was over before it was its turn"
            return ToolResult(name=call.name, arguments=shown, text=text, failed=True, timed_out=True)
        start = time.perf_counter()
        try:
            worker.start()
            patience = None if toolbox.timeout is None else toolbox.timeout + GRACE
            worker.join(min((t for t in (patience, _until(deadline)) if t is not None), default=None))
        finally:
            self._slots.release()
        seconds = time.perf_counter() - start
        if box:
            result = box[0]
        else:
            toolbox.hung = True
            waited = seconds if toolbox.timeout is None else min(seconds, toolbox.timeout)
            text = f"error: {call.name} timed out after {waited:.3g} s"
            result = ToolResult(name=call.name, arguments=shown, text=text, failed=True, timed_out=True)
        # What has no UTF-8 form would stop the run when the completions are stored.
        result.text = clip_output(well_formed(result.text), limit)
        result.seconds = seconds
        return result

    def _refuse(self, toolbox: Toolbox, call: ToolCall) -> str | None:
        """Why this call cannot run, or `None`."""
        if call.name not in toolbox.functions:
            known = ", ".join(sorted(toolbox.functions)) or "none"
            return f"error: unknown tool {call.name!r}. Available tools: {known}"
        if toolbox.hung:
            return f"error: {call.name} is not available: an earlier call of this rollout never returned"
        if not call.raw and call.arguments is None:
            return f"error: the arguments of {call.name} are not a JSON object: {call.raw_arguments}"
        return None

    def _call_into(self, box: list[ToolResult], toolbox: Toolbox, call: ToolCall, shown: Any) -> None:
        """Thread body: puts the result into `box`."""
        function = toolbox.functions[call.name]
        try:
            value = function(call.raw_arguments) if call.raw else function(**call.arguments)
            if inspect.iscoroutine(value):
                value = self._await(value, toolbox.timeout, call.name)
            if isinstance(value, ToolOutput):
                text, failed, timed_out = str(value), value.failed, value.timed_out
            else:
                text, failed, timed_out = str(value), False, False
        except BaseException as error:  # a tool is foreign code: even `exit()` in it must only be a failed call
            text, failed, timed_out = f"error: {_describe(error)}", True, isinstance(error, TimeoutError)
        box.append(ToolResult(name=call.name, arguments=shown, text=text, failed=failed, timed_out=timed_out))

    def _await(self, coroutine: Coroutine, timeout: float | None, name: str) -> Any:
        """Run a coroutine on the shared loop, so that clients bound to a loop (HTTP sessions) keep working."""
        if self.event_loop is None:
            coroutine.close()
            raise RuntimeError(f"the tool {name} is a coroutine function, but there is no event loop to run it")
        future = asyncio.run_coroutine_threadsafe(coroutine, self.event_loop)
        try:
            return future.result(timeout)
        except TimeoutError:
            future.cancel()
            raise TimeoutError(f"{name} timed out after {timeout:g} s" if timeout else f"{name} timed out") from None


class ToolSession:
    """The running calls of one batch. Rollouts run side by side, the calls of one rollout in order.

    Args:
        runner ([`ToolRunner`]): what runs a call.
    """

    def __init__(self, runner: ToolRunner) -> None:
        self.runner = runner
        self.pending = 0
        self._done: queue.SimpleQueue[tuple[int, list[ToolResult]]] = queue.SimpleQueue()

    def start(self, key: int, toolbox: Toolbox, calls: list[ToolCall], deadline: float | None = None) -> None:
        """Run the calls of a rollout, without waiting for them.

        Args:
            key (`int`): names the rollout in `finished`.
            toolbox ([`Toolbox`]): its tools.
            calls (`list[ToolCall]`): in order.
            deadline (`float`, *optional*): `time.monotonic()` at which the rollout is over.
        """

        def serve() -> None:
            results = []
            for call in calls:
                try:
                    results.append(self.runner.run_one(toolbox, call, deadline))
                # a system without threads or memory: unanswered, the rollout waits for ever
                except Exception as error:
                    text = f"error: {call.name} could not run: {type(error).__name__}: {error}"
                    results.append(ToolResult(name=call.name, arguments=call.raw_arguments, text=text, failed=True))
            self._done.put((key, results))

        self.pending += 1
        # One light thread per rollout keeps its calls in order; the runner's slots bound how many really run.
        threading.Thread(target=serve, daemon=True).start()

    def finished(self, first: float | None, rest: float | None) -> list[tuple[int, list[ToolResult]]]:
        """Results that have come in, in the order they did.

        Args:
            first (`float` or `None`): seconds to wait for the first one, `None` for as long as it takes.
            rest (`float` or `None`): seconds to wait then for all others.
        """
        found: list[tuple[int, list[ToolResult]]] = []
        end = None if first is None else time.monotonic() + first
        while self.pending:
            try:
                found.append(self._done.get(timeout=None if end is None else max(0.0, end - time.monotonic())))
            except queue.Empty:
                break
            self.pending -= 1
            if len(found) == 1:
                end = None if rest is None else time.monotonic() + rest
        return found


def _describe(error: BaseException) -> str:
    """Type and message; the message is foreign code, too."""
    try:
        return f"{type(error).__name__}: {error}"
    except BaseException as another:
        return f"{type(error).__name__} (whose message raises {type(another).__name__})"


def _until(deadline: float | None) -> float | None:
    """Seconds until `deadline`, as many as a thread can wait; `None` if there is none."""
    return None if deadline is None else min(max(0.0, deadline - time.monotonic()), threading.TIMEOUT_MAX)
