"""Grouped products in CUDA against the shipped Triton kernels: correctness, then ms, TF/s and joules at the power limit.

    make -j8 OUT=/tmp/grouped
    python products.py all --library /tmp/grouped/libgrouped.so --out products.csv      # every part in its own process
    python products.py check forward_gated --library ...
    python products.py time up --library ... --variants 3x240A 2x256B

A variant is `<warpgroups of 64 rows>x<columns>`, then A or B for the operand that a cluster of two blocks shares. A launch
that does not end within five seconds ends the process with code 3; `all` goes on with the other variants.
"""

import argparse
import ctypes
import math
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

HUNG = 3
EXPERTS, TOKENS, TOP_K, WIDTH = 128, 32768, 4, 2880
KINDS = {  # product: kernels
    "up": "forward_gated",
    "down": "forward_scattered",
    "grad_hidden": "backward_plain",
    "grad_input": "backward_scattered",
    "wgrad_up": "wgrad",
    "wgrad_down": "wgrad",
}
ALPHA, LIMIT = 1.702, 7.0


class Call(ctypes.Structure):
    _fields_ = (
        [(name, ctypes.c_void_p) for name in ("a", "b", "offsets", "out", "gated", "bias", "order", "weight")]
        + [(n, ctypes.c_int64) for n in ("a_rows", "a_width", "b_width", "pitch", "expert_pitch", "gated_pitch")]
        + [(n, ctypes.c_int) for n in ("experts", "columns", "height", "contraction", "group", "blocks")]
        + [("alpha", ctypes.c_float), ("limit", ctypes.c_float), ("stream", ctypes.c_void_p)]
    )


class Library:
    def __init__(self, path: Path) -> None:
        self.c = ctypes.CDLL(str(path))
        self.c.variant_name.restype = ctypes.c_char_p
        self.names = [self.c.variant_name(i).decode() for i in range(self.c.variant_count())]
        self.blocks = torch.cuda.get_device_properties(0).multi_processor_count

    def variants(self, kind: str) -> list[str]:
        return [name.split("/")[1] for name in self.names if name.split("/")[0] == kind]

    def __call__(
        self,
        kind: str,
        variant: str,
        a: torch.Tensor,
        b: torch.Tensor,
        offsets: torch.Tensor,
        *,
        out: torch.Tensor | None = None,
        gated: torch.Tensor | None = None,
        bias: torch.Tensor | None = None,
        order: torch.Tensor | None = None,
        weight: torch.Tensor | None = None,
        group: int = 16,
    ) -> None:
        for tensor in (a, b):
            assert tensor.is_contiguous() and tensor.dtype == torch.bfloat16
        pointers = [0 if t is None else t.data_ptr() for t in (a, b, offsets, out, gated, bias, order, weight)]
        wgrad, transposed = kind == "wgrad", kind.startswith("backward")
        columns = b.shape[1] if wgrad or transposed else b.shape[2]
        contraction = 0 if wgrad else a.shape[1]
        call = Call(
            *pointers,
            a.shape[0],
            a.shape[1],
            b.shape[1] if wgrad else 0,
            out.stride(-2) if out is not None else 0,
            out.stride(0) if wgrad else 0,
            gated.stride(0) if gated is not None else 0,
            offsets.numel() - 1,
            columns,
            a.shape[1] if wgrad else 0,
            contraction,
            group,
            self.blocks,
            ALPHA,
            LIMIT,
            torch.cuda.current_stream().cuda_stream,
        )
        code = self.c.variant_launch(self.names.index(f"{kind}/{variant}"), ctypes.byref(call))
        if code:
            raise RuntimeError(f"launch returned {code}")


def finish(what: str, seconds: float = 5) -> None:
    """Synchronize, or end the process if that takes too long."""
    done = torch.cuda.Event()
    done.record()
    limit = time.monotonic() + seconds
    while not done.query():
        if time.monotonic() > limit:
            print(f"HANG {what}", flush=True)
            os._exit(HUNG)
        time.sleep(0.0005)
    torch.cuda.synchronize()


def activate(product: torch.Tensor) -> torch.Tensor:
    gate, linear = product[:, ::2].clamp(max=LIMIT), product[:, 1::2].clamp(-LIMIT, LIMIT)
    return (linear + 1) * gate * torch.sigmoid(ALPHA * gate)


