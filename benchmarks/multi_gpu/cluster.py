"""A PREDICTION of step time and memory on many nodes, which nobody here has run on, from pieces that were measured:

    python cluster.py --out cluster_prediction.csv      # from one GPU's rates, and from steps_h200.csv, collectives_h200.csv

A full fine-tuning step of gpt-oss-20b: FSDP2 over all GPUs, float32 master weights, bf16 computation, AdamW, gradient
checkpointing; the 8 GPUs of a node share every sequence. One turn is one packed list of sequences that a node works on, and
every turn gathers all parameters twice and reduces all gradients.

- computation: GPU-seconds of a turn by `trl_gptoss.step_time` (rates of one H200; `source` step_time.py), or those of the kernels in
  the profiled step of two GPUs (`source` its case; FSDP2's copies are in it), divided by the GPUs that share it: kernels are
  taken to be as efficient on an eighth of the heads and tokens;
- all-to-all: bytes over the rate measured inside a node, none of it hidden;
- gathers (bf16, twice) and scatters (float32): bytes over the rate inside a node or between nodes, whichever takes longer. No
  rate between nodes was measured: one 400 Gb/s adapter per GPU at 80 % is assumed (`--network`);
- how much of them computation hides is not known: `least_s` hides all that fits under it, `most_s` nothing;
- memory: `trl_gptoss.memory`.

Not in it: generation, tools, the optimizer, ranks that wait for each other, anything that fails.
"""

import argparse
import csv
from dataclasses import dataclass
from pathlib import Path

from trl_gptoss.memory import GIB, TrainSetup, predict_memory
from trl_gptoss.plan_command import load_shape
from trl_gptoss.step_time import predict_step_time

HERE = Path(__file__).resolve().parent
STEPS, COLLECTIVES = HERE / "steps_h200.csv", HERE / "collectives_h200.csv"
CASE = "full_fsdp2_sp"
NETWORK = 0.8 * 400e9 / 8  # bytes per second and GPU
BF16, FLOAT = 2, 4
SHAPE = load_shape("openai/gpt-oss-20b")
TURNS = ([24576], [24576] * 5, [131072])  # lengths of packed sequences
NODES, PER_NODE = (1, 2, 4, 16), 8


@dataclass(frozen=True, kw_only=True)
class Pieces:
    """What a prediction is made of.

    Args:
        lengths (`list[int]`): Tokens of the sequences of a turn.
        gpu_seconds (`float`): Of computation in a turn, summed over the GPUs that share it.
        link (`float`): Bytes per second and direction of a GPU inside a node, gathers and scatters.
        exchange (`float`): The same, all-to-all.
        source (`str`): Where the seconds come from.
    """

    lengths: list[int]
    gpu_seconds: float
    link: float
    exchange: float
    source: str


def setup(tokens: int, **more: object) -> TrainSetup:
    fixed = {"method": "full", "master_weights": True, "experts_token_chunk": 32768, "fused_elementwise": True}
    return TrainSetup(tokens=tokens, **fixed, **more)


def read(path: Path) -> list[dict[str, str]]:
    with path.open(encoding="utf-8") as file:
        return list(csv.DictReader(file))


def rates_of(collectives: list[dict[str, str]]) -> dict[str, float]:
    """`link` and `exchange` of the largest messages."""

    def best(name: str) -> float:
        return max(float(row["gb_per_s"]) for row in collectives if row["collective"] == name) * 1e9

    return {"link": min(best("all_gather"), best("reduce_scatter")), "exchange": best("all_to_all")}


def from_one_gpu(lengths: list[int], rates: dict[str, float]) -> Pieces:
    seconds = predict_step_time(SHAPE, setup(sum(lengths)), lengths).total
    return Pieces(lengths=lengths, gpu_seconds=seconds, source="step_time.py", **rates)


