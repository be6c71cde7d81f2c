"""Sampling with `transformers`' own `generate`, batched over all rollouts that are still running."""

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager

import torch
from transformers import GenerationConfig, PreTrainedModel

from .backend import Sample


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

    def generate(self, prompts: list[list[int]], max_new_tokens: list[int]) -> list[Sample]:
        """See [`GenerationBackend.generate`]."""
        if not prompts and not self.collective:
            return []
        # With sharded weights a rank without work still has to run the forwards that the others wait for.
        batch, limit = (prompts, max(max_new_tokens)) if prompts else ([[self.pad_id]], 1)
        input_ids_BT, mask_BT = self._left_pad(batch)
        with self.open_model() as model, torch.no_grad():
            was_training = model.training
            model.eval()
            try:
                generation_config = copy.deepcopy(self.generation_config)
                generation_config.max_new_tokens = limit
                output_BT = model.generate(
                    input_ids=input_ids_BT, attention_mask=mask_BT, generation_config=generation_config
                )
            finally:
                model.train(was_training)
        rows = output_BT[:, input_ids_BT.size(1) :].tolist()
        return [Sample(ids=self._cut(row, n)) for row, n in zip(rows, max_new_tokens)]

    def _left_pad(self, prompts: list[list[int]]) -> tuple[torch.Tensor, torch.Tensor]:
        """(B, T) ids and (B, T) mask, prompts flush right: [[7, 8, 9], [5]] -> [[7, 8, 9], [pad, pad, 5]]."""
        width = max(map(len, prompts))
        ids = [[self.pad_id] * (width - len(p)) + p for p in prompts]
        mask = [[0] * (width - len(p)) + [1] * len(p) for p in prompts]
        return torch.tensor(ids, device=self.device), torch.tensor(mask, device=self.device)

    def _cut(self, row: list[int], limit: int) -> list[int]:
        """Drop what follows the first stop id (padding) or the row's own limit."""
        for i, token in enumerate(row[:limit]):
            if token in self.stop_ids:
                return row[: i + 1]
        return row[:limit]
