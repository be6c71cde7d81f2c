"""Sinks on an unmodified FlashAttention-2, the one inside every CUDA build of torch: any GPU from Ampere on.

    lse' = logaddexp(lse, s)        out' = out * exp(lse - lse')

turns plain attention into sink attention. FlashAttention's backward rebuilds the probabilities as exp(S - lse), so with
(out', lse') in place of (out, lse) it returns the right dq, dk and dv; the sink's own gradient is one reduction more.
"""

import torch

from .reference import sink_gradient

NAME = "fa2"
SINKS_AS_THEY_ARE = False
_TOKENS = 8192  # rows of out and dout widened to float32 at once for the sink gradient


def unusable(device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
    """Why this backend cannot run, or None."""
    if device.type != "cuda" or torch.version.cuda is None:
        return f"FlashAttention-2 needs an NVIDIA GPU, this is {device.type}"
    major, minor = torch.cuda.get_device_capability(device)
    if major < 8:
        return f"FlashAttention-2 needs compute capability 8.0 (Ampere), this GPU has {major}.{minor}"
    if dtype not in (torch.bfloat16, torch.float16):
        return f"FlashAttention-2 takes bfloat16 and float16, not {dtype}"
    if head_dim % 8 or head_dim > 256:
        return f"FlashAttention-2 takes a head_dim up to 256 in steps of 8, not {head_dim}"
    if not torch.backends.cuda.is_flash_attention_available():
        return f"torch {torch.__version__} was built without FlashAttention"
    return None


def forward(
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
    """See `ops.forward`."""
    if q.shape[0] == 0 or k.shape[0] == 0:
        return _without_keys(q, sinks)
    out, lse, *_ = torch.ops.aten._flash_attention_forward(
        *_inner_contiguous(q, k, v),
        cu_seqlens_q,
        cu_seqlens_k,
        max(max_seqlen_q, 2),  # a maximum of 1 selects a decoding path that demands one query per sequence
        max_seqlen_k,
        0.0,
        causal,
        False,
        scale=scale,
        **_window(window),
    )
    lse = lse.masked_fill(lse == torch.inf, -torch.inf)  # its mark for rows that see no key
    if sinks is None:
        return out, lse
    lse_keys, lse = lse, torch.logaddexp(lse, sinks[:, None])
    weight = (lse_keys - lse).exp_().masked_fill_(lse_keys == -torch.inf, 0)
    # float32 inside, rounded once on the way out
    return out.mul_(weight.T.unsqueeze(-1)), lse


def backward(
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
    deterministic: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """See `ops.backward`."""
    if q.shape[0] == 0 or k.shape[0] == 0:
        dsinks = lse.new_zeros(0 if sinks is None else sinks.shape[0])
        return torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v), dsinks
    philox = torch.zeros(2, dtype=torch.uint64, device=q.device)  # dropout's random state: read, never used
    was, warn_only = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )
    torch.use_deterministic_algorithms(was or deterministic, warn_only=warn_only)
    try:
        dq, dk, dv = torch.ops.aten._flash_attention_backward(
            *_inner_contiguous(dout, q, k, v),
            out,
            lse.masked_fill(lse == -torch.inf, torch.inf),
            cu_seqlens_q,
            cu_seqlens_k,
            max(max_seqlen_q, 2),
            max_seqlen_k,
            0.0,
            causal,
            philox,
            philox.new_empty(0),
            scale=scale,
            **_window(window),
        )
    finally:
        torch.use_deterministic_algorithms(was, warn_only=warn_only)
    if sinks is None:
        return dq, dk, dv, lse.new_empty(0)
    delta = torch.cat([(a.float() * b.float()).sum(-1) for a, b in zip(dout.split(_TOKENS), out.split(_TOKENS))])
    return dq, dk, dv, sink_gradient(delta.T, lse, sinks)


def _window(window: int) -> dict[str, int]:
    return {"window_size_left": window - 1, "window_size_right": 0} if window else {}


def _inner_contiguous(*tensors: torch.Tensor) -> list[torch.Tensor]:
    return [x if x.stride(-1) == 1 else x.contiguous() for x in tensors]


def _without_keys(q: torch.Tensor, sinks: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    lse = q.new_full((q.shape[1], q.shape[0]), -torch.inf, dtype=torch.float32)
    return q.new_zeros(q.shape), lse if sinks is None else lse.copy_(sinks[:, None])
