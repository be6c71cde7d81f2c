"""One run on a Hopper GPU that checks a raw build against float64 and times it: python check_raw.py LIB [--bwd] [--time ...]."""

import argparse
import itertools
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))
import oracle  # noqa: E402
from cases import case, cases, make  # noqa: E402
from raw import Raw  # noqa: E402


def check(lib: Raw, fwd_variants: list[int], bwd_variants: list[int], limit: int) -> int:
    bad = 0
    for i, c in enumerate(cases()[:limit]):
        q, k, v, s, do, lq, lk = make(c, i)
        scale = c["d"] ** -0.5
        cu_q, cu_k = oracle.cumulative(lq, q.device), oracle.cumulative(lk, q.device)
        mx = max(lq) + c["slack"], max(lk) + c["slack"]
        args = (lq, lk, c["causal"], c["window"], scale)
        ref = oracle.attention(q, k, v, s, *args, dout=do)
        base = oracle.attention(q, k, v, s, *args, dout=do, dtype=torch.float32, bf16_like=c["dtype"])
        base = {n: x if n == "lse" or n == "dsinks" else x.to(c["dtype"]) for n, x in base.items()}
        tag = " ".join(f"{n}={x}" for n, x in c.items() if n not in ("d",) and x != case([1])[n])
        tail = (cu_q, cu_k, *mx, c["causal"], c["window"], scale)
        rows = []
        for var in fwd_variants:
            out, lse = lib.fwd(q, k, v, s, *tail, variant=var)
            torch.cuda.synchronize()
            rows.append((f"f{var}", {"out": out, "lse": lse}))
        for var, det in itertools.product(bwd_variants, (False, True)):
            o, l = ref["out"].to(c["dtype"]), ref["lse"].float()
            grads = lib.bwd(do, q, k, v, o, l, s, *tail, deterministic=det, variant=var)
            torch.cuda.synchronize()
            rows.append((f"b{var}{'d' if det else ''}", dict(zip(("dq", "dk", "dv", "dsinks"), grads, strict=True))))
        for name, res in rows:
            errs, fail = [], False
            for n, x in res.items():
                if n == "dsinks" and s is None:
                    continue
                r, b = ref[n], base[n]
                if n == "lse":
                    same = torch.equal(x.isinf(), r.isinf()) and not x.isnan().any()
                    fin = r.isfinite()
                    e = ((x[fin] - r[fin]).abs() / (1 + r[fin].abs())).max().item() if fin.any() else 0.0
                    ok = same and e < 3e-5
                    eb = 0.0
                else:
                    e, eb = oracle.relative(x, r), oracle.relative(b, r)
                    ok = e <= 2 * eb + 1e-4 and not x.isnan().any()
                errs.append(f"{n} {e:.1e}/{eb:.1e}{'' if ok else ' BAD'}")
                fail |= not ok
            bad += fail
            print(f"{'FAIL' if fail else 'ok  '} {name:4s} {' '.join(errs)} | {tag}", flush=True)
    return bad


def time_us(fn, reps: int) -> float:
    for _ in range(2):
        fn()
    ev = [(torch.cuda.Event(True), torch.cuda.Event(True)) for _ in range(reps)]
    for a, b in ev:
        a.record()
        fn()
        b.record()
    torch.cuda.synchronize()
    return sorted(a.elapsed_time(b) for a, b in ev)[reps // 2] * 1e3


FA4 = {(8192, 1): (1.09, 2.86), (8192, 8): (0.238, 0.630), (32768, 1): (16.4, 41.7), (32768, 8): (2.38, 6.66)}


def speed(
    lib: Raw,
    fwd_variants: list[int],
    bwd_variants: list[int],
    sizes=((8192, 8), (8192, 1), (32768, 8), (32768, 1)),
    d=64,
    window=0,
) -> None:
    for total, n in sizes:
        lens = [total // n] * n
        c = case(lens, h=64, kv=8, d=d)
        q, k, v, s, do, lq, lk = make(c, 0)
        cu = oracle.cumulative(lens, q.device)
        tail = (cu, cu, max(lens), max(lens), True, window, d**-0.5)
        pairs = sum(x * (x + 1) / 2 for x in lens)
        reps = 7 if total * total / n > 5e8 else 20
        for var in fwd_variants:
            x = q
            us = time_us(lambda: lib.fwd(x, k.to(x.dtype), v.to(x.dtype), s, *tail, variant=var, poison=False), reps)
            fa = FA4[total, n][0]
            print(
                f"fwd {total}x{n} v{var}: {us / 1e3:.3f} ms {4 * d * 64 * pairs / us / 1e6:.0f} TF/s, FA4/own {fa * 1e3 / us:.3f}",
                flush=True,
            )
        if bwd_variants:
            out, lse = lib.fwd(q, k, v, s, *tail, variant=fwd_variants[0])
        for var, det in itertools.product(bwd_variants, (False, True)):
            us = time_us(
                lambda: lib.bwd(do, q, k, v, out, lse, s, *tail, deterministic=det, variant=var, poison=False), reps
            )
            fa = FA4[total, n][1]
            print(
                f"bwd {total}x{n} v{var}{'d' if det else ''}: {us / 1e3:.3f} ms {10 * d * 64 * pairs / us / 1e6:.0f} TF/s, FA4/own {fa * 1e3 / us:.3f}",
                flush=True,
            )


if __name__ == "__main__":
    p = argparse.ArgumentParser()
    p.add_argument("lib")
    p.add_argument("--fwd", default="0")
    p.add_argument("--bwd", default="")
    p.add_argument("--cases", type=int, default=1000)
    p.add_argument("--time-fwd", default="")
    p.add_argument("--time-bwd", default="")
    a = p.parse_args()
    ints = lambda s: [int(x) for x in s.split(",") if x]  # noqa: E731
    torch.backends.cuda.matmul.allow_tf32 = False
    lib = Raw(a.lib)
    print(f"{check(lib, ints(a.fwd), ints(a.bwd), a.cases)} failures", flush=True)
    if a.time_fwd:
        speed(lib, ints(a.time_fwd), ints(a.time_bwd))