def error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return ((found.float() - expected).norm() / expected.norm().clamp(min=1e-30)).item()


CASES = {  # rows of every expert, K, N
    "ragged": ([0, 1, 130, 64, 0, 517, 191, 193, 0], 256, 720),
    "one expert has all": ([0, 0, 1000, 0], 320, 960),
    "many small": ([(37 * e) % 301 for e in range(130)], 192, 496),
    "odd sizes": ([65, 127, 128, 129, 256, 3, 0, 400], 200, 304),
    "gpt-oss": ([1000, 1090, 0, 950], 2880, 2880),
    "rows of one": ([1] * 40, 128, 256),
}


def check(library: Library, kind: str, variants: list[str]) -> None:
    torch.backends.cuda.matmul.allow_tf32 = False
    generator = torch.Generator("cuda").manual_seed(int(time.time()))

    def normal(*shape: int, scale: float = 1.0) -> torch.Tensor:
        return (torch.randn(*shape, device="cuda", generator=generator) * scale).bfloat16()

    prepared = []
    for name, (counts, K, N) in CASES.items():
        ends = [sum(counts[:e]) for e in range(len(counts) + 1)]
        M, E = ends[-1], len(counts)
        a = normal(M, K)
        rows = [slice(ends[e], ends[e + 1]) for e in range(E)]
        offsets = torch.tensor(ends, dtype=torch.int32, device="cuda")
        order = torch.randperm(M, device="cuda", generator=generator).int()
        case = {"a": a, "offsets": offsets, "M": M, "E": E, "N": N, "order": order}
        if kind == "wgrad":
            case["b"] = normal(M, N)
            case["expected"] = torch.stack([a[r].float().T @ case["b"][r].float() for r in rows])
        else:
            b = normal(E, N, K, scale=K**-0.5) if kind.startswith("backward") else normal(E, K, N, scale=K**-0.5)
            full = b.transpose(1, 2) if kind.startswith("backward") else b
            product = torch.cat([a[rows[e]].float() @ full[e].float() for e in range(E)])
            case["b"] = b
            if kind.startswith("forward"):
                case["bias"] = normal(E, N)
                product += torch.cat([case["bias"][e].float().expand(ends[e + 1] - ends[e], N) for e in range(E)])
            if kind == "forward_scattered":
                case["weight"] = normal(M).abs()
                product *= case["weight"][order.long()].float()[:, None]
            if kind.endswith("scattered"):
                place = torch.empty_like(product)
                place[order.long()] = product
                product = place
            case["expected"] = product
        prepared.append((name, case))
    for variant in variants:
        worst, wrong = 0.0, []
        for name, case in prepared:
            M, N = case["M"], case["N"]
            if kind == "wgrad":
                out = torch.full((case["E"] + 1, case["a"].shape[1], N), 7.0, device="cuda", dtype=torch.bfloat16)
                library(kind, variant, case["a"], case["b"], case["offsets"], out=out[: case["E"]], group=8)
                outs = [(out[: case["E"]], out[case["E"] :], case["expected"])]
            else:
                out = torch.full((M + 64, N), 7.0, device="cuda", dtype=torch.bfloat16)
                options = {"order": case["order"]} if kind.endswith("scattered") else {}
                options |= {key: case[key] for key in ("bias", "weight") if key in case}
                outs = [(out[:M], out[M:], case["expected"])]
                if kind == "forward_gated":
                    options["gated"] = gated = torch.full_like(out[:, : N // 2], 7.0).contiguous()
                    outs.append((gated[:M], gated[M:], activate(case["expected"])))
                library(kind, variant, case["a"], case["b"], case["offsets"], out=out, **options)
            finish(f"{kind}/{variant} {name}")
            for found, guard, expected in outs:
                e = error(found, expected)
                worst = max(worst, e if math.isfinite(e) else 9.0)
                if not e < 4e-3 or not (guard == 7.0).all():
                    wrong.append(f"{name} {e:.1e}{'' if (guard == 7.0).all() else ' guard'}")
            if kind == "wgrad":
                empty = case["offsets"].diff() == 0
                if not (out[: case["E"]][empty] == 0).all():
                    wrong.append(f"{name} zeros")
        if kind == "forward_gated":  # without the product itself
            case = prepared[0][1]
            alone = torch.full((case["M"], case["N"] // 2), 7.0, device="cuda", dtype=torch.bfloat16)
            library(kind, variant, case["a"], case["b"], case["offsets"], gated=alone, bias=case["bias"])
            finish(f"{kind}/{variant} alone")
            if not error(alone, activate(case["expected"])) < 4e-3:
                wrong.append("alone")
        where = f"{kind}/{variant}"
        print(f"{'WRONG' if wrong else 'PASS'} {where} {worst:.1e} {'; '.join(wrong)}", flush=True)


class Joules:
    """NVML's counter of the energy that the GPU has taken."""

    def __init__(self) -> None:
        self.nvml, self.device = ctypes.CDLL("libnvidia-ml.so.1"), ctypes.c_void_p()
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")[0]
        index = int(visible) if visible.isdigit() else 0
        if self.nvml.nvmlInit_v2() or self.nvml.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(self.device)):
            raise RuntimeError(f"NVML does not open GPU {index}.")

    def __call__(self) -> float:
        millijoules = ctypes.c_ulonglong()
        self.nvml.nvmlDeviceGetTotalEnergyConsumption(self.device, ctypes.byref(millijoules))
        return millijoules.value / 1e3

    def clock(self) -> int:
        found = ctypes.c_uint()
        self.nvml.nvmlDeviceGetClockInfo(self.device, 1, ctypes.byref(found))  # multiprocessors
        return found.value


class Product:
    """One product at full size: `shipped()` as the package runs it, `ours(variant)` in CUDA, their results."""

    def __init__(self, library: Library, name: str) -> None:
        from trl_gptoss.experts.cuda_path import _COLUMN_BLOCK, _COPY_BLOCK, gathered_product
        from trl_gptoss.experts.kernels_gemm import grouped_gemm
        from trl_gptoss.experts.kernels_route import sort_by_expert
        from trl_gptoss.experts.kernels_rowwise import gather_rows
        from trl_gptoss.experts.kernels_wgrad import grouped_wgrad
        from trl_gptoss.experts.tiles import padded_rows
        from trl_gptoss.experts.tuning import tile_config

        kind, E, W = KINDS[name], EXPERTS, WIDTH
        torch.manual_seed(0)
        x = torch.randn(TOKENS, W, device="cuda", dtype=torch.bfloat16)
        index = torch.rand(TOKENS, E, device="cuda").topk(TOP_K).indices.contiguous()
        order, offsets = sort_by_expert(index, E)
        M = order.numel()
        self.copies: Callable[[], None] | None = None
        config = tile_config("grad_hidden_sorted" if name == "grad_hidden" else name, M, E, x)

        def normal(*shape: int, scale: float = 1.0) -> torch.Tensor:
            return torch.empty(*shape, device="cuda", dtype=torch.bfloat16).normal_(0, scale)

        def empty(*shape: int) -> torch.Tensor:
            return torch.full(shape, 7.0, device="cuda", dtype=torch.bfloat16)

        def blocks(step: int) -> list[tuple[int, int]]:
            return [(begin, min(begin + step, W)) for begin in range(0, W, step)]

        N, K = (2 * W if name == "up" else W), (2 * W if name == "grad_input" else W)
        if name in ("wgrad_up", "wgrad_down"):
            N = 2 * W if name == "wgrad_up" else W
        self.flops = 2 * M * N * K
        if kind == "wgrad":
            other = normal(M + 64, N)
            rows = x.new_empty(padded_rows(M, E), W)
            gather_rows(x, order, offsets, TOP_K, out=rows)
            sorted_x = x[order.long() // TOP_K].contiguous()
            result, expected = empty(E, W, N), empty(E, W, N)
            parts = blocks(_COPY_BLOCK) if name == "wgrad_up" else [(0, W)]
            copies = [rows[:, b:e].contiguous() for b, e in parts]

            def shipped() -> None:
                for (begin, end), copy in zip(parts, copies, strict=True):
                    grouped_wgrad(copy, other[:M], expected[:, begin:end], offsets, config, padded_a=True)

            self.results = lambda: [(result, expected)]
            self.ours = lambda v: library(kind, v, sorted_x, other[:M], offsets, out=result, group=8)
        elif name == "up":
            b, bias = normal(E, K, N, scale=0.02), normal(E, N, scale=0.02)
            out, expected, hidden, hidden_expected = empty(M, N), empty(M, N), empty(M, W), empty(M, W)
            sorted_x = x.new_empty(M, W)

            def shipped() -> None:
                options = {"bias": bias, "alpha": ALPHA, "limit": LIMIT}
                gathered_product(
                    x, b, order, offsets, config, top_k=TOP_K, out=expected, gated=hidden_expected, **options
                )

            self.copies = lambda: gather_rows(x, order, offsets, TOP_K, out=sorted_x, padded=False)
            self.copies()
            self.results = lambda: [(out, expected), (hidden, hidden_expected)]
            self.ours = lambda v: library(kind, v, sorted_x, b, offsets, out=out, gated=hidden, bias=bias)
        elif name == "grad_hidden":
            b = normal(E, N, K, scale=0.02)
            copy = x.new_empty(padded_rows(M, E), W)
            gather_rows(x, order, offsets, TOP_K, out=copy)
            sorted_x = x[order.long() // TOP_K].contiguous()
            out, expected = empty(M, N), empty(M, N)

            def shipped() -> None:
                options = {"order": order, "padded_a": True, "transpose_b": True}
                grouped_gemm(copy, b, offsets, config, top_k=TOP_K, out=expected, **options)

            self.results = lambda: [(out, expected)]
            self.ours = lambda v: library(kind, v, sorted_x, b, offsets, out=out)
        else:
            transposed = name == "grad_input"
            b = normal(E, N, K, scale=0.02) if transposed else normal(E, K, N, scale=0.02)
            bias, weight = (None, None) if transposed else (normal(E, N), torch.rand(TOKENS, TOP_K, device="cuda"))
            weight = None if transposed else weight.bfloat16()
            rows, out, expected = normal(M, K), empty(M, N), empty(M, N)
            options = {"order": order, "bias": bias, "weight": weight}

            def shipped() -> None:
                for begin, end in blocks(_COLUMN_BLOCK):
                    grouped_gemm(
                        rows,
                        b,
                        offsets,
                        config,
                        top_k=TOP_K,
                        out=expected[:, begin:end],
                        scatter=True,
                        transpose_b=transposed,
                        columns=(begin, end),
                        **options,
                    )

            self.results = lambda: [(out, expected)]
            self.ours = lambda v: library(kind, v, rows, b, offsets, out=out, **options)
        self.shipped = shipped


def timed(step: Callable[[], None], steps: int, joules: Joules) -> tuple[float, float, int]:
    """Milliseconds and joules of a step, clock."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for _ in range(max(1, steps // 4)):
        step()
    torch.cuda.synchronize()
    before = joules()
    start.record()
    for _ in range(steps):
        step()
    end.record()
    clock = joules.clock()
    while not end.query():
        clock = joules.clock()
        time.sleep(0.01)
    torch.cuda.synchronize()
    return start.elapsed_time(end) / steps, (joules() - before) / steps, clock


def measure(
    library: Library, name: str, variants: list[str], out: Path | None, rounds: int, window: float, best: int
) -> None:
    product = Product(library, name)
    product.shipped()
    finish(f"{name}/triton", 60)
    if out is None:
        return  # only to fill Triton's cache
    errors = {"triton": 0.0}
    for variant in variants:
        for found, _ in product.results():
            found.fill_(7.0)
        try:
            product.ours(variant)
        except RuntimeError as failure:
            print(f"FAIL {name}/{variant} {failure}", flush=True)
            continue
        finish(f"{name}/{variant}")
        errors[variant] = max(error(found, expected.float()) for found, expected in product.results())
        if not errors[variant] < 6e-3:
            print(f"WRONG {name}/{variant} {errors.pop(variant):.1e}", flush=True)
    joules = Joules()
    steps = {variant: (lambda v=variant: product.ours(v)) for variant in errors} | {"triton": product.shipped}
    if product.copies:
        steps["copy"], errors["copy"] = product.copies, 0.0
    first = {variant: timed(step, 5, joules)[0] for variant, step in steps.items()}
    print(
        f"cool {name}: " + "  ".join(f"{v} {ms:.2f}" for v, ms in sorted(first.items(), key=lambda x: x[1])),
        flush=True,
    )
    kept = sorted((v for v in first if v not in ("triton", "copy")), key=first.get)[:best]
    kept = ["triton", *(["copy"] if product.copies else []), *kept]
    counts = {variant: max(4, int(window / first[variant])) for variant in kept}
    timed(steps["triton"], int(1200 / first["triton"]), joules)  # to the power limit
    taken = {variant: [] for variant in kept}
    for _ in range(rounds):
        for variant in kept:
            taken[variant].append(timed(steps[variant], counts[variant], joules))
    for variant, found in taken.items():
        ms, energy, clock = (statistics.median(values) for values in zip(*found, strict=True))
        low, high = min(f[0] for f in found), max(f[0] for f in found)
        rate = product.flops / ms / 1e9
        row = (
            f"{name},{variant},{ms:.3f},{low:.3f},{high:.3f},{rate:.0f},{energy:.3f},{clock:.0f},{errors[variant]:.1e}"
        )
        print("ROW " + row, flush=True)
        with out.open("a") as file:
            file.write(row + "\n")


def spawn(arguments: list[str], seconds: float) -> tuple[int, str]:
    try:
        done = subprocess.run(
            [sys.executable, __file__, *arguments], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=seconds
        )
        return done.returncode, done.stdout.decode()
    except subprocess.TimeoutExpired as late:
        return HUNG, (late.stdout or b"").decode() + "\nTIMEOUT"


def everything(library: Path, out: Path, args: argparse.Namespace) -> None:
    """Checks of all kinds side by side, then the timings one after another."""
    begun = time.monotonic()

    def say(text: str) -> None:
        print(f"[{time.monotonic() - begun:5.1f}] {text}", flush=True)

    names = Library(library).names
    from concurrent.futures import ThreadPoolExecutor

    def checked(kind: str) -> list[str]:
        left = [name.split("/")[1] for name in names if name.split("/")[0] == kind]
        if args.variants:
            left = [variant for variant in left if variant in args.variants]
        passed = []
        while left:
            code, text = spawn(["check", kind, "--library", str(library), "--variants", *left], args.limit)
            say(f"check {kind}: code {code}\n{text.strip()[-3000:]}")
            done = [line.split()[1].split("/")[1] for line in text.splitlines() if line.startswith(("PASS", "WRONG"))]
            passed += [line.split()[1].split("/")[1] for line in text.splitlines() if line.startswith("PASS")]
            left = left[len(done) + 1 :] if code else []  # the one that hung or failed is the next
        return passed

    with ThreadPoolExecutor(16) as pool:
        warm = [pool.submit(spawn, ["time", product, "--library", str(library)], 60) for product in KINDS]
        passed = dict(
            zip(dict.fromkeys(KINDS.values()), pool.map(checked, dict.fromkeys(KINDS.values())), strict=True)
        )
        for product, future in zip(KINDS, warm, strict=True):
            if future.result()[0]:
                say(f"warm {product}: {future.result()[1][-1500:]}")
    out.write_text("product,variant,ms,ms_min,ms_max,tflops,joules,mhz,error_to_triton\n")
    for product, kind in KINDS.items():
        if args.products and product not in args.products:
            continue
        left = passed[kind]
        if not left:
            continue
        common = ["--library", str(library), "--out", str(out), "--rounds", str(args.rounds), "--best", str(args.best)]
        while left:
            code, text = spawn(["time", product, *common, "--variants", *left], args.limit + 20)
            say(f"time {product}: code {code}\n{text.strip()[-3000:]}")
            hung = [line.split("/")[-1].split()[0] for line in text.splitlines() if line.startswith("HANG")]
            left = [variant for variant in left if variant not in hung] if code == HUNG and hung else []


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=["all", "check", "time", "clusters"])
    parser.add_argument("what", nargs="?")
    parser.add_argument("--library", type=Path, required=True)
    parser.add_argument("--variants", nargs="*")
    parser.add_argument("--products", nargs="*")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--window", type=float, default=450, help="milliseconds of a variant's turn")
    parser.add_argument("--best", type=int, default=6, help="variants that are timed hot")
    parser.add_argument("--limit", type=float, default=25, help="seconds of a process")
    args = parser.parse_args()
    if args.part == "all":
        everything(args.library, args.out or Path("products.csv"), args)
        return
    library = Library(args.library)
    if args.part == "clusters":
        for i, name in enumerate(library.names):
            print(name, library.c.variant_clusters(i))
        return
    kind = KINDS.get(args.what, args.what)
    variants = args.variants or library.variants(kind)
    if args.part == "check":
        check(library, kind, variants)
    else:
        measure(library, args.what, variants, args.out, args.rounds, args.window, args.best)


if __name__ == "__main__":
    main()
