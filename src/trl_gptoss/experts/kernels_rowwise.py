"""Triton: the memory-bound steps around the grouped products: combine, sorted copies, bias and router gradients.

Shape legend: T tokens, k = top_k, M = T * k assignments, E experts, H hidden. Reductions over the rows of an expert go
through one fp32 partial sum per row tile and a second kernel, so that they are deterministic.
"""

import torch
import triton
import triton.language as tl

from .tiles import PAD, expert_tiles, locate_tile, padded_rows
from .tuning import cdiv, next_power_of_2

_COLUMNS = 128  # columns of one step
_PARTS = 4  # programs that share the columns of a row tile: finding the expert costs as much as two steps


@triton.jit
def _combine_kernel(
    rows_ptr,
    index_ptr,
    out_ptr,
    T,
    columns,
    stride_rows,
    stride_out,
    E,
    TOP_K: tl.constexpr,
    BT: tl.constexpr,
    BC: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64) * BT + tl.arange(0, BT)
    column = tl.program_id(1) * BC + tl.arange(0, BC)
    mask = (token < T)[:, None] & (column < columns)[None, :]
    total = tl.zeros((BT, BC), tl.float32)
    for slot in tl.static_range(TOP_K):
        assignment = token * TOP_K + slot
        row = tl.load(rows_ptr + assignment[:, None] * stride_rows + column[None, :], mask=mask, other=0.0)
        # selected after the load, so that the rows need not wait for the indices; rows of others are unwritten
        expert = tl.load(index_ptr + assignment, mask=token < T, other=-1)
        total += tl.where(((expert >= 0) & (expert < E))[:, None], row.to(tl.float32), 0.0)
    tl.store(out_ptr + token[:, None] * stride_out + column[None, :], total.to(out_ptr.dtype.element_ty), mask=mask)


def combine(rows: torch.Tensor, index: torch.Tensor, out: torch.Tensor, num_experts: int) -> None:
    """`out[t] = sum of rows[t * k + slot]` over the slots whose expert is computed here; `rows` (M, C), `out` (T, C)."""
    tokens, top_k = index.shape
    columns = out.shape[1]
    block_t = 4 if tokens >= 1024 else 1
    _combine_kernel[(cdiv(tokens, block_t), cdiv(columns, 512))](
        rows,
        index,
        out,
        tokens,
        columns,
        rows.stride(0),
        out.stride(0),
        num_experts,
        TOP_K=top_k,
        BT=block_t,
        BC=512,
        num_warps=4 if block_t > 1 else 2,
    )


