"""One rollout as plain data: what the policy sampled, what the environment answered, and which of it is trained on.

A trajectory is append-only token ids. Sampled ids are kept exactly as they were sampled and are never re-tokenised;
the loss mask is 1 on exactly those ids:

    prompt                     turn 0                                            turn 1
    ids    <|start|>user...    <|channel|>analysis ... <|call|>  <|start|>functions.python ... <|start|>assistant  <|channel|>final ... <|return|>
    who    data set            policy                            environment (observation)                         policy
    mask   (not a completion)  1 1 1 ... 1                       0 0 0 ... 0                                       1 1 1 ... 1
"""

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import numpy as np


class StopReason(StrEnum):
    """Why a rollout ended."""

    FINAL = "final"  # the policy ended its turn without calling a tool
    ENVIRONMENT = "environment"  # the environment set `done`
    TRUNCATED = "truncated"  # the policy was cut off: the token budget ran out in the middle of a turn
    MAX_TURNS = "max_turns"  # the turn budget ran out with a tool call still pending
    MAX_TOKENS = "max_tokens"  # the observation did not fit into the token budget any more
    MAX_SECONDS = "max_seconds"  # the wall-clock budget ran out


@dataclass(kw_only=True, slots=True)
class ToolResult:
    """What one tool call gave.

    name (`str`): the tool that ran (or that the policy asked for).
    arguments (`dict` or `str`): what it was called with.
    text (`str`): what the policy is shown, already cut to the output limit.
    failed (`bool`): the tool raised, exited non-zero, was unknown or got arguments it cannot take.
    timed_out (`bool`): the tool was stopped at its wall-clock limit (implies `failed`).
    seconds (`float`): wall-clock time.
    """

    name: str
    arguments: Any
    text: str
    failed: bool = False
    timed_out: bool = False
    seconds: float = 0.0


@dataclass(kw_only=True, slots=True)
class Turn:
    """What the policy sampled in one go, and what the environment appended after it.

    policy_ids (`list[int]`): sampled ids, terminator included, exactly as sampled.
    sampling_logps (`list[float]` or `None`): log-probs of `policy_ids` in nats under the sampler, if it reports them.
    observation_ids (`list[int]`): ids appended after them (tool results and the next generation prompt); empty on
        the last turn.
    messages (`list[dict]`): `policy_ids` parsed for people and rewards: `role`, `content`, and for Harmony `channel`,
        `recipient`, `content_type`.
    tool_results (`list[ToolResult]`): results in the order of the calls.
    anomalies (`list[str]`): what the parser had to repair or drop.
    routing (`np.ndarray` or `None`): (n, L, k) uint8, the experts that the sampler used at the positions that this turn
        added to those of the turns before; the last sampled id has none yet.
    """

    policy_ids: list[int]
    sampling_logps: list[float] | None = None
    observation_ids: list[int] = field(default_factory=list)
    messages: list[dict[str, Any]] = field(default_factory=list)
    tool_results: list[ToolResult] = field(default_factory=list)
    anomalies: list[str] = field(default_factory=list)
    routing: np.ndarray | None = field(default=None, compare=False)


@dataclass(kw_only=True, slots=True)
class Trajectory:
    """One rollout.

    prompt_ids (`list[int]`): the first prompt, generation prompt included.
    turns (`list[Turn]`): in order; turn n+1 was sampled after `prompt_ids` + all ids of the turns up to n.
    stop_reason (`StopReason`): why it ended.
    final_text (`str` or `None`): text of the last final message of the last turn; `None` if it gave none.
    """

    prompt_ids: list[int]
    turns: list[Turn] = field(default_factory=list)
    stop_reason: StopReason = StopReason.FINAL
    final_text: str | None = None

    @property
    def completion_ids(self) -> list[int]:
        """Everything after the prompt, in order: (completion_length,)."""
        return [i for turn in self.turns for i in (*turn.policy_ids, *turn.observation_ids)]

    @property
    def loss_mask(self) -> list[int]:
        """1 on sampled ids, 0 on observations; aligned with `completion_ids`."""
        return [m for turn in self.turns for m in (*[1] * len(turn.policy_ids), *[0] * len(turn.observation_ids))]

    @property
    def sampling_logps(self) -> list[float] | None:
        """Sampler log-probs aligned with `completion_ids` (0.0 on observations), or `None` if a turn has none."""
        if any(turn.sampling_logps is None for turn in self.turns):
            return None
        return [p for turn in self.turns for p in (*turn.sampling_logps, *[0.0] * len(turn.observation_ids))]

    @property
    def routing(self) -> np.ndarray | None:
        """(prompt + completion - 1, L, k) uint8 experts of all ids but the last, or `None` if a turn has none. Where an
        engine gave up behind the results of a tool, they end before the last sampled id."""
        if not self.turns or any(turn.routing is None for turn in self.turns):
            return None
        return np.concatenate([turn.routing for turn in self.turns])

    @property
    def anomalies(self) -> list[str]:
        return [a for turn in self.turns for a in turn.anomalies]

    @property
    def tool_results(self) -> list[ToolResult]:
        return [r for turn in self.turns for r in turn.tool_results]

    def prompt_of_turn(self, n: int) -> list[int]:
        """The ids that turn `n` was sampled after; always an extension of `prompt_of_turn(n - 1)`."""
        return self.prompt_ids + [i for t in self.turns[:n] for i in (*t.policy_ids, *t.observation_ids)]
