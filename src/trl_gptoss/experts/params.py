"""The tensors of one experts layer and the masks that say which gradients are wanted."""

from typing import NamedTuple

import torch


class ExpertParams(NamedTuple):
    """Parameters of one layer. E experts, H hidden, I intermediate, R rank.

    gate_up (`(E, H, 2 I)`): Gate in even, linear part in odd columns.
    gate_up_bias (`(E, 2 I)`), down (`(E, I, H)`), down_bias (`(E, H)`).
    lora_up_in (`(E, H, R)`), lora_up_out (`(E, R, 2 I)`): Low-rank update of `gate_up`, scaling included, or `None`.
    lora_down_in (`(E, I, R)`), lora_down_out (`(E, R, H)`): The same for `down`.
    """

    gate_up: torch.Tensor
    gate_up_bias: torch.Tensor
    down: torch.Tensor
    down_bias: torch.Tensor
    lora_up_in: torch.Tensor | None = None
    lora_up_out: torch.Tensor | None = None
    lora_down_in: torch.Tensor | None = None
    lora_down_out: torch.Tensor | None = None


class Activation(NamedTuple):
    """Clamped SwiGLU: (clip(linear) + 1) * gate * sigmoid(alpha * gate), gate clipped from above, at `limit`."""

    alpha: float
    limit: float


class Saved(NamedTuple):
    """What lives between forward and backward besides the inputs.

    gate_up (`(M, 2 I)`): Biased first product, rows sorted by expert.
    order (`(M,)`), offsets (`(E + 1,)`): Sorted assignments and the first row of every expert.
    """

    gate_up: torch.Tensor
    order: torch.Tensor
    offsets: torch.Tensor


class Needs(NamedTuple):
    """Which gradients are wanted, in the order of the inputs."""

    x: bool
    weight: bool
    gate_up: bool
    gate_up_bias: bool
    down: bool
    down_bias: bool
    lora_up_in: bool = False
    lora_up_out: bool = False
    lora_down_in: bool = False
    lora_down_out: bool = False


class Gradients(NamedTuple):
    """Gradients in the order of the inputs; `None` where none was wanted."""

    x: torch.Tensor | None
    weight: torch.Tensor | None
    gate_up: torch.Tensor | None
    gate_up_bias: torch.Tensor | None
    down: torch.Tensor | None
    down_bias: torch.Tensor | None
    lora_up_in: torch.Tensor | None = None
    lora_up_out: torch.Tensor | None = None
    lora_down_in: torch.Tensor | None = None
    lora_down_out: torch.Tensor | None = None


def gradient_buffers(params: ExpertParams, needs: Needs, dtype: torch.dtype | None, zero: bool) -> ExpertParams:
    """Buffers for the wanted parameter gradients, in `dtype` (the parameter's own when `None`)."""
    make = torch.zeros_like if zero else torch.empty_like
    layout = torch.contiguous_format
    return ExpertParams(
        *(
            make(param, dtype=dtype, memory_format=layout) if param is not None and need else None
            for param, need in zip(params, needs[2:], strict=True)
        )
    )
