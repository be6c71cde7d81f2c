"""Triton: rows sorted by expert times that expert's matrix, as a persistent kernel (forward and input gradients).

Shape legend: M sorted rows, E experts, K contraction, N columns. Nothing here is Hopper-only: tensor descriptors (TMA)
are used where the configuration asks for them and the GPU has them.
"""

import torch
import triton
import triton.language as tl
from triton.tools.ragged_tma import load_ragged, to_ragged_indices
from triton.tools.tensor_descriptor import TensorDescriptor

from . import tiles
from .tiles import expert_tiles, place_tile
from .tuning import TileConfig, cdiv, next_power_of_2


@triton.jit
def _store_rows(ragged, start, end, row, column, block, BM: tl.constexpr, BN: tl.constexpr):
    """Write `block` to rows `row:` of the rows `start:end` of one expert; what lies past `end` is not written."""
    wrap, last, place = to_ragged_indices(start, end - start, row)
    ragged.store([wrap, last, place, column], tl.reshape(block, (1, 1, BM, BN)))


@triton.jit
def _tile(
    a,
    b,
    c,
    h,
    bias_ptr,
    c_ptr,
    h_ptr,
    order_ptr,
    weight_ptr,
    low_ptr,
    up_ptr,
    K,
    N,
    N_low,
    column_begin,
    columns,
    stride_a,
    stride_b,
    stride_b_expert,
    stride_c,
    stride_h,
    alpha,
    limit,
    expert,
    start,
    start_a,
    end,
    tile_m,
    first,
    TOP_K: tl.constexpr,
    GATHER: tl.constexpr,
    SCATTER: tl.constexpr,
    TRANS_B: tl.constexpr,
    BIASED: tl.constexpr,
    GATED: tl.constexpr,
    WEIGHTED: tl.constexpr,
    STORE_C: tl.constexpr,
    RANK: tl.constexpr,
    PRECISION: tl.constexpr,
    EVEN_K: tl.constexpr,
    TMA_A: tl.constexpr,
    TMA_B: tl.constexpr,
    TMA_STORE_C: tl.constexpr,
    TMA_STORE_H: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
):
    """One tile of the product: rows `tile_m * BM:` of the expert's, columns `first:`."""
    rows = start + tile_m * BM + tl.arange(0, BM)
    row_mask = rows < end
    local = first + tl.arange(0, BN)
    n = column_begin + local
    n_mask = local < columns
    inner = tl.arange(0, BK)
    if GATHER or SCATTER or WEIGHTED:
        assignment = tl.load(order_ptr + rows, mask=row_mask, other=0)
    if not TMA_A:
        if GATHER:
            source = assignment // TOP_K
        else:
            source = start_a + tl.minimum(rows, end - 1) - start
        a_ptrs = a + source.to(tl.int64)[:, None] * stride_a + inner[None, :]
    if not TMA_B:
        if TRANS_B:
            b_ptrs = b + expert.to(tl.int64) * stride_b_expert + n.to(tl.int64)[None, :] * stride_b + inner[:, None]
        else:
            b_ptrs = b + expert.to(tl.int64) * stride_b_expert + inner.to(tl.int64)[:, None] * stride_b + n[None, :]

    acc = tl.zeros((BM, BN), tl.float32)
    for step in range(0, tl.cdiv(K, BK)):
        k = step * BK
        if TMA_A:
            a_tile = load_ragged(a, start_a, end - start, [tile_m * BM, k])
        else:  # either way rows past the expert's end are zeros: they cost the tensor cores less power
            if EVEN_K:
                a_tile = tl.load(a_ptrs, mask=row_mask[:, None], other=0.0)
            else:
                a_tile = tl.load(a_ptrs, mask=row_mask[:, None] & (inner[None, :] < K - k), other=0.0)
            a_ptrs += BK
        if TMA_B:
            if TRANS_B:
                b_tile = b.load([expert * N + column_begin + first, k]).T
            else:
                b_tile = b.load([expert * K + k, column_begin + first])
        else:
            if EVEN_K:
                b_tile = tl.load(b_ptrs, mask=n_mask[None, :], other=0.0)
            else:
                b_tile = tl.load(b_ptrs, mask=n_mask[None, :] & (inner[:, None] < K - k), other=0.0)
            if TRANS_B:
                b_ptrs += BK
            else:
                b_ptrs += BK * stride_b
        acc = tl.dot(a_tile, b_tile, acc, input_precision=PRECISION)

    if RANK > 0:
        r = tl.arange(0, RANK)
        low = tl.load(low_ptr + rows.to(tl.int64)[:, None] * RANK + r[None, :], mask=row_mask[:, None], other=0.0)
        up = tl.load(
            up_ptr + expert.to(tl.int64) * RANK * N_low + r[:, None] * N_low + n[None, :],
            mask=n_mask[None, :],
            other=0.0,
        )
        acc = tl.dot(low, up, acc, input_precision=PRECISION)

    if BIASED:
        bias = tl.load(bias_ptr + expert.to(tl.int64) * N + n, mask=n_mask, other=0.0).to(tl.float32)
        acc += bias[None, :]
    if WEIGHTED:
        weight = tl.load(weight_ptr + assignment, mask=row_mask, other=0.0).to(tl.float32)
        acc *= weight[:, None]
    if STORE_C:
        if TMA_STORE_C:
            _store_rows(c, start, end, tile_m * BM, first, acc.to(c.dtype), BM, BN)
        else:
            if SCATTER:
                destination = assignment.to(tl.int64)
            else:
                destination = rows.to(tl.int64)
            c_ptrs = c_ptr + destination[:, None] * stride_c + local[None, :]
            tl.store(c_ptrs, acc.to(c_ptr.dtype.element_ty), mask=row_mask[:, None] & n_mask[None, :])
    if GATED:
        gate, linear = tl.split(tl.reshape(acc, (BM, BN // 2, 2)))
        gate = tl.minimum(gate, limit)
        linear = tl.minimum(tl.maximum(linear, -limit), limit)
        activated = (linear + 1.0) * gate / (1.0 + tl.exp(-alpha * gate))
        if TMA_STORE_H:
            _store_rows(h, start, end, tile_m * BM, first // 2, activated.to(h.dtype), BM, BN // 2)
        else:
            m = first // 2 + tl.arange(0, BN // 2)
            tl.store(
                h_ptr + rows.to(tl.int64)[:, None] * stride_h + m[None, :],
                activated.to(h_ptr.dtype.element_ty),
                mask=row_mask[:, None] & (m < columns // 2)[None, :],
            )


@triton.jit
def _grouped_gemm_kernel(
    a,
    b,
    a_narrow,
    b_narrow,
    c,
    h,
    bias_ptr,
    c_ptr,
    h_ptr,
    order_ptr,
    offsets_ptr,
    weight_ptr,
    low_ptr,
    up_ptr,
    K,
    N,
    N_low,
    column_begin,
    columns,
    stride_a,
    stride_b,
    stride_b_expert,
    stride_c,
    stride_h,
    alpha,
    limit,
    E,
    num_programs,
    E_POW2: tl.constexpr,
    TOP_K: tl.constexpr,
    GATHER: tl.constexpr,
    PADDED_A: tl.constexpr,
    PAD: tl.constexpr,
    SCATTER: tl.constexpr,
    TRANS_B: tl.constexpr,
    BIASED: tl.constexpr,
    GATED: tl.constexpr,
    WEIGHTED: tl.constexpr,
    STORE_C: tl.constexpr,
    RANK: tl.constexpr,
    PRECISION: tl.constexpr,
    EVEN_K: tl.constexpr,
    TMA_A: tl.constexpr,
    TMA_B: tl.constexpr,
    TMA_STORE_C: tl.constexpr,
    TMA_STORE_H: tl.constexpr,
    FLATTEN: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BN_NARROW: tl.constexpr,
    BK: tl.constexpr,
    GROUP: tl.constexpr,
):
    NARROW: tl.constexpr = BN_NARROW > 0
    running, row_tiles = expert_tiles(offsets_ptr, E, E_POW2, BM)
    if PADDED_A:
        lane = tl.arange(0, E_POW2)
        padded, _ = expert_tiles(offsets_ptr, E, E_POW2, PAD)
    column_tiles = columns // BN if NARROW else tl.cdiv(columns, BN)
    total = row_tiles * column_tiles
    if NARROW:
        narrow, narrow_tiles = expert_tiles(offsets_ptr, E, E_POW2, 2 * BM)
        running = running * column_tiles + narrow
        total += narrow_tiles
    for tile in tl.range(tl.program_id(0), total, num_programs, flatten=FLATTEN):
        expert, start, end, tile_m, tile_n = place_tile(offsets_ptr, running, tile, column_tiles, NARROW, BM, GROUP)
        start_a = start
        if PADDED_A:
            start_a = tl.sum(tl.where(lane == expert - 1, padded, 0), axis=0) * PAD
        first = tile_n * BN
        if NARROW and tile_n == column_tiles:
            _tile(
                a_narrow, b_narrow, c, h, bias_ptr, c_ptr, h_ptr, order_ptr, weight_ptr, low_ptr, up_ptr, K, N, N_low,
                column_begin, columns, stride_a, stride_b, stride_b_expert, stride_c, stride_h, alpha, limit, expert,
                start, start_a, end, tile_m, first, TOP_K, GATHER, SCATTER, TRANS_B, BIASED, GATED, WEIGHTED, STORE_C,
                RANK, PRECISION, EVEN_K, TMA_A, TMA_B, TMA_STORE_C, TMA_STORE_H, 2 * BM, BN_NARROW, BK,
            )  # fmt: skip
        else:
            _tile(
                a, b, c, h, bias_ptr, c_ptr, h_ptr, order_ptr, weight_ptr, low_ptr, up_ptr, K, N, N_low, column_begin,
                columns, stride_a, stride_b, stride_b_expert, stride_c, stride_h, alpha, limit, expert, start,
                start_a, end, tile_m, first, TOP_K, GATHER, SCATTER, TRANS_B, BIASED, GATED, WEIGHTED, STORE_C, RANK,
                PRECISION, EVEN_K, TMA_A, TMA_B, TMA_STORE_C, TMA_STORE_H, BM, BN, BK,
            )  # fmt: skip


def _describe(b: torch.Tensor, bk: int, bn: int, transposed: bool) -> TensorDescriptor:
    return TensorDescriptor.from_tensor(b, [bn, bk] if transposed else [bk, bn])


def grouped_gemm(
    a: torch.Tensor,
    b: torch.Tensor,
    offsets: torch.Tensor,
    config: TileConfig,
    *,
    top_k: int,
    out: torch.Tensor | None = None,
    order: torch.Tensor | None = None,
    gather: bool = False,
    padded_a: bool = False,
    scatter: bool = False,
    transpose_b: bool = False,
    bias: torch.Tensor | None = None,
    gated: torch.Tensor | None = None,
    alpha: float = 0.0,
    limit: float = 0.0,
    weight: torch.Tensor | None = None,
    low_rank: tuple[torch.Tensor, torch.Tensor] | None = None,
    columns: tuple[int, int] | None = None,
) -> None:
    """Multiply the sorted rows of `a` with the matrix of their expert.

    Args:
        a (`(M, K)`, or `(T, K)` with `gather`): Left operand, last dimension contiguous. With `padded_a` it comes from
            `gather_rows(padded=True)` and has `padded_rows(M, E)` rows; the product does not.
        b (`(E, K, N)`, or `(E, N, K)` with `transpose_b`): Contiguous right operands.
        offsets (`(E + 1,)`, int32): From `sort_by_expert`.
        config (`TileConfig`): Tile sizes.
        out (`(M, columns)`): Where the product goes; rows by assignment id with `scatter`.
        order (`(M,)`, int32): Needed by `gather`, `padded_a`, `scatter` and `weight`.
        bias (`(E, N)`): Added to the product.
        gated (`(M, N / 2)`): Receives the clamped SwiGLU of the interleaved product (gate even, linear odd columns).
        weight (`(M,)`, by assignment id): Multiplies the biased product.
        low_rank (`(M, R)`, `(E, R, N)`): Their product is added; R is a power of two of at least 16.
        columns (`(begin, end)`): Only these columns of the product, written to columns `0:end - begin` of `out`.
    """
    experts = b.shape[0]
    K, N = (b.shape[2], b.shape[1]) if transpose_b else (b.shape[1], b.shape[2])
    begin, end = columns or (0, N)
    M = order.numel() if gather or padded_a else a.shape[0]
    row_tiles = cdiv(M, config.bm) + min(experts, M)
    programs = tiles.programs(config, row_tiles * cdiv(end - begin, config.bn), a.device)
    even_k = K % config.bk == 0
    a_operand, b_operand, tma_a, tma_b = a, b, False, False
    a_narrow, b_narrow, bn_narrow = None, None, 0
    if config.tma and even_k:
        flat_b = b.reshape(-1, b.shape[2])
        tma_a, tma_b = not gather and tiles.can_describe(a), tiles.can_describe(flat_b)
        if tma_a:
            a_operand = tiles.ragged_descriptor(a, config.bm, config.bk)
        if tma_b:
            b_operand = _describe(flat_b, config.bk, config.bn, transpose_b)
        if config.narrow and tma_a and tma_b and gated is None and low_rank is None:
            bn_narrow = tiles.narrow_columns(end - begin, config.bn)
        if bn_narrow:
            a_narrow = tiles.ragged_descriptor(a, 2 * config.bm, config.bk)
            b_narrow = _describe(flat_b, config.bk, bn_narrow, transpose_b)
    stored_c = config.tma_store and out is not None and not scatter and not bn_narrow and tiles.can_describe(out)
    stored_h = config.tma_store and gated is not None and tiles.can_describe(gated)
    low, up = low_rank or (None, None)
    _grouped_gemm_kernel[(programs,)](
        a_operand,
        b_operand,
        a_narrow,
        b_narrow,
        tiles.ragged_descriptor(out, config.bm, config.bn) if stored_c else None,
        tiles.ragged_descriptor(gated, config.bm, config.bn // 2) if stored_h else None,
        bias,
        out,
        gated,
        order,
        offsets,
        weight,
        low,
        up,
        K,
        N,
        N if up is None else up.shape[2],
        begin,
        end - begin,
        a.stride(0),
        b.stride(1),
        b.stride(0),
        0 if out is None else out.stride(0),
        0 if gated is None else gated.stride(0),
        alpha,
        limit,
        experts,
        programs,
        E_POW2=next_power_of_2(experts),
        TOP_K=top_k,
        GATHER=gather,
        PADDED_A=padded_a,
        PAD=tiles.PAD,
        SCATTER=scatter,
        TRANS_B=transpose_b,
        BIASED=bias is not None,
        GATED=gated is not None,
        WEIGHTED=weight is not None,
        STORE_C=out is not None,
        RANK=0 if low is None else low.shape[1],
        PRECISION=tiles.precision(a.dtype),
        EVEN_K=even_k,
        TMA_A=tma_a,
        TMA_B=tma_b,
        TMA_STORE_C=stored_c,
        TMA_STORE_H=stored_h,
        FLATTEN=config.flatten and not bn_narrow,
        BM=config.bm,
        BN=config.bn,
        BN_NARROW=bn_narrow,
        BK=config.bk,
        GROUP=config.group,
        num_warps=config.warps,
        num_stages=config.stages,
    )
