"""How fast a critic learns by its updates per batch: `make retool ALGORITHM=ppo` on the tiny model, one row per step.

    python benchmarks/ppo/critic_updates.py --out benchmarks/ppo/critic_updates.csv --seed 0 --steps 30 \
        -- --critic_epochs 2 --critic_mini_batches 4 --critic_learning_rate 1e-3

What stands behind `--` goes to examples/retool.py. A calculator in the same process takes the sandbox's place, so that it runs
where sandboxes cannot be made.
"""

import argparse
import ast
import csv
import datetime
import operator
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "examples"))
sys.path.append(str(ROOT / "benchmarks/common"))

import retool  # noqa: E402
from stamp import commit  # noqa: E402

from trl_gptoss import GptOssPPOTrainer  # noqa: E402
from trl_gptoss.environments.executor import ExecutionResult, register_executor  # noqa: E402

OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul}
SETTINGS = ("critic_epochs", "critic_mini_batches", "critic_learning_rate", "critic_warmup_steps", "lr_scheduler_type")


class Calculator:
    """Executes sums, differences and products of integers."""

    def probe(self) -> None:
        """It runs everywhere."""

    def run(self, code: str, *, timeout: float, output_limit: int) -> ExecutionResult:
        try:
            return ExecutionResult(text=f"{value(ast.parse(code.strip(), mode='eval').body)}\n")
        except (SyntaxError, ValueError) as error:
            return ExecutionResult(text=f"{type(error).__name__}: {error}\n"[:output_limit], failed=True)

    def session(self) -> Any:
        raise NotImplementedError("a calculator has no variables; leave `stateful` off")

    def close(self) -> None:
        """Nothing is held."""


def value(node: ast.expr) -> int:
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
        return OPERATORS[type(node.op)](value(node.left), value(node.right))
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -value(node.operand)
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return node.value
    raise ValueError("only sums, differences and products of integers")


def stamp(machine: str) -> dict[str, str]:
    """What every row says about where it comes from."""
    today = datetime.date.today().isoformat()
    return {"date": today, "commit": commit(), "machine": machine, "torch": torch.__version__}


def append(path: Path, row: dict[str, Any]) -> None:
    """Write a row, below a header if the file is new."""
    new = not path.exists()
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, list(row))
        if new:
            writer.writeheader()
        writer.writerow(row)


class Recorder(TrainerCallback):
    """One row per step, written at once."""

    def __init__(self, path: Path, machine: str) -> None:
        self.path, self.stamp = path, stamp(machine)

    def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        logs = state.log_history[-1]
        if "explained_variance" not in logs:
            return
        measured = {name: round(logs[name], 4) for name in ("reward", "explained_variance")}
        settings = {name: getattr(args, name) for name in SETTINGS}
        run = {"executor": args.executor, "seed": args.seed, **settings}
        append(self.path, {**self.stamp, **run, "step": logs["step"], **measured})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="CSV file to append to")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--machine", default=f"{os.cpu_count()} CPU cores", help="what the column says")
    parser.add_argument("settings", nargs="*", help="for examples/retool.py")
    args = parser.parse_args()
    register_executor("calculator", Calculator)
    recorder = Recorder(args.out, args.machine)

    class Trainer(GptOssPPOTrainer):
        def __init__(self, *positional: Any, **named: Any) -> None:
            super().__init__(*positional, **named)
            self.add_callback(recorder)

    retool.ALGORITHMS["ppo"] = (retool.GptOssPPOConfig, Trainer)
    with tempfile.TemporaryDirectory() as folder:
        recipe = ["--config", str(ROOT / "configs/recipes/tiny_ppo.yaml"), "--output_dir", folder]
        recipe += ["--seed", str(args.seed), "--max_steps", str(args.steps), "--executor", "calculator"]
        recipe += ["--held_out_size", "0", "--log_completions", "false", "--use_cpu", "true"]
        retool.main(*retool.parse([*recipe, *args.settings]))


if __name__ == "__main__":
    main()
