"""The seam between the tool loop and whatever samples tokens: ids in, ids out."""

import math
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

import numpy as np


class SampleEnd(StrEnum):
    """Why a backend stopped sampling a row."""

    STOP = "stop"  # the last id is a stop id
    LENGTH = "length"  # as many ids as were allowed
    ABORT = "abort"  # the engine gave up on the request


@dataclass(kw_only=True, slots=True)
class Sample:
    """What a backend sampled after one prompt.

    ids (`list[int]`): sampled ids in order. The last one is a stop id, or there are exactly as many as were allowed
        (unless the engine aborted the request).
    logps (`list[float]` or `None`): log-probs in nats of `ids` under the distribution they were drawn from
        (temperature, top-p and so on applied), if the sampler reports them. NaN where it has none.
    end ([`SampleEnd`] or `None`): why it ends there, if the backend reports it.
    routing (`np.ndarray` or `None`): experts of prompt and ids, see `routed_experts.py`, if the backend records them.
    """

    ids: list[int]
    logps: list[float] | None = None
    end: SampleEnd | None = None
    routing: np.ndarray | None = field(default=None, compare=False)


@dataclass(kw_only=True, frozen=True)
class SamplingOptions:
    """How one row is sampled.

    temperature (`float`, *optional*, defaults to `1.0`): what the logits are divided by; 0 takes the most likely id.
    top_p (`float`, *optional*, defaults to `1.0`): smallest set of ids with this probability.
    top_k (`int`, *optional*, defaults to `0`): most likely ids to draw from; 0 for all.
    min_p (`float`, *optional*, defaults to `0.0`): least probability relative to the most likely id.
    repetition_penalty (`float`, *optional*, defaults to `1.0`): above 1 for fewer repetitions.
    seed (`int`, *optional*): makes the row reproducible, where the backend can do that.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None

    def __post_init__(self) -> None:
        for name, fits, expected in (
            ("temperature", 0 <= self.temperature < math.inf, "a number of at least 0"),
            ("top_p", 0 < self.top_p <= 1, "above 0 and at most 1"),
            ("top_k", self.top_k >= 0, "at least 0 (0 for all ids)"),
            ("min_p", 0 <= self.min_p <= 1, "from 0 to 1"),
            ("repetition_penalty", 0 < self.repetition_penalty < math.inf, "above 0"),
        ):
            if not fits:
                raise ValueError(f"{name} is {vars(self)[name]}, it must be {expected}.")


class GenerationBackend(Protocol):
    """Samples continuations of token ids.

    `collective` says whether `generate` contains communication between ranks (sharded weights, tensor parallelism over
    ranks). If it does, every rank must call `generate` the same number of times, with an empty list when it has nothing
    to ask for; the loop takes care of that. If it does not, a rank is free to run ahead of the others.
    """

    collective: bool
    sampling: SamplingOptions  # of rows that bring none of their own

    def generate(
        self, prompts: list[list[int]], max_new_tokens: list[int], sampling: list[SamplingOptions] | None = None
    ) -> list[Sample]:
        """Sample one continuation for each prompt.

        Args:
            prompts (`list[list[int]]`): token ids, of any lengths. May be empty.
            max_new_tokens (`list[int]`): at least 1 for each prompt.
            sampling (`list[SamplingOptions]`, *optional*): for each prompt; the backend's own for all if not given.

        Returns:
            `list[Sample]`: in the order of `prompts`, at most `max_new_tokens[i]` ids each.
        """
        ...
