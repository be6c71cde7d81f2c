"""Triton: the two matrix-product shapes of a mixture of experts, as persistent kernels.

`grouped_gemm` multiplies rows sorted by expert with that expert's matrix (forward and input gradients).
`grouped_wgrad` contracts over the rows of an expert (weight gradients).

Shape legend: M sorted rows, E experts, K contraction, N columns. Rows of expert e are `offsets[e]:offsets[e + 1]`.
Which rows a tile covers is found on the device from `offsets`, so the host never waits for the token counts. Nothing
here is Hopper-only: tensor descriptors (TMA) are used where the configuration asks for them and the GPU has them.
"""

import functools

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from .tuning import TileConfig, cdiv, next_power_of_2

PAD = 64  # rows per padded block of an expert; a multiple of every contraction step of `grouped_wgrad`


@triton.jit
def expert_tiles(offsets_ptr, E, E_POW2: tl.constexpr, BM: tl.constexpr):
    """Running number of row tiles per expert (E_POW2,) and the total."""
    expert = tl.arange(0, E_POW2)
    begin = tl.load(offsets_ptr + expert, mask=expert < E, other=0)
    end = tl.load(offsets_ptr + expert + 1, mask=expert < E, other=0)
    tiles = (end - begin + BM - 1) // BM
    return tl.cumsum(tiles, axis=0), tl.sum(tiles, axis=0)


@triton.jit
def locate_tile(offsets_ptr, running, tile, BM: tl.constexpr):
    """Expert, first row and end row (of the expert) of row tile `tile`."""
    done = running <= tile
    expert = tl.sum(done.to(tl.int32), axis=0)
    first = tl.max(tl.where(done, running, 0), axis=0)
    begin = tl.load(offsets_ptr + expert) + (tile - first) * BM
    return expert, begin, tl.load(offsets_ptr + expert + 1)


