"""Where a GPU's time goes in a profiled step: kernels, collectives, and collectives that nothing else hides."""

import json
import tempfile
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

from torch.profiler import profile

Interval = tuple[float, float]  # begin and end in seconds
# NCCL's kernels by what uses them here: Ulysses sends and receives, FSDP2 gathers and scatters, DDP reduces
COLLECTIVES = {
    "SendRecv": "all_to_all",
    "AllGather": "all_gather",
    "ReduceScatter": "reduce_scatter",
    "AllReduce": "all_reduce",
    "Broadcast": "broadcast",
}
KINDS = (*COLLECTIVES.values(), "other_nccl")


def kernels_of(profiled: profile) -> list[tuple[str, float, float]]:
    """Name, begin and end (seconds) of everything that ran on the GPU; nothing on a CPU."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiled.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    kinds = ("kernel", "gpu_memcpy", "gpu_memset")
    return [(e["name"], e["ts"] / 1e6, (e["ts"] + e["dur"]) / 1e6) for e in events if e.get("cat") in kinds]


def collective(name: str) -> str | None:
    """The collective that a kernel belongs to, None for computation."""
    if "nccl" not in name.lower():
        return None
    return next((kind for part, kind in COLLECTIVES.items() if part in name), "other_nccl")


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """The same points, as intervals that do not touch."""
    merged: list[Interval] = []
    for begin, end in sorted(intervals):
        if merged and begin <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((begin, end))
    return merged


def length(intervals: Iterable[Interval]) -> float:
    return sum(end - begin for begin, end in intervals)


def outside(intervals: Iterable[Interval], others: Iterable[Interval]) -> float:
    """Length of what `intervals` cover and `others` do not.

    2 of the 4 seconds of the first are outside of the second:

        intervals  ####
        others       ######
    """
    others = union(others)
    return length(union([*intervals, *others])) - length(others)


def shares(kernels: list[tuple[str, float, float]]) -> dict[str, float]:
    """Seconds of a step's GPU time.

    Args:
        kernels (`list[tuple[str, float, float]]`): See `kernels_of`.

    Returns:
        `dict[str, float]`: `compute_s` of kernels that are no collective; `<kind>_s` of each kind of collective, the wait for
        the other rank included; `exposed_<kind>_s` of the part of it during which nothing is computed; `exposed_s` of all.
    """
    by_kind: dict[str, list[Interval]] = defaultdict(list)
    compute: list[Interval] = []
    for name, begin, end in kernels:
        kind = collective(name)
        (compute if kind is None else by_kind[kind]).append((begin, end))
    found = {"compute_s": length(union(compute))}
    for kind in KINDS:
        found[f"{kind}_s"] = length(union(by_kind[kind]))
        found[f"exposed_{kind}_s"] = outside(by_kind[kind], compute)
    found["exposed_s"] = outside([interval for found_ in by_kind.values() for interval in found_], compute)
    return found
