"""Train steps at the width of gpt-oss-20b on one GPU or several; one process per GPU, started by `run_all.py`.

    torchrun --nproc_per_node 2 train_steps.py --out FOLDER --case lora_ddp_sp lora_ddp_dp

The cases are those of ../long_traces/steps.py, run by its `run`: everything but the sampling, random weights. Every process
writes a line per micro-step to `FOLDER/steps_<case>_<rank>.csv` as soon as it is over. A step takes one row of tokens from every
rank; with sequence parallelism the ranks work on all rows together, one row after the other. In the profiled steps
(`profiled`) the seconds of kernels and collectives come from the profiler, see `gpu_time.py`.
"""

import argparse
import contextlib
import json
import os
import sys
import traceback
from collections.abc import Iterator
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1] / "long_traces"))
sys.path.append(str(Path(__file__).resolve().parents[1] / "experts"))

import torch
import torch.distributed as dist
from accelerate import Accelerator, PartialState
from ahead import wait
from collectives import measure
from gpu_time import KINDS, kernels_of, shares
from rows import Rows
from steps import GIB, ON_GPU, RANK, WORLD, Case, build_trainer, case_columns, run, timed
from torch.profiler import ProfilerActivity, profile
from transformers import GptOssForCausalLM, TrainerCallback
from trl import GRPOTrainer

from trl_gptoss.memory import ModelShape, TrainSetup, predict_memory
from trl_gptoss.parallelism import assert_sharded, shard_mesh, shard_model
from trl_gptoss.step_time import predict_step_time

SHORT, LONG, REST = 24576, 131072, 512  # tokens of a row; REST goes with a single LONG one
CHUNK = 32768


@dataclass(frozen=True, kw_only=True)
class Ranks:
    """A case of several ranks.

    Args:
        method (`str`): "lora" or "full".
        sharding (`str`): "none" (one GPU, or DDP) or "fsdp2".
        shared (`bool`): Whether all ranks share every sequence (sequence_parallel_size), or each has its own.
        lengths (`tuple[str, ...]`): A step each: "short" for a row of SHORT tokens per rank, "long" for one row of LONG
            tokens and short ones on the other ranks; "+" behind it: profiled.
        layers (`int`): Of the model.
    """

    method: str
    sharding: str
    shared: bool
    lengths: tuple[str, ...]
    layers: int = 24


CASES = {
    "lora_one": Ranks(method="lora", sharding="none", shared=False, lengths=("short", "short")),
    "lora_one_long": Ranks(method="lora", sharding="none", shared=False, lengths=("long",)),
    "full_one_12": Ranks(method="full", sharding="none", shared=False, lengths=("short", "short"), layers=12),
    "lora_ddp_sp": Ranks(method="lora", sharding="none", shared=True, lengths=("short", "short", "short+", "long+")),
    "lora_ddp_dp": Ranks(method="lora", sharding="none", shared=False, lengths=("short", "short", "short+")),
    "lora_fsdp2_sp": Ranks(method="lora", sharding="fsdp2", shared=True, lengths=("short", "short", "short+")),
    "lora_fsdp2_dp": Ranks(method="lora", sharding="fsdp2", shared=False, lengths=("short", "short", "short+")),
    "full_fsdp2_sp": Ranks(
        method="full", sharding="fsdp2", shared=True, lengths=("short", "short", "short+", "long+")
    ),
    "full_fsdp2_sp_12": Ranks(
        method="full", sharding="fsdp2", shared=True, lengths=("short", "short", "short+"), layers=12
    ),
    "full_fsdp2_dp_12": Ranks(
        method="full", sharding="fsdp2", shared=False, lengths=("short", "short", "short+"), layers=12
    ),
}


