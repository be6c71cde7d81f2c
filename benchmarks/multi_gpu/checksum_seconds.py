"""Seconds of the probe's checksums of one layer of the 20B (0.79B values in bf16), hashes looked up in a table against computed.

    python checksum_seconds.py --out checksum_seconds.csv

Both ways in turn, on the same tensors, an idle GPU before and after; they have to agree. A sync that is probed takes the
checksums of all layers twice, of what is sent and of what the engine holds.
"""

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1] / "experts"))

import torch
from rows import Rows

from trl_gptoss.rollouts.vllm import checksums
from trl_gptoss.rollouts.vllm.loading import trainer_checksums

ON_GPU = torch.cuda.is_available()
WIDTH, EXPERTS = (2880, 32) if ON_GPU else (256, 4)


def layer() -> dict[str, torch.Tensor]:
    shapes = {
        "mlp.experts.gate_up_proj": (EXPERTS, WIDTH, 2 * WIDTH),
        "mlp.experts.down_proj": (EXPERTS, WIDTH, WIDTH),
        "self_attn.q_proj.weight": (4096, WIDTH),
        "self_attn.o_proj.weight": (WIDTH, 4096),
    }
    device = "cuda" if ON_GPU else "cpu"
    return {name: torch.randn(shape, device=device, dtype=torch.bfloat16) for name, shape in shapes.items()}


def seconds(tensors: dict[str, torch.Tensor]) -> tuple[float, list[int]]:
    begin = time.perf_counter()
    sums = [
        value
        for name, tensor in tensors.items()
        for value in trainer_checksums(f"model.layers.0.{name}", tensor, tensor.dtype).values()
    ]
    return time.perf_counter() - begin, sums  # the sums are on the host: nothing is left to wait for


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="CSV to append to")
    parser.add_argument("--repeats", type=int, default=10)
    args = parser.parse_args()
    rows, tensors = Rows(args.out), layer()
    ways: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        "computed": checksums._hashes,
        "looked_up": checksums._looked_up,
    }
    for repeat in range(-1, args.repeats):
        found = {}
        for way, function in ways.items():
            checksums._looked_up = function
            taken, found[way] = seconds(tensors)
            if repeat >= 0:  # the first one makes the table
                rows.add(
                    way=way, values=sum(t.numel() for t in tensors.values()), repeat=repeat, seconds=round(taken, 6)
                )
        if found["computed"] != found["looked_up"]:
            raise RuntimeError("The two ways differ.")


if __name__ == "__main__":
    main()
