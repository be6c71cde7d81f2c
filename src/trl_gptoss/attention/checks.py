"""Does the active backend compute what it should, on this machine, now? Two seconds before a training run.

The yardstick is the formula written out in float64, sharing nothing with any backend.
"""

import torch

from .backends import active_backend
from .ops import sink_attention

_LENGTHS = (150, 1, 0, 77)
_HEADS, _KV_HEADS, _HEAD_DIM = 16, 2, 64
# relative errors (norms); bfloat16 flash attention reaches 2-4e-3, a lost or wrong gradient is of order 1e-1 to 1
_TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1.2e-2}


def selftest(device: torch.device | str | None = None) -> dict[str, float]:
    """Compare out, dq, dk, dv and dsinks of the active backend with float64, for a full and a window-128 layer.

    Args:
        device (`torch.device` or `str`, *optional*): Defaults to the current CUDA device, else the CPU.

    Returns:
        `dict[str, float]`: Relative error of each, the worse of the two layers.

    Raises:
        `RuntimeError`: An error exceeds its tolerance, or is not a number. Names the backend and the gradient.
    """
    device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    names = ("out", "dq", "dk", "dv", "dsinks")
    worst = dict.fromkeys(names, 0.0)
    for window in (None, 128):
        inputs, dout, cu_seqlens = _case(device, dtype)
        got = _run(inputs, dout, cu_seqlens, window)
        want = formula(*(x.detach().double().cpu() for x in inputs), _LENGTHS, window, dout.double().cpu())
        for name, x, y in zip(names, got, want):
            error = float((x.double().cpu() - y).norm() / y.norm())
            worst[name] = max(worst[name], error)
            if not error <= _TOLERANCE[dtype]:
                raise RuntimeError(
                    f"sink_fa3 self-test failed: backend {active_backend(device, dtype, _HEAD_DIM)!r} on {device} has a "
                    f"relative error of {error:.1e} in {name} (window {window}, {dtype}; at most {_TOLERANCE[dtype]:.0e} "
                    "expected). Force another backend with TRL_GPTOSS_ATTENTION=fa2 or =reference, and report this."
                )
    return worst


def _case(device: torch.device, dtype: torch.dtype) -> tuple[list[torch.Tensor], torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    total = sum(_LENGTHS)
    shapes = ((total, _HEADS, _HEAD_DIM), (total, _KV_HEADS, _HEAD_DIM), (total, _KV_HEADS, _HEAD_DIM))
    q, k, v = (torch.randn(shape, generator=generator).to(device, dtype).requires_grad_() for shape in shapes)
    sinks = (2 * torch.randn(_HEADS, generator=generator)).to(device).requires_grad_()
    dout = torch.randn(shapes[0], generator=generator).to(device, dtype)
    cu_seqlens = torch.tensor((0, *_LENGTHS), dtype=torch.int32).cumsum(0).to(device, torch.int32)
    return [q, k, v, sinks], dout, cu_seqlens


def _run(
    inputs: list[torch.Tensor], dout: torch.Tensor, cu_seqlens: torch.Tensor, window: int | None
) -> tuple[torch.Tensor, ...]:
    with torch.enable_grad():
        out = sink_attention(
            *inputs,
            cu_seqlens_q=cu_seqlens,
            max_seqlen_q=max(_LENGTHS),
            max_seqlen_k=max(_LENGTHS),
            window=window,
        )
        return out.detach(), *torch.autograd.grad(out, inputs, dout)


def formula(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sinks: torch.Tensor,
    lengths: tuple[int, ...],
    window: int | None,
    dout: torch.Tensor,
) -> tuple[torch.Tensor, ...]:
    """Causal sink attention by softmax over the scores and one more column, and its gradients by autograd.

    Args:
        q (`torch.Tensor`): (total, num_heads, head_dim), any dtype; the arithmetic keeps it.
        k (`torch.Tensor`): (total, num_kv_heads, head_dim).
        v (`torch.Tensor`): (total, num_kv_heads, head_dim).
        sinks (`torch.Tensor`): (num_heads,).
        lengths (`tuple[int, ...]`): Of the packed sequences.
        window (`int`, *optional*): Number of keys seen.
        dout (`torch.Tensor`): (total, num_heads, head_dim).

    Returns:
        `tuple`: out, dq, dk, dv, dsinks.
    """
    with torch.enable_grad():
        q, k, v, sinks = (x.detach().requires_grad_() for x in (q, k, v, sinks))
        outs = []
        for q_SHD, k_SKD, v_SKD in zip(*(x.split(lengths) for x in (q, k, v))):
            group = q.shape[1] // k.shape[1]
            scores = torch.einsum("qhd,khd->hqk", q_SHD, k_SKD.repeat_interleave(group, 1)) * q.shape[2] ** -0.5
            own = torch.arange(len(q_SHD))
            distance = own[:, None] - own
            hidden = (distance < 0) | (distance >= window) if window else distance < 0
            scores = scores.masked_fill(hidden, -torch.inf)
            column = sinks[:, None, None].expand(-1, len(q_SHD), 1)
            probs = torch.cat((scores, column), -1).softmax(-1)[..., :-1]
            outs.append(torch.einsum("hqk,khd->qhd", probs, v_SKD.repeat_interleave(group, 1)))
        out = torch.cat(outs)
        return out.detach(), *torch.autograd.grad(out, (q, k, v, sinks), dout)
