"""Triton: a handful of assignments, as in decoding one token: two launches instead of four, no sort.

With so few rows a matrix unit has nothing to share and the time is that of reading the chosen experts' weights, or of
the host that launches. Every assignment multiplies its row with its expert's matrix; the second kernel adds the k slots
of a token as it goes.

Shape legend: T tokens, k = top_k, M = T * k assignments, E experts, H hidden, I intermediate.
"""

import torch
import triton
import triton.language as tl

from .tuning import cdiv

MAX_ASSIGNMENTS = 8
"""Above this the chosen experts repeat often enough, or the launches weigh little enough, for the sorted path."""


@triton.jit
def _gate_up_kernel(
    x_ptr,
    w_ptr,
    bias_ptr,
    index_ptr,
    hidden_ptr,
    H,
    I,  # noqa: E741
    alpha,
    limit,
    E,
    TOP_K: tl.constexpr,
    EVEN: tl.constexpr,
    BK: tl.constexpr,
    BN: tl.constexpr,
    STAGES: tl.constexpr,
):
    assignment = tl.program_id(0)
    expert = tl.load(index_ptr + assignment).to(tl.int64)
    if (expert >= 0) & (expert < E):
        n = tl.program_id(1) * BN + tl.arange(0, BN)
        n_mask = n < 2 * I
        inner = tl.arange(0, BK)
        x_ptrs = x_ptr + (assignment // TOP_K).to(tl.int64) * H + inner
        w_ptrs = w_ptr + expert * H * 2 * I + inner.to(tl.int64)[:, None] * 2 * I + n[None, :]
        acc = tl.zeros((BK, BN), tl.float32)
        for k in tl.range(0, H, BK, num_stages=STAGES):
            if EVEN:
                x = tl.load(x_ptrs)
                w = tl.load(w_ptrs, mask=n_mask[None, :], other=0.0)
            else:
                x = tl.load(x_ptrs, mask=inner < H - k, other=0.0)
                w = tl.load(w_ptrs, mask=n_mask[None, :] & (inner < H - k)[:, None], other=0.0)
            acc += x.to(tl.float32)[:, None] * w.to(tl.float32)
            x_ptrs += BK
            w_ptrs += BK * 2 * I
        product = tl.sum(acc, axis=0)
        product += tl.load(bias_ptr + expert * 2 * I + n, mask=n_mask, other=0.0).to(tl.float32)
        gate, linear = tl.split(tl.reshape(product, (BN // 2, 2)))
        gate = tl.minimum(gate, limit)
        linear = tl.minimum(tl.maximum(linear, -limit), limit)
        hidden = (linear + 1.0) * gate / (1.0 + tl.exp(-alpha * gate))
        m = tl.program_id(1) * (BN // 2) + tl.arange(0, BN // 2)
        tl.store(hidden_ptr + assignment.to(tl.int64) * I + m, hidden.to(hidden_ptr.dtype.element_ty), mask=m < I)


@triton.jit
def _down_kernel(
    hidden_ptr,
    w_ptr,
    bias_ptr,
    index_ptr,
    weight_ptr,
    out_ptr,
    H,
    I,  # noqa: E741
    E,
    TOP_K: tl.constexpr,
    EVEN: tl.constexpr,
    BK: tl.constexpr,
    BN: tl.constexpr,
    STAGES: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    n_mask = n < H
    inner = tl.arange(0, BK)
    acc = tl.zeros((BK, BN), tl.float32)
    bias = tl.zeros((BN,), tl.float32)
    for slot in tl.static_range(TOP_K):
        assignment = token * TOP_K + slot
        expert = tl.load(index_ptr + assignment).to(tl.int64)
        if (expert >= 0) & (expert < E):
            weight = tl.load(weight_ptr + assignment).to(tl.float32)
            bias += weight * tl.load(bias_ptr + expert * H + n, mask=n_mask, other=0.0).to(tl.float32)
            h_ptrs = hidden_ptr + assignment * I + inner
            w_ptrs = w_ptr + expert * I * H + inner.to(tl.int64)[:, None] * H + n[None, :]
            for k in tl.range(0, I, BK, num_stages=STAGES):
                if EVEN:
                    h = tl.load(h_ptrs)
                    w = tl.load(w_ptrs, mask=n_mask[None, :], other=0.0)
                else:
                    h = tl.load(h_ptrs, mask=inner < I - k, other=0.0)
                    w = tl.load(w_ptrs, mask=n_mask[None, :] & (inner < I - k)[:, None], other=0.0)
                acc += (h.to(tl.float32) * weight)[:, None] * w.to(tl.float32)
                h_ptrs += BK
                w_ptrs += BK * H
    out = tl.sum(acc, axis=0) + bias
    tl.store(out_ptr + token * H + n, out.to(out_ptr.dtype.element_ty), mask=n_mask)


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
    """Output (T, H) of a few assignments; arguments as in `fused_experts`, contiguous."""
    experts, H, width = gate_up.shape
    I = width // 2  # noqa: E741
    tokens, top_k = index.shape
    hidden = x.new_empty(tokens * top_k, I)
    out = torch.empty_like(x)
    _gate_up_kernel[(tokens * top_k, cdiv(width, 64))](
        x,
        gate_up,
        gate_up_bias,
        index,
        hidden,
        H,
        I,
        alpha,
        limit,
        experts,
        TOP_K=top_k,
        EVEN=H % 64 == 0,
        BK=64,
        BN=64,
        STAGES=4,
        num_warps=4,
    )
    _down_kernel[(tokens, cdiv(H, 32))](
        hidden,
        down,
        down_bias,
        index,
        weight,
        out,
        H,
        I,
        experts,
        TOP_K=top_k,
        EVEN=I % 64 == 0,
        BK=64,
        BN=32,
        STAGES=8,
        num_warps=4,
    )
    return out
