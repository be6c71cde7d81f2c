"""The seam between the tool loop and whatever samples tokens: ids in, ids out."""

from dataclasses import dataclass
from typing import Protocol


@dataclass(kw_only=True, slots=True)
class Sample:
    """What a backend sampled after one prompt.

    ids (`list[int]`): sampled ids in order. The last one is a stop id, or there are exactly as many as were allowed.
    logps (`list[float]` or `None`): log-probs in nats of `ids` under the sampler, if it reports them.
    """

    ids: list[int]
    logps: list[float] | None = None


class GenerationBackend(Protocol):
    """Samples continuations of token ids.

    `collective` says whether `generate` contains communication between ranks (sharded weights, one shared server).
    If it does, every rank must call `generate` the same number of times, with an empty list when it has nothing to
    ask for; the loop takes care of that. If it does not, a rank is free to run ahead of the others.
    """

    collective: bool

    def generate(self, prompts: list[list[int]], max_new_tokens: list[int]) -> list[Sample]:
        """Sample one continuation for each prompt.

        Args:
            prompts (`list[list[int]]`): token ids, of any lengths. May be empty.
            max_new_tokens (`list[int]`): at least 1 for each prompt.

        Returns:
            `list[Sample]`: in the order of `prompts`, at most `max_new_tokens[i]` ids each.
        """
        ...
