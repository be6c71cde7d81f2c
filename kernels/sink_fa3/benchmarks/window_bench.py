"""Times the window kernels: `WINDOW_LIB=lib.so python window_bench.py [csv]`. 64 query heads, 8 KV heads, d=64, bf16.

Milliseconds are medians of CUDA-event timings over input sets that together exceed the L2 cache. `floor` is the time to read
each input and write each output once at 4.2 TB/s.
"""

import csv
import ctypes
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))
from window_lib import WindowKernels

HEADS, KV_HEADS, DIM = 64, 8, 64
# FlashAttention-4 4.0.0b36 on one H200 at these sizes (forward, backward milliseconds).
FA4 = {(32768, 1): (0.665, 1.85), (32768, 8): (0.667, 1.77), (8192, 8): (0.172, 0.460)}


def median_ms(calls, repeats: int = 40) -> float:
    for call in calls * 2:
        call()
    times = []
    for i in range(repeats):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda._sleep(200_000)  # the launches queue up behind it, so that host time stays out of the figure
        begin.record()
        calls[i % len(calls)]()
        end.record()
        times.append((begin, end))
    torch.cuda.synchronize()
    return sorted(b.elapsed_time(e) for b, e in times)[repeats // 2]


def run(kernels: WindowKernels, tokens: int, seqs: int) -> dict:
    """`tokens` in all, in `seqs` equal sequences."""
    cu = torch.arange(0, tokens + 1, tokens // seqs, dtype=torch.int32, device="cuda")
    sinks = torch.randn(HEADS, device="cuda")
    forward, backward = [], []
    for _ in range(max(2, 4 * 8192 // tokens)):
        q, dout, out = (torch.randn(tokens, HEADS, DIM, device="cuda", dtype=torch.bfloat16) for _ in range(3))
        k, v = (torch.randn(tokens, KV_HEADS, DIM, device="cuda", dtype=torch.bfloat16) for _ in range(2))
        lse = torch.empty(HEADS, tokens, device="cuda")
        grads = [torch.empty_like(t) for t in (q, k, v)]
        dsinks = torch.empty(HEADS, device="cuda")
        args = kernels._args(q, k, v, sinks, cu, 128, DIM**-0.5, 0)
        size = kernels.lib.window_backward_workspace(ctypes.byref(args)) // 4
        workspace = torch.empty(size, device="cuda")
        forward.append(lambda o=out, e=lse, q=q, k=k, v=v: kernels.forward_into(o, e, q, k, v, sinks, cu))
        backward.append(
            lambda a=args, g=grads, d=dsinks, w=workspace, do=dout, e=lse: kernels.backward_into(a, g, d, w, do, e)
        )
    fwd, bwd = median_ms(forward), median_ms(backward)
    base = FA4.get((tokens, seqs), (float("nan"), float("nan")))
    per_token = DIM * 2
    q_bytes, kv_bytes = tokens * HEADS * per_token, tokens * KV_HEADS * per_token
    return {
        "tokens": tokens,
        "seqs": seqs,
        "fwd_ms": round(fwd, 4),
        "fwd_vs_fa4": round(base[0] / fwd, 2),
        "fwd_floor_ms": round((2 * q_bytes + 2 * kv_bytes) / 4.2e9, 4),
        "bwd_ms": round(bwd, 4),
        "bwd_vs_fa4": round(base[1] / bwd, 2),
        "bwd_floor_ms": round((3 * q_bytes + 4 * kv_bytes) / 4.2e9, 4),
    }


if __name__ == "__main__":
    torch.manual_seed(0)
    kernels = WindowKernels()
    rows = [run(kernels, t, s) for t, s in ((32768, 1), (32768, 8), (8192, 8), (8192, 1))]
    for row in rows:
        print(row, flush=True)
    if len(sys.argv) > 1:
        with open(sys.argv[1], "w", newline="") as f:
            writer = csv.DictWriter(f, rows[0])
            writer.writeheader()
            writer.writerows(rows)
