"""Ranks as threads: a sum over ranks for tests of functions that take `reduce`, without processes."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

T = TypeVar("T")


def run_ranks(functions: list[Callable[[Callable[[torch.Tensor], torch.Tensor]], T]]) -> list[T]:
    """Run `functions[rank](reduce)` at once. A rank that calls `reduce` more or less often than the others breaks the
    barrier: an error."""
    barrier = threading.Barrier(len(functions), timeout=5)
    slots: list[torch.Tensor | None] = [None] * len(functions)

    def run(rank: int) -> T:
        def reduce(tensor: torch.Tensor) -> torch.Tensor:
            slots[rank] = tensor
            barrier.wait()
            total = torch.stack([slot for slot in slots if slot is not None]).sum(0)
            barrier.wait()
            return total

        return functions[rank](reduce)

    with ThreadPoolExecutor(len(functions)) as pool:
        return [future.result() for future in [pool.submit(run, rank) for rank in range(len(functions))]]
