"""Whole steps of one layer at the power limit: milliseconds and joules of candidates, taking turns, on one GPU.

    python energy.py --out energy.csv --cases 128:trained 128:eval 32:trained
    python energy.py --compile 0 4      # every fourth candidate, to fill Triton's cache from four processes first

A candidate is a set of names of `trl_gptoss.experts.cuda_path` that are swapped. Every candidate's output and gradients
are compared with the shipped ones first. None of the candidates has been measured; they compile for sm_90a without
spills, and in Triton's interpreter they give what the shipped kernels give.
"""

import argparse
import contextlib
import ctypes
import os
import statistics
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import fused_gate
import narrow_products
import narrow_wgrad
import torch
from layer import build
from rows import Rows

from trl_gptoss.experts import cuda_path, tuning
from trl_gptoss.experts.tuning import TileConfig


def tiles(change: Callable[[str, TileConfig], TileConfig]) -> Callable[..., TileConfig]:
    plain = tuning.tile_config
    return lambda kernel, *rest: change(kernel, plain(kernel, *rest))


def three_stages(kernel: str, config: TileConfig) -> TileConfig:
    """Room for a second tile of 512 rows."""
    known = kernel in ("down", "grad_input", "grad_hidden_sorted")
    return replace(config, stages=3, tma_store=False) if known else config


def steps_of_128(kernel: str, config: TileConfig) -> TileConfig:
    return replace(config, bk=128, stages=2) if kernel == "grad_input" and config.bn == 256 else config


PRODUCTS, WGRADS = narrow_products.grouped_gemm, narrow_wgrad.grouped_wgrad
CANDIDATES: dict[str, dict[str, Any]] = {
    "shipped": {},
    "columns in one block": {"_COLUMN_BLOCK": 2880},
    "columns in two blocks": {"_COLUMN_BLOCK": 1536},
    "copies in one block": {"_COPY_BLOCK": 2880},
    "narrow 256x64": {"grouped_gemm": PRODUCTS((256, 64))},
    "narrow 512x64": {"grouped_gemm": PRODUCTS((512, 64)), "tile_config": tiles(three_stages)},
    "narrow wgrad of down": {"grouped_wgrad": WGRADS((64,))},
    "narrow wgrads": {"grouped_wgrad": WGRADS((64, 128))},
    "gate in the epilogue": fused_gate.swaps(),
    "gate in the epilogue, not flattened": fused_gate.swaps(flatten=False, stages=4),
    "gate in the epilogue, narrow 256x64 and wgrads": fused_gate.swaps(PRODUCTS((256, 64)))
    | {"grouped_wgrad": WGRADS((64, 128))},
    "grad_input in steps of 128": {"tile_config": tiles(steps_of_128)},
}
IN_FORWARD = ("shipped", "columns in one block", "columns in two blocks", "narrow 256x64", "narrow 512x64")


@contextlib.contextmanager
def swapped(names: dict[str, Any]) -> Iterator[None]:
    before = {name: getattr(cuda_path, name) for name in names}
    vars(cuda_path).update(names)
    try:
        yield
    finally:
        vars(cuda_path).update(before)


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


class Case:
    """One layer in one mode; `step` is a forward, and a backward if anything is trained."""

    def __init__(self, experts: int, mode: str, tokens: int) -> None:
        self.experts, self.mode = experts, mode
        self.x = torch.randn(1, tokens, 2880, device="cuda", dtype=torch.bfloat16, requires_grad=mode != "eval")
        self.grad = torch.randn_like(self.x)
        self.ours = build("gptoss_fused", experts).requires_grad_(mode == "trained")

    def step(self, layer: torch.nn.Module) -> torch.Tensor:
        layer.zero_grad(set_to_none=True)
        self.x.grad = None
        with torch.set_grad_enabled(self.mode != "eval"):
            out = layer(self.x)[0]
        if self.mode != "eval":
            out.backward(self.grad)
        return out

    def results(self, swaps: dict[str, Any]) -> list[torch.Tensor]:
        with swapped(swaps):
            found = [self.step(self.ours).detach().clone()]
        grads = [self.x.grad, *(p.grad for p in self.ours.parameters())]
        return found + [grad.clone() for grad in grads if grad is not None]

    def measure(
        self, layer: torch.nn.Module, swaps: dict[str, Any], joules: Joules, steps: int
    ) -> tuple[float, float]:
        """Milliseconds and joules of a step."""
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        with swapped(swaps):
            for _ in range(3):
                self.step(layer)
            torch.cuda.synchronize()
            before = joules()
            start.record()
            for _ in range(steps):
                self.step(layer)
            end.record()
            torch.cuda.synchronize()
        return start.elapsed_time(end) / steps, (joules() - before) / steps


def compare(case: Case, names: list[str]) -> list[str]:
    """Names that run; prints how far each is from what is shipped."""
    good, expected = [], case.results({})
    for name in names:
        try:
            found = case.results(CANDIDATES[name])
        except Exception as error:  # one that fails must not stop the others
            print(f"{name}: {type(error).__name__}: {error}"[:300], flush=True)
            continue
        pairs = [(a.float(), b.float()) for a, b in zip(found, expected, strict=True) if not torch.equal(a, b)]
        errors = [f"{((a - b).norm() / b.norm()).item():.1e}" for a, b in pairs]
        print(f"{name}: {' '.join(errors) or 'same bits'}", flush=True)
        good.append(name)
    return good


def run_case(rows: Rows, case: Case, names: list[str], rounds: int, milliseconds: float) -> None:
    other = build("grouped_mm", case.experts).requires_grad_(case.mode == "trained")
    layers = {name: (case.ours, CANDIDATES[name]) for name in names} | {"grouped_mm": (other, {})}
    joules = Joules()
    steps = {name: max(4, int(milliseconds / case.measure(*layers[name], joules, 4)[0])) for name in layers}
    case.measure(*layers["shipped"], joules, 4 * steps["shipped"])  # to the power limit
    taken = {name: [] for name in layers}
    for _ in range(rounds):
        for name, found in taken.items():
            found.append(case.measure(*layers[name], joules, steps[name]))
    for name, found in taken.items():
        ms, energy = (statistics.median(values) for values in zip(*found, strict=True))
        rows.add(
            case="energy", implementation=name, experts=case.experts, tokens=case.x.shape[1], mode=case.mode,
            ms=round(ms, 3), ms_min=round(min(f[0] for f in found), 3), ms_max=round(max(f[0] for f in found), 3),
            joules=round(energy, 3),
        )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("energy.csv"))
    parser.add_argument("--cases", nargs="*", default=["128:trained", "128:eval", "32:trained"])
    parser.add_argument("--tokens", type=int, default=32768)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--window", type=float, default=600, help="milliseconds of a candidate's turn")
    parser.add_argument("--compile", type=int, nargs=2, metavar=("FIRST", "STEP"))
    args = parser.parse_args()
    for text in args.cases:
        experts, mode = text.split(":")
        case = Case(int(experts), mode, args.tokens)
        names = list(IN_FORWARD if mode == "eval" else CANDIDATES)
        if args.compile:
            for name in names[args.compile[0] :: args.compile[1]]:
                case.results(CANDIDATES[name])
        else:
            run_case(Rows(args.out), case, compare(case, names), args.rounds, args.window)
        del case


if __name__ == "__main__":
    main()
