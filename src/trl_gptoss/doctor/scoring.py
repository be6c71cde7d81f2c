"""Log-probs of given ids, as a trainer or an engine with this or that fault would report them.

Shapes: R rows, T tokens of a row, V vocabulary.
"""

from dataclasses import dataclass

import torch
from transformers import PreTrainedModel


@dataclass(kw_only=True, frozen=True)
class Reading:
    """How log-probs are read off hidden states.

    temperature (`float`, *optional*, defaults to `1.0`): what logits are divided by.
    top_p (`float`, *optional*, defaults to `1.0`): renormalised over the smallest set of this probability; ids outside
        have a log-prob of -inf.
    head_dtype (`torch.dtype`, *optional*): of the product with the LM head; `None` for the model's own.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    head_dtype: torch.dtype | None = None


@torch.no_grad()
def score(model: PreTrainedModel, rows: list[list[int]], reading: Reading) -> list[torch.Tensor]:
    """(T - 1,) float64 log-probs on the CPU of all ids but the first of each row, one row at a time."""
    training = model.training
    model.eval()
    try:
        return [_score_row(model, row, reading) for row in rows]
    finally:
        model.train(training)


def _score_row(model: PreTrainedModel, row: list[int], reading: Reading) -> torch.Tensor:
    ids_1T = torch.tensor([row], device=model.get_input_embeddings().weight.device)
    hooks = []
    if reading.head_dtype is not None:
        hooks.append(model.get_output_embeddings().register_forward_hook(_in_dtype(reading.head_dtype)))
    try:
        logits_TV = model(input_ids=ids_1T, attention_mask=torch.ones_like(ids_1T), use_cache=False).logits[0, :-1]
    finally:
        for hook in hooks:
            hook.remove()
    logits_TV = logits_TV.float() / reading.temperature
    if reading.top_p < 1.0:
        logits_TV = _nucleus(logits_TV, reading.top_p)
    return logits_TV.log_softmax(-1).gather(1, ids_1T[0, 1:, None])[:, 0].double().cpu()


def _in_dtype(dtype: torch.dtype):
    def hook(head: torch.nn.Linear, inputs: tuple[torch.Tensor], output: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.linear(inputs[0].to(dtype), head.weight.to(dtype)).to(output.dtype)

    return hook


def _nucleus(logits_TV: torch.Tensor, top_p: float) -> torch.Tensor:
    ordered, index = logits_TV.softmax(-1).sort(-1, descending=True)
    outside = ordered.cumsum(-1) - ordered >= top_p
    return logits_TV.masked_fill(torch.zeros_like(outside).scatter(-1, index, outside), -torch.inf)