def rows_of(kind: str, tiny: bool) -> list[int]:
    ranks = max(WORLD, 2)  # one process takes two rows, one after the other
    rows = [SHORT] * ranks if kind.startswith("short") else [LONG] + [REST] * (ranks - 1)
    return [max(row // 256, 16) for row in rows] if tiny else rows


def step_case(ranks: Ranks, tiny: bool) -> Case:
    layers = min(ranks.layers, 3) if tiny else ranks.layers
    return Case(
        generations=[rows_of(kind, tiny) for kind in ranks.lengths], method=ranks.method, layers=layers, tiny=tiny,
        chunk=CHUNK, fused_elementwise=True, warm_up=32 if tiny else 512,
    )  # fmt: skip


def clock(ranks: Ranks):
    """The clock of steps.py, with a profiler around some of the micro-steps."""
    profiled = {1 + number for number, kind in enumerate(ranks.lengths) if kind.endswith("+")}  # 0 is the warm-up
    activity = ProfilerActivity.CUDA if ON_GPU else ProfilerActivity.CPU

    def profiling(base: type[GRPOTrainer]) -> type[GRPOTrainer]:
        class Profiled(timed(base)):
            traced: dict[int, dict[str, float]]

            def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
                number = len(self.steps)
                if number not in profiled:
                    return super().training_step(*args, **kwargs)
                with profile(activities=[activity]) as profiled_step:
                    loss = super().training_step(*args, **kwargs)
                self.traced[number] = shares(kernels_of(profiled_step))
                return loss

        return Profiled

    return profiling


class Writer(TrainerCallback):
    """A line for every micro-step, when its optimizer step is over."""

    def __init__(self, name: str, ranks: Ranks, case: Case, rows: Rows, tiny: bool) -> None:
        self.name, self.ranks, self.case, self.rows, self.tiny = name, ranks, case, rows, tiny
        self.trainer: Any = None
        self.written = len(case.generations[0]) // WORLD  # the warm-up is not

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        steps = self.trainer.steps
        for number in range(self.written, len(steps)):
            self._write(number, steps[number])
        self.written = max(self.written, len(steps))

    def _write(self, number: int, step: Any) -> None:
        per_generation = len(self.case.generations[0]) // WORLD
        generation = number // per_generation - 1
        lengths = self.case.generations[generation]
        # one process works on its rows in micro-steps, several on all of them in one
        lengths = lengths if WORLD > 1 else [lengths[number % per_generation]]
        memory, seconds = self._predictions(lengths, number % per_generation > 0)
        traced = self.trainer.traced.get(number, {})
        columns = ["compute_s", "exposed_s", *(f"{prefix}{kind}_s" for kind in KINDS for prefix in ("", "exposed_"))]
        self.rows.add(
            case=self.name, gpus=WORLD, rank=RANK, sharding=self.ranks.sharding, sequence_parallel_size=WORLD if self.ranks.shared else 1,
            **case_columns(self.case), generation=generation, micro_step=number % per_generation,
            rows=self.ranks.lengths[generation].rstrip("+"), lengths=" ".join(map(str, lengths)), tokens=sum(lengths), seconds=round(step.seconds, 4),
            optimizer_s="" if step.optimizer_seconds is None else round(step.optimizer_seconds, 4),
            tokens_per_s=round(sum(lengths) / step.seconds), peak_gib=round(step.peak / GIB, 3),
            reserved_gib=round(step.reserved / GIB, 3), planner_gib=round(memory.total / GIB, 3),
            planner_s=round(seconds, 4), planner_parts_gib=json.dumps({k: round(v / GIB, 3) for k, v in memory.parts.items()}),
            profiled=bool(traced), **{c: round(traced[c], 5) if traced else "" for c in columns},
            tiny=self.tiny, trl=metadata.version("trl"),
        )  # fmt: skip

    def _predictions(self, lengths: list[int], later: bool) -> tuple[Any, float]:
        """Memory of the worst pass, and seconds of the step: shared rows one after the other, own ones at once. `later`: an
        earlier micro-step has left its gradients."""
        shape = ModelShape.from_config(self.trainer._base_model.config.get_text_config())
        passes = enumerate(lengths)
        setups = [self._setup(length, later or self.ranks.shared and row > 0) for row, length in passes]
        seconds = [predict_step_time(shape, setup).total for setup in setups]
        worst = max((predict_memory(shape, setup) for setup in setups), key=lambda memory: memory.total)
        return worst, sum(seconds) if self.ranks.shared else max(seconds)

    def _setup(self, tokens: int, accumulates: bool) -> TrainSetup:
        # FSDP2 is applied before the trainer sees the model, so it does not know of it
        setup = self.trainer._setup(tokens, accumulates=accumulates)
        return replace(setup, sharding=self.ranks.sharding, master_weights=False)


@contextlib.contextmanager
def sharded_by_hand(sharding: str) -> Iterator[None]:
    """Accelerate leaves a model as it is that `shard_model` has sharded. By configuration it would keep float32 master weights
    of all parameters, which two GPUs have no room for."""
    if sharding == "none":
        yield
        return
    original = Accelerator.prepare_model
    Accelerator.prepare_model = lambda self, model, *args, **kwargs: model
    try:
        yield
    finally:
        Accelerator.prepare_model = original


def run_case(name: str, folder: Path, tiny: bool) -> None:
    ranks = CASES[name]
    case = step_case(ranks, tiny)
    writer = Writer(name, ranks, case, Rows(folder / f"steps_{name}_{RANK}.csv"), tiny)

    def build(case: Case, model: GptOssForCausalLM, output: str) -> GRPOTrainer:
        trainer = build_trainer(case, model, output, clock(ranks), sequence_parallel_size=WORLD if ranks.shared else 1)
        if ranks.sharding == "fsdp2":
            assert_sharded(shard_model(trainer.model, shard_mesh("cuda" if ON_GPU else "cpu")))
        trainer.traced, writer.trainer = {}, trainer
        trainer.add_callback(writer)
        return trainer

    with sharded_by_hand(ranks.sharding):
        run(case, lambda *_: None, build)
    writer.trainer = None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--case", nargs="+", choices=CASES, required=True)
    parser.add_argument("--collectives", action="store_true", help="collectives by themselves, first")
    parser.add_argument("--tiny", action="store_true", help="tiny width and rows, to try the script without GPUs")
    args = parser.parse_args()
    wait()
    if ON_GPU:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
    if args.collectives:
        PartialState(cpu=not ON_GPU)  # the process group
        measure(args.out, RANK, args.tiny)
    failed = 0
    for name in args.case:
        try:
            run_case(name, args.out, args.tiny)
        except (RuntimeError, ValueError):  # out of memory, for one: the next case may still run
            traceback.print_exc()
            failed += 1
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()
    return failed


if __name__ == "__main__":
    sys.exit(main())
