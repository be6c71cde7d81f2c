"""All cells of the reproduction, one after another, as many as fit into a time budget.

    python benchmarks/reproduction/run_all.py --model outputs/reproduction/model --dense outputs/reproduction/dense \\
      --budget 560 --jobs 6

Give the same command again until the table has no open cell: what is finished is skipped, what was begun goes on from its
checkpoint, what failed is tried again. Every cell runs in a process of its own and logs to WORK/<cell>.log; `--jobs` of them
share the GPU, which one such model does not fill. `--list` only prints the table.
"""

import argparse
import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from statistics import fmean

from causes import CAUSES
from cell import UNFINISHED, Cell, add_cell_arguments, add_place_arguments
from problems import TASKS
from results import Result, read_result

HERE = Path(__file__).resolve().parent
GRACE = 30  # seconds that a cell gets to save when the time is up
MARGIN = 60  # seconds before that at which a cell stops training: the last measurement, and saving


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


def run_one(line: list[str], log: Path, seconds: float, threads: int, grace: float) -> int:
    """Run a cell for at most `seconds`; its exit status. One that does not stop by itself is asked to, `grace` seconds later
    killed."""
    log.parent.mkdir(parents=True, exist_ok=True)
    environment = {"OMP_NUM_THREADS": str(threads), **os.environ}
    with log.open("a", encoding="utf-8") as file:
        process = subprocess.Popen(line, stdout=file, stderr=subprocess.STDOUT, env=environment)
        try:
            return process.wait(timeout=seconds)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGTERM)  # the trainer saves its last finished step
        try:
            process.wait(timeout=grace)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        return UNFINISHED


def finished(cell: Cell, results: Path) -> Result | None:
    """The result of a cell, `None` if there is none yet.

    Raises:
        `ValueError`: there is one, but of other settings.
    """
    path = results / f"{cell.name}.csv"
    if not path.is_file():
        return None
    result = read_result(path)
    for name, value in asdict(cell).items():
        # the default of the precision is the machine's, and a table may be printed on another one
        if name != "precision" and result.about[name] != str(value):
            raise ValueError(
                f"{path} was made with {name}={result.about[name]}, this call has {value}: use another --results, or the "
                "settings of before"
            )
    return result


def state(cell: Cell, work: Path, results: Path, failed: dict[str, Path]) -> str:
    """A line of the table."""
    result = finished(cell, results)
    if result is not None:
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


def run(
    cells: list[Cell],
    models: dict[bool, Path],
    work: Path,
    results: Path,
    executor: str,
    budget: float,
    jobs: int = 1,
    margin: float = MARGIN,
) -> dict[str, Path]:
    """Run what is not finished until the time is up.

    Args:
        cells (`list[Cell]`): in the order in which they are begun.
        models (`dict[bool, Path]`): the GPT-OSS shape under `False`, the dense control under `True`.
        work, results, executor: see `cell.run_cell`.
        budget (`float`): seconds for all of them.
        jobs (`int`, *optional*, defaults to 1): how many run at the same time.
        margin (`float`, *optional*, defaults to `MARGIN`): seconds that a cell keeps for its last measurement.

    Returns:
        `dict[str, Path]`: the logs of those that failed.
    """
    deadline = time.monotonic() + budget
    waiting = iter([cell for cell in cells if finished(cell, results) is None])
    failed: dict[str, Path] = {}
    grace = min(GRACE, margin)
    lock, interrupted = threading.Lock(), threading.Event()

    def worker() -> None:
        while not interrupted.is_set():
            with lock:
                cell = next(waiting, None)
            left = deadline - time.monotonic()
            if cell is None or left < 2 * margin:
                return
            print(f"{cell.name} ...", flush=True)
            log = work / f"{cell.name}.log"
            line = command(cell, models[CAUSES[cell.cause].dense], work, results, executor, left - margin - grace)
            threads = max(1, os.cpu_count() // jobs)
            if run_one(line, log, left - grace, threads, grace) not in (0, UNFINISHED):
                failed[cell.name] = log

    with ThreadPoolExecutor(jobs) as pool:
        try:
            for future in [pool.submit(worker) for _ in range(jobs)]:
                future.result()
        except BaseException:  # Ctrl-C has reached the cells, too: they save, and no other is begun
            interrupted.set()
            raise
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
    parser.add_argument("--jobs", type=int, default=1, help="cells that run at the same time")
    parser.add_argument(
        "--margin", type=float, default=MARGIN, help="seconds of it for the last measurement of a cell"
    )
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
    if args["jobs"] < 1:
        parser.error(f"--jobs is {args['jobs']}, it must be at least 1")
    failed: dict[str, Path] = {}
    places = {name: args[name] for name in ("work", "results")}
    if not args["list"]:
        models = {False: args["model"], True: args["dense"]}
        failed = run(
            cells,
            models,
            executor=args["executor"],
            budget=args["budget"],
            jobs=args["jobs"],
            margin=args["margin"],
            **places,
        )
    print(table(cells, failed=failed, **places))
    missing = sum(finished(cell, args["results"]) is None for cell in cells)
    print(
        f"{len(cells) - missing} of {len(cells)} cells are done" + (", give the same command again" if missing else "")
    )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
