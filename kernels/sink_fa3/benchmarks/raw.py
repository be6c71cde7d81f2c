"""The launchers of csrc/launch.h through ctypes, for a library built from tune_full.cu: no torch headers, no binding."""

import ctypes as C

import torch


class Problem(C.Structure):
    _fields_ = (
        [("dtype", C.c_int)]
        + [(n, C.c_int) for n in ("total_q", "total_k", "heads", "kv_heads", "head_dim", "batch")]
        + [("max_seqlen_q", C.c_int), ("max_seqlen_k", C.c_int), ("causal", C.c_bool), ("window", C.c_int)]
        + [("scale", C.c_float), ("cu_seqlens_q", C.c_void_p), ("cu_seqlens_k", C.c_void_p)]
    )


class Sinks(C.Structure):
    _fields_ = [("data", C.c_void_p), ("type", C.c_int)]


class FwdArgs(C.Structure):
    _fields_ = (
        [(n, C.c_void_p) for n in "qkv"]
        + [(n, C.c_int64) for n in ("q_token", "q_head", "k_token", "k_head", "v_token", "v_head")]
        + [("sinks", Sinks)]
        + [(n, C.c_void_p) for n in ("out", "lse", "workspace")]
    )


class BwdArgs(C.Structure):
    _fields_ = (
        [(n, C.c_void_p) for n in ("dout", "q", "k", "v", "out")]
        + [(f"{t}_{s}", C.c_int64) for t in ("do", "q", "k", "v", "o") for s in ("token", "head")]
        + [("lse", C.c_void_p), ("sinks", Sinks)]
        + [(n, C.c_void_p) for n in ("dq", "dk", "dv", "dsinks", "workspace")]
        + [("deterministic", C.c_bool)]
    )


def pointer(x: torch.Tensor | None) -> int | None:
    return None if x is None else x.data_ptr()


def float_sinks(x: torch.Tensor | None) -> Sinks:
    assert x is None or x.dtype == torch.float32
    return Sinks(pointer(x), 0)


class Raw:
    """`variant` picks one of the configurations of tune_full.cu. Results are filled with NaN first unless `poison` is off."""

    def __init__(self, path: str):
        self.lib = C.CDLL(path)
        self.lib.sink_fa3_fwd.restype = self.lib.sink_fa3_bwd.restype = C.c_char_p
        self.lib.sink_fa3_fwd_workspace.restype = self.lib.sink_fa3_bwd_workspace.restype = C.c_int64

    @staticmethod
    def _problem(q, k, cu_q, cu_k, max_q, max_k, causal, window, scale) -> Problem:
        dtype = {torch.bfloat16: 0, torch.float16: 1}[q.dtype]
        sizes = (q.shape[0], k.shape[0], q.shape[1], k.shape[1], q.shape[2], cu_q.numel() - 1, max_q, max_k)
        return Problem(dtype, *sizes, causal, window, scale, cu_q.data_ptr(), cu_k.data_ptr())

    @staticmethod
    def _results(shapes, dtypes, device, poison) -> list[torch.Tensor]:
        res = [torch.empty(s, dtype=d, device=device) for s, d in zip(shapes, dtypes, strict=True)]
        if poison:
            for x in res:
                x.fill_(float("nan"))
        return res

    @staticmethod
    def _call(function, p, args, variant) -> None:
        stream = C.c_void_p(torch.cuda.current_stream().cuda_stream)
        error = function(C.byref(p), C.byref(args), stream, C.c_int(variant))
        if error:
            raise RuntimeError(error.decode())

    def fwd(self, q, k, v, sinks, *tail, variant: int = 0, poison: bool = True):
        shapes = (q.shape, (q.shape[1], q.shape[0]))
        out, lse = self._results(shapes, (q.dtype, torch.float32), q.device, poison)
        p = self._problem(q, k, *tail)
        work = torch.empty(self.lib.sink_fa3_fwd_workspace(C.byref(p)), dtype=torch.uint8, device=q.device)
        strides = [x.stride(i) for x in (q, k, v) for i in (0, 1)]
        args = FwdArgs(*map(pointer, (q, k, v)), *strides, float_sinks(sinks), *map(pointer, (out, lse, work)))
        self._call(self.lib.sink_fa3_fwd, p, args, variant)
        return out, lse

    def bwd(self, dout, q, k, v, out, lse, sinks, *tail, deterministic=False, variant: int = 0, poison: bool = True):
        shapes = (q.shape, k.shape, v.shape, (q.shape[1],))
        grads = self._results(shapes, (q.dtype, q.dtype, q.dtype, torch.float32), q.device, poison)
        p = self._problem(q, k, *tail)
        work = torch.empty(self.lib.sink_fa3_bwd_workspace(C.byref(p)) + 1024, dtype=torch.uint8, device=q.device)
        aligned = (work.data_ptr() + 1023) // 1024 * 1024
        strides = [x.stride(i) for x in (dout, q, k, v, out) for i in (0, 1)]
        pointers = map(pointer, (dout, q, k, v, out))
        grad_pointers = map(pointer, grads)
        args = BwdArgs(*pointers, *strides, pointer(lse), float_sinks(sinks), *grad_pointers, aligned, deterministic)
        self._call(self.lib.sink_fa3_bwd, p, args, variant)
        return grads
