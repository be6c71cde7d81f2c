"""The window kernels through their C entry points (`window_capi.cu`), and a float64 reference.

`WINDOW_LIB` names the shared library; `build` compiles it with nvcc.
"""

import ctypes
import os
import subprocess
from pathlib import Path

import torch

CSRC = Path(__file__).resolve().parent.parent / "csrc"
SOURCES = [CSRC / "window_fwd.cu", CSRC / "window_bwd.cu", Path(__file__).resolve().parent / "window_capi.cu"]
POINTERS = ["q", "k", "v", "dout", "out", "dq", "dk", "dv", "workspace", "lse", "sinks", "dsinks", "cu_seqlens"]
STRIDES = ["q_token", "q_head", "k_token", "k_head", "v_token", "v_head", "do_token", "do_head"]
INTS = ["total", "heads", "kv_heads", "num_seqs", "seq_length", "window", "fp16"]


class WindowArgs(ctypes.Structure):
    _fields_ = (
        [(n, ctypes.c_void_p) for n in POINTERS]
        + [(n, ctypes.c_int64) for n in STRIDES]
        + [(n, ctypes.c_int) for n in INTS]
        + [("scale", ctypes.c_float)]
    )


def build(target: Path, nvcc: str = "nvcc") -> Path:
    """Compiles the kernels for sm_90a into `target` (about 10 s)."""
    flags = ["-std=c++17", "-O3", "-gencode", "arch=compute_90a,code=sm_90a", "-shared", "-Xcompiler", "-fPIC"]
    subprocess.run([nvcc, *flags, "-o", str(target), *map(str, SOURCES)], check=True)
    return target


