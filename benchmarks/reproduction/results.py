"""The CSVs of cells, read back: those of finished ones, and in the folder `unfinished` what others have done so far."""

import csv
import math
from dataclasses import dataclass
from pathlib import Path

from causes import CAUSES

# What has to be the same in all cells that are compared.
SAME = (
    "hardware", "sampler", "precision", "steps", "prompts", "generations", "micro_batches", "learning_rate",
    "kl_coefficient", "train_size", "held_out", "answers", "tool_tokens",
)  # fmt: skip


@dataclass(kw_only=True, slots=True)
class Result:
    """A cell, finished or not.

    path (`Path`): its CSV.
    about (`dict[str, str]`): the columns that are the same in all rows, among others.
    steps (`list[dict[str, str]]`): the rows, step 0 first.
    """

    path: Path
    about: dict[str, str]
    steps: list[dict[str, str]]

    @property
    def finished(self) -> bool:
        """Whether all steps are there, and with them the measurement after the last one."""
        return len(self.steps) == int(self.about["steps"]) + 1

    @property
    def accuracies(self) -> tuple[float, float]:
        """On held-out problems, before and after; for finished cells only."""
        return float(self.steps[0]["accuracy"]), float(self.steps[-1]["accuracy"])

    def curve(self, column: str) -> dict[int, float]:
        """Step to value, without the steps at which it was not logged or is not finite."""
        values = {int(row["step"]): float(row[column]) for row in self.steps if row[column] != ""}
        return {step: value for step, value in values.items() if math.isfinite(value)}


def read_result(path: Path, unfinished: bool = False) -> Result:
    """One CSV.

    Args:
        path (`Path`): the file.
        unfinished (`bool`, *optional*, defaults to `False`): the last steps may be missing.

    Raises:
        `ValueError`: it is not one of a cell, or steps are missing that may not.
    """
    with path.open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    if not rows or "cause" not in rows[0] or rows[0]["cause"] not in CAUSES:
        raise ValueError(
            f"{path} is no result of cell.py: expected rows with a column `cause` out of {', '.join(CAUSES)}"
        )
    found, expected = [int(row["step"]) for row in rows], list(range(int(rows[0]["steps"]) + 1))
    if unfinished:
        expected = expected[: max(1, len(found))]
    if found != expected:
        raise ValueError(f"{path} has {len(found)} rows, expected the steps 0 to {expected[-1]}: run the cell again")
    return Result(path=path, about=rows[0], steps=rows)


def read_results(folder: Path) -> list[Result]:
    """All CSVs of a folder in the order of their names, then those of its folder `unfinished` that were not finished since."""
    done = sorted(folder.glob("*.csv"))
    names = {path.name for path in done}
    begun = [path for path in sorted((folder / "unfinished").glob("*.csv")) if path.name not in names]
    return [read_result(path) for path in done] + [read_result(path, unfinished=True) for path in begun]


def check_comparable(results: list[Result]) -> None:
    """
    Raises:
        `ValueError`: two cells of a task differ in more than cause, strength and seed; says which and in what.
    """
    first: dict[tuple[str, bool, str], Result] = {}
    for result in results:
        dense = CAUSES[result.about["cause"]].dense
        for key, names in (((result.about["task"], False), SAME), ((result.about["task"], dense), ("model",))):
            other = first.setdefault((*key, names[0]), result)
            for name in names:
                if other.about[name] != result.about[name]:
                    raise ValueError(
                        f"{other.path.name} has {name}={other.about[name]}, {result.path.name} has {result.about[name]}: "
                        "they cannot be compared. Run both with the same settings, or move one away."
                    )
