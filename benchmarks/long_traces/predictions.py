"""The planner against the peaks in rows of `steps.py`:  python predictions.py h200.csv packed_h200.csv --out planner_h200.csv

One line for each setting and number of tokens, with the largest peak of its micro-steps. Rows of TRL's trainer count their
padded tokens, packed ones their real ones. `planner.py` measures further configurations by itself.
"""

import argparse
import csv
import json
from pathlib import Path

from table import read, setting

from trl_gptoss.memory import GIB, TrainSetup, predict_memory
from trl_gptoss.plan_command import ModelShape, load_shape

STAMP = ("gpu", "driver", "torch", "triton", "transformers", "trl", "commit", "date")
LEAST = 4096  # tokens: below, the weights are nearly all there is


def predict(row: dict[str, str], tokens: int) -> tuple[dict[str, float], float]:
    """Parts and sum in GiB."""
    whole = load_shape("openai/gpt-oss-20b")
    fields = {name: getattr(whole, name) for name in ModelShape.__dataclass_fields__}
    shape = ModelShape(**{**fields, "num_layers": int(row["layers"])})
    setup = TrainSetup(
        tokens=tokens,
        method=row["method"],
        experts_implementation=row["experts"],
        experts_token_chunk=int(row["experts_token_chunk"]),
        fused_elementwise=row["fused_elementwise"] == "True",
        activation_offloading=row["activation_offloading"] == "True",
    )
    prediction = predict_memory(shape, setup)
    return {name: round(size / GIB, 3) for name, size in prediction.parts.items()}, prediction.total / GIB


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", type=Path, nargs="+", help="files of steps.py")
    parser.add_argument("--out", type=Path, default=Path("planner_h200.csv"))
    args = parser.parse_args()
    largest: dict[tuple, dict[str, str]] = {}
    for path in args.rows:
        for row in read(path):
            tokens = int(row["tokens"] if row["packed"] == "True" else row["padded_tokens"])
            key = (setting(row), row["layers"], tokens)
            if tokens >= LEAST and (key not in largest or float(row["peak_gib"]) > float(largest[key]["peak_gib"])):
                largest[key] = row
    with args.out.open("w", newline="", encoding="utf-8") as file:
        writer = None
        for (name, layers, tokens), row in largest.items():
            parts, predicted = predict(row, tokens)
            measured = float(row["peak_gib"])
            line = {column: row[column] for column in STAMP} | {
                "settings": name, "layers": layers, "tokens": tokens, "weights_gib": row["weights_gib"],
                "measured_gib": measured, "predicted_gib": round(predicted, 3),
                "error": f"{predicted / measured - 1:+.4f}", "parts_gib": json.dumps(parts),
            }  # fmt: skip
            writer = writer or csv.DictWriter(file, line)
            if file.tell() == 0:
                writer.writeheader()
            writer.writerow(line)
            print(f"{line['error']}  {measured:8.3f} {predicted:8.3f}  {layers:>3} layers {tokens:>7} tokens  {name}")


if __name__ == "__main__":
    main()
