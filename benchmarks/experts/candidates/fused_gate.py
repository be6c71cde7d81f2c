"""Candidate: the backward of the activation in the epilogue of the product before it.

The gradient of the activated rows is never written and read as such: 1.5 GB less traffic at 32768 tokens, and a kernel
less. For trained experts, whose sorted copy of the output's gradient comes by TMA. Writes what `gate_backward` writes:
the gradient of the pairs in place, weight * activation, dot products by assignment and column tile, partial column sums
by row tile. Not for expert parallelism: rows behind the last expert are not cleared.
"""

from dataclasses import replace
from typing import Any

import torch
import triton
import triton.language as tl
from triton.tools.ragged_tma import load_ragged
from triton.tools.tensor_descriptor import TensorDescriptor

from trl_gptoss.experts import kernels_gate, kernels_gemm, kernels_rowwise, tiles
from trl_gptoss.experts.tiles import expert_tiles, place_tile
from trl_gptoss.experts.tuning import TileConfig, cdiv, next_power_of_2


@triton.jit
def _piece(
    acc,
    pair_ptr,
    hidden_ptr,
    partial_ptr,
    rows,
    row_mask,
    column,
    I,  # noqa: E741
    weight,
    alpha,
    limit,
    row_tile,
    BIAS: tl.constexpr,
):
    """One block of columns of a tile: everything that `gate_backward` does; returns the rows' dot products."""
    dtype = hidden_ptr.dtype.element_ty
    c_mask = column < I
    mask = row_mask[:, None] & c_mask[None, :]
    place = rows.to(tl.int64)[:, None] * I + column[None, :]
    pair = tl.load(pair_ptr + place, mask=mask, other=0)
    grad = acc.to(dtype).to(tl.float32)
    gate_raw = pair.to(tl.int16).to(dtype, bitcast=True).to(tl.float32)
    linear_raw = (pair >> 16).to(tl.int16).to(dtype, bitcast=True).to(tl.float32)
    gate = tl.minimum(gate_raw, limit)
    linear = tl.minimum(tl.maximum(linear_raw, -limit), limit) + 1.0
    sigmoid = 1.0 / (1.0 + tl.exp(-alpha * gate))
    glu = gate * sigmoid
    hidden = linear * glu
    dot = tl.sum(hidden * grad, axis=1)
    grad *= weight[:, None]
    d_linear = tl.where(tl.abs(linear_raw) <= limit, grad * glu, 0.0)
    d_gate = tl.where(gate_raw <= limit, grad * linear * (sigmoid + alpha * glu * (1.0 - sigmoid)), 0.0)
    low = d_gate.to(dtype).to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
    high = d_linear.to(dtype).to(tl.int16, bitcast=True).to(tl.int32) << 16
    tl.store(pair_ptr + place, low | high, mask=mask)
    tl.store(hidden_ptr + place, (hidden * weight[:, None]).to(dtype), mask=mask)
    if BIAS:
        partial = partial_ptr + row_tile.to(tl.int64) * 2 * I + 2 * column
        tl.store(partial, tl.sum(d_gate, axis=0), mask=c_mask)
        tl.store(partial + 1, tl.sum(d_linear, axis=0), mask=c_mask)
    return dot


