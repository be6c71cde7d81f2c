"""All cells of the reproduction, one after another, as many as fit into a time budget.

    python benchmarks/reproduction/run_all.py --model outputs/reproduction/model --dense outputs/reproduction/dense \\
      --budget 560

Give the same command again until the table has no open cell: what is finished is skipped, what was begun goes on from its
checkpoint, what failed is tried again. Every cell runs in a process of its own and logs to WORK/<cell>.log. `--list` only
prints the table.
"""

import argparse
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, fields
from pathlib import Path
from statistics import fmean

from causes import CAUSES
from cell import UNFINISHED, Cell, add_cell_arguments, add_place_arguments
from problems import TASKS
from results import read_result

HERE = Path(__file__).resolve().parent
GRACE = 30  # seconds that a cell gets to save when the time is up
MARGIN = 60  # seconds before the end at which a cell stops training: the last measurement, and saving


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Which cells there are.

    tasks (`list[str]`), causes (`list[str]`): all combinations of these.
    seeds (`int`), other_seeds (`int`): seeds of the tool task, and of the others.
    strengths (`list[float]`): further cells of the tool task, with weaker sinks instead of none, for the first seed.
    """

    tasks: list[str]
    causes: list[str]
    seeds: int
    other_seeds: int
    strengths: list[float]

    def cells(self, settings: dict) -> list[Cell]:
        """First every cause with the first seed, then the other seeds, so that a part of the grid says something."""
        grid = []
        for seed in range(max(self.seeds, self.other_seeds)):
            for task in self.tasks:
                if seed >= (self.seeds if task == "tool" else self.other_seeds):
                    continue
                grid += [Cell(task=task, cause=name, seed=seed, **settings) for name in self.causes]
                if task == "tool" and seed == 0 and "no_sinks" in self.causes:
                    grid += [Cell(task=task, cause="no_sinks", strength=s, **settings) for s in self.strengths]
        return grid


def command(cell: Cell, model: Path, work: Path, results: Path, executor: str, budget: float) -> list[str]:
    """How `cell.py` is called for it."""
    line = [sys.executable, str(HERE / "cell.py"), "--model", str(model), "--budget", f"{budget:.0f}"]
    line += ["--work", str(work), "--results", str(results), "--executor", executor]
    for f in fields(Cell):
        line += [f"--{f.name}", str(getattr(cell, f.name))]
    return line


def run_one(line: list[str], log: Path, seconds: float) -> int:
    """Run a cell for at most `seconds`; its exit status. One that does not stop by itself is asked to, then killed."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("a", encoding="utf-8") as file:
        process = subprocess.Popen(line, stdout=file, stderr=subprocess.STDOUT)
        try:
            return process.wait(timeout=seconds)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGTERM)  # the trainer saves its last finished step
        except BaseException:
            process.send_signal(signal.SIGTERM)
            process.wait(timeout=GRACE)
            raise
        try:
            process.wait(timeout=GRACE)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        return UNFINISHED


def state(cell: Cell, work: Path, results: Path, failed: dict[str, Path]) -> str:
    """A line of the table."""
    path = results / f"{cell.name}.csv"
    if path.is_file():
        result = read_result(path)
        before, after = result.accuracies
        rewards = list(result.curve("reward").values())[-10:]
        mismatch = list(result.curve("mismatch_kl").values())
        return (
            f"done     reward {fmean(rewards) if rewards else float('nan'):7.3f}   accuracy {before:.3f} -> {after:.3f}   "
            f"mismatch KL {fmean(mismatch) if mismatch else float('nan'):.1e}"
        )
    if cell.name in failed:
        return f"FAILED   see {failed[cell.name]}"
    steps = [int(p.name.removeprefix("checkpoint-")) for p in (work / cell.name).glob("checkpoint-*")]
    return f"begun    step {max(steps)} of {cell.steps}" if steps else "open"


def table(cells: list[Cell], work: Path, results: Path, failed: dict[str, Path]) -> str:
    width = max(len(cell.name) for cell in cells)
    return "\n".join(f"{cell.name:<{width}}  {state(cell, work, results, failed)}" for cell in cells)


def run(cells: list[Cell], models: dict[bool, Path], work: Path, results: Path, executor: str, budget: float):
    """Run what is not finished until the time is up; returns the logs of the cells that failed."""
    deadline = time.monotonic() + budget
    failed: dict[str, Path] = {}
    for cell in cells:
        left = deadline - time.monotonic()
        if left < 2 * MARGIN:
            break
        if (results / f"{cell.name}.csv").is_file():
            continue
        print(f"{cell.name} ...", flush=True)
        log = work / f"{cell.name}.log"
        line = command(cell, models[CAUSES[cell.cause].dense], work, results, executor, left - MARGIN - GRACE)
        if run_one(line, log, left - GRACE) not in (0, UNFINISHED):
            failed[cell.name] = log
    return failed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", type=Path, required=True, help="made by pretrain.py")
    parser.add_argument("--dense", type=Path, help="made by pretrain.py --dense; without it there is no dense control")
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS))
    parser.add_argument("--causes", nargs="+", choices=list(CAUSES), default=list(CAUSES))
    parser.add_argument("--seeds", type=int, default=3, help="of the tool task")
    parser.add_argument("--other_seeds", type=int, default=1, help="of the other tasks")
    parser.add_argument("--strengths", type=float, nargs="*", default=[0.1, 0.3], help="see cell.py")
    parser.add_argument("--budget", type=float, default=560, help="seconds of this call")
    parser.add_argument("--list", action="store_true", help="only print the table")
    add_cell_arguments(parser, leave_out=("task", "cause", "seed", "strength"))
    add_place_arguments(parser)
    args = vars(parser.parse_args())
    names = {f.name for f in fields(Cell)} - {"task", "cause", "seed", "strength"}
    settings = {name: args[name] for name in names if args[name] is not None}
    causes = [name for name in args["causes"] if args["dense"] is not None or not CAUSES[name].dense]
    plan = Plan(causes=causes, **{f.name: args[f.name] for f in fields(Plan) if f.name != "causes"})
    cells = plan.cells(settings)
    if not cells:
        parser.error("no cell is left: the dense control needs --dense")
    failed: dict[str, Path] = {}
    places = {name: args[name] for name in ("work", "results")}
    if not args["list"]:
        models = {False: args["model"], True: args["dense"]}
        failed = run(cells, models, executor=args["executor"], budget=args["budget"], **places)
    print(table(cells, failed=failed, **places))
    missing = sum(not (args["results"] / f"{cell.name}.csv").is_file() for cell in cells)
    print(
        f"{len(cells) - missing} of {len(cells)} cells are done" + (", give the same command again" if missing else "")
    )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
