"""The token-in/token-out loop: sample, parse, run the tools, append, until every rollout has ended.

Nothing that was sampled is ever decoded and encoded again. The prompt of turn n+1 is the prompt of turn n, followed by
the ids sampled in turn n and the ids of the observation:

    prompt | sampled 0 | observation 0 | sampled 1 | observation 1 | sampled 2
           |  mask 1   |    mask 0     |  mask 1   |    mask 0     |  mask 1
"""

import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from ..trajectory import StopReason, ToolResult, Trajectory, Turn
from .backend import GenerationBackend, Sample, SampleEnd
from .routed_experts import RouterShape, RoutingOfBatch
from .stream import SampleRequest, SampleStream, WaveStream
from .tools import Toolbox, ToolCall, ToolRunner, ToolSession

_IDLE = 0.05  # seconds to wait where nothing can be done
_TICK = 0.01  # seconds for which samples are waited for while tools run


@dataclass(kw_only=True, slots=True)
class ParsedSample:
    """What a turn format reads out of sampled ids.

    messages (`list[dict]`): for people and rewards, see [`Turn`].
    calls (`list[ToolCall]`): calls that may be executed.
    anomalies (`list[str]`): what had to be repaired or dropped.
    final_text (`str` or `None`): text of the last final message.
    """

    messages: list[dict[str, Any]]
    calls: list[ToolCall] = field(default_factory=list)
    anomalies: list[str] = field(default_factory=list)
    final_text: str | None = None


@dataclass(kw_only=True, slots=True)
class Observation:
    """Ids to append after tool calls (up to and including the next generation prompt), and the same as messages."""

    ids: list[int]
    messages: list[dict[str, Any]]


class TurnFormat(Protocol):
    """How a model family writes turns as token ids. Neither method may raise because of what was sampled."""

    def parse(self, ids: list[int], toolbox: Toolbox) -> ParsedSample: ...

    def observe(self, calls: list[ToolCall], results: list[ToolResult]) -> Observation: ...


@dataclass(kw_only=True, slots=True)
class RolloutLimits:
    """Budgets of one rollout.

    max_turns (`int` or `None`): most turns the policy may take, `None` for no limit.
    max_rollout_tokens (`int`): most ids after the prompt, observations included.
    max_context (`int`): most ids the model can see, prompt included.
    max_seconds (`float`, *optional*): most wall-clock time, `None` for no limit. Turns are then sampled in pieces of
        `piece_tokens` ids, and the time is looked at between two of them.
    piece_tokens (`int`, *optional*, defaults to `512`): see `max_seconds`.
    """

    max_turns: int | None
    max_rollout_tokens: int
    max_context: int
    max_seconds: float | None = None
    piece_tokens: int = 512


class _HasDone(Protocol):
    done: bool


@dataclass(kw_only=True, slots=True)
class Episode:
    """One rollout while it runs.

    trajectory ([`Trajectory`]): grows turn by turn.
    toolbox ([`Toolbox`]): the tools this rollout may call.
    environment (`object` with `done`, *optional*): asked after the tools of a turn have run whether the episode is
        over.
    messages (`list[dict]`): the completion as messages: policy messages and tool results in order.
    seed (`int`, *optional*): makes what is sampled depend on this seed and not on the order in which rollouts go on,
        where the backend can do that.
    """

    trajectory: Trajectory
    toolbox: Toolbox
    environment: _HasDone | None = None
    messages: list[dict[str, Any]] = field(default_factory=list)
    seed: int | None = None
    context: list[int] = field(default_factory=list)
    budget: int = 0
    deadline: float | None = None
    piece: Sample | None = None
    pieces: int = 0