@triton.jit
def _gather_rows_kernel(
    source_ptr,
    order_ptr,
    offsets_ptr,
    weight_ptr,
    out_ptr,
    partial_ptr,
    columns,
    stride_source,
    stride_out,
    stride_partial,
    E,
    E_POW2: tl.constexpr,
    TOP_K: tl.constexpr,
    COPY: tl.constexpr,
    PADDED: tl.constexpr,
    SUM: tl.constexpr,
    PARTS: tl.constexpr,
    BM: tl.constexpr,
    BC: tl.constexpr,
):
    running, row_tiles = expert_tiles(offsets_ptr, E, E_POW2, BM)
    tile = tl.program_id(0) // PARTS
    part = tl.program_id(0) % PARTS
    if tile < row_tiles:
        expert, begin, end = locate_tile(offsets_ptr, running, tile, BM)
        lane = tl.arange(0, BM)
        rows = begin + lane
        row_mask = rows < end
        assignment = tl.load(order_ptr + rows, mask=row_mask, other=0)
        source = source_ptr + (assignment // TOP_K).to(tl.int64)[:, None] * stride_source
        if SUM:
            weight = tl.load(weight_ptr + assignment, mask=row_mask, other=0.0).to(tl.float32)[:, None]
        place = ((tile * BM + lane) if PADDED else rows).to(tl.int64)[:, None] * stride_out
        for start in range(part * BC, columns, PARTS * BC):
            column = start + tl.arange(0, BC)
            c_mask = column < columns
            block = tl.load(source + column[None, :], mask=row_mask[:, None] & c_mask[None, :], other=0.0)
            if COPY:
                mask = c_mask[None, :] if PADDED else row_mask[:, None] & c_mask[None, :]
                tl.store(out_ptr + place + column[None, :], block, mask=mask)
            if SUM:
                total = tl.sum(block.to(tl.float32) * weight, axis=0)
                tl.store(partial_ptr + tile.to(tl.int64) * stride_partial + column, total, mask=c_mask)


def gather_rows(
    source: torch.Tensor,
    order: torch.Tensor,
    offsets: torch.Tensor,
    top_k: int,
    *,
    out: torch.Tensor | None = None,
    weight: torch.Tensor | None = None,
    partial: torch.Tensor | None = None,
    padded: bool = True,
) -> None:
    """Rows of their tokens in expert order; `padded`: every expert filled up with zero rows to a multiple of `PAD`.

    Args:
        source (`(T, C)`): Rows by token; last dimension contiguous.
        out (`(padded_rows(M, E), C)`, or `(M, C)` if not padded, *optional*): Receives the rows.
        weight (`(M,)`, by assignment id, *optional*): For `partial`.
        partial (`(row tiles, C)`, fp32, *optional*): Receives the weighted sum of every block of `PAD` rows.
    """
    M, columns, experts = order.numel(), source.shape[1], offsets.numel() - 1
    parts = min(_PARTS, cdiv(columns, _COLUMNS))
    _gather_rows_kernel[(padded_rows(M, experts) // PAD * parts,)](
        source,
        order,
        offsets,
        weight,
        out,
        partial,
        columns,
        source.stride(0),
        0 if out is None else out.stride(0),
        0 if partial is None else partial.stride(0),
        experts,
        E_POW2=next_power_of_2(experts),
        TOP_K=top_k,
        COPY=out is not None,
        PADDED=padded,
        SUM=partial is not None,
        PARTS=parts,
        BM=PAD,
        BC=_COLUMNS,
        num_warps=8,
    )


@triton.jit
def _sum_tiles_kernel(
    partial_ptr,
    offsets_ptr,
    out_ptr,
    C,
    E,
    E_POW2: tl.constexpr,
    ACCUMULATE: tl.constexpr,
    BM: tl.constexpr,
    BT: tl.constexpr,
    BC: tl.constexpr,
):
    running, _ = expert_tiles(offsets_ptr, E, E_POW2, BM)
    expert = tl.program_id(0)
    lane = tl.arange(0, E_POW2)
    last = tl.sum(tl.where(lane == expert, running, 0), axis=0)
    first = tl.sum(tl.where(lane == expert - 1, running, 0), axis=0)
    column = tl.program_id(1) * BC + tl.arange(0, BC)
    total = tl.zeros((BT, BC), tl.float32)
    for start in range(first, last, BT):
        tiles = start + tl.arange(0, BT)
        mask = (tiles < last)[:, None] & (column < C)[None, :]
        total += tl.load(partial_ptr + tiles.to(tl.int64)[:, None] * C + column[None, :], mask=mask, other=0.0)
    result = tl.sum(total, axis=0)
    out_ptrs = out_ptr + expert.to(tl.int64) * C + column
    if ACCUMULATE:
        result += tl.load(out_ptrs, mask=column < C, other=0.0)
    tl.store(out_ptrs, result.to(out_ptr.dtype.element_ty), mask=column < C)


def sum_tiles(partial: torch.Tensor, offsets: torch.Tensor, out: torch.Tensor, accumulate: bool = False) -> None:
    """Sum the partial sums of every expert: `partial` (row tiles, C) fp32 to `out` (E, C); unused experts get zero."""
    experts, columns = out.shape
    _sum_tiles_kernel[(experts, cdiv(columns, 128))](
        partial,
        offsets,
        out,
        columns,
        experts,
        E_POW2=next_power_of_2(experts),
        ACCUMULATE=accumulate,
        BM=PAD,
        BT=16,
        BC=128,
        num_warps=4,
    )


@triton.jit
def _router_gradient_kernel(
    dots_ptr,
    grad_ptr,
    bias_ptr,
    index_ptr,
    out_ptr,
    H,
    stride_grad,
    E,
    SEGMENTS: tl.constexpr,
    SEGMENTS_POW2: tl.constexpr,
    TOP_K: tl.constexpr,
    K_POW2: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    slot = tl.arange(0, K_POW2)
    expert = tl.load(index_ptr + token * TOP_K + slot, mask=slot < TOP_K, other=-1).to(tl.int64)
    computed = (expert >= 0) & (expert < E)
    total = tl.zeros((K_POW2, BLOCK), tl.float32)
    for start in range(0, H, BLOCK):
        column = start + tl.arange(0, BLOCK)
        grad = tl.load(grad_ptr + token * stride_grad + column, mask=column < H, other=0.0).to(tl.float32)
        bias = tl.load(
            bias_ptr + expert[:, None] * H + column[None, :], mask=computed[:, None] & (column < H)[None, :], other=0.0
        )
        total += grad[None, :] * bias.to(tl.float32)
    segment = tl.arange(0, SEGMENTS_POW2)
    dots = tl.load(
        dots_ptr + (token * TOP_K + slot)[:, None] * SEGMENTS + segment[None, :],
        mask=computed[:, None] & (segment < SEGMENTS)[None, :],
        other=0.0,
    )
    result = tl.sum(total, axis=1) + tl.sum(dots, axis=1)
    tl.store(
        out_ptr + token * TOP_K + slot,
        tl.where(computed, result, 0.0).to(out_ptr.dtype.element_ty),
        mask=slot < TOP_K,
    )


def router_gradient(
    dots: torch.Tensor, grad: torch.Tensor, bias: torch.Tensor, index: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """Gradient of the router weights (T, k): <down output, grad> from the activation's dot products and the bias."""
    tokens, top_k = index.shape
    out = torch.empty(tokens, top_k, dtype=dtype, device=grad.device)
    segments = dots.shape[1]
    _router_gradient_kernel[(tokens,)](
        dots,
        grad,
        bias,
        index,
        out,
        grad.shape[1],
        grad.stride(0),
        bias.shape[0],
        SEGMENTS=segments,
        SEGMENTS_POW2=next_power_of_2(segments),
        TOP_K=top_k,
        K_POW2=next_power_of_2(top_k),
        BLOCK=min(1024, next_power_of_2(grad.shape[1])),
        num_warps=4,
    )
    return out
