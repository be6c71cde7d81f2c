"""Checks the window kernels against float64 on many shapes: `WINDOW_LIB=lib.so python window_check.py [fwd|bwd]`.

Prints one line a case with the relative errors and ends with status 1 if any exceeds its limit.
"""

import sys

import torch
from window_lib import WindowKernels, reference, relative_error

LIMITS = {"out": 2.6e-3, "dq": 3.0e-3, "dk": 3.0e-3, "dv": 3.0e-3, "dsinks": 3.0e-3}  # bf16; fp16 is far below


def make(total: int, kv_heads: int, dtype: torch.dtype, seed: int, fused: bool = False):
    gen = torch.Generator(device="cuda").manual_seed(seed)
    heads = 8 * kv_heads

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=gen, device="cuda").to(dtype)

    if fused:  # q, k, v as slices of one projection: strides that are not the shape's
        qkv = draw(total, heads + 2 * kv_heads, 64)
        q, k, v = qkv.split([heads, kv_heads, kv_heads], dim=1)
    else:
        q, k, v = draw(total, heads, 64), draw(total, kv_heads, 64), draw(total, kv_heads, 64)
    sinks = torch.randn(heads, generator=gen, device="cuda")
    return q, k, v, draw(total, heads, 64), sinks


def cases():
    bf, hf = torch.bfloat16, torch.float16
    for n in (1, 2, 15, 16, 17, 127, 128, 129, 1000, 4099):
        yield f"length {n}", [0, n], 1, bf, 128, "random"
    yield "fp16 1000", [0, 1000], 1, hf, 128, "random"
    yield "fp16 3 kv heads", [0, 333], 3, hf, 128, "random"
    yield "8 kv heads", [0, 2500], 8, bf, 128, "random"
    yield "packed", [0, 1, 3, 3, 20, 150, 150, 150, 700, 701, 1500, 1500], 2, bf, 128, "random"
    yield "packed short", list(range(0, 400, 7)) + [400], 1, bf, 128, "random"
    yield "packed 4", [0, 512, 1024, 1536, 2048], 2, bf, 128, "random"
    yield "tokens outside", [0, 100, 260, 300], 1, bf, 128, "outside"
    yield "tokens outside, no sink", [0, 100, 260, 300], 1, bf, 128, "outside none"
    for w in (1, 2, 16, 100, 127):
        yield f"window {w}", [0, 77, 600], 1, bf, w, "random"
    yield "no sink", [0, 500, 900], 1, bf, 128, "none"
    yield "sink -inf", [0, 500], 1, bf, 128, "-inf"
    yield "sink +inf", [0, 500], 1, bf, 128, "inf"
    yield "sink 1e4", [0, 500], 1, bf, 128, "1e4"
    yield "sink -1e4", [0, 500], 1, bf, 128, "-1e4"
    yield "scores 1e4", [0, 500], 1, bf, 128, "scores"
    yield "fused strides", [0, 300, 777], 2, bf, 128, "fused"


def main(parts: list[str]) -> int:
    kernels = WindowKernels()
    failed = 0
    for seed, (name, cu, kv_heads, dtype, window, kind) in enumerate(cases()):
        total = cu[-1] + (37 if "outside" in kind else 0)
        q, k, v, dout, sinks = make(total, kv_heads, dtype, seed, fused=kind == "fused")
        if "none" in kind:
            sinks = None
        elif kind in ("-inf", "inf", "1e4", "-1e4"):
            sinks[::2] = float(kind)
        if kind == "scores":
            q, k = q * 50, k * 50
        cu_gpu = torch.tensor(cu, dtype=torch.int32, device="cuda")
        ref = dict(
            zip(
                ("out", "lse", "dq", "dk", "dv", "dsinks"),
                reference(q, k, v, sinks, cu, dout, window=window, scale=0.125),
                strict=True,
            )
        )
        out, lse = kernels.forward(q, k, v, sinks, cu_gpu, window=window)
        got = {"out": out}
        if "bwd" in parts:
            ref_lse = ref["lse"].float().contiguous()
            names = ("dq", "dk", "dv", "dsinks")
            got |= dict(
                zip(names, kernels.backward(q, k, v, sinks, cu_gpu, dout, ref_lse, window=window), strict=True)
            )
        torch.cuda.synchronize()
        same = (lse.double() - ref["lse"]).abs()
        lse_error = torch.where(lse.double() == ref["lse"], 0.0, same).max().item()
        errors = {n: relative_error(x, ref[n]) for n, x in got.items() if not (n == "dsinks" and sinks is None)}
        bad = not lse_error < (2e-2 if kind in ("scores", "1e4", "-1e4") else 1e-4)
        slack = 20 if kind == "scores" else 1  # one-hot rows: the gradients are differences that cancel
        bad |= any(not e < slack * LIMITS[n] for n, e in errors.items())
        failed += bad
        text = " ".join(f"{n} {e:.1e}" for n, e in errors.items())
        print(f"{'BAD' if bad else 'ok '} {name:26s} lse {lse_error:.1e} {text}", flush=True)
    # Controls: the same comparison must notice a window off by one and missing sinks.
    q, k, v, dout, sinks = make(700, 1, torch.bfloat16, 99)
    cu_gpu = torch.tensor([0, 700], dtype=torch.int32, device="cuda")
    ref = reference(q, k, v, sinks, [0, 700], dout, window=128, scale=0.125)
    for name, s, w in (("window 127", sinks, 127), ("sinks dropped", None, 128)):
        error = relative_error(kernels.forward(q, k, v, s, cu_gpu, window=w)[0], ref[0])
        bad = error < 2 * LIMITS["out"]
        failed += bad
        print(f"{'BAD' if bad else 'ok '} control {name}: out {error:.1e}")
    if "bwd" in parts:
        q, k, v, dout, sinks = make(3000, 8, torch.bfloat16, 5)
        cu_gpu = torch.tensor([0, 900, 3000], dtype=torch.int32, device="cuda")
        _, lse = kernels.forward(q, k, v, sinks, cu_gpu)
        first = kernels.backward(q, k, v, sinks, cu_gpu, dout, lse)
        same = all(
            torch.equal(a, b)
            for fill in (0.0, float("nan"), 7.0) * 17
            for a, b in zip(first, kernels.backward(q, k, v, sinks, cu_gpu, dout, lse, fill=fill), strict=True)
        )
        failed += not same
        print("ok  bit-equal over 51 runs" if same else "BAD results differ between runs")
    print(f"{failed} failed")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:] or ["fwd", "bwd"]))
