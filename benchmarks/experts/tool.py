"""Another script's measurement of the layer with a longer window, or with every step and the GPU's clock written down.

    python tool.py bench_experts.py --window 800 -- --import trl_gptoss --impl gptoss_fused --tokens 32768
    python tool.py bench_experts.py --steps steps.csv -- --import trl_gptoss --impl gptoss_fused --tokens 32768

The script must take its milliseconds from `do_bench` of triton.testing, which by default takes as many samples as fit
100 ms: two of a step of 40. `--window` gives it that many milliseconds of warm-up and of samples. `--steps` does what
`do_bench` does by default, with each step between events of its own, and 20 more steps afterwards.
"""

import argparse
import csv
import functools
import importlib.util
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import torch
from clock import clock_samples
from rows import Rows
from triton.testing import do_bench


class TracedBench:
    """Stands in for `do_bench`: the same steps in the same order; `found` has (call, phase, step, start, end, ms)."""

    def __init__(self) -> None:
        self.found: list[tuple[int, str, int, float, float, float]] = []
        self.calls = 0

    def __call__(self, fn: Callable[[], None], return_mode: str = "median") -> float:
        flush = torch.empty(2**26, dtype=torch.int32, device="cuda")
        fn()
        estimate = statistics.mean(self.steps("estimate", 5, fn, flush))
        warm, samples = max(1, int(25 / estimate)), max(1, int(100 / estimate))
        taken = self.steps("warm-up and samples", warm + samples, fn, flush)
        self.steps("more", 20, fn, flush)
        self.calls += 1
        return statistics.median(taken[warm:])

    def steps(self, phase: str, count: int, fn: Callable[[], None], flush: torch.Tensor) -> list[float]:
        events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(count + 1)]
        torch.cuda.synchronize()
        events[0][0].record()
        torch.cuda.synchronize()
        zero = time.perf_counter()
        for start, end in events[1:]:
            flush.zero_()  # the L2 cache
            start.record()
            fn()
            end.record()
        torch.cuda.synchronize()
        taken = [start.elapsed_time(end) for start, end in events[1:]]
        for step, ((start, _), ms) in enumerate(zip(events[1:], taken, strict=True)):
            begin = zero + events[0][0].elapsed_time(start) / 1e3
            self.found.append((self.calls, phase, step, begin, begin + ms / 1e3, ms))
        return taken


def write_steps(bench: TracedBench, clock: Path, out: Path) -> None:
    """One row per step; MHz and W are the smallest and largest sample inside the step."""
    samples = [tuple(map(float, row)) for row in csv.reader(clock.open()) if len(row) == 4]
    rows = Rows(out)
    for call, phase, step, begin, end, ms in bench.found:
        inside = [sample for sample in samples if begin <= sample[0] <= end] or [(0.0, 0.0, 0.0, 0.0)]
        rows.add(
            call=call, phase=phase, step=step, ms=round(ms, 2),
            mhz_min=int(min(s[1] for s in inside)), mhz_max=int(max(s[1] for s in inside)),
            watt_min=int(min(s[2] for s in inside)), watt_max=int(max(s[2] for s in inside)),
            watt_mean=int(inside[-1][3]),
        )  # fmt: skip


def load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("script", type=Path)
    parser.add_argument("--window", type=int, help="milliseconds of warm-up and of samples")
    parser.add_argument("--steps", type=Path, help="CSV file for single steps")
    own, arguments = sys.argv[1:], []
    if "--" in own:  # what follows belongs to the script
        own, arguments = own[: own.index("--")], own[own.index("--") + 1 :]
    args = parser.parse_args(own)
    module = load(args.script)
    sys.argv = [str(args.script), *arguments]
    if args.window:
        module.do_bench = functools.partial(do_bench, warmup=args.window, rep=args.window)
        module.main()
    elif args.steps:
        module.do_bench = bench = TracedBench()
        clock = args.steps.with_suffix(".clock")
        with clock_samples(clock):
            module.main()
        write_steps(bench, clock, args.steps)
    else:
        module.main()


if __name__ == "__main__":
    main()
