"""One run of the reproduction: a cause, a task, a seed.

    python benchmarks/reproduction/cell.py --model outputs/reproduction/model --cause no_sinks --task tool --seed 0

The policy is measured on held-out problems, trained, and measured again; RESULTS/<cell>.csv then has a row for each
optimizer step, with the machine and the whole configuration in every row. A run that was interrupted goes on from its last
checkpoint when the same command is given again. `--budget` ends it in time: exit status 3 says that steps are missing.

`--sampler vllm` samples with a colocated vLLM instead of the policy itself (not run yet).
"""

import argparse
import csv
import hashlib
import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import torch
from arithmetic import register_arithmetic
from causes import CAUSES, CORRECTIONS, Cause, cause
from faults import register_fault
from machine import COLUMNS, machine_info
from problems import TASKS, load_problems
from trainer import ReproductionTrainer
from transformers import AutoConfig, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from trl_gptoss import GptOssGRPOConfig
from trl_gptoss.evaluation import Outcomes
from trl_gptoss.tasks import gsm8k, retool, verify_if
from trl_gptoss.trainers.checkpointing import last_complete_checkpoint

HERE = Path(__file__).resolve().parent
UNFINISHED = 3  # exit status

# max_turns, max_rollout_tokens; `Cell.tool_tokens` of the tool task
BUDGETS = {"tool": (6, None), "single_turn": (1, 64), "instruction": (1, 64)}
REWARDS = {"tool": retool.REWARDS, "single_turn": gsm8k.REWARDS, "instruction": verify_if.REWARDS}

# A column of the CSV, and what the trainer logs it as.
METRICS = {
    "reward": "reward",
    "grad_norm": "grad_norm",
    "kl": "kl",
    "entropy": "entropy",
    "clip_fraction": "clip_ratio/region_mean",
    "max_log_ratio": "on_policy/max_log_ratio",
    "max_log_ratio_recomputed": "on_policy/max_log_ratio_recomputed",
    "log_ppl_mismatch": "rollout_correction/log_ppl_diff",
    "mismatch_kl": "rollout_correction/kl_k3",
    "mismatch_max_ratio": "rollout_correction/ratio_max",
    "kept_fraction": "rollout_correction/kept_fraction",
    "weights_ess": "rollout_correction/ess_weights",
    "routes_differ": "router_replay/own_choice_differs",
    "mean_tokens": "completions/mean_length",
}
EVALUATION = ("problems", "accuracy", "low", "high")


@dataclass(frozen=True, kw_only=True)
class Cell:
    """What determines a run; every field is a column of its CSV. The learning rate is not tuned.

    task (`str`), cause (`str`), seed (`int`): which cell.
    strength (`float`): of the fault `no_sinks`: the share of the sinks that is missing.
    steps (`int`): optimizer steps.
    prompts (`int`), generations (`int`), micro_batches (`int`): prompts of a step, rollouts of each, and into how many
        micro-batches their product is divided.
    learning_rate (`float`), kl_coefficient (`float`): of GRPO.
    sampler (`str`): `"transformers"`: the policy itself; `"vllm"`.
    precision (`str`): `"bf16"`: autocast, weights in float32; `"float32"`.
    train_size (`int`), held_out (`int`), answers (`int`): problems to train on, held-out ones, answers sampled to each of
        those.
    tool_tokens (`int`): most tokens of a rollout of the tool task after its prompt, tool results included. Right ones of four
        steps have up to 126.
    """

    task: str
    cause: str
    seed: int = 0
    strength: float = 1.0
    steps: int = 100
    prompts: int = 24
    generations: int = 8
    micro_batches: int = 4
    learning_rate: float = 1e-4
    kl_coefficient: float = 1e-3
    sampler: str = "transformers"
    precision: str = field(default_factory=lambda: "bf16" if torch.cuda.is_available() else "float32")
    train_size: int = 4000
    held_out: int = 200
    answers: int = 1
    tool_tokens: int = 192

    def __post_init__(self) -> None:
        for name, found, expected in (
            ("task", self.task, TASKS),
            ("sampler", self.sampler, ("transformers", "vllm")),
            ("precision", self.precision, ("bf16", "float32")),
        ):
            if found not in expected:
                raise ValueError(f"{name} is {found!r}, expected one of {', '.join(expected)}")
        fault = cause(self.cause).fault
        if fault is not None:
            register_fault(fault, self.strength)
        elif self.strength != 1:
            raise ValueError(f"strength={self.strength}, but the cause {self.cause!r} has no fault in the attention")
        if self.prompts * self.generations % self.micro_batches:
            raise ValueError(
                f"{self.prompts} prompts x {self.generations} generations cannot be divided into {self.micro_batches} "
                "micro-batches of the same number of rollouts"
            )

    @property
    def name(self) -> str:
        strength = "" if self.strength == 1 else f"-{self.strength:g}"
        return f"{self.task}-{self.cause}{strength}-seed{self.seed}"


