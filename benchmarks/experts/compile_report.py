"""Compile the kernels ahead of time for a GPU that need not be there: registers, spills, shared memory, instructions.

    python compile_report.py                 # shipped H200 tiles, sm_90
    python compile_report.py --arch 80       # defaults of other GPUs

Needs the triton package (3.6) and no GPU. `stack` above 0 means spilled registers; HGMMA is Hopper's matrix
instruction, UTMALDG/UTMASTG its bulk tensor copies, LDGSTS asynchronous copies.
"""

import argparse
import multiprocessing
import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from trl_gptoss.experts import (
    cuda_path,
    kernels_decode,
    kernels_gate,
    kernels_gemm,
    kernels_route,
    kernels_rowwise,
    kernels_wgrad,
    tiles,
    tune,
    tuning,
)
from trl_gptoss.experts.params import Activation, ExpertParams, Needs
from trl_gptoss.experts.tables import TABLES

TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
OPCODES = ("HGMMA", "HMMA", "LDGSTS", "UTMALDG", "UTMASTG", "LDL", "STL")


class NoDevice:
    """Stands in for the driver: compilation asks only for the target."""

    def __init__(self, arch: int) -> None:
        self.arch = arch

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.arch, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int | None = None) -> int:
        return 0


class Compiled:
    """Takes the place of a kernel: compiles at launch and prints a report once per variant."""

    seen: set[str] = set()

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel

    def __getitem__(self, grid: Any) -> Any:
        def launch(*args: Any, **kwargs: Any) -> None:
            compiled = self.kernel.warmup(*args, grid=grid, **kwargs)
            if compiled.hash not in self.seen:
                self.seen.add(compiled.hash)
                tile = "x".join(str(kwargs[name]) for name in ("BM", "BN", "BK") if name in kwargs)
                flags = " ".join(k for k, v in kwargs.items() if v is True)
                print(f"{self.kernel.__name__:24s} {tile:12s} {resources(compiled)}  {flags}", flush=True)

        return launch


def resources(compiled: Any) -> str:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        dump = [subprocess.run([TOOLS / "cuobjdump", flag, file.name], capture_output=True, text=True, check=True).stdout
                for flag in ("-res-usage", "-sass")]  # fmt: skip
    registers, stack = re.search(r"REG:(\d+) STACK:(\d+)", dump[0]).groups()
    counts = {opcode: len(re.findall(rf"\b{opcode}", dump[1])) for opcode in OPCODES}
    shown = " ".join(f"{opcode}:{count}" for opcode, count in counts.items() if count)
    return f"registers {registers:>3s} stack {stack:>3s} shared {compiled.metadata.shared:6d} {shown}"


def run(experts: int, tokens: int, hidden: int, rank: int) -> None:
    options = {"dtype": torch.bfloat16, "device": "meta"}
    E, H = experts, hidden
    shapes = [(E, H, 2 * H), (E, 2 * H), (E, H, H), (E, H)]
    shapes += [(E, H, rank), (E, rank, 2 * H), (E, H, rank), (E, rank, H)] if rank else []
    params = ExpertParams(*(torch.empty(shape, **options) for shape in shapes))
    x, weight = torch.empty(tokens, H, **options), torch.empty(tokens, 4, **options)
    index = torch.empty(tokens, 4, dtype=torch.int64, device="meta")
    activation = Activation(1.702, 7.0)
    cuda_path.forward(x, index, weight, params, activation, keep=False)
    _, saved = cuda_path.forward(x, index, weight, params, activation, keep=True)
    needs = Needs(*[True] * 6, *[bool(rank)] * 4)
    cuda_path.backward(x, x, index, weight, params, activation, saved, needs)


def compile_task(task: tuple[int, int, int, str | None]) -> None:
    """One layer, or the candidates of one kernel."""
    experts, tokens, rank, kernel = task
    if kernel is None:
        run(experts, tokens, 2880, rank)
        return
    for name, launch in tune.launches(experts, 2880, 2880, 4, tokens, torch.device("meta")):
        if name == kernel:
            for config in tuning.candidates(kernel, tuning.bucket(tokens * 4, experts)):
                try:
                    launch(config)
                except RuntimeError as error:  # a pass of Triton's failed; the tuner skips it too
                    print(f"{kernel} {config}: {error}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arch", type=int, default=90)
    parser.add_argument("--experts", type=int, default=32)
    parser.add_argument("--tokens", type=int, nargs="*", default=[8, 64, 512, 2048, 8192, 32768])
    parser.add_argument("--rank", type=int, default=0, help="rank of an adapter, a power of two of at least 16")
    parser.add_argument("--candidates", action="store_true", help="also everything that tune_experts would try")
    parser.add_argument("--jobs", type=int, default=1, help="processes; more than one fills Triton's cache faster")
    args = parser.parse_args()
    driver.set_active(NoDevice(args.arch))
    table = TABLES["NVIDIA H200"] if args.arch == 90 else {}
    configs = {kernel: {rows: tuning.TileConfig(*v) for rows, v in entry.items()} for kernel, entry in table.items()}
    tuning._table = lambda index: (configs, args.arch >= 90)
    tiles.processors = lambda device: 132
    tiles.can_describe = lambda matrix: args.arch >= 90
    for module in (kernels_decode, kernels_gate, kernels_gemm, kernels_route, kernels_rowwise, kernels_wgrad):
        for name in [name for name in vars(module) if name.endswith("_kernel")]:
            setattr(module, name, Compiled(getattr(module, name)))
    tasks = [(args.experts, tokens, args.rank, None) for tokens in args.tokens]
    if args.candidates:
        tasks += [(args.experts, tokens, 0, kernel) for tokens in args.tokens for kernel in tuning.KERNELS]
    if args.jobs == 1:
        for task in tasks:
            compile_task(task)
    else:
        with multiprocessing.get_context("fork").Pool(args.jobs) as pool:  # keeps the stand-ins of this process
            pool.map(compile_task, tasks, chunksize=1)


if __name__ == "__main__":
    main()
