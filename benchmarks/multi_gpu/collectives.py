"""Collectives by themselves, with the sizes of a train step of gpt-oss-20b; called by `train_steps.py --collectives FOLDER`.

Bytes are those that a rank sends to the others (which for all_reduce is twice its share), so that bytes over seconds is the
rate of a GPU's links in one direction.
"""

import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from rows import Rows

TOKENS = (12288, 65536)  # of one rank: 24k and 128k tokens shared by two
HEADS = (64 + 8 + 8) * 64  # queries, keys and values of a token
LAYER, REPEATS = 797_000_000, 10  # parameters of a decoder layer


def measure(folder: Path, rank: int, tiny: bool) -> None:
    """Writes `FOLDER/collectives.csv`. Every rank calls it, with a process group."""
    world, on_gpu = dist.get_world_size(), torch.cuda.is_available()
    rows = Rows(folder / "collectives.csv")
    for name, size, parts, call in _cases(world, "cuda" if on_gpu else "cpu", tiny):
        seconds = [_seconds(call, on_gpu) for _ in range(2 + REPEATS)][2:]
        median = statistics.median(seconds)
        if rank == 0:
            rows.add(
                collective=name, gpus=world, elements=size, bytes_sent=parts, seconds=f"{median:.3e}",
                gb_per_s=round(parts / median / 1e9, 1), least_s=f"{min(seconds):.3e}", tiny=tiny,
            )  # fmt: skip


def _seconds(call: Callable[[], object], on_gpu: bool) -> float:
    dist.barrier()
    if on_gpu:
        torch.cuda.synchronize()
    begin = time.perf_counter()
    call()
    if on_gpu:
        torch.cuda.synchronize()
    return time.perf_counter() - begin


def _cases(world: int, device: str, tiny: bool):
    """Name, elements (bf16), bytes sent by a rank, and the call."""
    width, shrink = 2, 512 if tiny else 1
    others = (world - 1) / world
    for tokens in TOKENS:
        sent = torch.ones(world, tokens * HEADS // world // shrink, dtype=torch.bfloat16, device=device)
        received = torch.empty_like(sent)
        size = sent.numel()
        yield "all_to_all", size, round(size * width * others), lambda: dist.all_to_all_single(received, sent)  # noqa: B023
    share = torch.ones(LAYER // world // shrink, dtype=torch.bfloat16, device=device)
    whole = torch.empty(share.numel() * world, dtype=torch.bfloat16, device=device)
    size = whole.numel()
    yield "all_gather", size, round(size * width * others), lambda: dist.all_gather_into_tensor(whole, share)
    yield "reduce_scatter", size, round(size * width * others), lambda: dist.reduce_scatter_tensor(share, whole)
    yield "all_reduce", size, round(2 * size * width * others), lambda: dist.all_reduce(whole)
