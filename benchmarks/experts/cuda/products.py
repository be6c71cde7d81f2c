"""Grouped products in CUDA against the shipped Triton kernels: correctness, then ms and joules at the power limit.

    python products.py all --out cuda_h200.csv            # builds for every product, checks, times; three minutes
    python products.py check wgrad --variants 3x192A      # one kind of product, once it is built
    python products.py time up --variants 3x240B --out cuda_h200.csv

A variant is `<warpgroups of 64 rows>x<columns>`, then A or B for the operand that a cluster of two blocks shares. Needs a
Hopper GPU and nvcc. A launch that does not end within five seconds ends the process with code 3.
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
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

HERE = Path(__file__).resolve().parent
EXPERTS, TOKENS, TOP_K, WIDTH = 128, 32768, 4, 2880
KINDS = {  # TRANSPOSED, WEIGHT_GRADIENT, EPILOGUE of variants.cu
    "forward_gated": ("false", "false", "kGated"),
    "forward_scattered": ("false", "false", "kScattered"),
    "backward_plain": ("true", "false", "kPlain"),
    "backward_scattered": ("true", "false", "kScattered"),
    "wgrad": ("false", "true", "kPlain"),
}
PRODUCTS = {
    "up": "forward_gated",
    "down": "forward_scattered",
    "grad_hidden": "backward_plain",
    "grad_input": "backward_scattered",
    "wgrad_up": "wgrad",
    "wgrad_down": "wgrad",
}
ALPHA, LIMIT = 1.702, 7.0


class Params(ctypes.Structure):
    """`Params` of grouped.cuh."""

    _fields_ = [
        ("offsets", ctypes.c_void_p),
        *((name, ctypes.c_int) for name in ("experts", "columns", "height", "contraction", "group")),
        ("out", ctypes.c_void_p),
        ("pitch", ctypes.c_int64),
        ("expert_pitch", ctypes.c_int64),
        ("gated", ctypes.c_void_p),
        ("gated_pitch", ctypes.c_int64),
        *((name, ctypes.c_void_p) for name in ("bias", "order", "weight")),
        ("alpha", ctypes.c_float),
        ("limit", ctypes.c_float),
    ]


class Call(ctypes.Structure):
    """`Call` of variants.cu."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("a", "b", "stream")),
        ("a_width", ctypes.c_int64),
        ("blocks", ctypes.c_int),
        ("params", Params),
    ]


