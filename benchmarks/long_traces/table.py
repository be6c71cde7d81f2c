"""Tables of the committed rows, in Markdown:  python table.py h200.csv [planner_h200.csv]"""

import argparse
import csv
from collections import defaultdict
from pathlib import Path

Key = tuple[str, ...]
LEVERS = ("attention", "experts", "experts_token_chunk", "fused_elementwise", "activation_offloading")


def read(path: Path) -> list[dict[str, str]]:
    with path.open(encoding="utf-8") as file:
        return list(csv.DictReader(file))


def setting(row: dict[str, str]) -> str:
    """One line for the levers of a row."""
    named = [row["attention"], row["experts"]]
    named += [f"experts_token_chunk={row['experts_token_chunk']}"] if row["experts_token_chunk"] != "0" else []
    named += [name for name in ("fused_elementwise", "activation_offloading") if row[name] == "True"]
    return (
        f"{row['trainer']}: "
        + ", ".join(named)
        + ("" if row["packed"] == "True" or row["trainer"] == "stock" else ", padded")
    )


def optimizer_seconds(rows: list[dict[str, str]]) -> float:
    found = [float(row["optimizer_s"]) for row in rows if row["optimizer_s"]]
    return min(found) if found else 0.0


def single_rows(rows: list[dict[str, str]]) -> dict[str, dict[int, dict[str, float]]]:
    """Setting -> tokens -> best step of one sequence: seconds with the optimizer's, tokens per second, GiB."""
    groups: dict[str, dict[int, list[dict[str, str]]]] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        if row["tokens"] == row["padded_tokens"]:
            groups[setting(row)][int(row["tokens"])].append(row)
    found: dict[str, dict[int, dict[str, float]]] = defaultdict(dict)
    for name, lengths in groups.items():
        for tokens, steps in lengths.items():
            seconds = min(float(row["seconds"]) for row in steps) + optimizer_seconds(steps)
            found[name][tokens] = {
                "seconds": seconds,
                "tokens_per_s": tokens / seconds,
                "above": max(float(row["above_weights_gib"]) for row in steps),
                "peak": max(float(row["peak_gib"]) for row in steps),
                "steps": len(steps),
            }
    return found


def mixes(rows: list[dict[str, str]]) -> dict[str, dict[int, dict[str, float]]]:
    """Setting -> number of the optimizer step -> real tokens per second of rows of several lengths."""
    groups: dict[str, dict[int, list[dict[str, str]]]] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        groups[setting(row)][int(row["generation"])].append(row)
    found: dict[str, dict[int, dict[str, float]]] = defaultdict(dict)
    for name, generations in groups.items():
        for number, steps in generations.items():
            tokens = sum(int(row["tokens"]) for row in steps)
            if all(row["tokens"] == row["padded_tokens"] for row in steps):
                continue
            seconds = sum(float(row["seconds"]) for row in steps) + optimizer_seconds(steps)
            found[name][number] = {
                "tokens": tokens,
                "padded": sum(int(row["padded_tokens"]) for row in steps),
                "seconds": seconds,
                "tokens_per_s": tokens / seconds,
                "peak": max(float(row["peak_gib"]) for row in steps),
            }
    return found


def print_lengths(rows: list[dict[str, str]]) -> None:
    found = single_rows(rows)
    stock = next((steps for name, steps in found.items() if name.startswith("stock")), {})
    print("| tokens | setting | s | tokens/s | of stock | GiB above the weights | of stock | micro-steps |")
    print("|---|---|---|---|---|---|---|---|")
    for tokens in sorted({tokens for steps in found.values() for tokens in steps}):
        for name, steps in found.items():
            if tokens not in steps:
                continue
            step, reference = steps[tokens], stock.get(tokens)
            speed = f"{step['tokens_per_s'] / reference['tokens_per_s']:.2f}x" if reference else ""
            memory = f"{step['above'] / reference['above']:.2f}" if reference and reference["above"] else ""
            print(
                f"| {tokens} | {name} | {step['seconds']:.3f} | {step['tokens_per_s']:.0f} | {speed} | {step['above']:.2f} | "
                f"{memory} | {step['steps']:.0f} |"
            )


def print_mixes(rows: list[dict[str, str]]) -> None:
    found = mixes(rows)
    stock = next((steps for name, steps in found.items() if name.startswith("stock")), {})
    print("| optimizer step | setting | real / padded tokens | s | real tokens/s | of stock | peak GiB |")
    print("|---|---|---|---|---|---|---|")
    for number in sorted({number for steps in found.values() for number in steps}):
        for name, steps in found.items():
            if number in steps:
                step, reference = steps[number], stock.get(number)
                speed = f"{step['tokens_per_s'] / reference['tokens_per_s']:.2f}x" if reference else ""
                print(
                    f"| {number} | {name} | {step['tokens']} / {step['padded']} | {step['seconds']:.2f} | "
                    f"{step['tokens_per_s']:.0f} | {speed} | {step['peak']:.1f} |"
                )
    print_later(found, stock)


def print_later(found: dict[str, dict[int, dict[str, float]]], stock: dict[int, dict[str, float]]) -> None:
    """All steps but the first, in which kernels are compiled, as one."""

    def rate(steps: dict[int, dict[str, float]]) -> float:
        tokens, seconds = (sum(step[n] for step in steps.values()) for n in ("tokens", "seconds"))
        return tokens / seconds

    later = {name: {n: step for n, step in steps.items() if n > 0} for name, steps in found.items()}
    reference = {n: step for n, step in stock.items() if n > 0}
    for name, steps in later.items():
        if steps:
            tokens, padded, seconds = (
                sum(step[n] for step in steps.values()) for n in ("tokens", "padded", "seconds")
            )
            speed = f"{rate(steps) / rate(reference):.2f}x" if reference else ""
            peak = max(step["peak"] for step in steps.values())
            print(
                f"| after 0 | {name} | {tokens} / {padded} | {seconds:.2f} | {rate(steps):.0f} | {speed} | {peak:.1f} |"
            )


def print_planner(rows: list[dict[str, str]]) -> None:
    print("| settings | measured GiB | predicted GiB | error |")
    print("|---|---|---|---|")
    for row in rows:
        print(f"| `{row['settings']}` | {row['measured_gib']} | {row['predicted_gib']} | {row['error']} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("steps", type=Path, help="rows of steps.py, one row per device")
    parser.add_argument("--mixes", type=Path, help="rows of steps.py, several rows per device")
    parser.add_argument("--planner", type=Path, help="rows of planner.py")
    args = parser.parse_args()
    if args.steps.is_file():
        print_lengths(read(args.steps))
    if args.mixes and args.mixes.is_file():
        print_mixes(read(args.mixes))
    if args.planner and args.planner.is_file():
        print_planner(read(args.planner))


if __name__ == "__main__":
    main()
