"""One call of a backend: what is due around it whoever asks, the operators or the autograd function of eager mode."""

from types import ModuleType

import torch

from . import varlen


def forward(
    backend: ModuleType,
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
    deterministic: bool,
    trim: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`ops.forward` on a given backend."""
    if trim:
        cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, _ = _trimmed(cu_seqlens_q, cu_seqlens_k)
    args = (q, k, v, sinks, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, causal, window, scale)
    device = q.device.type
    if torch.is_autocast_enabled(device):  # backends compute in the dtypes they are given
        with torch.autocast(device, enabled=False):
            out, lse = backend.forward(*args)
    else:
        out, lse = backend.forward(*args)
    return out.contiguous(), lse.contiguous()  # flash attention copies the strides of q; graphs rely on these


def backward(
    backend: ModuleType,
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
    trim: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """`ops.backward` on a given backend."""
    if trim:
        cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, _ = _trimmed(cu_seqlens_q, cu_seqlens_k)
    args = (dout, q, k, v, out, lse, sinks, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, causal, window, scale,
            deterministic)  # fmt: skip
    device = q.device.type
    if torch.is_autocast_enabled(device):
        with torch.autocast(device, enabled=False):
            dq, dk, dv, dsinks = backend.backward(*args)
    else:
        dq, dk, dv, dsinks = backend.backward(*args)
    return dq.contiguous(), dk.contiguous(), dv.contiguous(), dsinks


def _trimmed(cu_seqlens_q: torch.Tensor, cu_seqlens_k: torch.Tensor) -> varlen.Varlen:
    if cu_seqlens_q.is_cuda and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "sink_fa3 finds packed sequences by reading position_ids, which a CUDA graph cannot do. Pass cu_seq_lens_q, "
            "cu_seq_lens_k, max_length_q and max_length_k, or compile without CUDA graphs."
        )
    return varlen.trimmed(cu_seqlens_q, cu_seqlens_k)