def config_of(cell: Cell, out: Path, executor: str) -> GptOssGRPOConfig:
    """The trainer's configuration."""
    what = cause(cell.cause)
    turns, tokens = BUDGETS[cell.task]
    correction = {f"rollout_correction_{name}": value for name, value in CORRECTIONS[what.correction].items()}
    vllm: dict[str, Any] = {}
    if cell.sampler == "vllm":
        vllm = {"use_vllm": True, "vllm_mode": "colocate", "vllm_gpu_memory_utilization": 0.3}
    return GptOssGRPOConfig(
        str(out),
        seed=cell.seed,
        max_steps=cell.steps,
        per_device_train_batch_size=cell.prompts * cell.generations // cell.micro_batches,
        gradient_accumulation_steps=cell.micro_batches,
        steps_per_generation=cell.micro_batches,
        num_generations=cell.generations,
        learning_rate=cell.learning_rate,
        lr_scheduler_type="constant",
        beta=cell.kl_coefficient,
        temperature=1.0,
        bf16=cell.precision == "bf16",
        activation_checkpointing=False,
        model_init_kwargs={"dtype": "float32"},
        on_policy="off" if what.two_forwards else "force",
        on_policy_check_steps=10,
        freeze=list(what.freeze) or None,
        router_replay=what.router_replay,
        **correction,
        **vllm,
        max_turns=turns,
        max_rollout_tokens=cell.tool_tokens if cell.task == "tool" else tokens,
        executor=executor,
        tool_timeout=5.0,
        reward_weights=[1.0, 0.2],
        per_device_eval_batch_size=100,
        num_generations_eval=1,
        logging_steps=1,
        log_trajectories=2,
        save_strategy="steps",
        save_steps=20,
        save_total_limit=1,
        disable_tqdm=True,
        dataloader_pin_memory=False,
        report_to="none",
    )


