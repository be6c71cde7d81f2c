"""`sink_attention` and the two torch operators behind it.

Attention with a learned sink per head:

    P_ij = exp(S_ij) / (sum_j' exp(S_ij') + exp(sink_h)),    out_i = sum_j P_ij v_j,    S = scale * q k^T

A backend is called below autograd, so it may rescale flash attention's result and hand flash attention's backward a
log-sum-exp that includes the sink; on top of autograd the same rescaling would lose gradients. Two ways lead there. Graphs
and fake tensors take the operators, opaque to torch.compile. Eager mode takes an autograd.Function around the very same two
functions: the operators' wrappers cost 0.4 ms of Python per call, more than a window layer takes on a GPU.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch.autograd.function import once_differentiable

from . import backends, calls, varlen
from .reference import sink_gradient


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
    deterministic: bool,
    trim: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Forward on varlen inputs: q (total_q, H, D), k/v (total_k, KV, D), sinks float32 (H,), window 0 = full.

    Returns out like q, contiguous, and lse (H, total_q) in float32 (float64 for float64 inputs), sink included.
    """
    return calls.forward(backends.choose(q), q, k, v, sinks, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, causal,
                       window, scale, deterministic, trim)  # fmt: skip


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
    trim: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients dq, dk, dv (contiguous, in the inputs' dtype) and dsinks (H,), or (0,) without sinks."""
    return calls.backward(backends.choose(q), dout, q, k, v, out, lse, sinks, cu_seqlens_q, cu_seqlens_k, max_seqlen_q,
                        max_seqlen_k, causal, window, scale, deterministic, trim)  # fmt: skip


sink_attention_op = torch.library.custom_op("trl_gptoss::sink_attention", forward, mutates_args=())
sink_attention_backward_op = torch.library.custom_op("trl_gptoss::sink_attention_backward", backward, mutates_args=())


@sink_attention_op.register_fake
def _(
    q, k, v, sinks, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, causal, window, scale, deterministic, trim
):
    lse_dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    return q.new_empty(q.shape), q.new_empty((q.shape[1], q.shape[0]), dtype=lse_dtype)


@sink_attention_backward_op.register_fake
def _(dout, q, k, v, out, lse, sinks, *args):
    dsinks = lse.new_empty((0,) if sinks is None else sinks.shape)
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape), dsinks


def _setup_context(ctx, inputs, output) -> None:
    q, k, v, sinks, cu_seqlens_q, cu_seqlens_k, *settings = inputs
    out, lse = output
    ctx.save_for_backward(q, k, v, out, lse, sinks, cu_seqlens_q, cu_seqlens_k)
    ctx.settings = settings
    ctx.set_materialize_grads(False)


def _gradients(
    ctx, dout: torch.Tensor | None, dlse: torch.Tensor | None, run_forward: Callable, run_backward: Callable
):
    q, k, v, out, lse, sinks, *cu_seqlens = ctx.saved_tensors
    dout = torch.zeros_like(out) if dout is None else dout
    grads = run_backward(dout, q, k, v, out, lse, sinks, *cu_seqlens, *ctx.settings)
    if dlse is not None:
        more = _lse_gradients(dlse, q, k, lse, sinks, (*cu_seqlens, *ctx.settings), run_forward, run_backward)
        grads = [a if b is None else a + b for a, b in zip(grads, more)]
    dq, dk, dv, dsinks = grads
    return dq, dk, dv, None if sinks is None else dsinks, *(None,) * 9


def _op_backward(ctx, dout, dlse):
    return _gradients(ctx, dout, dlse, sink_attention_op, sink_attention_backward_op)


sink_attention_op.register_autograd(_op_backward, setup_context=_setup_context)