@triton.jit
def _halves(block, BM: tl.constexpr, BN: tl.constexpr):
    return tl.split(tl.permute(tl.reshape(block, (BM, 2, BN // 2)), (0, 2, 1)))


@triton.jit
def _two(
    block,
    pair_ptr,
    hidden_ptr,
    partial_ptr,
    rows,
    row_mask,
    begin,
    I,  # noqa: E741
    weight,
    alpha,
    limit,
    row_tile,
    BIAS: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
):
    """Two pieces: with wider ones the registers do not hold the rest of the tile."""
    left, right = _halves(block, BM, BN)
    column = begin + tl.arange(0, BN // 2)
    dot = _piece(
        left, pair_ptr, hidden_ptr, partial_ptr, rows, row_mask, column, I, weight, alpha, limit, row_tile, BIAS
    )
    return dot + _piece(
        right,
        pair_ptr,
        hidden_ptr,
        partial_ptr,
        rows,
        row_mask,
        column + BN // 2,
        I,
        weight,
        alpha,
        limit,
        row_tile,
        BIAS,
    )


@triton.jit
def _fused_gate_kernel(
    a,
    b,
    pair_ptr,
    hidden_ptr,
    order_ptr,
    offsets_ptr,
    weight_ptr,
    dot_ptr,
    partial_ptr,
    K,
    I,  # noqa: E741
    M,
    alpha,
    limit,
    E,
    num_programs,  # noqa: E741
    E_POW2: tl.constexpr,
    PAD: tl.constexpr,
    BIAS: tl.constexpr,
    FLATTEN: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    GROUP: tl.constexpr,
):
    running, row_tiles = expert_tiles(offsets_ptr, E, E_POW2, BM)
    lane = tl.arange(0, E_POW2)
    padded, _ = expert_tiles(offsets_ptr, E, E_POW2, PAD)
    column_tiles = tl.cdiv(I, BN)
    for tile in tl.range(tl.program_id(0), row_tiles * column_tiles, num_programs, flatten=FLATTEN):
        expert, start, end, tile_m, tile_n = place_tile(offsets_ptr, running, tile, column_tiles, BM, GROUP)
        start_a = tl.sum(tl.where(lane == expert - 1, padded, 0), axis=0) * PAD
        acc = tl.zeros((BM, BN), tl.float32)
        for step in range(0, tl.cdiv(K, BK)):
            a_tile = load_ragged(a, start_a, end - start, [tile_m * BM, step * BK])
            b_tile = b.load([expert * I + tile_n * BN, step * BK]).T
            acc = tl.dot(a_tile, b_tile, acc)
        rows = start + tile_m * BM + tl.arange(0, BM)
        row_mask = rows < end
        assignment = tl.load(order_ptr + rows, mask=row_mask, other=0)
        weight = tl.load(weight_ptr + assignment, mask=row_mask, other=0.0).to(tl.float32)
        row_tile = tl.sum(tl.where(lane == expert - 1, running, 0), axis=0) + tile_m
        left, right = _halves(acc, BM, BN)
        a0, a1 = _halves(left, BM, BN // 2)
        a2, a3 = _halves(right, BM, BN // 2)
        begin = tile_n * BN
        dot = _two(
            a0,
            pair_ptr,
            hidden_ptr,
            partial_ptr,
            rows,
            row_mask,
            begin,
            I,
            weight,
            alpha,
            limit,
            row_tile,
            BIAS,
            BM,
            BN // 4,
        )
        dot += _two(
            a1,
            pair_ptr,
            hidden_ptr,
            partial_ptr,
            rows,
            row_mask,
            begin + BN // 4,
            I,
            weight,
            alpha,
            limit,
            row_tile,
            BIAS,
            BM,
            BN // 4,
        )
        dot += _two(
            a2,
            pair_ptr,
            hidden_ptr,
            partial_ptr,
            rows,
            row_mask,
            begin + BN // 2,
            I,
            weight,
            alpha,
            limit,
            row_tile,
            BIAS,
            BM,
            BN // 4,
        )
        dot += _two(
            a3,
            pair_ptr,
            hidden_ptr,
            partial_ptr,
            rows,
            row_mask,
            begin + 3 * BN // 4,
            I,
            weight,
            alpha,
            limit,
            row_tile,
            BIAS,
            BM,
            BN // 4,
        )
        tl.store(dot_ptr + assignment.to(tl.int64) * column_tiles + tile_n, dot, mask=row_mask)


def fused_gate(copy, down, gate_up, hidden, order, offsets, weight, config, alpha, limit, need_bias):
    """`grouped_gemm(copy, down, padded_a=True, transpose_b=True)` and `gate_backward` in one launch.

    Returns:
        Dots (M, column tiles) by assignment and partial sums (row tiles, 2 I) or `None`, both fp32.
    """
    experts, I, K = down.shape  # noqa: E741
    M = order.numel()
    column_tiles, row_tiles = cdiv(I, config.bn), cdiv(M, config.bm) + min(experts, M)
    dots = torch.empty(M, column_tiles, dtype=torch.float32, device=copy.device)
    partial = torch.empty(row_tiles, 2 * I, dtype=torch.float32, device=copy.device) if need_bias else None
    programs = tiles.programs(config, row_tiles * column_tiles, copy.device)
    _fused_gate_kernel[(programs,)](
        tiles.ragged_descriptor(copy, config.bm, config.bk),
        TensorDescriptor.from_tensor(down.reshape(-1, K), [config.bn, config.bk]),
        gate_up.view(torch.int32),
        hidden,
        order,
        offsets,
        weight,
        dots,
        partial,
        K,
        I,
        M,
        alpha,
        limit,
        experts,
        programs,
        E_POW2=next_power_of_2(experts),
        PAD=tiles.PAD,
        BIAS=need_bias,
        FLATTEN=config.flatten,
        BM=config.bm,
        BN=config.bn,
        BK=config.bk,
        GROUP=config.group,
        num_warps=config.warps,
        num_stages=config.stages,
    )
    return dots, partial


def swaps(product: Any = kernels_gemm.grouped_gemm, **change: Any) -> dict[str, Any]:
    """Names of `cuda_path` to swap. `product` serves the other products, `change` alters the tile configuration."""
    state: dict[str, Any] = {}

    def grouped_gemm(
        a: torch.Tensor, b: torch.Tensor, offsets: torch.Tensor, config: TileConfig, **options: Any
    ) -> None:
        if options.get("padded_a"):
            state["product"] = a, b, replace(config, tma_store=False, **change)
        else:
            product(a, b, offsets, config, **options)

    def gate_backward(
        gate_up: torch.Tensor, grad: torch.Tensor, order: torch.Tensor, offsets: torch.Tensor, weight: torch.Tensor,
        alpha: float, limit: float, *, need_bias: bool, need_hidden: bool,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:  # fmt: skip
        arguments = order, offsets, weight
        if "product" not in state:
            needs = {"need_bias": need_bias, "need_hidden": need_hidden}
            return kernels_gate.gate_backward(gate_up, grad, *arguments, alpha, limit, **needs)
        copy, down, config = state.pop("product")
        dots, partial = fused_gate(copy, down, gate_up, grad, *arguments, config, alpha, limit, need_bias)
        if need_bias:
            state["partial"] = partial.data_ptr(), config.bm
        return dots, partial

    def sum_tiles(partial: torch.Tensor, offsets: torch.Tensor, out: torch.Tensor, accumulate: bool = False) -> None:
        address, rows = state.get("partial", (0, 0))
        if address != partial.data_ptr():
            kernels_rowwise.sum_tiles(partial, offsets, out, accumulate)
            return
        del state["partial"]
        experts, columns = out.shape
        kernels_rowwise._sum_tiles_kernel[(experts, cdiv(columns, 128))](
            partial, offsets, out, columns, experts, E_POW2=next_power_of_2(experts), ACCUMULATE=accumulate, BM=rows,
            BT=16, BC=128, num_warps=4,
        )  # fmt: skip

    return {"grouped_gemm": grouped_gemm, "gate_backward": gate_backward, "sum_tiles": sum_tiles}
