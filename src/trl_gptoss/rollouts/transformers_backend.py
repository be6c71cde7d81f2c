"""Sampling with `transformers`' own `generate`, batched over all rollouts that are still running."""

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager

import torch
from transformers import GenerationConfig, PreTrainedModel

from .backend import Sample, SampleEnd, SamplingOptions


class TransformersBackend:
    """A [`GenerationBackend`] on top of `model.generate`.

    Prompts are left-padded into one batch. The model is in eval mode while it samples, so that the policy that acts
    is the one without dropout, and back in its former mode afterwards.

    Args:
        open_model (`Callable[[], AbstractContextManager[PreTrainedModel]]`):
            Gives the model to sample from: unwrapped, its weights gathered if they have to be.
        generation_config ([`~transformers.GenerationConfig`]):
            How to sample; `max_new_tokens` in it is ignored.
        stop_ids (`list[int]`): ids that end a sample.
        pad_id (`int`): any id the embedding knows; it is masked everywhere.
        device (`torch.device`): where the model lives.
        collective (`bool`): whether the weights are sharded over ranks, see [`GenerationBackend`].
    """

    def __init__(
        self,
        open_model: Callable[[], AbstractContextManager[PreTrainedModel]],
        generation_config: GenerationConfig,
        stop_ids: list[int],
        pad_id: int,
        device: torch.device,
        collective: bool,
    ) -> None:
        self.open_model = open_model
        self.generation_config = generation_config
        self.stop_ids = frozenset(stop_ids)
        self.pad_id = pad_id
        self.device = device
        self.collective = collective

    def generate(
        self, prompts: list[list[int]], max_new_tokens: list[int], sampling: list[SamplingOptions] | None = None
    ) -> list[Sample]:
        """See [`GenerationBackend.generate`]. Rows with the same options share a batch."""
        if sampling is None:
            return self._batch(prompts, max_new_tokens, self.generation_config)
        if self.collective:
            raise NotImplementedError(
                "Options for single rows need a batch for each of them, and with sharded weights all ranks must generate "
                "equally often. Use vLLM, or the same options for all rows."
            )
        samples: list[Sample | None] = [None] * len(prompts)
        for options in dict.fromkeys(sampling):
            rows = [row for row, own in enumerate(sampling) if own == options]
            batch = self._batch(
                [prompts[row] for row in rows], [max_new_tokens[row] for row in rows], self._configuration(options)
            )
            for row, sample in zip(rows, batch, strict=True):
                samples[row] = sample
        return [sample for sample in samples if sample is not None]

    def _configuration(self, options: SamplingOptions) -> GenerationConfig:
        if options.seed is not None:
            raise NotImplementedError(
                "`generate` draws all rows from one generator: a seed for single rows needs vLLM."
            )
        configuration = copy.deepcopy(self.generation_config)
        configuration.do_sample = options.temperature > 0
        configuration.temperature = options.temperature or 1.0
        configuration.top_p = options.top_p
        configuration.top_k = options.top_k
        configuration.min_p = options.min_p or None
        configuration.repetition_penalty = options.repetition_penalty
        return configuration

    def _batch(
        self, prompts: list[list[int]], max_new_tokens: list[int], generation_config: GenerationConfig
    ) -> list[Sample]:
        if not prompts and not self.collective:
            return []
        # With sharded weights a rank without work still has to run the forwards that the others wait for.
        batch, limit = (prompts, max(max_new_tokens)) if prompts else ([[self.pad_id]], 1)
        input_ids_BT, mask_BT = self._left_pad(batch)
        with self.open_model() as model, torch.no_grad():
            was_training = model.training
            model.eval()
            try:
                generation_config = copy.deepcopy(generation_config)
                generation_config.max_new_tokens = limit
                output_BT = model.generate(
                    input_ids=input_ids_BT, attention_mask=mask_BT, generation_config=generation_config
                )
            finally:
                model.train(was_training)
        rows = output_BT[:, input_ids_BT.size(1) :].tolist()
        return [self._cut(row, n) for row, n in zip(rows, max_new_tokens)]

    def _left_pad(self, prompts: list[list[int]]) -> tuple[torch.Tensor, torch.Tensor]:
        """(B, T) ids and (B, T) mask, prompts flush right: [[7, 8, 9], [5]] -> [[7, 8, 9], [pad, pad, 5]]."""
        width = max(map(len, prompts))
        ids = [[self.pad_id] * (width - len(p)) + p for p in prompts]
        mask = [[0] * (width - len(p)) + [1] * len(p) for p in prompts]
        return torch.tensor(ids, device=self.device), torch.tensor(mask, device=self.device)

    def _cut(self, row: list[int], limit: int) -> Sample:
        """Drop what follows the first stop id (padding) or the row's own limit."""
        for i, token in enumerate(row[:limit]):
            if token in self.stop_ids:
                return Sample(ids=row[: i + 1], end=SampleEnd.STOP)
        return Sample(ids=row[:limit], end=SampleEnd.LENGTH)
