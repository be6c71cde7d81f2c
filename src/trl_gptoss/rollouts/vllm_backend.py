"""Sampling with TRL's vLLM client, token ids in and out, safe for ranks with different numbers of running rollouts.

TRL's `VLLMGeneration.generate` gathers the prompts of all ranks (server mode) or of a tensor-parallel group (colocate
mode), and hands the completions back by slices of equal length: with unequal lengths ranks get each other's completions.
Here every rank brings the same number of prompts: the missing ones are copies of a prompt that is there anyway, and
their completions are dropped.
"""

from collections.abc import Callable
from contextlib import nullcontext

from accelerate import Accelerator
from accelerate.utils import gather_object
from trl.generation.vllm_generation import VLLMGeneration

from .backend import Sample, SamplingOptions


class VllmBackend:
    """A [`GenerationBackend`] on top of [`~trl.generation.vllm_generation.VLLMGeneration`].

    Args:
        generation (`VLLMGeneration`): TRL's client, in either mode.
        accelerator ([`~accelerate.Accelerator`]): for the number of prompts of the other ranks.
        stop_ids (`list[int]`): ids that end a sample, handed to vLLM as `stop_token_ids`.
        sync_weights (`Callable[[], None]`): called before each generation; brings the current weights to vLLM if they
            have changed.
    """

    collective = True

    def __init__(
        self,
        generation: VLLMGeneration,
        accelerator: Accelerator,
        stop_ids: list[int],
        sync_weights: Callable[[], None],
    ) -> None:
        self.generation = generation
        self.accelerator = accelerator
        self.sync_weights = sync_weights
        self.sampling = SamplingOptions()
        generation.generation_kwargs = {**generation.generation_kwargs, "stop_token_ids": list(stop_ids)}

    def generate(
        self, prompts: list[list[int]], max_new_tokens: list[int], sampling: list[SamplingOptions] | None = None
    ) -> list[Sample]:
        """See [`GenerationBackend.generate`]. TRL's client has one limit and one set of options for all rows."""
        self.sync_weights()
        here = (len(prompts), max(max_new_tokens, default=1), prompts[0] if prompts else None)
        everywhere = gather_object([here])
        count = max(n for n, _, _ in everywhere)
        spare = next(p for _, _, p in everywhere if p is not None)
        self.generation.max_completion_length = max(limit for _, limit, _ in everywhere)
        _, ids, logps, _ = self.generation.generate(
            prompts=prompts + [spare] * (count - len(prompts)),
            images=None,
            num_generations=1,
            profiler=nullcontext(),
        )
        # vLLM gives the log-probs of the most likely tokens at each position; TRL asks for the sampled one only.
        return [
            Sample(ids=list(i[:limit]), logps=[p[0] for p in row[:limit]])
            for i, row, limit in zip(ids, logps, max_new_tokens)
        ]
