"""Triton: weight gradients, the contraction over the rows of every expert, as a persistent kernel.

Shape legend: M sorted rows, E experts, H and N rows and columns of a weight.
"""

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from . import tiles
from .tiles import PAD, expert_tiles
from .tuning import TileConfig, cdiv, next_power_of_2


@triton.jit
def _tile(
    a,
    b,
    c,
    H,
    N,
    stride_a,
    stride_b,
    stride_c_expert,
    stride_c,
    expert,
    start_m,
    start_n,
    begin_a,
    begin_b,
    count,
    PAD_A: tl.constexpr,
    PAD_B: tl.constexpr,
    ACCUMULATE: tl.constexpr,
    PRECISION: tl.constexpr,
    TMA: tl.constexpr,
    TMA_STORE: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
):
    """One tile of an expert's gradient, from row `start_m` and column `start_n` on."""
    m = start_m + tl.arange(0, BM)
    n = start_n + tl.arange(0, BN)
    m_mask = m < H
    n_mask = n < N
    acc = tl.zeros((BM, BN), tl.float32)
    for step in range(0, tl.cdiv(count, BK)):
        if TMA:
            a_tile = a.load([begin_a + step * BK, start_m])
            b_tile = b.load([begin_b + step * BK, start_n])
        else:
            k = step * BK + tl.arange(0, BK)
            a_mask = m_mask[None, :] & (PAD_A | (k < count))[:, None]
            b_mask = n_mask[None, :] & (PAD_B | (k < count))[:, None]
            a_tile = tl.load(a + (begin_a + k).to(tl.int64)[:, None] * stride_a + m[None, :], mask=a_mask, other=0.0)
            b_tile = tl.load(b + (begin_b + k).to(tl.int64)[:, None] * stride_b + n[None, :], mask=b_mask, other=0.0)
        acc = tl.dot(tl.trans(a_tile), b_tile, acc, input_precision=PRECISION)
    if TMA_STORE:
        c.store([expert, start_m, start_n], tl.reshape(acc.to(c.dtype), (1, BM, BN)))
    else:
        c_ptrs = c + expert.to(tl.int64) * stride_c_expert + m.to(tl.int64)[:, None] * stride_c + n[None, :]
        c_mask = m_mask[:, None] & n_mask[None, :]
        if ACCUMULATE:
            acc += tl.load(c_ptrs, mask=c_mask, other=0.0)
        tl.store(c_ptrs, acc.to(c.dtype.element_ty), mask=c_mask)


@triton.jit
def _grouped_wgrad_kernel(
    a,
    b,
    c,
    a_narrow,
    b_narrow,
    c_narrow,
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
    BN_NARROW: tl.constexpr,
    BK: tl.constexpr,
    GROUP: tl.constexpr,
):
    running, _ = expert_tiles(offsets_ptr, E, E_POW2, PAD)
    lane = tl.arange(0, E_POW2)
    tiles_m = tl.cdiv(H, BM)
    NARROW: tl.constexpr = BN_NARROW > 0
    tiles_n = N // BN if NARROW else tl.cdiv(N, BN)
    whole = tiles_m * tiles_n
    per_expert = whole + tl.cdiv(H, 2 * BM) if NARROW else whole
    group_size = GROUP * tiles_n
    for tile in tl.range(tl.program_id(0), E * per_expert, num_programs, flatten=FLATTEN):
        expert = tile // per_expert
        rest = tile % per_expert
        begin = tl.load(offsets_ptr + expert)
        count = tl.load(offsets_ptr + expert + 1) - begin
        padded = tl.sum(tl.where(lane == expert - 1, running, 0), axis=0) * PAD
        begin_a = padded if PAD_A else begin
        begin_b = padded if PAD_B else begin
        if NARROW and rest >= whole:
            start_m = (rest - whole) * 2 * BM
            start_n = tiles_n * BN
            _tile(
                a_narrow, b_narrow, c_narrow, H, N, stride_a, stride_b, stride_c_expert, stride_c, expert, start_m, start_n,
                begin_a, begin_b, count, PAD_A, PAD_B, ACCUMULATE, PRECISION, TMA, TMA_STORE, 2 * BM, BN_NARROW, BK,
            )  # fmt: skip
        else:
            first_m = rest // group_size * GROUP
            rows_in_group = min(tiles_m - first_m, GROUP)
            start_m = (first_m + rest % group_size % rows_in_group) * BM
            start_n = rest % group_size // rows_in_group * BN
            _tile(
                a, b, c, H, N, stride_a, stride_b, stride_c_expert, stride_c, expert, start_m, start_n,
                begin_a, begin_b, count, PAD_A, PAD_B, ACCUMULATE, PRECISION, TMA, TMA_STORE, BM, BN, BK,
            )  # fmt: skip


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
    count = experts * cdiv(H, config.bm) * cdiv(N, config.bn)
    programs = tiles.programs(config, count, a.device)
    tma_store = (
        config.tma_store
        and not accumulate
        and tiles.can_describe(out[0])
        and out.stride(0) * out.element_size() % 16 == 0
    )
    tma = config.tma and padded_a != padded_b and tiles.can_describe(a) and tiles.can_describe(b)
    bn_narrow = tiles.narrow_columns(N, config.bn) if config.narrow and tma and tma_store else 0
    describe = TensorDescriptor.from_tensor
    _grouped_wgrad_kernel[(programs,)](
        describe(a, [config.bk, config.bm]) if tma else a,
        describe(b, [config.bk, config.bn]) if tma else b,
        describe(out, [1, config.bm, config.bn]) if tma_store else out,
        describe(a, [config.bk, 2 * config.bm]) if bn_narrow else None,
        describe(b, [config.bk, bn_narrow]) if bn_narrow else None,
        describe(out, [1, 2 * config.bm, bn_narrow]) if bn_narrow else None,
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
        PRECISION=tiles.precision(a.dtype),
        TMA=tma,
        TMA_STORE=tma_store,
        FLATTEN=config.flatten and not bn_narrow,
        BM=config.bm,
        BN=config.bn,
        BN_NARROW=bn_narrow,
        BK=config.bk,
        GROUP=config.group,
        num_warps=config.warps,
        num_stages=config.stages,
    )
