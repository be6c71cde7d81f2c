"""Drawing the next token of every row by the row's own options and its own seed, and keeping its log-prob.

`generate` has one temperature and one random generator for a batch: what a rollout samples would depend on who happens to
be in its batch. Here each row has a stream of uniform numbers, made from its seed, and one number picks the token by the
inverse of the row's cumulative distribution:

    p       .5  .3  .2       u = .65
    cdf     .5  .8  1.       first cdf > u: the second token
"""

import math

import torch
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from .backend import SamplingOptions


class RowSampler(LogitsProcessor):
    """The last logits processor of a greedy `generate`: it leaves exactly one token that can be chosen.

    Args:
        rows (`list[SamplingOptions]`): of each row. A row without a seed draws one from torch's global generator.
        limit (`int`): most tokens of a row.
    """

    def __init__(self, rows: list[SamplingOptions], limit: int) -> None:
        self.rows = rows
        self.logps: list[torch.Tensor] = []  # one (B,) for each token
        self._uniforms_BT = torch.stack([_uniforms(row.seed, limit) for row in rows])
        self._groups = _groups(rows)

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """(B, T) ids and (B, V) logits -> (B, V) with 0 at the drawn token and -inf elsewhere."""
        scores_BV = scores.float()
        for rows, processors in self._groups:
            scores_BV = _process(scores_BV, input_ids, rows, processors)
        logps_BV = scores_BV.log_softmax(-1)
        cdf_BV = logps_BV.double().exp().cumsum(-1)
        step = len(self.logps)
        u_B1 = self._uniforms_BT[:, step : step + 1].to(cdf_BV.device) * cdf_BV[:, -1:]
        drawn_B1 = torch.searchsorted(cdf_BV, u_B1, right=True).clamp(max=cdf_BV.size(1) - 1)
        self.logps.append(logps_BV.gather(1, drawn_B1)[:, 0])
        return torch.full_like(scores, -math.inf).scatter(1, drawn_B1, 0.0)

    def logps_of_rows(self) -> list[list[float]]:
        """Log-probs in nats of the drawn tokens under the distribution they were drawn from, one list for each row."""
        return torch.stack(self.logps, dim=1).tolist()


def _uniforms(seed: int | None, limit: int) -> torch.Tensor:
    """(limit,) float64 in [0, 1)."""
    if seed is None:
        seed = int(torch.randint(2**62, ()))
    return torch.rand(limit, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def _groups(rows: list[SamplingOptions]) -> list[tuple[list[int], LogitsProcessorList]]:
    """Rows of equal options, with the processors of these options in the order of `generate`."""
    members: dict[tuple, list[int]] = {}
    for i, row in enumerate(rows):
        key = (row.temperature, row.top_p, row.top_k, row.min_p, row.repetition_penalty)
        members.setdefault(key, []).append(i)
    groups = []
    for (temperature, top_p, top_k, min_p, penalty), group in members.items():
        processors = LogitsProcessorList()
        if penalty != 1.0:
            processors.append(RepetitionPenaltyLogitsProcessor(penalty))
        if temperature == 0:  # the most likely token, with certainty
            processors.append(TopKLogitsWarper(1))
        elif temperature != 1.0:
            processors.append(TemperatureLogitsWarper(float(temperature)))
        if top_k > 0:
            processors.append(TopKLogitsWarper(top_k))
        if top_p < 1.0:
            processors.append(TopPLogitsWarper(top_p))
        if min_p > 0:
            processors.append(MinPLogitsWarper(min_p))
        if processors:
            groups.append((group, processors))
    return groups


def _process(
    scores_BV: torch.Tensor, input_ids: torch.Tensor, rows: list[int], processors: LogitsProcessorList
) -> torch.Tensor:
    if len(rows) == len(scores_BV):
        return processors(input_ids, scores_BV)
    index = torch.tensor(rows, device=scores_BV.device)
    return scores_BV.index_copy(0, index, processors(input_ids[index], scores_BV[index]))
