"""Tile configurations of the Triton kernels: user cache, then the shipped table of this GPU, then a safe default.

A configuration depends on the kernel and on the mean number of rows per expert, rounded to a power of two. Nothing is
measured behind the user's back: `tune_experts` measures when it is called and writes the cache file.
"""

import functools
import json
import math
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch

from .tables import TABLES

KERNELS = (
    "up",
    "up_eval",
    "down",
    "grad_hidden",
    "grad_hidden_sorted",
    "grad_input",
    "wgrad_up",
    "wgrad_down",
)
PRESORTED = ("up", "up_eval", "grad_hidden")  # gather their rows, in the product or before it
NARROWED = ("down", "grad_hidden_sorted", "grad_input", "wgrad_up", "wgrad_down")
STORED_BY_TMA = ("up", "up_eval", "grad_hidden", "grad_hidden_sorted", "wgrad_up", "wgrad_down")


@dataclass(frozen=True, slots=True)
class TileConfig:
    """Tile of one kernel: `bm` rows x `bn` columns, `bk` contraction step.

    `warps` and `stages` are Triton's; up to `group` row tiles of an expert share a column before the next starts (L2 reuse);
    `programs` is the size of the persistent grid per multiprocessor; `tma` uses tensor descriptors where they exist;
    `flatten` joins the tile loop with the contraction loop, so that a tile's first loads overlap the last one's store;
    `tma_store` (of `STORED_BY_TMA`) writes the result through a descriptor; `presort` (of `PRESORTED`) reads a sorted copy
    of the input instead of gathering rows: a bandwidth-bound pass more, a faster product; `narrow` (of `NARROWED`, with
    `tma`) covers the columns that whole tiles leave over with tiles of `2 bm` rows and `bn / 4` or `bn / 2` columns, where
    half a tile is enough; these kernels then neither flatten nor, but for the weight gradients, store by descriptor.
    """

    bm: int
    bn: int
    bk: int
    warps: int
    stages: int
    group: int = 8
    programs: int = 1
    tma: bool = False
    flatten: bool = False
    tma_store: bool = False
    presort: bool = False
    narrow: bool = False


def cache_path(device_name: str) -> Path:
    """File with the configurations measured on this machine; `TRL_GPTOSS_CACHE` moves its folder."""
    root = os.environ.get("TRL_GPTOSS_CACHE") or Path.home() / ".cache" / "trl_gptoss"
    return Path(root) / "experts" / f"{device_name.replace(' ', '_')}.json"


def cdiv(a: int, b: int) -> int:
    """Ceiling division. Triton's own helpers cost 7 us a call on the host, as much as a decoding kernel."""
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    """Smallest power of two that is at least `n`."""
    return 1 << (n - 1).bit_length()


def bucket(rows: int, experts: int) -> int:
    """Mean rows per expert as a power of two, 1 to 8192."""
    return min(8192, 2 ** max(0, round(math.log2(max(1.0, rows / experts)))))


def default_config(kernel: str, rows_per_expert: int, hopper: bool) -> TileConfig:
    """A configuration that fits every GPU with bf16 tensor cores (48-96 KiB of shared memory, 192 KiB on Hopper)."""
    if rows_per_expert <= 64 and not kernel.startswith("wgrad"):
        if rows_per_expert > 16:
            return TileConfig(rows_per_expert, 128, 64, 4, 3, programs=2)
        return TileConfig(16, 64, 64, 4, 4, programs=4)
    return TileConfig(128, 256, 64, 8, 3, tma=True) if hopper else TileConfig(128, 128, 32, 8, 3)


def low_rank_config(rank: int) -> TileConfig:
    """Configuration of the products with a rank-sized side (memory-bound)."""
    return TileConfig(64, rank, 64, 4, 4, programs=4)


def low_rank_wgrad_config(rows: int, columns: int) -> TileConfig:
    """Configuration of a weight gradient of shape (rows, columns) of which one is the rank."""
    bm, bn = (min(128, max(16, next_power_of_2(size))) for size in (rows, columns))
    return TileConfig(bm, bn, 64, 4, 3, programs=3)


@functools.cache
def _table(device_index: int | None) -> tuple[dict[str, dict[int, TileConfig]], bool]:
    if device_index is None:
        return {}, False
    name = torch.cuda.get_device_name(device_index)
    table = {kernel: dict(rows) for kernel, rows in TABLES.get(name, {}).items()}
    table = {kernel: {rows: TileConfig(*values) for rows, values in entry.items()} for kernel, entry in table.items()}
    path = cache_path(name)
    if path.is_file():
        for kernel, entry in json.loads(path.read_text()).items():
            known = {int(rows): TileConfig(**values) for rows, values in entry.items()}
            table[kernel] = {**table.get(kernel, {}), **known}
    return table, torch.cuda.get_device_capability(device_index)[0] >= 9


