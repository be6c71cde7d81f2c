"""Microseconds of host time to enqueue one call through autograd: `python host_time.py table.csv`. GPT-OSS's heads, bf16.

Forward and backward of the active backend and, where it is installed, of flash-attn-4. Calls follow each other without a
synchronisation, so they queue up and what is measured is Python, torch and the launches.
"""

import csv
import statistics
import sys
import time
from collections.abc import Callable

import torch

from trl_gptoss.attention import active_backend, bench

SHAPES = ((512, 1), (8192, 8))  # tokens, sequences


def microseconds(call: Callable, calls: int = 20, repeats: int = 15) -> tuple[float, float]:
    """The smallest and the median time of a call over `repeats` bursts."""
    for _ in range(10):
        call()
    times = []
    for _ in range(repeats):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(calls):
            call()
        times.append((time.perf_counter() - start) / calls * 1e6)
    torch.cuda.synchronize()
    return min(times), statistics.median(times)


def flash_attn_4(q, k, v, sinks, cu, longest, window, scale):
    from flash_attn.cute import flash_attn_varlen_func

    result = flash_attn_varlen_func(
        q, k, v, cu_seqlens_q=cu, cu_seqlens_k=cu, max_seqlen_q=longest, max_seqlen_k=longest, softmax_scale=scale, causal=True,
        window_size=(window - 1, 0) if window else (None, None), learnable_sink=sinks,
    )  # fmt: skip
    return result[0] if isinstance(result, (tuple, list)) else result


def row(name: str, attention: Callable, tokens: int, sequences: int, window: int) -> dict:
    q = torch.randn(tokens, 64, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    k, v = (torch.randn(tokens, 8, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(2))
    sinks = torch.randn(64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    dout = torch.randn_like(q)
    cu = torch.arange(0, tokens + 1, tokens // sequences, dtype=torch.int32, device="cuda")

    def forward():
        return attention(q, k, v, sinks, cu, tokens // sequences, window, 0.125)

    out = forward()
    fwd = microseconds(forward)
    bwd = microseconds(lambda: torch.autograd.grad(out, (q, k, v, sinks), dout, retain_graph=True))
    names = ("fwd_us_min", "fwd_us", "bwd_us_min", "bwd_us")
    times = dict(zip(names, (round(x, 1) for x in (*fwd, *bwd)), strict=True))
    return dict(backend=name, tokens=tokens, sequences=sequences, window=window) | times


def main() -> None:
    peers = {active_backend(): bench}
    try:
        import flash_attn.cute  # noqa: F401
    except ImportError as error:
        print(f"no flash-attn-4: {error}")
    else:
        peers["flash-attn-4"] = flash_attn_4
    rows = []
    for tokens, sequences in SHAPES:
        for window in (128, 0):
            for name, attention in peers.items():
                rows.append(row(name, attention, tokens, sequences, window))
                print(rows[-1], flush=True)
    if len(sys.argv) > 1:
        with open(sys.argv[1], "w", newline="") as file:
            writer = csv.DictWriter(file, rows[0])
            writer.writeheader()
            writer.writerows(rows)


if __name__ == "__main__":
    main()
