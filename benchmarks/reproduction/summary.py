"""What came out, as the tables of docs/reproduction.md:  python benchmarks/reproduction/summary.py [RESULTS]

A line for each task, cause and strength: the reward of the last steps, its mean over the seeds with the least and the largest,
and held-out accuracy before and after. "beyond the seeds" compares a cause with everything right on the same task: whether all
of its seeds end below all of those, or all above.
"""

import sys
from collections import defaultdict
from pathlib import Path
from statistics import fmean

from causes import CAUSES
from results import Result, check_comparable, read_results

HERE = Path(__file__).resolve().parent
LAST = 5  # steps whose mean reward is the final one
HEADER = (
    "| task | | cause | seeds | final reward | beyond the seeds | accuracy before | after | KL to the sampler | largest gradient norm |\n"
    "|---|---|---|---|---|---|---|---|---|---|"
)


def final_reward(result: Result) -> float:
    """Mean reward of the last `LAST` steps."""
    rewards = result.curve("reward")
    return fmean(rewards[step] for step in sorted(rewards)[-LAST:])


def verdict(rewards: list[float], right: list[float]) -> str:
    """How the final rewards of a cause lie to those of everything right: "below", "above" or "no"."""
    if max(rewards) < min(right):
        return "below"
    return "above" if min(rewards) > max(right) else "no"


def accuracy(results: list[Result], row: int) -> str:
    """Mean over the seeds, from the least lower to the largest upper end of their 95 % intervals: they share problems."""
    rows = [result.steps[row] for result in results]
    low, high = min(float(r["low"]) for r in rows), max(float(r["high"]) for r in rows)
    return f"{fmean(float(r['accuracy']) for r in rows):.3f} [{low:.3f}, {high:.3f}]"


def lines(results: list[Result]) -> list[str]:
    """The rows of the table, everything right first in each task."""
    check_comparable(results)
    groups: dict[tuple[str, str, float], list[Result]] = defaultdict(list)
    for result in results:
        groups[result.about["task"], result.about["cause"], float(result.about["strength"])].append(result)
    order = list(CAUSES)
    drawn = []
    for task, cause, strength in sorted(
        groups, key=lambda key: (key[0] != "tool", key[0], order.index(key[1]), -key[2])
    ):
        runs, right = groups[task, cause, strength], groups.get((task, "right", 1.0), [])
        rewards = [final_reward(run) for run in runs]
        spread = f" [{min(rewards):.3f}, {max(rewards):.3f}]" if len(runs) > 1 else ""
        what = CAUSES[cause].what + ("" if strength == 1 else f", {strength:.0%} of them")
        compared = "" if cause == "right" or not right else verdict(rewards, [final_reward(run) for run in right])
        kl = fmean(value for run in runs for value in run.curve("mismatch_kl").values())
        norm = max(value for run in runs for value in run.curve("grad_norm").values())
        drawn.append(
            f"| {task} | {CAUSES[cause].letter} | {what} | {len(runs)} | {fmean(rewards):.3f}{spread} | {compared} | "
            f"{accuracy(runs, 0)} | {accuracy(runs, -1)} | {kl:.1e} | {norm:.2g} |"
        )
    return drawn


def main() -> int:
    results = read_results(Path(sys.argv[1]) if len(sys.argv) > 1 else HERE / "results")
    print("\n".join([HEADER, *lines(results)]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
