"""Times the window kernels: `python window_bench.py libsink_fa3.so [table.csv]`. 64 query heads, 8 KV heads, d=64, bf16.

Milliseconds are medians over input sets that together exceed the L2 cache, the allocation of the results included. The floor
is the time to read each input and write each output once at 4.2 TB/s (the backward does not read the output).
"""

import csv
import sys
from collections.abc import Callable

import torch

HEADS, KV_HEADS, DIM = 64, 8, 64
# FlashAttention-4 4.0.0b36 on one H200 at these sizes: forward and backward milliseconds.
FA4 = {(32768, 1): (0.665, 1.85), (32768, 8): (0.667, 1.77), (8192, 8): (0.172, 0.460)}


def median_ms(calls: list[Callable], repeats: int = 40) -> float:
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


def row(tokens: int, seqs: int) -> dict[str, float | int]:
    """`tokens` in all, in `seqs` equal sequences."""
    ops = torch.ops.sink_fa3
    cu = torch.arange(0, tokens + 1, tokens // seqs, dtype=torch.int32, device="cuda")
    sinks = torch.randn(HEADS, device="cuda")
    tail = (cu, cu, tokens // seqs, tokens // seqs, True, 128, DIM**-0.5)
    forward, backward = [], []
    for _ in range(max(2, 4 * 8192 // tokens)):
        q, dout = (torch.randn(tokens, HEADS, DIM, device="cuda", dtype=torch.bfloat16) for _ in range(2))
        k, v = (torch.randn(tokens, KV_HEADS, DIM, device="cuda", dtype=torch.bfloat16) for _ in range(2))
        out, lse = ops.window_fwd(q, k, v, sinks, *tail)
        forward.append(lambda x=(q, k, v): ops.window_fwd(*x, sinks, *tail))
        backward.append(lambda x=(dout, q, k, v, out, lse): ops.window_bwd(*x, sinks, *tail, True))
    fwd, bwd = median_ms(forward), median_ms(backward)
    base = FA4.get((tokens, seqs), (float("nan"), float("nan")))
    q_bytes, kv_bytes = tokens * HEADS * DIM * 2, tokens * KV_HEADS * DIM * 2
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
    torch.ops.load_library(sys.argv[1])
    torch.manual_seed(0)
    rows = [row(t, s) for t, s in ((32768, 1), (32768, 8), (8192, 8), (8192, 1))]
    for r in rows:
        print(r, flush=True)
    if len(sys.argv) > 2:
        with open(sys.argv[2], "w", newline="") as f:
            writer = csv.DictWriter(f, rows[0])
            writer.writeheader()
            writer.writerows(rows)
