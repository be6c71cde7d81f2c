"""What came out, as the tables of docs/reproduction.md:  python benchmarks/reproduction/summary.py [RESULTS]

A line for each task, cause and strength. "reward" is the mean reward of the last steps that all seeds of the cause have, averaged
over the seeds, with the least and the largest; "beyond the seeds" compares it with that of everything right at the same steps:
whether all seeds of a cause are below all of those, or all above; it is a dash where everything right has one seed only. Accuracies are on held-out problems; one that was not measured is
a dash.
"""

import sys
from collections import defaultdict
from pathlib import Path
from statistics import fmean

from causes import CAUSES
from results import Result, check_comparable, read_results

HERE = Path(__file__).resolve().parent
LAST = 5  # steps of a mean
HEADER = (
    "| task | | cause | seeds | steps | reward | beyond the seeds | accuracy before | after | KL to the sampler, first and last "
    "| largest gradient norm |\n|---|---|---|---|---|---|---|---|---|---|---|"
)


def reward_until(result: Result, step: int) -> float:
    """Mean reward of the last `LAST` steps up to `step`."""
    rewards = result.curve("reward")
    return fmean(value for s, value in rewards.items() if step - LAST < s <= step)


def verdict(rewards: list[float], right: list[float]) -> str:
    """How the final rewards of a cause lie to those of everything right: "below", "above" or "no"."""
    if max(rewards) < min(right):
        return "below"
    return "above" if min(rewards) > max(right) else "no"


def accuracy(results: list[Result], row: int) -> str:
    """Mean over the seeds, from the least lower to the largest upper end of their 95 % intervals: they share problems."""
    if not all(result.finished for result in results) and row != 0:
        return "-"
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
        shared = min(len(run.steps) - 1 for run in [*runs, *right])
        rewards = [reward_until(run, shared) for run in runs]
        spread = f" [{min(rewards):.3f}, {max(rewards):.3f}]" if len(runs) > 1 else ""
        what = CAUSES[cause].what + ("" if strength == 1 else f", {strength:.0%} of them")
        compared = verdict(rewards, [reward_until(run, shared) for run in right]) if len(right) > 1 else "-"
        lengths = sorted(len(run.steps) - 1 for run in runs)
        steps = str(lengths[0]) if lengths[0] == lengths[-1] else f"{lengths[0]} to {lengths[-1]}"
        kls = [list(run.curve("mismatch_kl").values()) for run in runs]
        norm = max(value for run in runs for value in run.curve("grad_norm").values())
        drawn.append(
            f"| {task} | {CAUSES[cause].letter} | {what} | {len(runs)} | {steps} | {fmean(rewards):.3f}{spread} | "
            f"{'' if cause == 'right' else compared} | {accuracy(runs, 0)} | {accuracy(runs, -1)} | "
            f"{fmean(kl[0] for kl in kls):.1e}, {fmean(kl[-1] for kl in kls):.1e} | {norm:.2g} |"
        )
    return drawn


def main() -> int:
    results = read_results(Path(sys.argv[1]) if len(sys.argv) > 1 else HERE / "results")
    print("\n".join([HEADER, *lines(results)]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
