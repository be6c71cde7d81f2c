"""Sampling with `transformers`' own `generate`, batched over all rollouts that are ready for their next turn."""

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

import torch
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel

from .backend import Sample, SampleEnd, SamplingOptions
from .row_sampler import RowSampler


class _RoutingRecord(Protocol):
    def forwards(self) -> list[torch.Tensor]: ...


class TransformersBackend:
    """A [`GenerationBackend`] on top of `model.generate`.

    Prompts are left-padded into one batch. The model is in eval mode while it samples, so that the policy that acts
    is the one without dropout, and back in its former mode afterwards.

    Args:
        open_model (`Callable[[], AbstractContextManager[PreTrainedModel]]`):
            Gives the model to sample from: unwrapped, its weights gathered if they have to be.
        generation_config ([`~transformers.GenerationConfig`]):
            How to sample; `max_new_tokens` in it is ignored. Its temperature, top-k, top-p, min-p and repetition
            penalty are for rows that bring no options of their own.
        stop_ids (`list[int]`): ids that end a sample.
        pad_id (`int`): any id the embedding knows; it is masked everywhere.
        device (`torch.device`): where the model lives.
        collective (`bool`): whether the weights are sharded over ranks, see [`GenerationBackend`].
        record_routing (`Callable[[PreTrainedModel], AbstractContextManager]`, *optional*):
            Records the experts of every forward inside of it; yields an object whose `forwards()` are (L, B*T, k) each.
    """

    def __init__(
        self,
        open_model: Callable[[], AbstractContextManager[PreTrainedModel]],
        generation_config: GenerationConfig,
        stop_ids: list[int],
        pad_id: int,
        device: torch.device,
        collective: bool,
        record_routing: Callable[[PreTrainedModel], AbstractContextManager[_RoutingRecord]] | None = None,
    ) -> None:
        self.open_model = open_model
        self.generation_config = generation_config
        self.sampling = _sampling_options(generation_config)
        self.stop_ids = frozenset(stop_ids)
        self.pad_id = pad_id
        self.device = device
        self.collective = collective
        self.record_routing = record_routing

    def generate(
        self, prompts: list[list[int]], max_new_tokens: list[int], sampling: list[SamplingOptions] | None = None
    ) -> list[Sample]:
        """See [`GenerationBackend.generate`]."""
        if not prompts and not self.collective:
            return []
        # With sharded weights a rank without work still has to run the forwards that the others wait for.
        batch, limit = (prompts, max(max_new_tokens)) if prompts else ([[self.pad_id]], 1)
        rows = sampling if sampling else [self.sampling] * len(batch)
        sampler = RowSampler(rows, limit)
        input_ids_BT, mask_BT = self._left_pad(batch)
        with self.open_model() as model, torch.no_grad(), self._recording(model) as record:
            was_training = model.training
            model.eval()
            try:
                output_BT = model.generate(
                    input_ids=input_ids_BT,
                    attention_mask=mask_BT,
                    generation_config=self._greedy(limit),
                    logits_processor=LogitsProcessorList([sampler]),
                )
            finally:
                model.train(was_training)
        ids_of_rows = output_BT[:, input_ids_BT.size(1) :].tolist()
        samples = [
            self._sample(ids, logps, n) for ids, logps, n in zip(ids_of_rows, sampler.logps_of_rows(), max_new_tokens)
        ]
        if record is not None and prompts:
            _add_routing(samples, record.forwards(), prompts)
        return samples

    def _recording(self, model: PreTrainedModel) -> AbstractContextManager[_RoutingRecord | None]:
        return nullcontext() if self.record_routing is None else self.record_routing(model)

    def _greedy(self, limit: int) -> GenerationConfig:
        """`generate` only takes what [`RowSampler`] leaves; the options of sampling are applied there, row by row."""
        generation_config = copy.deepcopy(self.generation_config)
        generation_config.max_new_tokens = limit
        generation_config.do_sample = False
        generation_config.repetition_penalty = 1.0  # `None` would be the model's own
        generation_config.temperature = generation_config.top_p = generation_config.top_k = None
        generation_config.min_p = None
        return generation_config

    def _left_pad(self, prompts: list[list[int]]) -> tuple[torch.Tensor, torch.Tensor]:
        """(B, T) ids and (B, T) mask, prompts flush right: [[7, 8, 9], [5]] -> [[7, 8, 9], [pad, pad, 5]]."""
        width = max(map(len, prompts))
        ids = [[self.pad_id] * (width - len(p)) + p for p in prompts]
        mask = [[0] * (width - len(p)) + [1] * len(p) for p in prompts]
        return torch.tensor(ids, device=self.device), torch.tensor(mask, device=self.device)

    def _sample(self, ids: list[int], logps: list[float], limit: int) -> Sample:
        """Drop what follows the first stop id (padding) or the row's own limit."""
        for i, token in enumerate(ids[:limit]):
            if token in self.stop_ids:
                return Sample(ids=ids[: i + 1], logps=logps[: i + 1], end=SampleEnd.STOP)
        return Sample(ids=ids[:limit], logps=logps[:limit], end=SampleEnd.LENGTH)


def _add_routing(samples: list[Sample], forwards: list[torch.Tensor], prompts: list[list[int]]) -> None:
    """The first forward is the left-padded prompts, (L, B*T, k), each later one a token of every row, (L, B, k)."""
    count, width = len(prompts), max(map(len, prompts))
    by_row = [f.unflatten(1, (count, -1)) for f in forwards]
    experts_BTLk = torch.cat(by_row, dim=2).permute(1, 2, 0, 3).cpu().numpy()
    for sample, prompt, rows in zip(samples, prompts, experts_BTLk):
        sample.routing = rows[width - len(prompt) : width + len(sample.ids) - 1]


def _sampling_options(config: GenerationConfig) -> SamplingOptions:
    """The options of a generation config; what it leaves open is switched off."""
    penalty = 1.0 if config.repetition_penalty is None else config.repetition_penalty
    if not config.do_sample:
        return SamplingOptions(temperature=0.0, repetition_penalty=penalty)
    return SamplingOptions(
        temperature=1.0 if config.temperature is None else config.temperature,
        top_p=1.0 if config.top_p is None else config.top_p,
        top_k=config.top_k or 0,
        min_p=config.min_p or 0.0,
        repetition_penalty=penalty,
    )