class WindowKernels:
    """Forward and backward on (total, heads, 64) CUDA tensors; see `csrc/window.h` for the meaning of the arguments."""

    def __init__(self, path: str | None = None):
        self.lib = ctypes.CDLL(path or os.environ["WINDOW_LIB"])
        self.lib.window_error.restype = ctypes.c_char_p
        self.lib.window_backward_workspace.restype = ctypes.c_size_t

    def _args(self, q, k, v, sinks, cu, window, scale, seq_length) -> WindowArgs:
        return WindowArgs(
            q=q.data_ptr(),
            k=k.data_ptr(),
            v=v.data_ptr(),
            sinks=None if sinks is None else sinks.data_ptr(),
            cu_seqlens=None if cu is None else cu.data_ptr(),
            q_token=q.stride(0),
            q_head=q.stride(1),
            k_token=k.stride(0),
            k_head=k.stride(1),
            v_token=v.stride(0),
            v_head=v.stride(1),
            total=q.shape[0],
            heads=q.shape[1],
            kv_heads=k.shape[1],
            num_seqs=0 if cu is None else cu.numel() - 1,
            seq_length=seq_length,
            window=window,
            fp16=int(q.dtype == torch.float16),
            scale=scale,
        )

    def _check(self, code: int) -> None:
        if code != 0:
            raise RuntimeError(f"window kernel: {self.lib.window_error(code).decode()}")

    def forward(self, q, k, v, sinks, cu, *, window=128, scale=0.125, seq_length=0):
        out = torch.full_like(q, float("nan"), memory_format=torch.contiguous_format)
        lse = torch.full((q.shape[1], q.shape[0]), float("nan"), dtype=torch.float32, device=q.device)
        return self.forward_into(out, lse, q, k, v, sinks, cu, window, scale, seq_length)

    def forward_into(self, out, lse, q, k, v, sinks, cu, window=128, scale=0.125, seq_length=0):
        a = self._args(q, k, v, sinks, cu, window, scale, seq_length)
        a.out, a.lse = out.data_ptr(), lse.data_ptr()
        self._check(self.lib.window_forward(ctypes.byref(a), ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)))
        return out, lse

    def backward(self, q, k, v, sinks, cu, dout, lse, *, window=128, scale=0.125, seq_length=0, fill=float("nan")):
        grads = [torch.full(t.shape, fill, dtype=t.dtype, device=t.device) for t in (q, k, v)]
        dsinks = torch.full((q.shape[1],), fill, dtype=torch.float32, device=q.device)
        a = self._args(q, k, v, sinks, cu, window, scale, seq_length)
        nbytes = self.lib.window_backward_workspace(ctypes.byref(a))
        workspace = torch.full((nbytes // 4,), fill, dtype=torch.float32, device=q.device)
        return self.backward_into(a, grads, dsinks, workspace, dout, lse)

    def backward_into(self, a, grads, dsinks, workspace, dout, lse):
        a.dq, a.dk, a.dv = (g.data_ptr() for g in grads)
        a.dsinks, a.lse, a.workspace, a.dout = (t.data_ptr() for t in (dsinks, lse, workspace, dout))
        a.do_token, a.do_head = dout.stride(0), dout.stride(1)
        self._check(
            self.lib.window_backward(ctypes.byref(a), ctypes.c_void_p(torch.cuda.current_stream().cuda_stream))
        )
        return *grads, dsinks


def visible_keys(cu: list[int], total: int, window: int, device) -> tuple[torch.Tensor, torch.Tensor]:
    """Index (total, window) of the keys each token may see and whether it does; tokens outside `cu` see none."""
    token = torch.arange(total, device=device)
    start = torch.full((total,), total, device=device)
    for a, b in zip(cu[:-1], cu[1:], strict=True):
        start[a:b] = a
    key = token[:, None] - torch.arange(window - 1, -1, -1, device=device)[None]
    return key.clamp(min=0), key >= start[:, None]


def reference(q, k, v, sinks, cu: list[int], dout, *, window: int, scale: float, dtype=torch.float64):
    """out, lse, dq, dk, dv, dsinks of the same inputs in `dtype`, one gather of `window` keys a token."""
    total, heads, dim = q.shape
    kv_heads = k.shape[1]
    leaf = [t.detach().to(dtype).requires_grad_() for t in (q, k, v)]
    qd, kd, vd = leaf
    sd = torch.full((heads,), -torch.inf, dtype=dtype, device=q.device) if sinks is None else sinks.to(dtype)
    sd = sd.detach().requires_grad_()
    index, seen = visible_keys(cu, total, window, q.device)
    qg = qd.view(total, kv_heads, heads // kv_heads, dim)
    scores = torch.einsum("tkgd,twkd->tkgw", qg, kd[index]) * scale
    scores = scores.masked_fill(~seen[:, None, None, :], -torch.inf)
    sink = sd.view(1, kv_heads, -1, 1).expand(total, -1, -1, 1)
    with torch.no_grad():  # finite even where a row sees nothing or the sink is infinite
        top = torch.cat([scores, sink], -1).amax(-1, keepdim=True)
        shift = torch.where(top == -torch.inf, 0.0, top)
    if sinks is not None and torch.isposinf(sinks).any():
        weight = torch.where(torch.isposinf(shift), 0.0, torch.exp(scores - shift.clamp(max=1e30)))
        rest = torch.where(torch.isposinf(shift), 1.0, torch.exp(sink.clamp(max=1e30) - shift.clamp(max=1e30)))
    else:
        weight, rest = torch.exp(scores - shift), torch.exp(sink - shift)
    total_weight = weight.sum(-1, keepdim=True) + rest
    prob = weight / torch.where(total_weight == 0, 1.0, total_weight)
    out = torch.einsum("tkgw,twkd->tkgd", prob, vd[index]).reshape(total, heads, dim)
    lse = (shift + total_weight.log()).reshape(total, heads).T
    grads = torch.autograd.grad((out * dout.to(dtype)).sum(), [*leaf, sd])
    return out.detach(), lse.detach(), *grads


def relative_error(x: torch.Tensor, ref: torch.Tensor) -> float:
    """Norm of the difference over the norm of the reference (absolute where the reference is all zero)."""
    norm = ref.double().norm().item()
    return (x.double() - ref.double()).norm().item() / (norm if norm > 0 else 1.0)
