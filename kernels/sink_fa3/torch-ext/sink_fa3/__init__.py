"""Attention with learned sinks on Hopper: the raw operators. `trl_gptoss.attention` is the differentiable interface."""

import torch

from ._ops import ops


def fwd(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sinks: torch.Tensor | None,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    causal: bool,
    window: int,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Forward; OPS.md gives shapes and dtypes.

    Returns:
        `tuple`: out (total_q, num_heads, head_dim) and lse (num_heads, total_q) float32, sink included.
    """
    return ops.fwd(q, k, v, sinks, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, causal, window, scale)


def bwd(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    sinks: torch.Tensor | None,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    causal: bool,
    window: int,
    scale: float,
    deterministic: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Backward.

    Returns:
        `tuple`: dq, dk, dv like q, k, v, and dsinks (num_heads,) float32.
    """
    return ops.bwd(
        dout, q, k, v, out, lse, sinks, cu_seqlens_q, cu_seqlens_k,
        max_seqlen_q, max_seqlen_k, causal, window, scale, deterministic,
    )  # fmt: skip


__all__ = ["bwd", "fwd", "ops"]
