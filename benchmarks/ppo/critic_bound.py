"""What a critic that knows the tiny task could explain, and what the critic of a run does.

    python benchmarks/ppo/critic_bound.py record FOLDER --seed 3 --steps 60     # rollouts of configs/recipes/tiny_ppo.yaml
    python benchmarks/ppo/critic_bound.py measure FOLDER --out benchmarks/ppo/critic_bound.csv

One row for ten steps. `bound` is the explained variance of the mean return of all their rollouts with the same wording, the same kind
of mistake so far (operator, operand, answer, format) and the same place: means of the very rollouts they are measured on, so a little
too high. `critic` is that of the values before the critic learned from a batch; `critic_first` and `critic_behind_operator` are over one
token a rollout, the first and the one behind the operator (number 10 of mostly 20). The shares are those of the rollouts whose first
mistake is of that kind. A calculator takes the sandbox's place.
"""

import argparse
import os
import re
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoTokenizer, PreTrainedTokenizerBase

sys.path.insert(0, str(Path(__file__).resolve().parent))

from critic_updates import ROOT, Calculator, append, register_executor, retool, stamp  # noqa: E402

from trl_gptoss import GptOssPPOTrainer  # noqa: E402
from trl_gptoss.tasks.retool import OPERATORS, WORDINGS, compute  # noqa: E402

Batch = dict[str, torch.Tensor]
RECORDED = ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask", "policy_mask", "returns", "old_values")
KINDS = ["operator", "operand", "answer", "format"]


def record(folder: Path, seed: int, steps: int, settings: list[str]) -> None:
    """Run the recipe; keep the tokenizer and each generation batch with values and returns."""
    register_executor("calculator", Calculator)
    folder.mkdir(parents=True)

    class Trainer(GptOssPPOTrainer):
        def __init__(self, *positional: Any, **named: Any) -> None:
            super().__init__(*positional, **named)
            self.processing_class.save_pretrained(folder)

        def _add_targets(self, output: dict[str, Any]) -> None:
            super()._add_targets(output)
            number = len(list(folder.glob("batch_*.pt")))
            torch.save({name: output[name].clone() for name in RECORDED}, folder / f"batch_{number:03d}.pt")

    retool.ALGORITHMS["ppo"] = (retool.GptOssPPOConfig, Trainer)
    with tempfile.TemporaryDirectory() as scratch:
        recipe = ["--config", str(ROOT / "configs/recipes/tiny_ppo.yaml"), "--output_dir", scratch]
        recipe += ["--seed", str(seed), "--max_steps", str(steps), "--executor", "calculator", "--held_out_size", "0"]
        retool.main(*retool.parse([*recipe, "--log_completions", "false", "--use_cpu", "true", *settings]))


def load(folder: Path) -> list[Batch]:
    return [torch.load(path) for path in sorted(folder.glob("batch_*.pt"))]


def explained(values: np.ndarray, returns: np.ndarray) -> float:
    return 1 - (returns - values).var(ddof=1) / returns.var(ddof=1)


def first_mistake(question: str, tokens: list[str]) -> tuple[str, str, int]:
    """Wording, kind of the first mistake ("" for none) and its place among the policy tokens."""
    a, b = re.findall(r"\d+", question)
    wordings = {w.format(a=a, b=b): (w, operator) for operator in OPERATORS for w in WORDINGS[operator]}
    wording, operator = next(v for text, v in wordings.items() if text in question)
    result = str(compute(int(a), operator, int(b)))
    call = ["<|channel|>", "analysis", " to", "=", "python", " code", "<|message|>", *a, operator, *b, "<|call|>"]
    right = [*call, "<|channel|>", "final", "<|message|>", *result, "<|return|>"]
    place = next((i for i, (x, y) in enumerate(zip(tokens, right)) if x != y), min(len(tokens), len(right)) - 1)
    if tokens == right:
        return wording, "", len(right)
    if place in (7, 8, 9, 10, 11):
        return wording, "operator" if place == 9 else "operand", place
    return wording, "answer" if place >= 16 else "format", place


def measure(batches: list[Batch], tokenizer: PreTrainedTokenizerBase) -> dict[str, float]:
    states, places, returns, values, kinds = [], [], [], [], Counter()
    for batch in batches:
        for row, mask in enumerate(batch["policy_mask"]):
            question = tokenizer.decode(batch["prompt_ids"][row][batch["prompt_mask"][row].bool()][10:])
            tokens = [tokenizer.decode([i]) for i in batch["completion_ids"][row][mask].tolist()]
            wording, kind, place = first_mistake(question, tokens)
            kinds[kind] += 1
            states += [(wording, kind if i > place else "", i) for i in range(len(tokens))]
            places += range(len(tokens))
            returns += batch["returns"][row][mask].tolist()
            values += batch["old_values"][row][mask].tolist()
    _, cell = np.unique(np.array(states, dtype=str), axis=0, return_inverse=True)
    places, returns, values = map(np.array, (places, returns, values))
    means = np.bincount(cell, returns) / np.bincount(cell)
    shares = {f"share_{kind}": kinds[kind] / kinds.total() for kind in KINDS}
    found = {"bound": explained(means[cell], returns), "critic": explained(values, returns)}
    for name, place in (("first", 0), ("behind_operator", 10)):
        found[f"critic_{name}"] = explained(values[places == place], returns[places == place])
    return {**found, "mean_return": returns.mean(), **shares}


def rounded(row: dict[str, Any]) -> dict[str, Any]:
    return {name: round(value, 4) if isinstance(value, float) else value for name, value in row.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["record", "measure"])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--out", type=Path, help="CSV file to append to")
    parser.add_argument("--recorded", default="tiny_ppo.yaml, seed 3", help="what the column says of the rollouts")
    parser.add_argument("--seed", type=int, default=3)
    parser.add_argument("--steps", type=int, default=60)
    args, settings = parser.parse_known_args()  # what it does not know is for examples/retool.py
    if args.what == "record":
        record(args.folder, args.seed, args.steps, settings)
        return
    tokenizer = AutoTokenizer.from_pretrained(args.folder)
    batches, here = load(args.folder), stamp(f"{os.cpu_count()} CPU cores")
    for first in range(0, len(batches), 10):
        part = batches[first : first + 10]
        steps = {"recorded": args.recorded, "first_step": first + 1, "last_step": first + len(part)}
        append(args.out, here | steps | rounded(measure(part, tokenizer)))


if __name__ == "__main__":
    main()
