"""Draw the figures of docs/gallery.md from the committed rows:  python benchmarks/figures.py [--check]

With --check nothing is written, and the exit status is 1 if a figure is not the one that the rows give.
"""

import argparse
import csv
import json
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path

from transformers import GptOssConfig

from trl_gptoss.memory import ModelShape, TrainSetup, predict_memory
from trl_gptoss.report.charts import Series, standalone_svg

ROOT = Path(__file__).resolve().parents[1]
FIGURES = ROOT / "docs" / "figures"


def rows(path: str) -> list[dict[str, str]]:
    with (ROOT / path).open(encoding="utf-8") as file:
        return list(csv.DictReader(file))


def retool_tiny() -> str:
    """Held-out accuracy of each seed before and after RL, and with the tool out of order."""
    curves = defaultdict(list)
    for row in rows("benchmarks/retool_tiny.csv"):
        label = row["policy"] if row["tool"] == "python" else f"{row['policy']}, tool unavailable"
        curves[label].append((float(row["seed"]), float(row["accuracy"])))
    return _draw("Tiny ReTool: held-out accuracy by seed", curves)


def experts(mode: str, title: str) -> str:
    """TFLOP/s of one layer of 32 experts over tokens."""
    curves = defaultdict(list)
    for row in rows("benchmarks/experts/h200.csv"):
        if row["case"] == "layer" and row["experts"] == "32" and row["mode"] == mode and float(row["tflops"]) > 0:
            curves[row["implementation"]].append((float(row["tokens"]), float(row["tflops"])))
    return _draw(title, curves)


def long_rows(column: str, best: Callable[[Iterable[float]], float], title: str) -> str:
    """One sequence on one GPU: a column over thousands of tokens, for stock TRL and ours."""
    found = defaultdict(lambda: defaultdict(list))
    for row in rows("benchmarks/long_traces/h200.csv"):
        if row["tokens"] == row["padded_tokens"]:
            label = "TRL 1.16, FA4, grouped_mm" if row["trainer"] == "stock" else "ours"
            label += ", checkpoints on the host" if row["activation_offloading"] == "True" else ""
            found[label][int(row["tokens"]) / 1024].append(float(row[column]))
    return _draw(title, {label: [(x, best(y)) for x, y in points.items()] for label, points in found.items()})


def mixed_rows() -> str:
    """Log-normal lengths: real tokens per second of every optimizer step."""
    names = {("stock", "False"): "TRL 1.16, FA4, grouped_mm, padded", ("ours", "True"): "ours, packed"}
    steps = defaultdict(lambda: defaultdict(lambda: [0, 0.0]))
    for row in rows("benchmarks/long_traces/mixed_h200.csv"):
        step = steps[names.get((row["trainer"], row["packed"]), "ours, padded")][int(row["generation"])]
        step[0] += int(row["tokens"])
        step[1] += float(row["seconds"]) + float(row["optimizer_s"] or 0)
    curves = {name: [(number, t / s) for number, (t, s) in found.items()] for name, found in steps.items()}
    return _draw("GRPO step of the 20B, log-normal lengths: real tokens/s by optimizer step", curves)


def planner() -> str:
    """Predicted and measured peak of every configuration."""
    found = rows("benchmarks/long_traces/planner_h200.csv") + rows("benchmarks/long_traces/planner_levers_h200.csv")
    curves = {
        name: [(number, float(row[f"{name}_gib"])) for number, row in enumerate(found, 1)]
        for name in ("measured", "predicted")
    }
    return _draw("Peak of a train step in GiB, by configuration (H200)", curves)


def shared_rows() -> str:
    """LoRA on the 20B: GiB above the weights over the GPUs that share a sequence. More than were there are the planner's."""
    cases = {"lora_one": 1, "lora_one_long": 1, "lora_ddp_sp": 2}
    shape, gib = ModelShape.from_config(GptOssConfig(num_hidden_layers=24, num_local_experts=32)), 2**30
    curves = defaultdict(dict)
    for row in rows("benchmarks/multi_gpu/steps_h200.csv"):
        tokens = int(row["lengths"].split()[0])
        if row["case"] in cases and tokens >= 24576:
            above = float(row["peak_gib"]) - json.loads(row["planner_parts_gib"])["weights"]
            measured = curves[f"{tokens // 1024}k, measured"]
            measured[cases[row["case"]]] = max(above, measured.get(cases[row["case"]], 0.0))
    for tokens in (24576, 131072):
        for size in (1, 2, 4, 8):
            setup = TrainSetup(
                tokens=tokens, num_gpus=size, sequence_parallel_size=size, experts_token_chunk=32768, fused_elementwise=True
            )  # fmt: skip
            memory = predict_memory(shape, setup)
            curves[f"{tokens // 1024}k, planner"][size] = (memory.total - memory.parts["weights"]) / gib
    points = {label: [(float(size), value) for size, value in curve.items()] for label, curve in curves.items()}
    return _draw("LoRA step of the 20B: GiB above the weights by GPUs to a sequence (H200)", points)


def router_replay() -> str:
    """KL of each step's batch, replayed and not."""
    names = {"rollout_correction/kl_k3": "with replay", "bench/kl_k3_without_replay": "the same batches without"}
    curves = defaultdict(list)
    for row in rows("benchmarks/vllm/h200.csv"):
        if (row["width"], row["case"], row["learning_rate"]) == ("20b", "replay", "2e-06") and row["metric"] in names:
            curves[names[row["metric"]]].append((float(row["step"]), float(row["value"])))
    return _draw("Router replay: KL (k3) by step (H200)", curves)


def _draw(title: str, curves: dict[str, list[tuple[float, float]]]) -> str:
    return standalone_svg(title, [Series(label=k, points=sorted(v), markers=True) for k, v in curves.items()])


def figures() -> dict[str, str]:
    """File name to content."""
    return {
        "retool_tiny.svg": retool_tiny(),
        "experts_eval.svg": experts("eval", "Experts, forward only: TFLOP/s over tokens (H200, 32 experts)"),
        "experts_trained.svg": experts(
            "trained", "Experts, forward and backward: TFLOP/s over tokens (H200, 32 experts)"
        ),
        "long_speed.svg": long_rows(
            "tokens_per_s", max, "GRPO step of the 20B, one sequence: tokens/s over thousands of tokens"
        ),
        "long_memory.svg": long_rows(
            "above_weights_gib", max, "GRPO step of the 20B: GiB above the weights over thousands of tokens"
        ),
        "long_mixed.svg": mixed_rows(),
        "planner.svg": planner(),
        "shared_memory.svg": shared_rows(),
        "router_replay.svg": router_replay(),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--check", action="store_true", help="only say which figures are out of date")
    args = parser.parse_args()
    old = []
    for name, content in figures().items():
        path = FIGURES / name
        if path.is_file() and path.read_text(encoding="utf-8") == content:
            continue
        old.append(name)
        if not args.check:
            path.write_text(content, encoding="utf-8")
    print(f"{'out of date' if args.check else 'drawn'}: {', '.join(old) or 'none'}")
    return 1 if args.check and old else 0


if __name__ == "__main__":
    sys.exit(main())
