"""What one case of h200.py costs beside another one that took turns with it.

    python benchmarks/vllm/overhead.py h200_compiled.csv --case cached --base plain

Steps of the same number and the same commit are a pair (a run, then: a file may hold several). The first three are left out (kernels are compiled), no other one is. For the whole step and
its parts, case / base: the geometric mean of the ratios of all pairs, the same without the lowest and the highest tenth and the
median of the ratios, which hiccups of a shared host hardly move, and the ratio of the sums; each with a 95 % interval from 10000
bootstrap samples of the pairs.
"""

import argparse
import csv
from collections import defaultdict

import numpy as np

WARM_UP = 3
SAMPLES = 10_000
PARTS = ("whole step", "forward, backward, optimizer", "sampling with tools", "sync and probe")


Step = tuple[str, int]  # commit and number


def seconds(path: str, width: str, commit: str | None) -> dict[str, dict[str, dict[Step, float]]]:
    """By case, part and step."""
    found: dict[str, dict[str, dict[Step, float]]] = defaultdict(lambda: defaultdict(dict))
    with open(path, newline="") as file:
        for row in csv.DictReader(file):
            if row["width"] == width and commit in (None, row["commit"]):
                found[row["case"]][row["metric"]][row["commit"], int(row["step"])] = float(row["value"])
    parts: dict[str, dict[str, dict[Step, float]]] = {}
    for case, metrics in found.items():
        parts[case] = {part: {} for part in PARTS}
        for step, whole in metrics["bench/step_seconds"].items():
            rollouts = metrics["bench/rollout_seconds"][step]
            sync = metrics["vllm/sync_seconds"][step] + metrics["vllm/probe_seconds"][step]
            for part, value in zip(PARTS, (whole, whole - rollouts, rollouts - sync, sync), strict=True):
                parts[case][part][step] = value
    return parts


def trimmed(case_N: np.ndarray, base_N: np.ndarray) -> np.ndarray:
    """Geometric mean of the ratios without the tenth at either end."""
    logs_N = np.sort(np.log(case_N / base_N), axis=-1)
    cut = logs_N.shape[-1] // 10
    return np.exp(logs_N[..., cut : logs_N.shape[-1] - cut].mean(-1))


def estimates(case_N: np.ndarray, base_N: np.ndarray) -> dict[str, tuple[float, float, float]]:
    """Value and 95 % interval of each statistic over N pairs of seconds."""
    picked_SN = np.random.default_rng(0).integers(len(case_N), size=(SAMPLES, len(case_N)))

    def with_interval(statistic) -> tuple[float, float, float]:
        low, high = np.quantile(statistic(case_N[picked_SN], base_N[picked_SN]), (0.025, 0.975))
        return float(statistic(case_N, base_N)), float(low), float(high)

    return {
        "geometric mean": with_interval(lambda a, b: np.exp(np.log(a / b).mean(-1))),
        "geometric mean, trimmed": with_interval(trimmed),
        "median": with_interval(lambda a, b: np.median(a / b, axis=-1)),
        "ratio of sums": with_interval(lambda a, b: a.sum(-1) / b.sum(-1)),
    }


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("path", help="rows of h200.py")
    parser.add_argument("--width", default="20b")
    parser.add_argument("--case", default="cached")
    parser.add_argument("--base", default="plain")
    parser.add_argument("--commit", help="of one run")
    args = parser.parse_args()
    found = seconds(args.path, args.width, args.commit)
    for part in PARTS:
        case, base = found[args.case][part], found[args.base][part]
        steps = [step for step in sorted(case) if step in base and step[1] > WARM_UP]
        case_N, base_N = (np.array([values[step] for step in steps]) for values in (case, base))
        medians = f"medians {np.median(base_N):.4f} s, {np.median(case_N):.4f} s"
        print(f"{part}: {len(steps)} pairs, {args.base} and {args.case}: {medians}")
        for name, (value, low, high) in estimates(case_N, base_N).items():
            print(f"    {name} {value:.4f} [{low:.4f}, {high:.4f}]")


if __name__ == "__main__":
    main()