def from_rows(steps: list[dict[str, str]], case: str, rates: dict[str, float]) -> list[Pieces]:
    """From the fastest profiled step of each kind of rows of `case`, which all its GPUs shared one after the other. Rows of one
    length are a turn each; of a long and a short one, the turn is both.

    Raises:
        ValueError: no profiled step of that case.
    """
    profiled = [row for row in steps if row["case"] == case and row["profiled"] == "True"]
    if not profiled:
        raise ValueError(f"No profiled step of {case!r} in the rows.")
    fastest = {}
    for row in sorted(profiled, key=lambda row: -float(row["seconds"])):
        fastest[row["rows"]] = row
    return [_of_row(row, rates) for _, row in sorted(fastest.items(), reverse=True)]


def _of_row(row: dict[str, str], rates: dict[str, float]) -> Pieces:
    lengths = [int(length) for length in row["lengths"].split()]
    turns = len(lengths) if len(set(lengths)) == 1 else 1
    seconds = float(row["compute_s"]) / turns * int(row["gpus"])
    return Pieces(lengths=lengths[: len(lengths) // turns], gpu_seconds=seconds, source=row["case"], **rates)


def all_turns(steps: Path = STEPS, collectives: Path = COLLECTIVES, case: str = CASE) -> list[Pieces]:
    rates = rates_of(read(collectives))
    return [from_one_gpu(lengths, rates) for lengths in TURNS] + from_rows(read(steps), case, rates)


def predict(pieces: Pieces, nodes: int, per_node: int = PER_NODE, network: float = NETWORK) -> dict[str, object]:
    """One turn on every node."""
    gpus, tokens = nodes * per_node, sum(pieces.lengths)
    compute = pieces.gpu_seconds / per_node
    others = (per_node - 1) / per_node
    width = 2 * (SHAPE.attention_width + SHAPE.kv_width) * BF16  # q, k, v and the output of a token
    exchange = 3 * SHAPE.num_layers * tokens / per_node * width * others / pieces.exchange  # forward, again, backward
    # a GPU receives what its node has and it has not, and its part of what the node has not
    inside, between = SHAPE.parameters * others, SHAPE.parameters * (nodes - 1) / nodes / per_node
    each = max(inside / pieces.link, between / network)
    gathers, scatters = 2 * BF16 * each, FLOAT * each
    most = compute + exchange + gathers + scatters
    least = exchange + max(compute, gathers + scatters)
    shared = setup(tokens, num_gpus=gpus, sequence_parallel_size=per_node, sharding="fsdp2")
    return {
        "prediction": True, "source": pieces.source, "nodes": nodes, "gpus": gpus, "sequences": len(pieces.lengths),
        "tokens": tokens, "compute_s": compute, "all_to_all_s": exchange, "gathers_s": gathers, "scatters_s": scatters,
        "least_s": least, "most_s": most, "tokens_per_s_per_gpu_most": tokens / per_node / least,
        "tokens_per_s_per_gpu_least": tokens / per_node / most, "peak_gib": predict_memory(SHAPE, shared).total / GIB,
    }  # fmt: skip


def table(turns: list[Pieces], network: float = NETWORK) -> list[dict[str, str]]:
    rows = [predict(pieces, nodes, network=network) for pieces in turns for nodes in NODES]
    return [{k: f"{v:.4g}" if isinstance(v, float) else str(v) for k, v in row.items()} for row in rows]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=Path, default=STEPS, help="rows of train_steps.py")
    parser.add_argument("--collectives", type=Path, default=COLLECTIVES)
    parser.add_argument("--case", default=CASE, help="of the rows")
    parser.add_argument("--network", type=float, default=NETWORK, help="bytes per second and GPU between nodes")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    rows = table(all_turns(args.steps, args.collectives, args.case), args.network)
    for row in rows:
        print("  ".join(f"{name}={value}" for name, value in row.items()))
    if args.out:
        with args.out.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, rows[0], lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)


if __name__ == "__main__":
    main()
