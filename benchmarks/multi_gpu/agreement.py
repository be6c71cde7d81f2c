"""Loss and gradients of ranks that share sequences, in bf16, against one GPU and against float32; run by `run_all.py`.

    torchrun --nproc_per_node 2 agreement.py FOLDER --cell one,full ddp,2,full wrong,first_sinks

Two layers at the width of gpt-oss-20b, two rows per rank. The oracle is that of tests/distributed/sharing.py: one process, one
document at a time, transformers' eager attention and experts, here in float32 on the same bf16 numbers. What bf16 rounding
does to one GPU (`one`: the trainer without any sharing) is the measure for the others. Errors are relative in the
Euclidean norm, for groups of parameters. A line per cell and group goes to `FOLDER/agreement.csv`.
"""

import argparse
import contextlib
import gc
import sys
import time
from collections import defaultdict
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1] / "experts"))
sys.path.append(str(Path(__file__).resolve().parents[2] / "tests/distributed"))

import sharing
import torch
import torch.distributed as dist
from accelerate import PartialState
from ahead import wait
from rows import Rows
from sharing import DEVICE, ON_GPU, RANK, WORLD
from wrong_sharing import wrong

WIDE = {
    "hidden_size": 2880, "intermediate_size": 2880, "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64,
    "num_local_experts": 32, "num_experts_per_tok": 4, "sliding_window": 128, "vocab_size": 1024, "initializer_range": 0.02,
}  # fmt: skip
# (prompt, completion) tokens of the rows of each rank; no document ends where a share does
LENGTHS = ([(100, 1501), (41, 800)], [(16, 1102), (603, 3)]) * (WORLD // 2)
TINY_LENGTHS = ([(10, 41), (5, 20)], [(7, 31), (33, 1)]) * (WORLD // 2)
# LoRA's bf16 adapters of rank 2 have few entries, hence the wider of two bounds
BOUND = {"full": 1.5, "lora": 2.0}
GROUPS = ("sinks", "lora", "experts", "router", "self_attn", "norm", "embed_tokens", "lm_head")


def group_of(name: str) -> str:
    return next(group for group in GROUPS if group in name)


def squares(gradients: dict[str, torch.Tensor]) -> dict[str, float]:
    """Sum of squares by group, and of all."""
    found: dict[str, float] = defaultdict(float)
    for name, gradient in gradients.items():
        square = float(gradient.float().square().sum())
        found[group_of(name)] += square
        found["all"] += square
    return found


def relative(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> dict[str, float]:
    assert ours.keys() == theirs.keys(), sorted(ours.keys() ^ theirs.keys())[:4]
    error, size = squares({n: ours[n].float() - x.float() for n, x in theirs.items()}), squares(theirs)
    return {group: (error[group] / size[group]) ** 0.5 for group in size}


def inputs_of(rank: int) -> dict[str, torch.Tensor]:
    return sharing.converted(sharing.batch(rank, 0, torch.bfloat16), torch.float32)


def one_gpu(trainer) -> tuple[float, dict[str, torch.Tensor]]:
    """Mean loss of all ranks' batches, each on this GPU."""
    losses = []
    for rank in range(WORLD):
        loss = trainer.compute_loss(trainer.model, inputs_of(rank)) / WORLD
        loss.backward()
        losses.append(loss.item() * WORLD)
    return losses[RANK], {n: p.grad for n, p in sharing.named(trainer.model).items()}


def shared(trainer, wrapper: str) -> tuple[float, dict[str, torch.Tensor]]:
    if wrapper == "zero3":
        model, optimizer = sharing.zero3_engine(trainer, sharing.optimizer_of(trainer.model))
    else:
        options = {"mixed_precision": True} if wrapper == "fsdp2_master" else {}
        model = sharing.wrapped("ddp" if wrapper == "ddp" else "fsdp2", trainer.model, **options)
    model.train()
    last = trainer.compute_loss(model, inputs_of(RANK))
    if wrapper == "zero3":
        gradients = sharing.zero3_step(model, optimizer, last)
    else:
        last.backward()
        gradients = {n: sharing.whole(p.grad) for n, p in sharing.named(model).items()}
    return (last if trainer._reported_loss is None else trainer._reported_loss).item(), gradients


def gradients_of(wrapper: str, size: int, kind: str, checkpointing: bool) -> tuple[float, dict[str, torch.Tensor]]:
    trainer = sharing.trainer_of(sharing.policy(kind, torch.bfloat16), size, checkpointing, "token")
    sharing.train_sinks(trainer.model)
    trainer.model.train()
    return one_gpu(trainer) if wrapper == "one" else shared(trainer, wrapper)


class Comparison:
    """Cells against the oracle, and against the `one` of their kind if that was run before."""

    def __init__(self, rows: Rows) -> None:
        self.rows = rows
        self.one: dict[str, tuple[dict[str, float], dict[str, torch.Tensor]]] = {}

    def cell(self, text: str) -> None:
        start = time.perf_counter()
        what, *rest = text.split(",")
        variant = contextlib.nullcontext()
        wrapper, size, kind, checkpointing = what, 1, "full", "checkpointing" in rest
        if what == "wrong":
            variant, wrapper, size = wrong(rest[0]), "ddp", WORLD
        elif what == "one":
            kind = rest[0]
        else:
            size, kind = int(rest[0]), rest[1]
        [(loss32, gradients32, _)] = sharing.one_process(kind, torch.bfloat16, "token", 1, arithmetic=torch.float32)
        with variant:
            loss, gradients = gradients_of(wrapper, size, kind, checkpointing)
        errors = relative(gradients, gradients32)
        floor, apart = {}, {}
        if what == "one":
            self.one[kind] = errors, gradients
        elif kind in self.one:
            floor = self.one[kind][0]
            apart = relative(gradients, self.one[kind][1])
        far = torch.tensor([abs(loss - loss32)], device=DEVICE)
        dist.all_reduce(far, dist.ReduceOp.MAX)
        for group in errors if RANK == 0 else ():
            self.rows.add(
                cell=text, gpus=WORLD, wrapper=wrapper, sequence_parallel_size=size, kind=kind,
                checkpointing=checkpointing, control=what == "wrong", group=group, error=f"{errors[group]:.3e}",
                one_gpu=f"{floor[group]:.3e}" if floor else "",
                apart=f"{apart[group]:.3e}" if apart else "", bound=BOUND[kind],
                loss=f"{loss:.6f}", loss_float32=f"{loss32:.6f}", largest_loss_error=f"{far.item():.3e}",
                seconds=round(time.perf_counter() - start, 2),
            )  # fmt: skip
        del gradients
        gc.collect()
        if ON_GPU:
            torch.cuda.empty_cache()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--cell", nargs="+", required=True)
    parser.add_argument("--tiny", action="store_true", help="the tests' tiny model, to try the script without GPUs")
    args = parser.parse_args()
    wait()
    if ON_GPU:
        torch.cuda.set_device(DEVICE)
    if not sharing.DEEPSPEED:
        PartialState(cpu=not ON_GPU)
    # a ratio at the clip's edge would turn rounding into jumps
    sharing.CLIP, sharing.LENGTHS = 1e3, TINY_LENGTHS if args.tiny else LENGTHS
    sharing.SHAPE = {} if args.tiny else WIDE
    comparison, failed = Comparison(Rows(args.folder / "agreement.csv")), 0
    for text in args.cell:
        try:
            comparison.cell(text)
        except (RuntimeError, ValueError) as error:  # the next cell may still run
            print(f"{text}: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
            failed += 1
    dist.barrier()
    dist.destroy_process_group()
    return failed


if __name__ == "__main__":
    sys.exit(main())
