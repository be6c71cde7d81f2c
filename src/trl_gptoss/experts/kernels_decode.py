"""Triton: few assignments, as in decoding: three launches, no sort.

The time is that of reading the matrices of the chosen experts, each of them once, or of the host that launches. Every
program finds the rows of its expert in the list of indices, which is short; rows stay in the order of the assignments.

Shape legend: T tokens, k = top_k, M = T * k assignments, E experts, H hidden, I intermediate, K contraction, N columns.
"""

import torch
import triton
import triton.language as tl

from .kernels_rowwise import combine
from .tiles import precision
from .tuning import cdiv, next_power_of_2

MAX_ASSIGNMENTS = 256
"""Above this the experts have more rows than one tile, and a sort is cheaper than searching the list in every program."""


@triton.jit
def _decode_kernel(
    a_ptr,
    w_ptr,
    bias_ptr,
    index_ptr,
    weight_ptr,
    out_ptr,
    K,
    N,
    E,
    M,
    alpha,
    limit,
    M_POW2: tl.constexpr,
    TOP_K: tl.constexpr,
    BY_EXPERT: tl.constexpr,
    GATED: tl.constexpr,
    EVEN_K: tl.constexpr,
    PRECISION: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    STAGES: tl.constexpr,
):
    lane = tl.arange(0, M_POW2)
    ids = tl.load(index_ptr + lane, mask=lane < M, other=-1).to(tl.int32)
    if BY_EXPERT:
        expert = tl.program_id(1)
        mine = ids == expert
        count = tl.sum(mine.to(tl.int32), axis=0)
    else:  # fewer assignments than experts: the first one of an expert speaks for all of them
        slot = tl.program_id(1)
        expert = tl.load(index_ptr + slot).to(tl.int32)
        mine = ids == expert
        earlier = tl.sum((mine & (lane < slot)).to(tl.int32), axis=0)
        count = tl.where((expert >= 0) & (expert < E) & (earlier == 0), tl.sum(mine.to(tl.int32), axis=0), 0)
    place = tl.cumsum(mine.to(tl.int32), axis=0) - 1
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    n_mask = n < N
    inner = tl.arange(0, BK)
    for first in range(0, count, BM):
        row = first + tl.arange(0, BM)
        row_mask = row < count
        chosen = mine[:, None] & (place[:, None] == row[None, :])
        assignment = tl.sum(tl.where(chosen, lane[:, None], 0), axis=0)
        source = assignment // TOP_K if GATED else assignment
        a_ptrs = a_ptr + source.to(tl.int64)[:, None] * K + inner[None, :]
        w_ptrs = w_ptr + expert.to(tl.int64) * K * N + inner.to(tl.int64)[:, None] * N + n[None, :]
        acc = tl.zeros((BM, BN), tl.float32)
        for k in tl.range(0, K, BK, num_stages=STAGES):
            if EVEN_K:
                a = tl.load(a_ptrs, mask=row_mask[:, None], other=0.0)
                w = tl.load(w_ptrs, mask=n_mask[None, :], other=0.0)
            else:
                k_mask = inner < K - k
                a = tl.load(a_ptrs, mask=row_mask[:, None] & k_mask[None, :], other=0.0)
                w = tl.load(w_ptrs, mask=n_mask[None, :] & k_mask[:, None], other=0.0)
            acc = tl.dot(a, w, acc, input_precision=PRECISION)
            a_ptrs += BK
            w_ptrs += BK * N
        acc += tl.load(bias_ptr + expert.to(tl.int64) * N + n, mask=n_mask, other=0.0).to(tl.float32)[None, :]
        if GATED:
            gate, linear = tl.split(tl.reshape(acc, (BM, BN // 2, 2)))
            gate = tl.minimum(gate, limit)
            linear = tl.minimum(tl.maximum(linear, -limit), limit)
            activated = (linear + 1.0) * gate / (1.0 + tl.exp(-alpha * gate))
            m = tl.program_id(0) * (BN // 2) + tl.arange(0, BN // 2)
            out_ptrs = out_ptr + assignment.to(tl.int64)[:, None] * (N // 2) + m[None, :]
            mask = row_mask[:, None] & (m < N // 2)[None, :]
            tl.store(out_ptrs, activated.to(out_ptr.dtype.element_ty), mask=mask)
        else:
            weight = tl.load(weight_ptr + assignment, mask=row_mask, other=0.0).to(tl.float32)
            out_ptrs = out_ptr + assignment.to(tl.int64)[:, None] * N + n[None, :]
            mask = row_mask[:, None] & n_mask[None, :]
            tl.store(out_ptrs, (acc * weight[:, None]).to(out_ptr.dtype.element_ty), mask=mask)


def _product(a, w, bias, index, weight, out, alpha, limit, *, columns: int) -> None:
    """Rows of `a` times the matrix of their expert into `out`: activated without `weight`, weighted with it."""
    experts, K, N = w.shape
    M, top_k = index.numel(), index.shape[1]
    by_expert = experts <= M
    _decode_kernel[(cdiv(N, columns), experts if by_expert else M)](
        a,
        w,
        bias,
        index,
        weight,
        out,
        K,
        N,
        experts,
        M,
        alpha,
        limit,
        M_POW2=next_power_of_2(M),
        TOP_K=top_k,
        BY_EXPERT=by_expert,
        GATED=weight is None,
        EVEN_K=K % 64 == 0,
        PRECISION=precision(a.dtype),
        BM=16,
        BN=columns,
        BK=64,
        STAGES=5 if a.element_size() <= 2 else 2,  # 92 KiB of shared memory
        num_warps=4,
    )


def decode(
    x: torch.Tensor,
    index: torch.Tensor,
    weight: torch.Tensor,
    gate_up: torch.Tensor,
    gate_up_bias: torch.Tensor,
    down: torch.Tensor,
    down_bias: torch.Tensor,
    alpha: float,
    limit: float,
) -> torch.Tensor:
    """Output (T, H) of up to `MAX_ASSIGNMENTS` assignments; arguments as in `fused_experts`, contiguous."""
    experts, intermediate, H = down.shape
    M = index.numel()
    hidden = x.new_empty(M, intermediate)
    _product(x, gate_up, gate_up_bias, index, None, hidden, alpha, limit, columns=128)
    rows = x.new_empty(M, H)
    _product(hidden, down, down_bias, index, weight, rows, alpha, limit, columns=64)
    out = torch.empty_like(x)
    combine(rows, index, out, experts)
    return out