def build(kind: str, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    include = HERE.parents[2] / "kernels" / "sink_fa3" / "csrc"
    names = ("TRANSPOSED", "WEIGHT_GRADIENT", "EPILOGUE")
    defined = [f"-D{name}={value}" for name, value in zip(names, KINDS[kind], strict=True)]
    target = "-gencode=arch=compute_90a,code=sm_90a"
    command = ["nvcc", "-std=c++17", "-O3", target, "-I", include, *defined, "-Xptxas", "-v"]
    command += ["--shared", "-Xcompiler", "-fPIC", "-o", folder / f"{kind}.so", HERE / "variants.cu"]
    done = subprocess.run(command, capture_output=True, text=True)
    (folder / f"{kind}.log").write_text(done.stdout + done.stderr)  # registers and spills
    if done.returncode:
        raise RuntimeError(done.stderr[-2000:])


class Library:
    """The variants of one kind of product."""

    def __init__(self, folder: Path, kind: str) -> None:
        self.c = ctypes.CDLL(str(folder / f"{kind}.so"))
        self.wgrad, self.transposed = kind == "wgrad", kind.startswith("backward")
        self.c.variant_name.restype = ctypes.c_char_p
        self.names: list[str] = []
        while name := self.c.variant_name(len(self.names)):
            self.names.append(name.decode())
        self.blocks = torch.cuda.get_device_properties(0).multi_processor_count

    def __call__(
        self,
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
    ) -> None:
        for tensor in (a, b):
            assert tensor.is_contiguous() and tensor.dtype == torch.bfloat16
        pointers = [None if t is None else t.data_ptr() for t in (out, gated, bias, order, weight)]
        params = Params(
            offsets.data_ptr(),
            offsets.numel() - 1,
            b.shape[1] if self.wgrad or self.transposed else b.shape[2],
            a.shape[1] if self.wgrad else 0,
            0 if self.wgrad else a.shape[1],
            8 if self.wgrad else 16,
            pointers[0],
            0 if out is None else out.stride(-2),
            out.stride(0) if self.wgrad else 0,
            pointers[1],
            0 if gated is None else gated.stride(0),
            *pointers[2:],
            ALPHA,
            LIMIT,
        )
        stream = torch.cuda.current_stream().cuda_stream
        call = Call(a.data_ptr(), b.data_ptr(), stream, a.shape[1], self.blocks, params)
        if code := self.c.variant_launch(self.names.index(variant), ctypes.byref(call)):
            raise RuntimeError(f"launch returned {code}")


def finish(what: str, seconds: float = 5) -> None:
    """Synchronize, or end the process if that takes too long."""
    done = torch.cuda.Event()
    done.record()
    limit = time.monotonic() + seconds
    while not done.query():
        if time.monotonic() > limit:
            print(f"HANG {what}", flush=True)
            os._exit(3)
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
                library(variant, case["a"], case["b"], case["offsets"], out=out[: case["E"]])
                outs = [(out[: case["E"]], out[case["E"] :], case["expected"])]
            else:
                out = torch.full((M + 64, N), 7.0, device="cuda", dtype=torch.bfloat16)
                options = {"order": case["order"]} if kind.endswith("scattered") else {}
                options |= {key: case[key] for key in ("bias", "weight") if key in case}
                outs = [(out[:M], out[M:], case["expected"])]
                if kind == "forward_gated":
                    options["gated"] = gated = torch.full_like(out[:, : N // 2], 7.0).contiguous()
                    outs.append((gated[:M], gated[M:], activate(case["expected"])))
                library(variant, case["a"], case["b"], case["offsets"], out=out, **options)
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
            library(variant, case["a"], case["b"], case["offsets"], gated=alone, bias=case["bias"])
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

        E, W = EXPERTS, WIDTH
        torch.manual_seed(0)
        x = torch.randn(TOKENS, W, device="cuda", dtype=torch.bfloat16)
        index = torch.rand(TOKENS, E, device="cuda").topk(TOP_K).indices.contiguous()
        order, offsets = sort_by_expert(index, E)
        M = order.numel()
        self.others: dict[str, Callable[[], None]] = {}  # timed beside them
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
        if library.wgrad:
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
            self.ours = lambda v: library(v, sorted_x, other[:M], offsets, out=result)
        elif name == "up":
            b, bias = normal(E, K, N, scale=0.02), normal(E, N, scale=0.02)
            out, expected, hidden, hidden_expected = empty(M, N), empty(M, N), empty(M, W), empty(M, W)
            sorted_x = x.new_empty(M, W)

            def shipped() -> None:
                options = {"bias": bias, "alpha": ALPHA, "limit": LIMIT}
                gathered_product(
                    x, b, order, offsets, config, top_k=TOP_K, out=expected, gated=hidden_expected, **options
                )

            copy = self.others["sorted copy"] = lambda: gather_rows(
                x, order, offsets, TOP_K, out=sorted_x, padded=False
            )
            copy()
            self.others["cuBLAS, one expert has all"] = lambda: torch.mm(sorted_x, b[0], out=out)
            self.results = lambda: [(out, expected), (hidden, hidden_expected)]
            self.ours = lambda v: library(v, sorted_x, b, offsets, out=out, gated=hidden, bias=bias)
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
            self.ours = lambda v: library(v, sorted_x, b, offsets, out=out)
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

            dense = b[0].T if transposed else b[0]
            self.others["cuBLAS, one expert has all"] = lambda: torch.mm(rows, dense, out=out)
            self.results = lambda: [(out, expected)]
            self.ours = lambda v: library(v, rows, b, offsets, out=out, **options)
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
    library: Library, name: str, variants: list[str], out: Path, rounds: int, window: float, best: int
) -> None:
    product = Product(library, name)
    product.shipped()
    finish(f"{name}/triton", 60)
    errors = {"triton": 0.0}
    for variant in variants:
        for found, _ in product.results():
            found.fill_(7.0)
        product.ours(variant)
        finish(f"{name}/{variant}")
        errors[variant] = max(error(found, expected.float()) for found, expected in product.results())
        if not errors[variant] < 6e-3:
            raise RuntimeError(f"{name}/{variant} is wrong: {errors[variant]:.1e}")
    joules = Joules()
    steps = {variant: (lambda v=variant: product.ours(v)) for variant in errors} | {"triton": product.shipped}
    steps |= product.others
    cool = {variant: timed(step, 5, joules)[0] for variant, step in steps.items()}
    always = ["triton", *product.others]
    kept = always + sorted((v for v in cool if v not in always), key=cool.get)[:best]
    counts = {variant: max(4, int(window / cool[variant])) for variant in kept}
    timed(steps["triton"], int(1200 / cool["triton"]), joules)  # to the power limit
    taken = {variant: [] for variant in kept}
    for _ in range(rounds):
        for variant in kept:
            taken[variant].append(timed(steps[variant], counts[variant], joules))
    sys.path.insert(0, str(HERE.parent))
    from rows import Rows

    rows = Rows(out)
    for variant in sorted(cool, key=cool.get):
        row = {"product": name, "variant": variant, "cool_ms": round(cool[variant], 2)}
        row |= dict.fromkeys(("ms", "ms_min", "ms_max", "joules", "mhz"), "")
        if variant in kept:
            ms, energy, clock = zip(*taken[variant], strict=True)
            row |= {"ms": round(statistics.median(ms), 3), "ms_min": round(min(ms), 3), "ms_max": round(max(ms), 3)}
            row |= {"joules": round(statistics.median(energy), 3), "mhz": round(statistics.median(clock))}
        rows.add(**row, error_to_triton=f"{errors[variant]:.1e}" if variant in errors else "")


def everything(args: argparse.Namespace) -> None:
    """Every part in a process of its own; the checks side by side, the timings one after another."""
    common = ["--folder", args.folder, "--rounds", args.rounds, "--window", args.window, "--best", args.best]
    common += ["--out", args.out, *(["--variants", *args.variants] if args.variants else [])]

    def run(*part: str) -> None:
        done = subprocess.run([sys.executable, __file__, *part, *map(str, common)], capture_output=True, text=True)
        print(f"{' '.join(part)}: code {done.returncode}\n{(done.stdout + done.stderr).strip()[-4000:]}", flush=True)

    with ThreadPoolExecutor() as pool:
        list(pool.map(lambda kind: build(kind, args.folder), KINDS))
        list(pool.map(lambda kind: run("check", kind), KINDS))
    for product in PRODUCTS:
        run("time", product)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=["all", "check", "time"])
    parser.add_argument("what", nargs="?", help="a kind of product to check, a product to time")
    parser.add_argument("--folder", type=Path, default=Path("/tmp/grouped"), help="where the variants are built")
    parser.add_argument("--variants", nargs="*")
    parser.add_argument("--out", type=Path, default=Path("cuda_h200.csv"))
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--window", type=float, default=450, help="milliseconds of a variant's turn")
    parser.add_argument("--best", type=int, default=6, help="variants that are timed hot")
    args = parser.parse_args()
    if args.part == "all":
        everything(args)
        return
    kind = PRODUCTS.get(args.what, args.what)
    library = Library(args.folder, kind)
    variants = args.variants or library.names
    if args.part == "check":
        check(library, kind, variants)
    else:
        measure(library, args.what, variants, args.out, args.rounds, args.window, args.best)


if __name__ == "__main__":
    main()