@triton.jit
def _grouped_gemm_kernel(
    a,
    b,
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
    FLATTEN: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    GROUP: tl.constexpr,
):
    running, row_tiles = expert_tiles(offsets_ptr, E, E_POW2, BM)
    column_tiles = tl.cdiv(columns, BN)
    group_size = GROUP * column_tiles
    k_steps = tl.cdiv(K, BK)
    for tile in tl.range(tl.program_id(0), row_tiles * column_tiles, num_programs, flatten=FLATTEN):
        first_m = tile // group_size * GROUP
        rows_in_group = min(row_tiles - first_m, GROUP)
        tile_m = first_m + tile % group_size % rows_in_group
        tile_n = tile % group_size // rows_in_group
        expert, begin, end = locate_tile(offsets_ptr, running, tile_m, BM)

        rows = begin + tl.arange(0, BM)
        row_mask = rows < end
        local = tile_n * BN + tl.arange(0, BN)
        n = column_begin + local
        n_mask = local < columns
        inner = tl.arange(0, BK)
        if GATHER or SCATTER or WEIGHTED:
            assignment = tl.load(order_ptr + rows, mask=row_mask, other=0)
        if not TMA_A:
            if GATHER:
                source = assignment // TOP_K
            else:
                source = tl.minimum(rows, end - 1)
            a_ptrs = a + source.to(tl.int64)[:, None] * stride_a + inner[None, :]
        if not TMA_B:
            if TRANS_B:
                b_ptrs = (
                    b + expert.to(tl.int64) * stride_b_expert + n.to(tl.int64)[None, :] * stride_b + inner[:, None]
                )
            else:
                b_ptrs = (
                    b + expert.to(tl.int64) * stride_b_expert + inner.to(tl.int64)[:, None] * stride_b + n[None, :]
                )

        acc = tl.zeros((BM, BN), tl.float32)
        for step in range(0, k_steps):
            k = step * BK
            if TMA_A:
                a_tile = a.load([begin, k])
            else:
                if EVEN_K:
                    a_tile = tl.load(a_ptrs)
                else:
                    a_tile = tl.load(a_ptrs, mask=inner[None, :] < K - k, other=0.0)
                a_ptrs += BK
            if TMA_B:
                if TRANS_B:
                    b_tile = b.load([expert * N + column_begin + tile_n * BN, k]).T
                else:
                    b_tile = b.load([expert * K + k, column_begin + tile_n * BN])
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
            if SCATTER:
                destination = assignment.to(tl.int64)
            else:
                destination = rows.to(tl.int64)
            tl.store(
                c_ptr + destination[:, None] * stride_c + local[None, :],
                acc.to(c_ptr.dtype.element_ty),
                mask=row_mask[:, None] & n_mask[None, :],
            )
        if GATED:
            gate, linear = tl.split(tl.reshape(acc, (BM, BN // 2, 2)))
            gate = tl.minimum(gate, limit)
            linear = tl.minimum(tl.maximum(linear, -limit), limit)
            h = (linear + 1.0) * gate / (1.0 + tl.exp(-alpha * gate))
            m = tile_n * (BN // 2) + tl.arange(0, BN // 2)
            tl.store(
                h_ptr + rows.to(tl.int64)[:, None] * stride_h + m[None, :],
                h.to(h_ptr.dtype.element_ty),
                mask=row_mask[:, None] & (m < columns // 2)[None, :],
            )


@functools.cache
def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2


def _programs(config: TileConfig, tiles: int, device: torch.device) -> int:
    return max(1, min(tiles, _processors(device) * config.programs))


def _precision(dtype: torch.dtype) -> str:
    return "ieee" if dtype == torch.float32 else "tf32"


@functools.cache
def _has_tma(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] >= 9


def _can_describe(matrix: torch.Tensor) -> bool:
    """TMA wants a 16-byte aligned base and row pitch, and pays only from Hopper on."""
    return (
        _has_tma(matrix.device)
        and matrix.data_ptr() % 16 == 0
        and matrix.stride(0) * matrix.element_size() % 16 == 0
        and matrix.stride(1) == 1
    )


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
        a (`(M, K)`, or `(T, K)` with `gather`): Left operand, last dimension contiguous.
        b (`(E, K, N)`, or `(E, N, K)` with `transpose_b`): Contiguous right operands.
        offsets (`(E + 1,)`, int32): From `sort_by_expert`.
        config (`TileConfig`): Tile sizes.
        out (`(M, columns)`): Where the product goes; rows by assignment id with `scatter`.
        order (`(M,)`, int32): Needed by `gather`, `scatter` and `weight`.
        bias (`(E, N)`): Added to the product.
        gated (`(M, N / 2)`): Receives the clamped SwiGLU of the interleaved product (gate even, linear odd columns).
        weight (`(M,)`, by assignment id): Multiplies the biased product.
        low_rank (`(M, R)`, `(E, R, N)`): Their product is added; R is a power of two of at least 16.
        columns (`(begin, end)`): Only these columns of the product, written to columns `0:end - begin` of `out`.
    """
    experts = b.shape[0]
    K, N = (b.shape[2], b.shape[1]) if transpose_b else (b.shape[1], b.shape[2])
    begin, end = columns or (0, N)
    M = order.numel() if gather else a.shape[0]
    row_tiles = cdiv(M, config.bm) + min(experts, M)
    programs = _programs(config, row_tiles * cdiv(end - begin, config.bn), a.device)
    even_k = K % config.bk == 0
    a_operand, b_operand, tma_a, tma_b = a, b, False, False
    if config.tma and even_k:
        flat_b = b.reshape(-1, b.shape[2])
        tma_a, tma_b = not gather and _can_describe(a), _can_describe(flat_b)
        if tma_a:
            a_operand = TensorDescriptor.from_tensor(a, [config.bm, config.bk])
        if tma_b:
            b_block = [config.bn, config.bk] if transpose_b else [config.bk, config.bn]
            b_operand = TensorDescriptor.from_tensor(flat_b, b_block)
    low, up = low_rank or (None, None)
    _grouped_gemm_kernel[(programs,)](
        a_operand,
        b_operand,
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
        SCATTER=scatter,
        TRANS_B=transpose_b,
        BIASED=bias is not None,
        GATED=gated is not None,
        WEIGHTED=weight is not None,
        STORE_C=out is not None,
        RANK=0 if low is None else low.shape[1],
        PRECISION=_precision(a.dtype),
        EVEN_K=even_k,
        TMA_A=tma_a,
        TMA_B=tma_b,
        FLATTEN=config.flatten,
        BM=config.bm,
        BN=config.bn,
        BK=config.bk,
        GROUP=config.group,
        num_warps=config.warps,
        num_stages=config.stages,
    )


@triton.jit
def _grouped_wgrad_kernel(
    a,
    b,
    c,
    offsets_ptr,
    H,
    N,
    stride_a,
    stride_b,
    stride_c_expert,
    stride_c,
    E,
    num_programs,
    E_POW2: tl.constexpr,
    PAD_A: tl.constexpr,
    PAD_B: tl.constexpr,
    PAD: tl.constexpr,
    ACCUMULATE: tl.constexpr,
    PRECISION: tl.constexpr,
    TMA: tl.constexpr,
    TMA_STORE: tl.constexpr,
    FLATTEN: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    GROUP: tl.constexpr,
):
    running, _ = expert_tiles(offsets_ptr, E, E_POW2, PAD)
    lane = tl.arange(0, E_POW2)
    tiles_m = tl.cdiv(H, BM)
    tiles_n = tl.cdiv(N, BN)
    per_expert = tiles_m * tiles_n
    group_size = GROUP * tiles_n
    for tile in tl.range(tl.program_id(0), E * per_expert, num_programs, flatten=FLATTEN):
        expert = tile // per_expert
        rest = tile % per_expert
        first_m = rest // group_size * GROUP
        rows_in_group = min(tiles_m - first_m, GROUP)
        start_m = (first_m + rest % group_size % rows_in_group) * BM
        start_n = rest % group_size // rows_in_group * BN
        m = start_m + tl.arange(0, BM)
        n = start_n + tl.arange(0, BN)
        m_mask = m < H
        n_mask = n < N
        begin = tl.load(offsets_ptr + expert)
        count = tl.load(offsets_ptr + expert + 1) - begin
        padded = tl.sum(tl.where(lane == expert - 1, running, 0), axis=0) * PAD
        begin_a = padded if PAD_A else begin
        begin_b = padded if PAD_B else begin
        acc = tl.zeros((BM, BN), tl.float32)
        for step in range(0, tl.cdiv(count, BK)):
            if TMA:
                a_tile = a.load([begin_a + step * BK, start_m])
                b_tile = b.load([begin_b + step * BK, start_n])
            else:
                k = step * BK + tl.arange(0, BK)
                a_mask = m_mask[None, :] & (PAD_A | (k < count))[:, None]
                b_mask = n_mask[None, :] & (PAD_B | (k < count))[:, None]
                a_tile = tl.load(
                    a + (begin_a + k).to(tl.int64)[:, None] * stride_a + m[None, :], mask=a_mask, other=0.0
                )
                b_tile = tl.load(
                    b + (begin_b + k).to(tl.int64)[:, None] * stride_b + n[None, :], mask=b_mask, other=0.0
                )
            acc = tl.dot(tl.trans(a_tile), b_tile, acc, input_precision=PRECISION)
        if TMA_STORE:
            c.store([expert, start_m, start_n], tl.reshape(acc.to(c.dtype), (1, BM, BN)))
        else:
            c_ptrs = c + expert.to(tl.int64) * stride_c_expert + m.to(tl.int64)[:, None] * stride_c + n[None, :]
            c_mask = m_mask[:, None] & n_mask[None, :]
            if ACCUMULATE:
                acc += tl.load(c_ptrs, mask=c_mask, other=0.0)
            tl.store(c_ptrs, acc.to(c.dtype.element_ty), mask=c_mask)


def grouped_wgrad(
    a: torch.Tensor,
    b: torch.Tensor,
    out: torch.Tensor,
    offsets: torch.Tensor,
    config: TileConfig,
    *,
    padded_a: bool = False,
    padded_b: bool = False,
    accumulate: bool = False,
) -> None:
    """`out[e] = a[rows of e].T @ b[rows of e]`, fp32 accumulation, zeros for an expert without rows.

    Args:
        a (`(M, H)`), b (`(M, N)`): Sorted rows, last dimension contiguous. A padded operand comes from `gather_rows`:
            every expert starts at a multiple of `PAD` rows and ends in zero rows. With one padded operand the other is
            read past the end of an expert, so up to `PAD` rows behind the last expert must be finite.
        out (`(E, H, N)`, last dimension contiguous): Overwritten, or added to with `accumulate` (fp32 only).
    """
    experts, H, N = out.shape
    tiles = experts * cdiv(H, config.bm) * cdiv(N, config.bn)
    programs = _programs(config, tiles, a.device)
    tma_store = (
        config.tma_store and not accumulate and _can_describe(out[0]) and out.stride(0) * out.element_size() % 16 == 0
    )
    tma = config.tma and padded_a != padded_b and _can_describe(a) and _can_describe(b)
    _grouped_wgrad_kernel[(programs,)](
        TensorDescriptor.from_tensor(a, [config.bk, config.bm]) if tma else a,
        TensorDescriptor.from_tensor(b, [config.bk, config.bn]) if tma else b,
        TensorDescriptor.from_tensor(out, [1, config.bm, config.bn]) if tma_store else out,
        offsets,
        H,
        N,
        a.stride(0),
        b.stride(0),
        out.stride(0),
        out.stride(1),
        experts,
        programs,
        E_POW2=next_power_of_2(experts),
        PAD_A=padded_a,
        PAD_B=padded_b,
        PAD=PAD,
        ACCUMULATE=accumulate,
        PRECISION=_precision(a.dtype),
        TMA=tma,
        TMA_STORE=tma_store,
        FLATTEN=config.flatten,
        BM=config.bm,
        BN=config.bn,
        BK=config.bk,
        GROUP=config.group,
        num_warps=config.warps,
        num_stages=config.stages,
    )
