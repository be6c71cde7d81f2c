"""Measure, train, measure again: what the examples do around `trainer.train()`."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from trl import GRPOTrainer

from ..report import make_report

FILE_NAME = "evaluation.json"
Measure = Callable[[], list[dict[str, Any]]]


def format_rows(rows: list[dict[str, Any]]) -> str:
    """The rows as a table for the terminal."""
    lines = [f"{'policy':<12}{'environment':<14}{'correct':>12}{'accuracy':>10}   95% interval"]
    for row in rows:
        correct = f"{row['correct']}/{row['problems'] * row['answers']}"
        interval = f"[{row['low']:.3f}, {row['high']:.3f}]"
        lines.append(
            f"{row['policy']:<12}{row.get('environment', '-'):<14}{correct:>12}{row['accuracy']:>10.3f}   {interval}"
        )
    return "\n".join(lines)


def train_and_measure(trainer: GRPOTrainer, before: Measure, after: Measure) -> list[dict[str, Any]]:
    """Train between two measurements; leaves the model, evaluation.json and report.html in the output directory.

    A run that is resumed (`args.resume_from_checkpoint`) keeps the measurement that was made before it was interrupted.
    Every process must call it.

    Args:
        trainer ([`~trl.GRPOTrainer`]): not trained yet.
        before (`Callable`): rows of evaluation.json for the policy before training; an empty list if there is nothing to
            measure on.
        after (`Callable`): the same for the trained policy.
    """
    args = trainer.args
    file = Path(args.output_dir) / FILE_NAME
    resume = args.resume_from_checkpoint
    # a command line's words; true: the last one
    resume = {"true": True, "false": None}.get(str(resume).lower(), resume)
    rows: list[dict[str, Any]] = []
    if resume and file.is_file():
        rows = [row for row in json.loads(file.read_text()) if row["policy"].startswith("before")]
    elif not resume:
        rows = [{"policy": "before RL", **row} for row in before()]
        if trainer.is_world_process_zero():  # now, so that a run that is interrupted and resumed still has it
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(json.dumps(rows, indent=2) + "\n")
    trainer.train(resume_from_checkpoint=resume)
    trainer.save_model()  # now: a measurement that fails must not cost the model
    rows += [{"policy": "after RL", **row} for row in after()]
    trainer.save_state()
    if trainer.is_world_process_zero():
        file.write_text(json.dumps(rows, indent=2) + "\n")
        print(f"\n{format_rows(rows)}\n\nreport: {make_report(file.parent)}")
    return rows
