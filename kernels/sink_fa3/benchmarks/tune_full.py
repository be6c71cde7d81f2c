"""Checks configurations of the full kernels against float64 and times them, in one run on a Hopper GPU.

python tune_full.py libtune.so --check-fwd 0 --check-bwd 0,1 --time-fwd 0,1 --time-bwd 0,1,0d,2d   (d: deterministic)
"""

import argparse
import functools
import sys
from pathlib import Path

import torch
from raw import Raw

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
import oracle  # noqa: E402
from cases import case, cases, make  # noqa: E402

SIZES = ((8192, 8), (8192, 1), (32768, 8), (32768, 1))  # tokens, sequences
# FlashAttention-4 b36 on one H200, forward and backward in ms, measured in another run
FA4 = {(8192, 1): (1.09, 2.86), (8192, 8): (0.238, 0.630), (32768, 1): (16.4, 41.7), (32768, 8): (2.38, 6.66)}


def verdict(name: str, x: torch.Tensor, all_ref: dict, all_low: dict, dtype: torch.dtype) -> tuple[bool, str]:
    if name == "dsinks":
        ok, units = oracle.sinks_agree(x, all_ref, dtype)
        return ok, f"dsinks {units:.2f} units"
    ref, low = all_ref[name], all_low[name]
    if name == "lse":
        finite = ref.isfinite()
        error = ((x[finite] - ref[finite]).abs() / (1 + ref[finite].abs())).max().item() if finite.any() else 0.0
        return torch.equal(x.isinf(), ref.isinf()) and not x.isnan().any() and error < 3e-5, f"{name} {error:.1e}"
    error, allowed = oracle.relative(x, ref), oracle.relative(low, ref)
    return oracle.agrees(name, x, all_ref, all_low, dtype), f"{name} {error:.1e}/{allowed:.1e}"


def check(lib: Raw, fwd_variants: list[str], bwd_variants: list[str]) -> int:
    bad = 0
    for i, c in enumerate(cases()):
        q, k, v, s, do, lq, lk = make(c, i)
        scale = c["d"] ** -0.5
        tail = (
            oracle.cumulative(lq, q.device),
            oracle.cumulative(lk, q.device),
            max(lq) + c["slack"],
            max(lk) + c["slack"],
        )
        tail += (c["causal"], c["window"], scale)
        args = (q, k, v, s, lq, lk, c["causal"], c["window"], scale, do)
        ref = oracle.attention(*args)
        low = oracle.attention(*args, dtype=torch.float32, bf16_like=c["dtype"])
        low = {n: x.to(c["dtype"]) if n in ("out", "dq", "dk", "dv") else x for n, x in low.items()}
        runs = [(f"f{n}", ("out", "lse"), lib.fwd(q, k, v, s, *tail, variant=int(n))) for n in fwd_variants]
        out, lse = ref["out"].to(c["dtype"]), ref["lse"].float()
        for n in bwd_variants:
            names = ("dq", "dk", "dv") if s is None else ("dq", "dk", "dv", "dsinks")
            grads = lib.bwd(do, q, k, v, out, lse, s, *tail, **chosen(n))
            runs.append((f"b{n}", names, grads))
        torch.cuda.synchronize()
        tag = " ".join(f"{n}={x}" for n, x in c.items() if x != case([1])[n])
        for label, names, res in runs:
            verdicts = [verdict(n, x, ref, low, c["dtype"]) for n, x in zip(names, res)]
            ok = all(good for good, _ in verdicts)
            bad += not ok
            print("ok  " if ok else "FAIL", label, *(text for _, text in verdicts), "|", tag, flush=True)
    return bad


def chosen(variant: str) -> dict[str, bool | int]:
    return {"variant": int(variant.removesuffix("d")), "deterministic": variant.endswith("d")}


def milliseconds(fn, repeats: int) -> float:
    for _ in range(2):
        fn()
    events = [(torch.cuda.Event(True), torch.cuda.Event(True)) for _ in range(repeats)]
    for start, end in events:
        start.record()
        fn()
        end.record()
    torch.cuda.synchronize()
    return sorted(a.elapsed_time(b) for a, b in events)[repeats // 2]


def speed(lib: Raw, fwd_variants: list[str], bwd_variants: list[str]) -> None:
    for total, n in SIZES:
        lens = [total // n] * n
        q, k, v, s, do, _, _ = make(case(lens, h=64, kv=8), 0)
        cu = oracle.cumulative(lens, q.device)
        tail = (cu, cu, lens[0], lens[0], True, 0, 0.125)
        flops = 4 * 64 * 64 * n * lens[0] * (lens[0] + 1) / 2
        repeats = 7 if total // n > 8192 else 20
        for variant in fwd_variants:
            ms = milliseconds(
                functools.partial(lib.fwd, q, k, v, s, *tail, variant=int(variant), poison=False), repeats
            )
            fa4 = FA4[total, n][0]
            print(
                f"fwd {total}x{n} v{variant} {ms:.3f} ms {flops / ms / 1e9:.0f} TF/s FA4/own {fa4 / ms:.3f}",
                flush=True,
            )
        out, lse = lib.fwd(q, k, v, s, *tail)
        for variant in bwd_variants:
            fn = functools.partial(lib.bwd, do, q, k, v, out, lse, s, *tail, poison=False, **chosen(variant))
            ms = milliseconds(fn, repeats)
            fa4 = FA4[total, n][1]
            print(
                f"bwd {total}x{n} v{variant} {ms:.3f} ms {2.5 * flops / ms / 1e9:.0f} TF/s FA4/own {fa4 / ms:.3f}",
                flush=True,
            )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("library")
    for option in ("--check-fwd", "--check-bwd", "--time-fwd", "--time-bwd"):
        parser.add_argument(option, default="", help="comma-separated variants")
    a = parser.parse_args()
    check_fwd, check_bwd, time_fwd, time_bwd = (
        [x for x in text.split(",") if x] for text in (a.check_fwd, a.check_bwd, a.time_fwd, a.time_bwd)
    )
    torch.backends.cuda.matmul.allow_tf32 = False
    library = Raw(a.library)
    if check_fwd or check_bwd:
        print(f"{check(library, check_fwd, check_bwd)} failures", flush=True)
    if time_fwd or time_bwd:
        speed(library, time_fwd, time_bwd)
