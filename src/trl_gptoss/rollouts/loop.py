"""The token-in/token-out loop: sample, parse, run the tools, append, until every rollout has ended.

Nothing that was sampled is ever decoded and encoded again. The prompt of turn n+1 is the prompt of turn n, followed by
the ids sampled in turn n and the ids of the observation:

    prompt | sampled 0 | observation 0 | sampled 1 | observation 1 | sampled 2
           |  mask 1   |    mask 0     |  mask 1   |    mask 0     |  mask 1
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from ..trajectory import StopReason, ToolResult, Trajectory, Turn
from .backend import GenerationBackend, Sample
from .tools import Toolbox, ToolCall, ToolRunner


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
    """

    max_turns: int | None
    max_rollout_tokens: int
    max_context: int


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
    """

    trajectory: Trajectory
    toolbox: Toolbox
    environment: _HasDone | None = None
    messages: list[dict[str, Any]] = field(default_factory=list)
    context: list[int] = field(default_factory=list)
    budget: int = 0


def run_episodes(
    episodes: list[Episode],
    backend: GenerationBackend,
    turn_format: TurnFormat,
    tools: ToolRunner,
    limits: RolloutLimits,
    stop_ids: list[int],
    any_rank_running: Callable[[bool], bool],
) -> None:
    """Run all episodes to their end, in place.

    Args:
        episodes (`list[Episode]`): this rank's rollouts; their trajectories hold only the prompt.
        backend ([`GenerationBackend`]): what samples.
        turn_format ([`TurnFormat`]): what reads and writes turns.
        tools ([`ToolRunner`]): what executes calls.
        limits ([`RolloutLimits`]): budgets.
        stop_ids (`list[int]`): a sample that does not end with one of them was cut off.
        any_rank_running (`Callable[[bool], bool]`): logical or over all ranks. Used once per turn if the backend is
            collective, so that ranks whose rollouts have ended keep taking part.

    Raises:
        ValueError: a prompt leaves no room for a completion in the context.
    """
    for number, episode in enumerate(episodes):
        prompt = episode.trajectory.prompt_ids
        episode.context = list(prompt)
        episode.budget = min(limits.max_rollout_tokens, limits.max_context - len(prompt))
        if episode.budget < 1:
            raise ValueError(
                f"Prompt {number} of this batch has {len(prompt)} tokens and the model's context holds "
                f"{limits.max_context}: there is no room for a completion. Drop such rows from the data set."
            )
    running = list(episodes)
    while any_rank_running(bool(running)) if backend.collective else running:
        prompts = [e.context for e in running]
        samples = backend.generate(prompts, [e.budget for e in running])
        calls = [_take(e, s, turn_format, limits, stop_ids) for e, s in zip(running, samples, strict=True)]
        pending = [(e, c) for e, c in zip(running, calls) if c]
        results = tools.run([(e.toolbox, c) for e, c in pending])
        running = [e for (e, c), r in zip(pending, results) if _answer(e, c, r, turn_format)]


def _take(
    episode: Episode, sample: Sample, turn_format: TurnFormat, limits: RolloutLimits, stop_ids: list[int]
) -> list[ToolCall]:
    """Append a sample to its episode. Returns the calls to run; none if the episode has ended."""
    parsed = turn_format.parse(sample.ids, episode.toolbox)
    trajectory = episode.trajectory
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
    if not sample.ids or sample.ids[-1] not in stop_ids:
        trajectory.stop_reason = StopReason.TRUNCATED
    elif not parsed.calls:
        trajectory.stop_reason = StopReason.FINAL
    elif limits.max_turns is not None and len(trajectory.turns) >= limits.max_turns:
        trajectory.stop_reason = StopReason.MAX_TURNS
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
    if len(observation.ids) >= episode.budget:  # at least one id must be left for the policy
        episode.trajectory.stop_reason = StopReason.MAX_TOKENS
        return False
    turn.observation_ids = observation.ids
    episode.context = episode.context + observation.ids
    episode.budget -= len(observation.ids)
    return True
