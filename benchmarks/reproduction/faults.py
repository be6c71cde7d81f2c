"""Attention that is wrong on purpose, for the trainer of the reproduction only.

    no_sinks          the softmax has no sink: another function (FlashAttention-2 at the time of the article)
    no_sink_gradient  the same function as `sink_fa3`, but no gradient reaches the sinks (FlashAttention-3 at that time)

Nothing in `trl_gptoss` can train with these: the package refuses every attention that it does not know. They are registered
with transformers under names of their own here, and `trainer.py` switches the policy to them after that check.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from trl_gptoss.attention.interface import sink_attention_forward
from trl_gptoss.attention.mask import sink_mask

RIGHT = "sink_fa3"
FAULTS = ("no_sinks", "no_sink_gradient")

Attention = Callable[..., tuple[torch.Tensor, None]]


def attention_without_sinks(strength: float) -> Attention:
    """`sink_fa3` with weaker sinks.

    Args:
        strength (`float`): how much of exp(sink) is missing from the denominator of the softmax, above 0 and at most 1.
            1 leaves the sinks out; below 1 their logits are shifted by log(1 - strength), gradient included.
    """

    def forward(module: torch.nn.Module, *args, s_aux: torch.Tensor | None = None, **kwargs):
        weaker = None if strength == 1 or s_aux is None else s_aux + math.log1p(-strength)
        return sink_attention_forward(module, *args, s_aux=weaker, **kwargs)

    return forward


def attention_without_sink_gradient(module: torch.nn.Module, *args, s_aux: torch.Tensor | None = None, **kwargs):
    """`sink_fa3`, forward and the other gradients unchanged, but the sinks get none."""
    return sink_attention_forward(module, *args, s_aux=None if s_aux is None else s_aux.detach(), **kwargs)


def register_fault(fault: str, strength: float = 1.0) -> str:
    """Register one of `FAULTS` with transformers, with the mask of `sink_fa3`.

    Args:
        fault (`str`): which one.
        strength (`float`, *optional*, defaults to 1.0): of `no_sinks`, see `attention_without_sinks`.

    Returns:
        `str`: the name for `attn_implementation`.

    Raises:
        `ValueError`: no such fault, or a strength that makes no sense for it.
    """
    if fault not in FAULTS:
        raise ValueError(f"fault is {fault!r}, expected one of {', '.join(FAULTS)}")
    if not 0 < strength <= 1:
        raise ValueError(f"strength is {strength}, it must be above 0 and at most 1 (all of the sink is missing)")
    if fault == "no_sink_gradient" and strength != 1:
        raise ValueError(f"strength={strength} is for 'no_sinks'; 'no_sink_gradient' is there or it is not")
    # No "flash", "sdpa" or "/" in the name: transformers rewrites those.
    name = f"reproduction_{fault}" + ("" if strength == 1 else f"_{strength:g}")
    forward = attention_without_sinks(strength) if fault == "no_sinks" else attention_without_sink_gradient
    AttentionInterface.register(name, forward)
    AttentionMaskInterface.register(name, sink_mask)
    return name


@contextmanager
def attention(model: PreTrainedModel, name: str) -> Iterator[None]:
    """`model` computes its attention by `name` inside of the block; its weights are not touched."""
    before = model.config._attn_implementation
    model.config._attn_implementation = name
    try:
        yield
    finally:
        model.config._attn_implementation = before
