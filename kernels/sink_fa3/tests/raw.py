"""The launchers of csrc/launch.h through ctypes: checks and times kernels without torch's headers or a binding."""

import ctypes as C

import torch


class Problem(C.Structure):
    _fields_ = (
        [("dtype", C.c_int)]
        + [
            (n, C.c_int)
            for n in ("total_q", "total_k", "heads", "kv_heads", "head_dim", "batch", "max_seqlen_q", "max_seqlen_k")
        ]
        + [
            ("causal", C.c_bool),
            ("window", C.c_int),
            ("scale", C.c_float),
            ("cu_seqlens_q", C.c_void_p),
            ("cu_seqlens_k", C.c_void_p),
        ]
    )


class FwdArgs(C.Structure):
    _fields_ = (
        [(n, C.c_void_p) for n in "qkv"]
        + [(n, C.c_int64) for n in ("q_token", "q_head", "k_token", "k_head", "v_token", "v_head")]
        + [(n, C.c_void_p) for n in ("sinks", "out", "lse", "counter")]
    )


class BwdArgs(C.Structure):
    _fields_ = (
        [(n, C.c_void_p) for n in ("dout", "q", "k", "v", "out")]
        + [(f"{t}_{s}", C.c_int64) for t in ("do", "q", "k", "v", "o") for s in ("token", "head")]
        + [(n, C.c_void_p) for n in ("lse", "sinks", "dq", "dk", "dv", "dsinks", "workspace")]
        + [("deterministic", C.c_bool)]
    )


class Raw:
    """`variant` picks a tuning configuration where the library was built with several."""

    def __init__(self, path: str):
        self.lib = C.CDLL(path)
        for name in ("sink_fa3_fwd", "sink_fa3_bwd"):
            if name == "sink_fa3_bwd" and not self._has(name):
                continue
            getattr(self.lib, name).restype = C.c_char_p
        if self._has("sink_fa3_bwd_workspace"):
            self.lib.sink_fa3_bwd_workspace.restype = C.c_int64

    def _has(self, name: str) -> bool:
        try:
            self.lib[name]
        except AttributeError:
            return False
        return True

    @staticmethod
    def problem(q, k, cu_q, cu_k, max_q, max_k, causal, window, scale) -> Problem:
        return Problem(
            {torch.bfloat16: 0, torch.float16: 1}[q.dtype], q.shape[0], k.shape[0], q.shape[1], k.shape[1], q.shape[2],
            cu_q.numel() - 1, max_q, max_k, causal, window, scale, cu_q.data_ptr(), cu_k.data_ptr(),
        )  # fmt: skip

    def fwd(self, q, k, v, sinks, cu_q, cu_k, max_q, max_k, causal, window, scale, variant=0, poison=True):
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        lse = torch.empty((q.shape[1], q.shape[0]), dtype=torch.float32, device=q.device)
        if poison:
            out.fill_(float("nan"))
            lse.fill_(float("nan"))
        counter = torch.empty(4, dtype=torch.int32, device=q.device)
        args = FwdArgs(
            q.data_ptr(), k.data_ptr(), v.data_ptr(), q.stride(0), q.stride(1), k.stride(0), k.stride(1), v.stride(0), v.stride(1),
            None if sinks is None else sinks.data_ptr(), out.data_ptr(), lse.data_ptr(), counter.data_ptr(),
        )  # fmt: skip
        p = self.problem(q, k, cu_q, cu_k, max_q, max_k, causal, window, scale)
        err = self.lib.sink_fa3_fwd(
            C.byref(p), C.byref(args), C.c_void_p(torch.cuda.current_stream().cuda_stream), C.c_int(variant)
        )
        if err:
            raise RuntimeError(err.decode())
        return out, lse

    def bwd(
        self,
        dout,
        q,
        k,
        v,
        out,
        lse,
        sinks,
        cu_q,
        cu_k,
        max_q,
        max_k,
        causal,
        window,
        scale,
        deterministic=False,
        variant=0,
        poison=True,
    ):
        dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
        dsinks = torch.empty(q.shape[1], device=q.device)
        if poison:
            for x in (dq, dk, dv, dsinks):
                x.fill_(float("nan"))
        p = self.problem(q, k, cu_q, cu_k, max_q, max_k, causal, window, scale)
        size = self.lib.sink_fa3_bwd_workspace(C.byref(p))
        work = torch.empty(size, dtype=torch.uint8, device=q.device)
        strides = [x.stride(i) for x in (dout, q, k, v, out) for i in (0, 1)]
        args = BwdArgs(
            *[x.data_ptr() for x in (dout, q, k, v, out)], *strides, lse.data_ptr(), None if sinks is None else sinks.data_ptr(),
            dq.data_ptr(), dk.data_ptr(), dv.data_ptr(), dsinks.data_ptr(), work.data_ptr(), deterministic,
        )  # fmt: skip
        err = self.lib.sink_fa3_bwd(
            C.byref(p), C.byref(args), C.c_void_p(torch.cuda.current_stream().cuda_stream), C.c_int(variant)
        )
        if err:
            raise RuntimeError(err.decode())
        return dq, dk, dv, dsinks
