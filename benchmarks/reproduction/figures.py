"""Draw the figures of the reproduction from its committed rows:  python benchmarks/reproduction/figures.py [--check]

One SVG for each task, group of causes and quantity, in docs/figures/reproduction: the mean over the seeds, as far as all of them
have come, and the area between the least and the largest of them. Folders of further results beside them (other settings, which are
not compared) become folders of figures. With --check nothing is written, and the exit status is 1 if a figure is not the
one that the rows give. Without rows there is nothing to draw, and it says what to run.
"""

import argparse
import math
import sys
from collections import defaultdict
from pathlib import Path
from statistics import fmean

from causes import CAUSES
from results import Result, check_comparable, read_results

from trl_gptoss.report.charts import Series, standalone_svg

HERE = Path(__file__).resolve().parent
FIGURES = HERE.parents[1] / "docs" / "figures" / "reproduction"

QUANTITIES = {
    "reward": "reward",
    "grad_norm": "gradient norm",
    "kl": "log10 of the KL to the first policy",
    "entropy": "entropy",
    "clip_fraction": "clip fraction",
    "log_ppl_mismatch": "log-perplexity, trainer minus sampler",
    "max_log_ratio": "largest |log ratio| of the surrogate",
}
LOGARITHMIC = ("kl",)  # the causes are powers of ten apart
TASK_NAMES = {"tool": "Tool task", "single_turn": "Single turn", "instruction": "Instructions"}

# At most six lines to a figure: as many colours as there are.
GROUPS = {
    "causes": ("right", "no_sinks", "no_sink_gradient", "two_forwards", "nothing_fixed", "dense"),
    "remedies": (
        "right", "no_sinks", "no_sinks_token", "no_sinks_sequence", "no_sinks_geometric", "no_sinks_frozen",
    ),
    "switches": (
        "right", "correction_off", "correction_sequence", "correction_geometric", "attention_frozen", "router_replay",
    ),
    "strength": ("no_sinks",),
}  # fmt: skip

NOTHING = """There are no results in {folder}, so there is nothing to draw. On a machine with an H200:

  python benchmarks/reproduction/pretrain.py outputs/reproduction/model
  python benchmarks/reproduction/pretrain.py outputs/reproduction/dense --dense
  python benchmarks/reproduction/run_all.py --model outputs/reproduction/model --dense outputs/reproduction/dense

(the last one again until it says that all cells are done), then commit the CSVs and run this again."""


def series(label: str, runs: list[Result], column: str) -> Series | None:
    """Mean and range over the seeds at the steps that all of them have; `None` if there are none. Of `LOGARITHMIC` columns the
    logarithms are drawn, where there are any."""
    curves = [run.curve(column) for run in runs]
    if column in LOGARITHMIC:
        curves = [{step: math.log10(value) for step, value in curve.items() if value > 0} for curve in curves]
    steps = sorted(set.intersection(*map(set, curves)))
    if not steps:
        return None
    values = {step: [curve[step] for curve in curves] for step in steps}
    band = [(step, min(v), max(v)) for step, v in values.items()] if len(runs) > 1 else []
    seeds = f"{len(runs)} seeds" if len(runs) > 1 else "1 seed"
    points = [(float(step), fmean(v)) for step, v in values.items()]
    return Series(label=f"{label} ({seeds})", points=points, band=band)


def lines(task: str, group: str, results: list[Result]) -> dict[str, list[Result]]:
    """Label to runs, in the order of the legend. "strength" has a line for each strength of the fault, the others one for
    each cause (with all of the fault)."""
    runs: dict[str, list[Result]] = defaultdict(list)
    for name in GROUPS[group]:
        mine = [r for r in results if r.about["task"] == task and r.about["cause"] == name]
        for run in sorted(mine, key=lambda r: (float(r.about["strength"]), int(r.about["seed"]))):
            strength = float(run.about["strength"])
            if group == "strength":
                runs[f"{strength:.0%} of the sinks missing"].append(run)
            elif strength == 1:
                runs[CAUSES[name].what].append(run)
    return runs


def all_figures(folder: Path) -> dict[str, str]:
    """File name, below the folder of figures, to content: of `folder` and of the folders in it."""
    drawn = figures(read_results(folder))
    for other in sorted(path for path in folder.glob("*") if path.is_dir() and path.name != "unfinished"):
        drawn |= {f"{other.name}/{name}": svg for name, svg in figures(read_results(other)).items()}
    return drawn


def figures(results: list[Result]) -> dict[str, str]:
    """File name to content, for what there are at least two lines of."""
    check_comparable(results)
    drawn = {}
    for task, title in TASK_NAMES.items():
        for group in GROUPS:
            found = lines(task, group, results)
            if len(found) < 2 or (group != "causes" and found.keys() <= lines(task, "causes", results).keys()):
                continue  # nothing to compare, or nothing that the first figure does not show
            tokens = next(iter(found.values()))[0].about["tool_tokens"]
            heading = f"{title} ({tokens} tokens)" if task == "tool" else title
            for column, quantity in QUANTITIES.items():
                curves = [s for label, runs in found.items() if (s := series(label, runs, column)) is not None]
                svg = standalone_svg(f"{heading}: {quantity}", curves)
                if svg:
                    drawn[f"{task}_{group}_{column}.svg"] = svg
    return drawn


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--check", action="store_true", help="only say which figures are out of date")
    parser.add_argument("--results", type=Path, default=HERE / "results", help="folder with the CSVs")
    parser.add_argument("--out", type=Path, default=FIGURES, help="folder for the SVGs")
    args = parser.parse_args()
    if not read_results(args.results):
        print(NOTHING.format(folder=args.results))
        return 1
    old = []
    for name, content in all_figures(args.results).items():
        path = args.out / name
        if path.is_file() and path.read_text(encoding="utf-8") == content:
            continue
        old.append(name)
        if not args.check:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(content, encoding="utf-8")
    print(f"{'out of date' if args.check else 'drawn'}: {', '.join(old) or 'none'}")
    return 1 if args.check and old else 0


if __name__ == "__main__":
    sys.exit(main())
