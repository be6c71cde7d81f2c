"""Triton: backward of the router weight and the clamped SwiGLU, in place, with the sums that fall out on the way.

Shape legend: M sorted assignments, E experts, I intermediate.
"""

import torch
import triton
import triton.language as tl

from .tiles import PAD, expert_tiles, locate_tile, padded_rows
from .tuning import cdiv, next_power_of_2

_COLUMNS = 64  # columns of one program


@triton.jit
def _gate_backward_kernel(
    pair_ptr,
    grad_ptr,
    order_ptr,
    offsets_ptr,
    weight_ptr,
    dot_ptr,
    bias_ptr,
    I,  # noqa: E741
    M,
    alpha,
    limit,
    E,
    E_POW2: tl.constexpr,
    BITS: tl.constexpr,
    BIAS: tl.constexpr,
    KEEP: tl.constexpr,
    BM: tl.constexpr,
    BR: tl.constexpr,
    BC: tl.constexpr,
):
    # A gate value and its linear partner are one machine word: no shuffles, and half the address arithmetic. With
    # separate loads this kernel is bound by instructions at three times its memory time.
    half: tl.constexpr = tl.int16 if BITS == 16 else tl.int32
    dtype = grad_ptr.dtype.element_ty
    word = pair_ptr.dtype.element_ty
    running, row_tiles = expert_tiles(offsets_ptr, E, E_POW2, BM)
    column_tiles = tl.cdiv(I, BC)
    tile = tl.program_id(0) // column_tiles
    segment = tl.program_id(0) % column_tiles
    column = segment * BC + tl.arange(0, BC)
    c_mask = column < I
    if tile < row_tiles:
        expert, begin, end = locate_tile(offsets_ptr, running, tile, BM)
        gate_sum = tl.zeros((BR, BC), tl.float32)
        linear_sum = tl.zeros((BR, BC), tl.float32)
        for start in range(begin, min(begin + BM, end), BR):
            rows = start + tl.arange(0, BR)
            row_mask = rows < end
            assignment = tl.load(order_ptr + rows, mask=row_mask, other=0)
            weight = tl.load(weight_ptr + assignment, mask=row_mask, other=0.0).to(tl.float32)[:, None]
            mask = row_mask[:, None] & c_mask[None, :]
            place = rows.to(tl.int64)[:, None] * I + column[None, :]
            pair = tl.load(pair_ptr + place, mask=mask, other=0)
            grad = tl.load(grad_ptr + place, mask=mask, other=0.0).to(tl.float32)
            gate_raw = pair.to(half).to(dtype, bitcast=True).to(tl.float32)
            linear_raw = (pair >> BITS).to(half).to(dtype, bitcast=True).to(tl.float32)
            gate = tl.minimum(gate_raw, limit)
            linear = tl.minimum(tl.maximum(linear_raw, -limit), limit) + 1.0
            sigmoid = 1.0 / (1.0 + tl.exp(-alpha * gate))
            glu = gate * sigmoid
            hidden = linear * glu
            dot = tl.sum(hidden * grad, axis=1)
            tl.store(dot_ptr + assignment.to(tl.int64) * column_tiles + segment, dot, mask=row_mask)
            grad *= weight
            d_linear = tl.where(tl.abs(linear_raw) <= limit, grad * glu, 0.0)
            d_gate = tl.where(gate_raw <= limit, grad * linear * (sigmoid + alpha * glu * (1.0 - sigmoid)), 0.0)
            low = d_gate.to(dtype).to(half, bitcast=True).to(word) & ((1 << BITS) - 1)
            high = d_linear.to(dtype).to(half, bitcast=True).to(word) << BITS
            tl.store(pair_ptr + place, low | high, mask=mask)
            if KEEP:
                tl.store(grad_ptr + place, (hidden * weight).to(dtype), mask=mask)
            if BIAS:
                gate_sum += d_gate
                linear_sum += d_linear
        if BIAS:
            partial = bias_ptr + tile.to(tl.int64) * 2 * I + 2 * column
            tl.store(partial, tl.sum(gate_sum, axis=0), mask=c_mask)
            tl.store(partial + 1, tl.sum(linear_sum, axis=0), mask=c_mask)
    elif tile == row_tiles:
        # `grouped_wgrad` reads past the last expert and multiplies by zero: what it finds must be finite
        rows = tl.load(offsets_ptr + E) + tl.arange(0, BM)
        place = rows.to(tl.int64)[:, None] * I + column[None, :]
        mask = (rows < M)[:, None] & c_mask[None, :]
        tl.store(pair_ptr + place, tl.zeros((BM, BC), word), mask=mask)
        tl.store(grad_ptr + place, tl.zeros((BM, BC), dtype), mask=mask)


def gate_backward(
    gate_up: torch.Tensor,
    grad: torch.Tensor,
    order: torch.Tensor,
    offsets: torch.Tensor,
    weight: torch.Tensor,
    alpha: float,
    limit: float,
    *,
    need_bias: bool,
    need_hidden: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Backward of the router weight and the clamped SwiGLU, in place.

    Args:
        gate_up (`(M, 2 I)`): Biased first product; overwritten with its gradient.
        grad (`(M, I)`): Gradient of the activation without the router weight; overwritten with weight * activation
            when `need_hidden`.
        weight (`(M,)`, by assignment id): Router weights.

    Returns:
        Partial sums of <activation, grad> (`(M, column tiles)`, by assignment id, fp32), and the partial sums of the
        gradient over rows (`(row tiles, 2 I)`, fp32) or `None`.
    """
    M, width = grad.shape
    experts = offsets.numel() - 1
    row_tiles, column_tiles = padded_rows(M, experts) // PAD, cdiv(width, _COLUMNS)
    dots = torch.empty(M, column_tiles, dtype=torch.float32, device=grad.device)
    partial = torch.empty(row_tiles, 2 * width, dtype=torch.float32, device=grad.device) if need_bias else None
    bits = grad.element_size() * 8
    _gate_backward_kernel[((row_tiles + 1) * column_tiles,)](
        gate_up.view(torch.int32 if bits == 16 else torch.int64),
        grad,
        order,
        offsets,
        weight,
        dots,
        partial,
        width,
        M,
        alpha,
        limit,
        experts,
        E_POW2=next_power_of_2(experts),
        BITS=bits,
        BIAS=need_bias,
        KEEP=need_hidden,
        BM=PAD,
        BR=8,
        BC=_COLUMNS,
        num_warps=2,
    )
    return dots, partial
