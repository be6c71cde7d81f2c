"""Candidate: grouped products in two tile shapes within one launch.

BM x BN for whole column tiles and BM2 x BN2 for the last, narrow columns (2880 = 11 * 256 + 64), which come right after
the expert's other tiles, while its rows are in the L2 cache. Operands by TMA. In the place of `grouped_gemm`.
"""

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from triton.tools.ragged_tma import load_ragged
from triton.tools.tensor_descriptor import TensorDescriptor

from trl_gptoss.experts import kernels_gemm, tiles
from trl_gptoss.experts.tiles import expert_tiles
from trl_gptoss.experts.tuning import TileConfig, cdiv, next_power_of_2


@triton.jit
def _tile(
    a,
    b,
    c_ptr,
    order_ptr,
    weight_ptr,
    bias_ptr,
    K,
    N,
    column_begin,
    columns,
    stride_c,
    expert,
    start,
    start_a,
    end,
    tile_m,
    first,
    SCATTER: tl.constexpr,
    TRANS_B: tl.constexpr,
    BIASED: tl.constexpr,
    WEIGHTED: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
):
    rows = start + tile_m * BM + tl.arange(0, BM)
    row_mask = rows < end
    local = first + tl.arange(0, BN)
    n = column_begin + local
    n_mask = local < columns
    if SCATTER or WEIGHTED:
        assignment = tl.load(order_ptr + rows, mask=row_mask, other=0)
    acc = tl.zeros((BM, BN), tl.float32)
    for step in range(0, tl.cdiv(K, BK)):
        k = step * BK
        a_tile = load_ragged(a, start_a, end - start, [tile_m * BM, k])
        if TRANS_B:
            b_tile = b.load([expert * N + column_begin + first, k]).T
        else:
            b_tile = b.load([expert * K + k, column_begin + first])
        acc = tl.dot(a_tile, b_tile, acc)
    if BIASED:
        acc += tl.load(bias_ptr + expert.to(tl.int64) * N + n, mask=n_mask, other=0.0).to(tl.float32)[None, :]
    if WEIGHTED:
        acc *= tl.load(weight_ptr + assignment, mask=row_mask, other=0.0).to(tl.float32)[:, None]
    if SCATTER:
        destination = assignment.to(tl.int64)
    else:
        destination = rows.to(tl.int64)
    tl.store(
        c_ptr + destination[:, None] * stride_c + local[None, :],
        acc.to(c_ptr.dtype.element_ty),
        mask=row_mask[:, None] & n_mask[None, :],
    )


@triton.jit
def _narrow_kernel(
    a,
    b,
    a2,
    b2,
    c_ptr,
    order_ptr,
    offsets_ptr,
    weight_ptr,
    bias_ptr,
    K,
    N,
    column_begin,
    columns,
    stride_c,
    E,
    num_programs,
    E_POW2: tl.constexpr,
    PADDED_A: tl.constexpr,
    PAD: tl.constexpr,
    SCATTER: tl.constexpr,
    TRANS_B: tl.constexpr,
    BIASED: tl.constexpr,
    WEIGHTED: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    GROUP: tl.constexpr,
    BM2: tl.constexpr,
    BN2: tl.constexpr,
):
    lane = tl.arange(0, E_POW2)
    begin = tl.load(offsets_ptr + lane, mask=lane < E, other=0)
    count = tl.load(offsets_ptr + lane + 1, mask=lane < E, other=0) - begin
    wide = columns // BN
    per_expert = (count + BM - 1) // BM * wide + (count + BM2 - 1) // BM2
    running = tl.cumsum(per_expert, axis=0)
    if PADDED_A:
        padded, _ = expert_tiles(offsets_ptr, E, E_POW2, PAD)
    for tile in tl.range(tl.program_id(0), tl.sum(per_expert, axis=0), num_programs):
        done = running <= tile
        expert = tl.sum(done.to(tl.int32), axis=0)
        rest = tile - tl.max(tl.where(done, running, 0), axis=0)
        start = tl.load(offsets_ptr + expert)
        end = tl.load(offsets_ptr + expert + 1)
        start_a = start
        if PADDED_A:
            start_a = tl.sum(tl.where(lane == expert - 1, padded, 0), axis=0) * PAD
        row_tiles = tl.cdiv(end - start, BM)
        if rest < row_tiles * wide:
            group = tl.cdiv(row_tiles, tl.cdiv(row_tiles, GROUP))
            first = rest // (group * wide) * group
            inside = rest % (group * wide)
            group = min(row_tiles - first, group)
            _tile(
                a,
                b,
                c_ptr,
                order_ptr,
                weight_ptr,
                bias_ptr,
                K,
                N,
                column_begin,
                columns,
                stride_c,
                expert,
                start,
                start_a,
                end,
                first + inside % group,
                inside // group * BN,
                SCATTER,
                TRANS_B,
                BIASED,
                WEIGHTED,
                BM,
                BN,
                BK,
            )
        else:
            _tile(
                a2,
                b2,
                c_ptr,
                order_ptr,
                weight_ptr,
                bias_ptr,
                K,
                N,
                column_begin,
                columns,
                stride_c,
                expert,
                start,
                start_a,
                end,
                rest - row_tiles * wide,
                wide * BN,
                SCATTER,
                TRANS_B,
                BIASED,
                WEIGHTED,
                BM2,
                BN2,
                BK,
            )