@functools.cache
def _config(kernel: str, rows_per_expert: int, device_index: int | None, wide: bool) -> TileConfig:
    table, hopper = _table(device_index)
    known = table.get(kernel, {})
    if known:
        nearest = min(known, key=lambda rows: abs(math.log2(rows / rows_per_expert)))
        config = known[nearest]
    else:
        config = default_config(kernel, rows_per_expert, hopper)
    if wide:  # four bytes per element: half the contraction step fits the same shared memory
        config = TileConfig(min(config.bm, 64), min(config.bn, 64), 32, 4, 2, config.group, max(2, config.programs))
    return config


def tile_config(kernel: str, rows: int, experts: int, like: torch.Tensor) -> TileConfig:
    """Configuration for `kernel` with `rows` assignments over `experts`, for tensors like `like`."""
    index = like.device.index if like.is_cuda else None
    return _config(kernel, bucket(rows, experts), index, like.element_size() > 2)


def candidates(kernel: str, rows_per_expert: int) -> list[TileConfig]:
    """What `tune_experts` tries."""
    if not kernel.startswith("wgrad") and rows_per_expert <= 32:
        row_tile = 16 if rows_per_expert <= 8 else 32
        return [
            TileConfig(row_tile, 32, 128, 4, 4, programs=5),
            TileConfig(row_tile, 64, 128, 4, 3, programs=4),
            TileConfig(row_tile, 64, 64, 4, 5, programs=4),
            TileConfig(row_tile, 128, 64, 4, 4, programs=3),
            TileConfig(row_tile, 128, 64, 8, 5, programs=2),
        ]
    tma = TileConfig(128, 256, 64, 8, 3, tma=True)
    large = [replace(tma, flatten=flatten) for flatten in (False, True)]
    if kernel in STORED_BY_TMA:
        large += [replace(config, tma_store=True) for config in large]
    if kernel in PRESORTED:
        large += [replace(config, presort=True) for config in large]
    if kernel in NARROWED:
        stored = {"tma_store": True, "bk": 32, "stages": 4} if kernel.startswith("wgrad") else {}
        large.append(replace(tma, narrow=True, **stored))
    large.append(replace(tma, stages=4))
    if kernel.startswith("wgrad"):
        return [*large, TileConfig(128, 128, 64, 4, 3, programs=2, tma=True), TileConfig(128, 256, 32, 8, 6)]
    small = [TileConfig(64, 256, 64, 4, 4, tma=True), TileConfig(64, 128, 64, 4, 4, programs=2)]
    if rows_per_expert <= 64:
        return [*small, tma, TileConfig(128, 128, 64, 4, 3, programs=2, tma=True)]
    large += [replace(tma, group=group, flatten=True) for group in (4, 16)]
    large.append(TileConfig(128, 256, 32, 8, 5))
    return large if rows_per_expert > 256 else [small[0], *large]


def measure(
    launch: Callable[[TileConfig], None], configs: list[TileConfig], milliseconds: int = 50
) -> list[tuple[float, TileConfig]]:
    """Median milliseconds of every configuration that compiles and fits, fastest first."""
    from triton.compiler.errors import CompilationError
    from triton.runtime.errors import OutOfResources
    from triton.testing import do_bench

    timed = []
    for config in configs:
        try:
            launch(config)
            timed.append((do_bench(lambda c=config: launch(c), 10, milliseconds, return_mode="median"), config))
        except (OutOfResources, CompilationError):
            continue
        except RuntimeError as error:
            if "PassManager" not in str(error):  # what Triton raises when one of its passes fails
                raise
    return sorted(timed, key=lambda entry: entry[0])


def save_configs(device_name: str, found: dict[str, dict[int, TileConfig]]) -> Path:
    """Merge `found` into the cache file of this GPU and use it from now on in this process."""
    path = cache_path(device_name)
    known = json.loads(path.read_text()) if path.is_file() else {}
    for kernel, entry in found.items():
        known.setdefault(kernel, {}).update({str(rows): asdict(config) for rows, config in entry.items()})
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(f".{os.getpid()}")
    partial.write_text(json.dumps(known, indent=1, sort_keys=True))
    partial.replace(path)  # several ranks may tune at once
    _table.cache_clear()
    _config.cache_clear()
    return path