def run_episodes(
    episodes: list[Episode],
    backend: GenerationBackend,
    turn_format: TurnFormat,
    tools: ToolRunner,
    limits: RolloutLimits,
    stop_ids: list[int],
    any_rank_running: Callable[[bool], bool],
    router: RouterShape | None = None,
    wait_for_tools: bool = False,
) -> None:
    """Run all episodes to their end, in place. Each goes on as soon as it can; none waits for another one's tools.

    Args:
        episodes (`list[Episode]`): this rank's rollouts; their trajectories hold only the prompt.
        backend ([`GenerationBackend`]): what samples; requests go in as they come if it is a [`SampleStream`].
        turn_format ([`TurnFormat`]): what reads and writes turns.
        tools ([`ToolRunner`]): what executes calls.
        limits ([`RolloutLimits`]): budgets.
        stop_ids (`list[int]`): a sample that does not end with one of them was cut off.
        any_rank_running (`Callable[[bool], bool]`): logical or over all ranks. Used twice per wave if the backend is
            collective, so that ranks whose rollouts have ended keep taking part.
        router ([`RouterShape`], *optional*): the backend has to report the experts of every sample.
        wait_for_tools (`bool`, *optional*, defaults to `False`): see [`WaveStream`]; for a backend that samples in waves.

    Raises:
        ValueError: a prompt leaves no room for a completion in the context.
        RuntimeError: the backend sampled nothing at all.
        DamagedRouting: the experts it reports cannot be those it used.
    """
    stream = backend if isinstance(backend, SampleStream) else WaveStream(backend, any_rank_running, wait_for_tools)
    _Run(
        episodes, backend, stream, turn_format, tools.session(), limits, stop_ids, any_rank_running, router
    ).to_the_end()


class _Run:
    """The rollouts of one batch on their way. An episode is either being sampled, or its tools run, or it has ended."""

    def __init__(
        self,
        episodes: list[Episode],
        backend: GenerationBackend,
        stream: SampleStream,
        turn_format: TurnFormat,
        tools: ToolSession,
        limits: RolloutLimits,
        stop_ids: list[int],
        any_rank_running: Callable[[bool], bool],
        router: RouterShape | None,
    ) -> None:
        self.episodes = episodes
        self.backend = backend
        self.stream = stream
        self.stream.reset()
        self.turn_format = turn_format
        self.tools = tools
        self.limits = limits
        self.stop_ids = stop_ids
        self.any_rank_running = any_rank_running
        self.routing = None if router is None else RoutingOfBatch(router)
        self.calls: dict[int, list[ToolCall]] = {}

    def to_the_end(self) -> None:
        for key in range(len(self.episodes)):
            self.begin(key)
        while self.is_running():
            patience = self.stream.patience
            # Nothing to sample here: wait for a tool. Not for long, other ranks may need this one.
            first = patience if self.stream.waiting else _IDLE
            for key, results in self.tools.finished(first=first, rest=patience):
                self.answer(key, results)
            for key, sample in self.stream.poll(_TICK if self.tools.pending else _IDLE):
                self.take(key, sample)
        if self.routing is not None:
            for key, turn, rows in self.routing.checked():
                self.episodes[key].trajectory.turns[turn].routing = rows

    def is_running(self) -> bool:
        here = bool(self.stream.waiting or self.tools.pending)
        return self.any_rank_running(here) if self.backend.collective else here

    def begin(self, key: int) -> None:
        episode, limits = self.episodes[key], self.limits
        prompt = episode.trajectory.prompt_ids
        episode.context = list(prompt)
        episode.budget = min(limits.max_rollout_tokens, limits.max_context - len(prompt))
        if episode.budget < 1:
            raise ValueError(
                f"Prompt {key} of this batch has {len(prompt)} tokens and the model's context holds "
                f"{limits.max_context}: there is no room for a completion. Drop such rows from the data set."
            )
        if limits.max_seconds is not None:
            episode.deadline = time.monotonic() + limits.max_seconds
        self.sample(key)

    def sample(self, key: int) -> None:
        """Ask for the next turn of an episode, or for the next piece of it."""
        episode = self.episodes[key]
        so_far = [] if episode.piece is None else episode.piece.ids
        limit = episode.budget - len(so_far)
        if episode.deadline is not None:
            limit = min(limit, self.limits.piece_tokens)
        sampling = self.backend.sampling
        if episode.seed is not None:
            sampling = replace(sampling, seed=_derived_seed(episode.seed, episode.pieces))
        episode.pieces += 1
        self.stream.submit(
            key, SampleRequest(prompt=episode.context + so_far, max_new_tokens=limit, sampling=sampling)
        )

    def take(self, key: int, sample: Sample) -> None:
        """Append what was sampled, and go on with the tools of the turn."""
        episode = self.episodes[key]
        if self.routing is not None and sample.ids:
            prompt = len(episode.context) + (0 if episode.piece is None else len(episode.piece.ids))
            turn = len(episode.trajectory.turns)
            self.routing.add(key, turn, sample.routing, prompt, len(sample.ids))
        sample = _joined(episode.piece, sample)
        cut = not sample.ids or sample.ids[-1] not in self.stop_ids
        unfinished = cut and len(sample.ids) < episode.budget and sample.end is not SampleEnd.ABORT
        if unfinished and episode.deadline is not None and not _over(episode):
            episode.piece = sample
            self.sample(key)
            return
        episode.piece = None
        calls = _take(episode, sample, self.turn_format, self.limits, cut)
        if calls:
            self.calls[key] = calls
            self.tools.start(key, episode.toolbox, calls, episode.deadline)

    def answer(self, key: int, results: list[ToolResult]) -> None:
        """Append the results of a turn's calls, and go on with the next turn."""
        if _answer(self.episodes[key], self.calls.pop(key), results, self.turn_format):
            self.sample(key)