def narrow_gemm(
    a,
    b,
    offsets,
    config,
    *,
    top_k,
    out,
    order,
    padded_a=False,
    scatter=False,
    transpose_b=False,
    bias=None,
    weight=None,
    columns=None,
    narrow=(256, 64),
):
    experts = b.shape[0]
    K, N = (b.shape[2], b.shape[1]) if transpose_b else (b.shape[1], b.shape[2])
    begin, end = columns or (0, N)
    M = order.numel() if padded_a else a.shape[0]
    flat_b = b.reshape(-1, b.shape[2])
    count = (cdiv(M, config.bm) + min(experts, M)) * cdiv(end - begin, config.bn)
    programs = tiles.programs(config, count, a.device)

    def box(columns: int) -> list[int]:
        return [columns, config.bk] if transpose_b else [config.bk, columns]

    _narrow_kernel[(programs,)](
        tiles.ragged_descriptor(a, config.bm, config.bk),
        TensorDescriptor.from_tensor(flat_b, box(config.bn)),
        tiles.ragged_descriptor(a, narrow[0], config.bk),
        TensorDescriptor.from_tensor(flat_b, box(narrow[1])),
        out,
        order,
        offsets,
        weight,
        bias,
        K,
        N,
        begin,
        end - begin,
        out.stride(0),
        experts,
        programs,
        E_POW2=next_power_of_2(experts),
        PADDED_A=padded_a,
        PAD=tiles.PAD,
        SCATTER=scatter,
        TRANS_B=transpose_b,
        BIASED=bias is not None,
        WEIGHTED=weight is not None,
        BM=config.bm,
        BN=config.bn,
        BK=config.bk,
        GROUP=config.group,
        BM2=narrow[0],
        BN2=narrow[1],
        num_warps=config.warps,
        num_stages=config.stages,
    )


def _applies(b: torch.Tensor, config: TileConfig, options: dict[str, Any]) -> bool:
    begin, end = options.get("columns") or (0, b.shape[1] if options.get("transpose_b") else b.shape[2])
    plain = not options.get("gather") and options.get("gated") is None and options.get("low_rank") is None
    return plain and config.tma and config.bm == 128 and 0 < (end - begin) % config.bn <= 64


def grouped_gemm(narrow: tuple[int, int]) -> Callable[..., None]:
    """`kernels_gemm.grouped_gemm` with tiles of `narrow` where they apply."""

    def product(a: torch.Tensor, b: torch.Tensor, offsets: torch.Tensor, config: TileConfig, **options: Any) -> None:
        if not _applies(b, config, options):
            kernels_gemm.grouped_gemm(a, b, offsets, config, **options)
            return
        others = ("gather", "gated", "low_rank", "alpha", "limit")
        narrow_gemm(a, b, offsets, config, narrow=narrow, **{k: v for k, v in options.items() if k not in others})

    return product
