"""A PREDICTION of step time and memory on nodes of GPUs that nobody here has run on, from what two GPUs were measured at.

    python cluster.py --steps steps_h200.csv --collectives collectives_h200.csv --nodes 1 2 16 --out cluster.csv

Of a full fine-tuning step of gpt-oss-20b with FSDP2 over all GPUs (float32 master weights, bf16 computation, AdamW) and 8
GPUs that share every sequence. What is taken from where:

- computation: the seconds of two GPUs' step that no collective is responsible for, times two over eight (`--sequence`
  ranks share what two did), which supposes that kernels are as efficient on a quarter of the heads and tokens;
- all-to-all inside a node: bytes of the shape over the measured rate of two GPUs;
- gathers (two a pass, bf16) and scatters (one, float32): bytes over the measured rate inside a node, over `--network` bytes
  per second and GPU between nodes (an assumption: one 400 Gb/s adapter per GPU at 80 %);
- how much of them computation hides: all that fits under it, `--hidden` of which (measured share of the two GPUs' run);
- memory: `trl_gptoss.memory`, which was compared with the peaks of two GPUs.

Not in it: generation, stragglers, checkpoints, anything that fails.
"""

import argparse
import csv
from dataclasses import dataclass
from pathlib import Path

from trl_gptoss.memory import GIB, TrainSetup, predict_memory
from trl_gptoss.plan_command import load_shape

NETWORK = 0.8 * 400e9 / 8  # bytes per second and GPU
BF16, FLOAT = 2, 4


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What the rows of two GPUs say.

    Args:
        compute (`float`): Seconds of computation of a rank for one shared row of `tokens`.
        tokens (`int`): Tokens of that row.
        hidden (`float`): Share of the collectives that computation hid.
        link (`float`): Bytes per second and direction of a GPU inside a node, gathers.
        exchange (`float`): The same, all-to-all.
    """

    compute: float
    tokens: int
    hidden: float
    link: float
    exchange: float


def read(path: Path) -> list[dict[str, str]]:
    with path.open(encoding="utf-8") as file:
        return list(csv.DictReader(file))


def measured(steps: list[dict[str, str]], collectives: list[dict[str, str]], case: str) -> Measured:
    """From the fastest profiled step of `case`; several rows of a step are shared one after the other.

    Raises:
        ValueError: no profiled step of that case.
    """
    rows = [row for row in steps if row["case"] == case and row["profiled"] == "True"]
    if not rows:
        raise ValueError(f"No profiled step of {case!r} in the rows.")
    row = min(rows, key=lambda row: float(row["seconds"]))
    lengths = [int(length) for length in row["lengths"].split()]
    kinds = ("all_to_all", "all_gather", "reduce_scatter", "all_reduce", "broadcast", "other_nccl")
    busy = sum(float(row[f"{kind}_s"]) for kind in kinds)
    rates = {name: max(float(c["gb_per_s"]) for c in collectives if c["collective"] == name) * 1e9
             for name in ("all_gather", "all_to_all")}  # fmt: skip
    return Measured(
        compute=(float(row["seconds"]) - float(row["exposed_s"])) / len(lengths), tokens=lengths[0],
        hidden=1 - float(row["exposed_s"]) / busy if busy else 1.0, link=rates["all_gather"], exchange=rates["all_to_all"],
    )  # fmt: skip


def predict(found: Measured, nodes: int, per_node: int, network: float) -> dict[str, float]:
    """Seconds of a micro-step in which every group of `per_node` ranks works on `per_node` rows, one after the other."""
    shape, gpus = load_shape("openai/gpt-oss-20b"), nodes * per_node
    turn = found.compute * 2 / per_node
    others = (per_node - 1) / per_node
    width = 2 * (shape.attention_width + shape.kv_width) * BF16  # q, k, v and the output of a token
    exchange = (
        3 * shape.num_layers * found.tokens / per_node * width * others / found.exchange
    )  # checkpointing: 3 passes
    # a rank receives what the others hold; between nodes the adapters of a node work together
    inside, between = shape.parameters * others, shape.parameters * (nodes - 1) / nodes / per_node
    if nodes == 1:
        between = 0.0
    gathers = 2 * BF16 * max(inside / found.link, between / network)
    scatters = FLOAT * max(inside / found.link, between / network)
    hidden = min(found.hidden * (gathers + scatters), turn)
    each = turn + exchange + gathers + scatters - hidden
    setup = TrainSetup(
        tokens=found.tokens, method="full", num_gpus=gpus, sequence_parallel_size=per_node, sharding="fsdp2",
        master_weights=True, experts_token_chunk=32768, fused_elementwise=True,
    )  # fmt: skip
    return {
        "gpus": gpus, "tokens_of_a_row": found.tokens, "row_s": each, "micro_step_s": per_node * each, "compute_s": turn,
        "all_to_all_s": exchange, "gathers_s": gathers, "scatters_s": scatters, "hidden_s": hidden,
        "tokens_per_s": found.tokens * nodes / each, "tokens_per_s_per_gpu": found.tokens / per_node / each,
        "peak_gib": predict_memory(shape, setup).total / GIB,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=Path, required=True)
    parser.add_argument("--collectives", type=Path, required=True)
    parser.add_argument("--case", default="full_fsdp2_sp2")
    parser.add_argument("--nodes", type=int, nargs="+", default=[1, 2, 4, 16])
    parser.add_argument("--per-node", type=int, default=8)
    parser.add_argument("--network", type=float, default=NETWORK, help="bytes per second and GPU between nodes")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    found = measured(read(args.steps), read(args.collectives), args.case)
    rows = [{"prediction": True, "nodes": n, **predict(found, n, args.per_node, args.network)} for n in args.nodes]
    rows = [{k: f"{v:.4g}" if isinstance(v, float) else v for k, v in row.items()} for row in rows]
    print(f"# measured: {found}")
    for row in rows:
        print("  ".join(f"{name}={value}" for name, value in row.items()))
    if args.out:
        with args.out.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, rows[0])
            writer.writeheader()
            writer.writerows(rows)


if __name__ == "__main__":
    main()
