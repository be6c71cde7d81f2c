"""Few queries against a KV cache, ours and flash-attn-4's, in one run on a Hopper GPU.

    python decode.py [table.csv]        # with trl_gptoss and, for the peer's columns, flash-attn-4 installed

64 query heads, 8 KV heads, head_dim 64, bf16, sinks. Milliseconds of GPU time: the launches queue up behind a sleep, so that
host time stays out; medians over input sets that together exceed the L2 cache. flash-attn-4 is timed as it comes and with every
number of splits of `SPLITS` that it takes; the best is the peer. The floor reads keys and values once at 4.2 TB/s.
"""

import csv
import datetime
import importlib.metadata
import subprocess
import sys
from collections.abc import Callable

import torch

from trl_gptoss.attention import active_backend, sink_attention

HEADS, KV_HEADS, DIM = 64, 8, 64
SIZES = ((1, 1, 32768), (1, 8, 32768), (4, 1, 32768), (32, 1, 32768), (1, 64, 32768), (1, 1, 4096), (32, 1, 4096))
SPLITS = (1, 0, 16, 32)


def median_ms(calls: list[Callable], repeats: int = 30) -> float:
    for call in calls * 2:
        call()
    times = []
    for i in range(repeats):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda._sleep(1_500_000)
        begin.record()
        calls[i % len(calls)]()
        end.record()
        times.append((begin, end))
        torch.cuda.synchronize()
    return sorted(b.elapsed_time(e) for b, e in times)[repeats // 2]


def peer(tensors: list[tuple], sinks: torch.Tensor, lengths: dict, splits: int) -> tuple[float, torch.Tensor] | None:
    """Milliseconds and the result; None where flash-attn-4 refuses, whatever it raises."""
    from flash_attn.cute import flash_attn_varlen_func

    def call(x: tuple) -> torch.Tensor:
        return flash_attn_varlen_func(*x, **lengths, causal=True, learnable_sink=sinks, num_splits=splits)[0]

    try:
        return median_ms([lambda x=x: call(x) for x in tensors]), call(tensors[0])
    except Exception as why:  # a compiler of the peer's raises anything; a refusal is a result here
        print(f"  flash-attn-4 with num_splits={splits}: {type(why).__name__}: {str(why)[:160]}", flush=True)
        return None


def row(batch: int, queries: int, keys: int, with_peer: bool) -> dict[str, float | int | str]:
    bytes_ = batch * keys * KV_HEADS * DIM * 4
    tensors = []
    for _ in range(max(1, min(8, (1 << 28) // bytes_))):
        q = torch.randn(batch * queries, HEADS, DIM, device="cuda", dtype=torch.bfloat16)
        k, v = (torch.randn(batch * keys, KV_HEADS, DIM, device="cuda", dtype=torch.bfloat16) for _ in range(2))
        tensors.append((q, k, v))
    sinks = torch.randn(HEADS, device="cuda", dtype=torch.bfloat16)
    cu_q, cu_k = (torch.arange(batch + 1, dtype=torch.int32, device="cuda") * n for n in (queries, keys))
    lengths = {"cu_seqlens_q": cu_q, "cu_seqlens_k": cu_k, "max_seqlen_q": queries, "max_seqlen_k": keys}
    with torch.no_grad():
        own = median_ms([lambda x=x: sink_attention(*x, sinks, **lengths) for x in tensors])
        res = {"batch": batch, "queries": queries, "keys": keys, "own_ms": round(own, 4)}
        res |= {"floor_ms": round(bytes_ / 4.2e9, 4), "fa4_ms": "", "fa4_splits": "", "fa4_over_own": ""}
        if not with_peer:
            return res
        found = {s: x for s in SPLITS if (x := peer(tensors, sinks, lengths, s))}
        if found:
            best = min(found, key=lambda s: found[s][0])
            ms, out = found[best]
            ours = sink_attention(*tensors[0], sinks, **lengths)
            res |= {"fa4_ms": round(ms, 4), "fa4_splits": best, "fa4_over_own": round(ms / own, 2)}
            res["difference"] = f"{float((ours.float() - out.float()).norm() / out.float().norm()):.1e}"
    return res


def command(*words: str) -> str:
    return subprocess.run(words, capture_output=True, text=True).stdout.strip()


def main() -> None:
    try:
        version = importlib.metadata.version("flash-attn-4")
    except importlib.metadata.PackageNotFoundError:
        version = ""
    about = {
        "gpu": torch.cuda.get_device_name(),
        "driver": command("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
        "torch": torch.__version__,
        "flash_attn_4": version,
        "backend": active_backend(),
        "date": datetime.date.today().isoformat(),
    }
    torch.manual_seed(0)
    rows = []
    for size in SIZES:
        rows.append(about | row(*size, with_peer=bool(version)))
        print({k: v for k, v in rows[-1].items() if k not in about}, flush=True)
    if len(sys.argv) > 1:
        with open(sys.argv[1], "w", newline="") as f:
            writer = csv.DictWriter(f, max(rows, key=len))
            writer.writeheader()
            writer.writerows(rows)


if __name__ == "__main__":
    main()