def _derived_seed(seed: int, piece: int) -> int:
    """A seed for each piece of a rollout, whatever the other rollouts of the batch do."""
    return random.Random(f"{seed}/{piece}").getrandbits(62)


def _joined(before: Sample | None, after: Sample) -> Sample:
    """Two pieces of one turn."""
    if before is None:
        return after
    logps = None if before.logps is None or after.logps is None else before.logps + after.logps
    return replace(after, ids=before.ids + after.ids, logps=logps)


def _over(episode: Episode) -> bool:
    return episode.deadline is not None and time.monotonic() >= episode.deadline


def _take(
    episode: Episode, sample: Sample, turn_format: TurnFormat, limits: RolloutLimits, cut: bool
) -> list[ToolCall]:
    """Append a turn to its episode. Returns the calls to run; none if the episode has ended."""
    trajectory = episode.trajectory
    if not sample.ids:  # an engine that gave up on the request
        if not trajectory.turns:
            raise RuntimeError("The generation backend gave up on a rollout before its first token; see its log.")
        trajectory.stop_reason = StopReason.TRUNCATED
        return []
    parsed = turn_format.parse(sample.ids, episode.toolbox)
    trajectory.turns.append(
        Turn(
            policy_ids=sample.ids,
            sampling_logps=sample.logps,
            messages=parsed.messages,
            anomalies=parsed.anomalies,
        )
    )
    trajectory.final_text = parsed.final_text
    episode.messages += parsed.messages
    episode.context = episode.context + sample.ids
    episode.budget -= len(sample.ids)
    if cut:
        trajectory.stop_reason = StopReason.MAX_SECONDS if _over(episode) else StopReason.TRUNCATED
    elif not parsed.calls:
        trajectory.stop_reason = StopReason.FINAL
    elif limits.max_turns is not None and len(trajectory.turns) >= limits.max_turns:
        trajectory.stop_reason = StopReason.MAX_TURNS
    elif _over(episode):
        trajectory.stop_reason = StopReason.MAX_SECONDS
    else:
        return parsed.calls
    return []


def _answer(episode: Episode, calls: list[ToolCall], results: list[ToolResult], turn_format: TurnFormat) -> bool:
    """Append the results of a turn's calls. Returns whether the policy takes another turn."""
    turn = episode.trajectory.turns[-1]
    turn.tool_results = results
    observation = turn_format.observe(calls, results)
    episode.messages += observation.messages
    if episode.environment is not None and episode.environment.done:
        episode.trajectory.stop_reason = StopReason.ENVIRONMENT
        return False
    if _over(episode):
        episode.trajectory.stop_reason = StopReason.MAX_SECONDS
        return False
    if len(observation.ids) >= episode.budget:  # at least one id must be left for the policy
        episode.trajectory.stop_reason = StopReason.MAX_TOKENS
        return False
    turn.observation_ids = observation.ids
    episode.context = episode.context + observation.ids
    episode.budget -= len(observation.ids)
    return True
