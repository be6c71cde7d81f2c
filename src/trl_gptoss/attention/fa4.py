"""Sinks on flash-attn-4, whose kernels know them: SM90 and SM100 with the sink's gradient, since 4.0.0b26.

transformers' own `flash_attention_4` hands packed batches a maximum length in a tensor, which the kernels refuse; here it
is an int. The functions below are flash-attn-4's private pair under its autograd function: ours must sit below autograd
too, so that all backends share one operator. A test pins the parameters they are called with.

For a tile without keys its SM90 forward loads key block -1, which in a packed batch belongs to the sequence before. Such rows
(padding, for us) are overwritten with what they should be. Its SM90 softmax adds exp(sink - largest score) to the sum, which
overflows where a sink is 88 above all scores: the output is 0 as it should be, but the log-sum-exp +inf. And its sink gradient
is exp(sink - lse) times a sum, not a number for an infinite sink, whose gradient is 0.
"""

import importlib.metadata
from functools import lru_cache
from types import ModuleType

import torch
from packaging.version import Version

from .fa2 import _inner_contiguous, _without_keys
from .varlen import rows_without_keys

NAME = "fa4"
SINKS_AS_THEY_ARE = False
MINIMUM = Version("4.0.0b26")  # before, backward returned no sink gradient


def unusable(device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
    """Why this backend cannot run, or None."""
    if device.type != "cuda" or torch.version.cuda is None:
        return f"flash-attn-4 needs an NVIDIA GPU, this is {device.type}"
    major, minor = torch.cuda.get_device_capability(device)
    if major not in (9, 10, 11):
        return f"flash-attn-4 has the sink gradient on SM90 to SM110 only, this GPU is SM{major}{minor}"
    if dtype not in (torch.bfloat16, torch.float16):
        return f"flash-attn-4 takes bfloat16 and float16, not {dtype}"
    if head_dim % 8 or head_dim > 128:
        return f"flash-attn-4 trains with a head_dim up to 128 in steps of 8, not {head_dim}"
    return _not_installed()


@lru_cache(maxsize=1)
def _not_installed() -> str | None:
    try:
        version = Version(importlib.metadata.version("flash-attn-4"))
    except importlib.metadata.PackageNotFoundError:
        return "flash-attn-4 is not installed"
    if version < MINIMUM:
        return f"flash-attn-4 {version} drops the gradient of the sinks; install >= {MINIMUM}"
    try:
        _interface()
    except (ImportError, OSError) as error:
        return f"flash-attn-4 {version} does not import: {error}"
    return None


@lru_cache(maxsize=1)
def _interface() -> ModuleType:
    import flash_attn.cute.interface

    return flash_attn.cute.interface


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
    out, lse, *_ = _interface()._flash_attn_fwd(
        *_inner_contiguous(q, k, v),
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k,
        max_seqlen_q=max_seqlen_q,
        max_seqlen_k=max_seqlen_k,
        softmax_scale=scale,
        causal=causal,
        window_size_left=window - 1 if window else None,
        window_size_right=0 if window else None,
        learnable_sink=sinks,
        return_lse=True,
    )
    if sinks is not None:
        lse = torch.where(lse.isposinf(), sinks[:, None], lse)
    blind = rows_without_keys(cu_seqlens_q, cu_seqlens_k, q.shape[0], causal)
    if blind is not None:
        out = out.masked_fill_(blind[:, None, None], 0)
        nothing = lse.new_full((), -torch.inf) if sinks is None else sinks[:, None]
        lse = torch.where(blind, nothing, lse)
    return out, lse


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
    dout, q, k, v = _inner_contiguous(dout, q, k, v)
    dq, dk, dv, *dsinks = _interface()._flash_attn_bwd(
        q,
        k,
        v,
        out,
        dout,
        lse,
        softmax_scale=scale,
        causal=causal,
        window_size_left=window - 1 if window else None,
        window_size_right=0 if window else None,
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k,
        max_seqlen_q=max_seqlen_q,
        max_seqlen_k=max_seqlen_k,
        deterministic=deterministic,
        learnable_sink=sinks,
    )
    blind = rows_without_keys(cu_seqlens_q, cu_seqlens_k, q.shape[0], causal)
    if blind is not None:
        dq = dq.masked_fill_(blind[:, None, None], 0)
    return dq, dk, dv, dsinks[0].masked_fill(sinks.isinf(), 0) if dsinks else lse.new_empty(0)