class _EagerSinkAttention(torch.autograd.Function):
    """The same functions without the operators around them, and few of torch's own: a window layer takes 60 us on a GPU.

    Lengths and settings come as one tuple, since every argument costs, and the sinks in their own dtype: a cast outside would
    be one more autograd node, and a backend that takes them as they are needs none. The backward runs on the forward's backend.
    """

    @staticmethod
    def forward(ctx, q, k, v, sinks, settings):
        backend = backends.choose(q)
        ctx.backend = backend
        ctx.cast_from = None
        if sinks is not None and not (backend.SINKS_AS_THEY_ARE and sinks.dtype is q.dtype):
            ctx.cast_from = sinks.dtype
            sinks = sinks.to(_sinks_dtype(q))
        out, lse = calls.forward(backend, q, k, v, sinks, *settings)
        ctx.save_for_backward(q, k, v, out, lse, sinks, *settings[:2])
        ctx.settings = settings[2:]
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    @once_differentiable
    def backward(ctx, dout, dlse):
        run_forward, run_backward = partial(calls.forward, ctx.backend), partial(calls.backward, ctx.backend)
        dq, dk, dv, dsinks, *_ = _gradients(ctx, dout, dlse, run_forward, run_backward)
        if dsinks is not None and ctx.cast_from is not None:
            dsinks = dsinks.to(ctx.cast_from)
        return dq, dk, dv, dsinks, None


def _sinks_dtype(q: torch.Tensor) -> torch.dtype:
    return torch.float64 if q.dtype == torch.float64 else torch.float32


def _lse_gradients(
    dlse: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    lse: torch.Tensor,
    sinks: torch.Tensor | None,
    arguments: tuple,
    run_forward: Callable,
    run_backward: Callable,
) -> tuple[torch.Tensor | None, ...]:
    """What a gradient of the log-sum-exp adds to dq, dk, dv and dsinks: dS_ij = P_ij dlse_i.

    No kernel takes it, and it is rare (merging partial attentions), so it costs a forward and a backward of the same operators:
    sum_j P_ij k_j is the output for v = k, and sum_i P_ij x_i is the dv for dout = x.
    """
    scale = arguments[6]
    scaled = (dlse.T * scale).unsqueeze(-1)
    mean_k, _ = run_forward(q, k, k, sinks, *arguments)
    x = (scaled * q).to(q.dtype)
    _, _, dk, _ = run_backward(x, q, k, k, mean_k, lse, sinks, *arguments)
    dsinks = None if sinks is None else -sink_gradient(dlse, lse, sinks.to(_sinks_dtype(q))).to(sinks.dtype)
    return (scaled * mean_k).to(q.dtype), dk, None, dsinks