class Progress(TrainerCallback):
    """Writes the rows so far after every step: they outlive a machine that is taken away."""

    def __init__(self, write: Callable[[list[dict[str, Any]]], None]) -> None:
        self.write = write

    def on_log(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self.write(state.log_history)


class TimeBudget(TrainerCallback):
    """Saves and stops after the step in which the time is up."""

    def __init__(self, deadline: float) -> None:
        self.deadline = deadline

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if time.monotonic() > self.deadline:
            control.should_save = control.should_training_stop = True


def make_trainer(cell: Cell, model: Path, out: Path, executor: str) -> tuple[ReproductionTrainer, Outcomes, Any]:
    """The trainer of a cell, what measures it, and the held-out problems.

    Raises:
        `ValueError`: the cause is for the other kind of model.
    """
    what: Cause = cause(cell.cause)
    kind = AutoConfig.from_pretrained(model).model_type
    if what.dense != (kind != "gpt_oss"):
        wanted = "the dense control (pretrain.py --dense)" if what.dense else "a GPT-OSS"
        raise ValueError(f"{model} is a {kind}, but the cause {cell.cause!r} is for {wanted}")
    train, held_out = load_problems(cell.task, cell.train_size, cell.held_out, cell.seed)
    right, form = REWARDS[cell.task]
    outcomes = Outcomes(right)
    trainer = ReproductionTrainer(
        cause=what,
        strength=cell.strength,
        model=str(model),
        args=config_of(cell, out, executor),
        train_dataset=train,
        reward_funcs=[outcomes.reward, form],
        environment_factory=retool.environments() if cell.task == "tool" else None,
    )
    return trainer, outcomes, held_out


def model_digest(model: Path) -> str:
    """The first digits of the SHA-256 of the weights that a run starts from.

    Raises:
        `FileNotFoundError`: there are none.
    """
    files = sorted(model.glob("*.safetensors"))
    if not files:
        raise FileNotFoundError(f"{model} holds no *.safetensors: make the model with pretrain.py first")
    digest = hashlib.sha256()
    for path in files:
        digest.update(path.read_bytes())
    return digest.hexdigest()[:12]


def rows_of(cell: Cell, about: dict[str, Any], history: list[dict[str, Any]], measured: dict[str, Any]) -> list[dict]:
    """Rows of the CSV: step 0 has the measurement before training, the last step that after it.

    Args:
        cell ([`Cell`]), about (`dict`): go into every row.
        history (`list[dict]`): what the trainer logged.
        measured (`dict`): `"before"` and, once there is one, `"after"`: rows of `Outcomes.evaluate`.
    """

    def row(step: int, values: dict[str, Any], evaluation: dict[str, Any]) -> dict[str, Any]:
        return {
            **about, **asdict(cell), "step": step,
            **{column: values.get(name, "") for column, name in METRICS.items()},
            **{name: evaluation.get(name, "") for name in EVALUATION},
        }  # fmt: skip

    steps = {entry["step"]: entry for entry in history if "grad_norm" in entry}
    rows = [row(0, {}, measured["before"])]
    for step in sorted(steps):
        rows.append(row(step, steps[step], measured.get("after", {}) if step == cell.steps else {}))
    return rows


def columns() -> list[str]:
    """The header of every CSV."""
    about = [*COLUMNS, "model", "parameters", "attention", "correction", "on_policy"]
    return [*about, *(f.name for f in fields(Cell)), "step", *METRICS, *EVALUATION]


def write_csv(path: Path, rows: list[dict[str, Any]]) -> None:
    """Write all rows, or leave the file as it was."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(".tmp")
    with unfinished.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, columns(), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    unfinished.replace(path)


def run_cell(cell: Cell, model: Path, work: Path, results: Path, executor: str, budget: float | None) -> bool:
    """Run a cell, or go on with it.

    Args:
        cell ([`Cell`]): which.
        model (`Path`): what `pretrain.py` made.
        work (`Path`): checkpoints go to `work / cell.name`.
        results (`Path`): the CSV goes to `results / (cell.name + ".csv")` once all steps are done; until then its rows
            are in `work / cell.name / "unfinished.csv"`.
        executor (`str`): of the Python tool; plain sums are computed without it, see `arithmetic.py`.
        budget (`float`, *optional*): seconds after which no further step is begun.

    Returns:
        `bool`: whether it is complete.

    Raises:
        `ValueError`: the work folder was begun with another configuration or model, or nothing says with which.
    """
    deadline = None if budget is None else time.monotonic() + budget
    out = work / cell.name
    file = out / "cell.json"
    identity = {"cell": asdict(cell), "model": model_digest(model)}
    measured: dict[str, Any] = {}
    if file.is_file():
        begun = json.loads(file.read_text())
        if begun["identity"] != identity:
            raise ValueError(
                f"{out} was begun with {begun['identity']}, this is {identity}: delete it, or use another --work"
            )
        measured = begun["measured"]
    elif any(out.glob("checkpoint-*")):
        raise ValueError(f"{out} has checkpoints, but no cell.json that says what they are of: delete it")
    # The trainer would take one more step after the last one: a run whose last measurement is missing is only measured.
    trained = last_complete_checkpoint(str(out), 1) if any(out.glob("checkpoint-*")) else None
    all_steps = trained is not None and trained.endswith(f"-{cell.steps}")
    if cell.task == "tool":
        executor = register_arithmetic(executor)
    trainer, outcomes, held_out = make_trainer(cell, Path(trained) if all_steps else model, out, executor)

    def remember(name: str) -> None:
        """Measure, and write it down at once."""
        measured[name] = outcomes.evaluate(trainer, held_out, cell.answers)
        out.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps({"identity": identity, "measured": measured}, indent=2) + "\n")

    about = {
        **machine_info(),
        "model": identity["model"],
        "parameters": trainer.model.num_parameters(),
        "attention": trainer.model.config._attn_implementation,
        "correction": cause(cell.cause).correction,
        "on_policy": trainer.args.on_policy,
    }
    if "before" not in measured:
        remember("before")
    if all_steps:
        trainer.state = TrainerState.load_from_json(str(Path(trained) / "trainer_state.json"))
    else:
        unfinished = out / "unfinished.csv"
        trainer.add_callback(Progress(lambda logs: write_csv(unfinished, rows_of(cell, about, logs, measured))))
        if deadline is not None:
            trainer.add_callback(TimeBudget(deadline))
        trainer.train(resume_from_checkpoint=trained)
    if trainer.state.global_step < cell.steps:
        print(f"{cell.name}: {trainer.state.global_step} of {cell.steps} steps; give the same command again to go on")
        return False
    history = list(trainer.state.log_history)
    remember("after")
    write_csv(results / f"{cell.name}.csv", rows_of(cell, about, history, measured))
    before, after = measured["before"]["accuracy"], measured["after"]["accuracy"]
    print(f"{cell.name}: {cell.steps} steps, held-out accuracy {before:.3f} -> {after:.3f}")
    return True


def add_cell_arguments(parser: argparse.ArgumentParser, leave_out: tuple[str, ...] = ()) -> None:
    """An option for every field of `Cell` but `leave_out`."""
    choices = {"task": TASKS, "cause": tuple(CAUSES), "sampler": ("transformers", "vllm")}
    for f in fields(Cell):
        if f.name in leave_out:
            continue
        if f.name in ("task", "cause"):
            parser.add_argument(f"--{f.name}", choices=choices[f.name], required=True)
        elif f.name == "precision":
            parser.add_argument("--precision", choices=("bf16", "float32"), help="default: bf16 on CUDA")
        else:
            parser.add_argument(f"--{f.name}", type=f.type, default=f.default, choices=choices.get(f.name))


def add_place_arguments(parser: argparse.ArgumentParser) -> None:
    """Where things are, and how the policy's code runs."""
    parser.add_argument("--work", type=Path, default=Path("outputs/reproduction/cells"), help="checkpoints")
    parser.add_argument("--results", type=Path, default=HERE / "results", help="finished CSVs")
    parser.add_argument("--executor", default="bubblewrap", help="of the Python tool; none: sums only")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", type=Path, required=True, help="made by pretrain.py")
    add_cell_arguments(parser)
    add_place_arguments(parser)
    parser.add_argument("--budget", type=float, help="seconds after which no further step is begun")
    args = vars(parser.parse_args())
    settings = {f.name: args[f.name] for f in fields(Cell) if args[f.name] is not None}
    places = {name: args[name] for name in ("model", "work", "results", "executor", "budget")}
    return 0 if run_cell(Cell(**settings), **places) else UNFINISHED


if __name__ == "__main__":
    sys.exit(main())
