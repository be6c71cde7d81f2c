"""What a critic learns from recorded rollouts, by its settings; and what a critic that knows the task could.

    python benchmarks/ppo/critic_offline.py record FOLDER --seed 3 --steps 15     # rollouts of configs/recipes/tiny_ppo.yaml
    python benchmarks/ppo/critic_offline.py train FOLDER --out benchmarks/ppo/critic_offline.csv --lr 1e-3 --epochs 4
    python benchmarks/ppo/critic_offline.py bound FOLDER --out benchmarks/ppo/critic_bound.csv

`train` feeds the batches in their order to a fresh critic, asks it for the values of each before it learns from it, and writes the
mean explained variance of the last five: over all policy tokens, and over the tokens at single places of a rollout (of the usual 20,
number 9 is the operator, so that a value knows it from number 10 on). `--replay n` puts n rows of earlier batches beside each row.
`bound` is the explained variance of the mean return of all rollouts with the same wording, the same kind of mistake so far (operator,
operand, answer, format) and the same place, over ten batches: means of the very rollouts they are measured on, so a little too high.
"""

import argparse
import csv
import datetime
import os
import random
import re
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase

sys.path.insert(0, str(Path(__file__).resolve().parent))

from critic_updates import ROOT, Calculator, register_executor, retool  # noqa: E402

from trl_gptoss import GptOssPPOTrainer  # noqa: E402
from trl_gptoss.tasks.retool import OPERATORS, WORDINGS, compute  # noqa: E402
from trl_gptoss.trainers.value_head import SeparateCritic, split_values  # noqa: E402

Batch = dict[str, torch.Tensor]
RECORDED = ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask", "policy_mask", "returns")
PLACES = {"first": 0, "operator": 9, "behind_operator": 10, "second_turn": 13, "last": 19}
MEASURED = ["explained_variance", *(f"explained_variance_{place}" for place in PLACES)]
KINDS = ["operator", "operand", "answer", "format"]


def record(folder: Path, seed: int, steps: int, settings: list[str]) -> None:
    """Run the recipe; keep the policy that it starts from and each generation batch with its returns."""
    register_executor("calculator", Calculator)
    folder.mkdir(parents=True)

    class Trainer(GptOssPPOTrainer):
        def __init__(self, *positional: Any, **named: Any) -> None:
            super().__init__(*positional, **named)
            self.save_model(str(folder / "policy"))

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


def values_of(critic: SeparateCritic, batch: Batch, rows: torch.Tensor) -> torch.Tensor:
    """(rows, T)"""
    ids = torch.cat([batch["prompt_ids"][rows], batch["completion_ids"][rows]], 1)
    mask = torch.cat([batch["prompt_mask"][rows], batch["completion_mask"][rows]], 1)
    return split_values(critic(ids, mask, batch["completion_ids"].shape[1]), batch["policy_mask"][rows])[0]


def update(critic: SeparateCritic, optimizer: torch.optim.Optimizer, parts: list[tuple[Batch, torch.Tensor]]) -> None:
    tokens = sum(batch["policy_mask"][rows].sum() for batch, rows in parts)
    for batch, rows in parts:
        error = torch.where(batch["policy_mask"][rows], values_of(critic, batch, rows) - batch["returns"][rows], 0)
        (error.square().sum() / 2 / tokens).backward()
    for part in (critic.head, critic.backbone):
        torch.nn.utils.clip_grad_norm_(part.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()


def train(args: argparse.Namespace) -> dict[str, float]:
    batches = load(args.folder)
    random.seed(0)
    torch.manual_seed(0)
    policy = AutoModelForCausalLM.from_pretrained(args.folder / "policy", experts_implementation="grouped_mm")
    critic = SeparateCritic(policy.model)
    optimizer = torch.optim.AdamW(critic.parameters(), lr=args.lr, weight_decay=0.0)
    per_batch, at_place = [], {place: [] for place in PLACES}
    for number, batch in enumerate(batches):
        size = len(batch["returns"])
        mask = batch["policy_mask"].numpy()
        with torch.no_grad():
            values = values_of(critic, batch, torch.arange(size)).numpy()
        returns = batch["returns"].numpy()
        per_batch.append(explained(values[mask], returns[mask]))
        if number >= len(batches) - 5:
            order = mask.cumsum(1) - 1
            for place, at in PLACES.items():
                chosen = mask & (order == at)
                at_place[place].append((values[chosen], returns[chosen]))
        for _ in range(args.epochs):
            for rows in torch.randperm(size).chunk(args.mini_batches):
                earlier = [random.choice(batches[: number + 1]) for _ in range(args.replay)]
                replayed = [(b, torch.randperm(len(b["returns"]))[: len(rows)]) for b in earlier]
                update(critic, optimizer, [(batch, rows), *replayed])
    result = {f"explained_variance_{p}": explained(*map(np.concatenate, zip(*at_place[p]))) for p in PLACES}
    return {"explained_variance": float(np.mean(per_batch[-5:])), **result}


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


def bound(batches: list[Batch], tokenizer: PreTrainedTokenizerBase) -> dict[str, float]:
    states, returns, kinds = [], [], Counter()
    for batch in batches:
        for row, mask in enumerate(batch["policy_mask"]):
            question = tokenizer.decode(batch["prompt_ids"][row][batch["prompt_mask"][row].bool()][10:])
            tokens = [tokenizer.decode([i]) for i in batch["completion_ids"][row][mask].tolist()]
            wording, kind, place = first_mistake(question, tokens)
            kinds[kind] += 1
            states += [(wording, kind if i > place else "", i) for i in range(len(tokens))]
            returns += batch["returns"][row][mask].tolist()
    _, cell = np.unique(np.array(states, dtype=str), axis=0, return_inverse=True)
    returns = np.array(returns)
    means = np.bincount(cell, returns) / np.bincount(cell)
    shares = {f"share_{kind}": kinds[kind] / kinds.total() for kind in KINDS}
    return {"bound": explained(means[cell], returns), "mean_return": returns.mean(), **shares}


def write(path: Path, row: dict[str, Any]) -> None:
    git = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    stamp = {"date": datetime.date.today().isoformat(), "commit": git.stdout.strip()}
    stamp |= {"machine": f"{os.cpu_count()} CPU cores", "torch": torch.__version__}
    row = stamp | {name: round(v, 4) if isinstance(v, float) else v for name, v in row.items()}
    new = not path.exists()
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, list(row))
        if new:
            writer.writeheader()
        writer.writerow(row)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["record", "train", "bound"])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--out", type=Path, help="CSV file to append to")
    parser.add_argument("--recorded", default="tiny_ppo.yaml, seed 3", help="what the column says of the rollouts")
    parser.add_argument("--seed", type=int, default=3)
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--mini_batches", type=int, default=8)
    parser.add_argument("--replay", type=int, default=0)
    parser.add_argument("settings", nargs="*", help="for examples/retool.py, behind --")
    args = parser.parse_args()
    if args.what == "record":
        record(args.folder, args.seed, args.steps, args.settings)
    elif args.what == "train":
        settings = {name: getattr(args, name) for name in ("recorded", "lr", "epochs", "mini_batches", "replay")}
        write(args.out, settings | {"batches": len(load(args.folder))} | train(args))
    else:
        tokenizer = AutoTokenizer.from_pretrained(args.folder / "policy")
        batches = load(args.folder)
        for first in range(0, len(batches), 10):
            part = batches[first : first + 10]
            steps = {"recorded": args.recorded, "first_step": first + 1, "last_step": first + len(part)}
            write(args.out, steps | bound(part, tokenizer))


if __name__ == "__main__":
    main()