def sink_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sinks: torch.Tensor | None = None,
    *,
    cu_seqlens_q: torch.Tensor | None = None,
    cu_seqlens_k: torch.Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    causal: bool = True,
    window: int | None = None,
    scale: float | None = None,
    deterministic: bool = False,
    return_lse: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Attention with sinks, differentiable in q, k, v and sinks, on the best backend present.

    Args:
        q (`torch.Tensor`):
            (total_q, num_heads, head_dim) with `cu_seqlens_q`, or (batch, length_q, num_heads, head_dim) without. bfloat16
            and float16 run on every backend; float32 and float64 on the reference.
        k (`torch.Tensor`): (total_k, num_kv_heads, head_dim) or (batch, length_k, num_kv_heads, head_dim); `num_heads` must
            be a multiple of `num_kv_heads`.
        v (`torch.Tensor`): As `k`.
        sinks (`torch.Tensor`, *optional*): (num_heads,), float32 or the dtype of `q`. None: attention without sinks.
        cu_seqlens_q (`torch.Tensor`, *optional*): int32 (sequences + 1,), from 0 to total_q. Empty sequences are allowed.
        cu_seqlens_k (`torch.Tensor`, *optional*): int32 (sequences + 1,), from 0 to total_k; defaults to `cu_seqlens_q`.
        max_seqlen_q (`int`, *optional*): Longest query sequence. Without it the device is read once.
        max_seqlen_k (`int`, *optional*): Longest key sequence.
        causal (`bool`, defaults to `True`): Query i of a sequence sees keys j <= i + length_k - length_q.
        window (`int`, *optional*): Number of keys a query sees at most, its own included: 128 means i-127..i. Needs `causal`.
        scale (`float`, *optional*, defaults to `head_dim ** -0.5`): Factor of the scores.
        deterministic (`bool`, defaults to `False`): Bit-identical gradients from run to run.
        return_lse (`bool`, defaults to `False`): Also return the log-sum-exp of the scores and the sink.

    Returns:
        `torch.Tensor`: Like `q`. A query that sees no key gives 0. With `return_lse` also lse (num_heads, total_q) in float32
        (float64 for float64 inputs), natural logarithm, sink included; differentiable, at the price of a second pass.

    Raises:
        `ValueError`: Shapes, dtypes or devices that do not fit together, or a window without `causal`.
    """
    if cu_seqlens_q is None and cu_seqlens_k is not None:
        raise ValueError("sink_attention got cu_seqlens_k without cu_seqlens_q.")
    if (q.ndim, k.ndim, v.ndim) != ((4,) * 3 if cu_seqlens_q is None else (3,) * 3):
        raise ValueError(
            f"sink_attention got q, k, v of shapes {tuple(q.shape)}, {tuple(k.shape)}, {tuple(v.shape)}; expected (total, "
            "heads, head_dim) with cu_seqlens_q and (batch, length, heads, head_dim) without."
        )
    if cu_seqlens_q is None:
        if k.shape[0] != q.shape[0]:
            raise ValueError(f"sink_attention got a batch of {q.shape[0]} for q and {k.shape[0]} for k.")
        lengths = varlen.dense(q.shape[0], q.shape[1], k.shape[1], q.device)
        tokens = [x.reshape(-1, *x.shape[-2:]) for x in (q, k, v)]
    else:
        cu_seqlens_k = cu_seqlens_q if cu_seqlens_k is None else cu_seqlens_k
        lengths = varlen.from_lengths(
            cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, q.shape[0], k.shape[0], q.device
        )
        tokens = (q, k, v)
    out, lse = attend(
        *tokens,
        sinks,
        lengths,
        causal=causal,
        window=window,
        scale=scale,
        deterministic=deterministic,
    )
    if q.ndim == 4:
        out = out.view(q.shape)
    return (out, lse) if return_lse else out


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sinks: torch.Tensor | None,
    lengths: varlen.Varlen,
    *,
    causal: bool,
    window: int | None,
    scale: float | None,
    deterministic: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Check the arguments and call the operator. Arguments and results as `sink_attention`'s with flattened tokens."""
    _check(q, k, v, sinks, causal, window)
    settings = (
        lengths.cu_seqlens_q,
        lengths.cu_seqlens_k,
        lengths.max_seqlen_q,
        lengths.max_seqlen_k,
        causal,
        0 if window is None or window >= lengths.max_seqlen_k else window,
        q.shape[-1] ** -0.5 if scale is None else float(scale),
        deterministic,
        lengths.trim,
    )
    if torch.compiler.is_compiling() or type(q) is not torch.Tensor:  # fake tensors and other subclasses
        sinks = None if sinks is None else sinks.to(_sinks_dtype(q))
        return sink_attention_op(q, k, v, sinks, *settings)
    return _EagerSinkAttention.apply(q, k, v, sinks, settings)


def _check(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor | None, causal: bool, window: int | None
) -> None:
    heads, kv_heads, head_dim = q.shape[1], k.shape[1], q.shape[2]
    if k.shape != v.shape or k.shape[2] != head_dim or heads % kv_heads:
        raise ValueError(
            f"sink_attention got q with {heads} heads of {head_dim}, k {tuple(k.shape)} and v {tuple(v.shape)}; k and v need "
            "the same shape, the head_dim of q, and a number of heads that divides that of q."
        )
    if not q.dtype == k.dtype == v.dtype or not q.dtype.is_floating_point:
        raise ValueError(
            f"sink_attention got q, k, v of dtypes {q.dtype}, {k.dtype}, {v.dtype}; expected one floating dtype."
        )
    if not q.device == k.device == v.device:
        raise ValueError(f"sink_attention got q, k, v on {q.device}, {k.device}, {v.device}; expected one device.")
    if sinks is not None and (sinks.shape != (heads,) or sinks.device != q.device):
        raise ValueError(
            f"sink_attention got sinks of shape {tuple(sinks.shape)} on {sinks.device}; expected ({heads},), one per query "
            f"head, on {q.device}."
        )
    if window is not None and (window < 1 or not causal):
        raise ValueError(
            f"sink_attention got window={window} with causal={causal}; a window counts the keys up to the query's own, so it "
            "must be at least 1 and needs causal=True."
        )
