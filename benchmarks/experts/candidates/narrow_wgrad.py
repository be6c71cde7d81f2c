"""Candidate: weight gradients in two tile shapes within one launch, as `narrow_products.py` does for the products.

2880 = 11 * 256 + 64, 5760 = 22 * 256 + 128. In the place of `grouped_wgrad`.
"""

from collections.abc import Callable

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from trl_gptoss.experts import kernels_wgrad, tiles
from trl_gptoss.experts.tiles import expert_tiles
from trl_gptoss.experts.tuning import TileConfig, cdiv, next_power_of_2


@triton.jit
def _product(
    a, b, c, expert, start_m, start_n, begin_a, begin_b, count, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr
):
    acc = tl.zeros((BM, BN), tl.float32)
    for step in range(0, tl.cdiv(count, BK)):
        a_tile = a.load([begin_a + step * BK, start_m])
        b_tile = b.load([begin_b + step * BK, start_n])
        acc = tl.dot(tl.trans(a_tile), b_tile, acc)
    c.store([expert, start_m, start_n], tl.reshape(acc.to(c.dtype), (1, BM, BN)))


@triton.jit
def _narrow_wgrad_kernel(
    a,
    b,
    c,
    a2,
    b2,
    c2,
    offsets_ptr,
    H,
    N,
    E,
    num_programs,
    E_POW2: tl.constexpr,
    PAD_A: tl.constexpr,
    PAD_B: tl.constexpr,
    PAD: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    GROUP: tl.constexpr,
    BM2: tl.constexpr,
    BN2: tl.constexpr,
):
    running, _ = expert_tiles(offsets_ptr, E, E_POW2, PAD)
    lane = tl.arange(0, E_POW2)
    tiles_m = tl.cdiv(H, BM)
    tiles_n = N // BN
    wide = tiles_m * tiles_n
    per_expert = wide + tl.cdiv(H, BM2)
    for tile in tl.range(tl.program_id(0), E * per_expert, num_programs):
        expert = tile // per_expert
        rest = tile % per_expert
        begin = tl.load(offsets_ptr + expert)
        count = tl.load(offsets_ptr + expert + 1) - begin
        padded = tl.sum(tl.where(lane == expert - 1, running, 0), axis=0) * PAD
        begin_a = padded if PAD_A else begin
        begin_b = padded if PAD_B else begin
        if rest < wide:
            first_m = rest // (GROUP * tiles_n) * GROUP
            rows = min(tiles_m - first_m, GROUP)
            inside = rest % (GROUP * tiles_n)
            _product(
                a,
                b,
                c,
                expert,
                (first_m + inside % rows) * BM,
                inside // rows * BN,
                begin_a,
                begin_b,
                count,
                BM,
                BN,
                BK,
            )
        else:
            _product(a2, b2, c2, expert, (rest - wide) * BM2, tiles_n * BN, begin_a, begin_b, count, BM2, BN2, BK)


def grouped_wgrad(widths: tuple[int, ...]) -> Callable[..., None]:
    """`kernels_wgrad.grouped_wgrad` with narrow tiles where the last columns are one of `widths`."""

    def wgrad(
        a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, offsets: torch.Tensor, config: TileConfig,
        *, padded_a: bool = False, padded_b: bool = False, accumulate: bool = False,
    ) -> None:  # fmt: skip
        experts, H, N = out.shape
        left = N % config.bn
        large = config.tma and (config.bm, config.bn) == (128, 256)
        if accumulate or padded_a == padded_b or not large or left not in widths:
            padded = {"padded_a": padded_a, "padded_b": padded_b}
            kernels_wgrad.grouped_wgrad(a, b, out, offsets, config, accumulate=accumulate, **padded)
            return
        programs = tiles.programs(config, experts * cdiv(H, 128) * cdiv(N, 256), a.device)
        describe = TensorDescriptor.from_tensor
        _narrow_wgrad_kernel[(programs,)](
            describe(a, [32, 128]),
            describe(b, [32, 256]),
            describe(out, [1, 128, 256]),
            describe(a, [32, 256]),
            describe(b, [32, left]),
            describe(out, [1, 256, left]),
            offsets,
            H,
            N,
            experts,
            programs,
            E_POW2=next_power_of_2(experts),
            PAD_A=padded_a,
            PAD_B=padded_b,
            PAD=tiles.PAD,
            BM=128,
            BN=256,
            BK=32,
            GROUP=config.group,
            BM2=256,
            BN2=left,
            num_warps=8,
            num_stages=5 if left == 64 else 4,  # what fits 227 KiB beside two buffers for the stores
        )

    return wgrad
