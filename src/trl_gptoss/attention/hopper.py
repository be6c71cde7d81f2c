"""Our own kernels for Hopper (SM90a), in the library that `loading` finds. `kernels/sink_fa3/OPS.md` is their contract."""

import torch

from . import loading

NAME = "hopper"
SINKS_AS_THEY_ARE = True  # bfloat16 and float16 sinks too; their gradient comes in that dtype
_HEAD_DIMS = (64,)
_WINDOW = 128  # the one-shot kernels' largest window, head_dim and heads per key/value head: GPT-OSS's sliding layers
_WINDOW_HEAD_DIM = 64
_WINDOW_GROUP = 8


def unusable(device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
    """Why this backend cannot run, or None."""
    if device.type != "cuda" or torch.version.cuda is None:
        return f"the Hopper kernels need an NVIDIA H100, H200 or GH200, this is {device.type}"
    major, minor = torch.cuda.get_device_capability(device)
    if (major, minor) != (9, 0):
        return f"the Hopper kernels are built for SM90, this GPU is SM{major}{minor}"
    if dtype not in (torch.bfloat16, torch.float16):
        return f"the Hopper kernels take bfloat16 and float16, not {dtype}"
    if head_dim not in _HEAD_DIMS:
        return f"the Hopper kernels take a head_dim of {' or '.join(map(str, _HEAD_DIMS))}, not {head_dim}"
    return loading.kernels().missing


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
    ops = loading.kernels().ops
    op = ops.window_fwd if _one_shot(q, k, cu_seqlens_q, cu_seqlens_k, causal, window) else ops.fwd
    q, k, v = _loadable(q, k, v)
    sinks = sinks if sinks is None else sinks.contiguous()
    return op(q, k, v, sinks, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, causal, window, scale)


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
    ops = loading.kernels().ops
    op = ops.window_bwd if _one_shot(q, k, cu_seqlens_q, cu_seqlens_k, causal, window) else ops.bwd
    sinks = sinks if sinks is None else sinks.contiguous()
    tensors = (*_loadable(dout, q, k, v), out, lse, sinks, cu_seqlens_q, cu_seqlens_k)
    return op(*tensors, max_seqlen_q, max_seqlen_k, causal, window, scale, deterministic)


def _one_shot(
    q: torch.Tensor, k: torch.Tensor, cu_seqlens_q: torch.Tensor, cu_seqlens_k: torch.Tensor, causal: bool, window: int
) -> bool:
    """Whether queries and keys are the same tokens, which one shared `cu_seqlens` says, and the shape is GPT-OSS's."""
    if not causal or not 0 < window <= _WINDOW:
        return False
    total, heads, head_dim = q.shape
    if head_dim != _WINDOW_HEAD_DIM or k.shape[:2] != (total, heads // _WINDOW_GROUP) or heads % _WINDOW_GROUP:
        return False
    return cu_seqlens_q.data_ptr() == cu_seqlens_k.data_ptr() and cu_seqlens_q.shape == cu_seqlens_k.shape


def _loadable(*tensors: torch.Tensor) -> list[torch.Tensor]:
    """The bulk copy engine wants 16-byte aligned rows of contiguous elements; copy what is not."""
    return [x if _is_loadable(x) else x.clone(memory_format=torch.contiguous_format) for x in tensors]


def _is_loadable(x: torch.Tensor) -> bool:
    token, head, element = x.stride()
    return element == 1 and not (token % 8 or head % 8 or x.data_ptr() % 16)
