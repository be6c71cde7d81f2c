"""`trl-gptoss eval TASK MODEL`."""

import argparse
import importlib
import importlib.metadata
import json
import tempfile
from datetime import date
from pathlib import Path
from typing import Any

from .. import __version__

TASKS = ("gsm8k", "retool", "verify_if")
VERSIONS = ("torch", "transformers", "trl")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Sample answers to the problems of a task with the trainer's own rollouts and print the accuracy (avg@n, which "
        "is pass@1) with its 95% interval, and a line for the model card."
    )
    parser.add_argument("task", choices=TASKS, help="whose problems, environment and reward")
    parser.add_argument("model", help="Hub id or folder")
    parser.add_argument("--dataset", help="Hub id, or local file or folder (default: the task's generated problems)")
    parser.add_argument("--dataset-config", help="configuration of a Hub data set, e.g. main for openai/gsm8k")
    parser.add_argument("--split", default="test", help="its split, if it has several (default: test)")
    parser.add_argument("--limit", type=int, default=200, help="most problems (default: 200)")
    parser.add_argument("--answers", type=int, default=1, help="answers sampled to each problem (default: 1)")
    parser.add_argument(
        "--backend",
        choices=("transformers", "vllm"),
        default="transformers",
        help="what samples (default: transformers)",
    )
    parser.add_argument("--batch-size", type=int, default=16, help="rollouts at a time and device (default: 16)")
    parser.add_argument(
        "--temperature", type=float, default=1.0, help="of sampling (default: 1.0; 0: always the most likely token)"
    )
    parser.add_argument("--max-turns", type=int, default=8, help="most turns of a rollout (default: 8)")
    parser.add_argument(
        "--max-rollout-tokens", type=int, default=8192, help="most tokens after the prompt (default: 8192)"
    )
    parser.add_argument(
        "--reasoning-effort", choices=("low", "medium", "high"), default="medium", help="of GPT-OSS (default: medium)"
    )
    parser.add_argument("--stateful", action="store_true", help="retool: keep Python's variables between calls")
    parser.add_argument("--instructions", help="system message (default for stored data: the task's own)")
    parser.add_argument("--dtype", default="auto", help="of the model (default: as it was saved)")
    parser.add_argument("--seed", type=int, default=0, help="of sampling (default: 0)")
    parser.add_argument("--out", help="JSON file to write")
    parser.set_defaults(parser=parser)


def _load(args: argparse.Namespace) -> tuple[Any, Any]:
    """The task's module and the problems."""
    task = importlib.import_module(f"trl_gptoss.tasks.{args.task}")
    for name in ("limit", "answers"):
        if getattr(args, name) < 1:
            raise ValueError(f"--{name} is {getattr(args, name)}, it must be at least 1")
    instructions = args.instructions
    if instructions is None and args.dataset is not None:
        instructions = task.INSTRUCTIONS
    _, problems = task.load_problems(
        train_size=1,
        held_out_size=args.limit,
        test_dataset_name=args.dataset,
        test_dataset_config=args.dataset_config,
        test_split=args.split,
        instructions=instructions,
    )
    if not len(problems):
        raise ValueError(f"{args.dataset} has no problem that can be checked here")
    return task, problems


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """What `run` writes: the result, and everything that determines it.

    Raises:
        `ValueError`, `FileNotFoundError`, `ModuleNotFoundError`: what the user can fix.
    """
    if args.backend == "vllm":
        try:
            importlib.metadata.version("vllm")
        except importlib.metadata.PackageNotFoundError:
            raise ModuleNotFoundError("--backend vllm needs vLLM: pip install 'trl-gptoss[vllm]'") from None
    task, problems = _load(args)

    from ..trainers import GptOssGRPOConfig, GptOssGRPOTrainer
    from .outcomes import Outcomes

    outcomes = Outcomes(task.REWARDS[0])
    with tempfile.TemporaryDirectory() as scratch:
        config = GptOssGRPOConfig(
            scratch,
            per_device_train_batch_size=2,  # nothing is trained; two is the smallest group
            num_generations=2,
            per_device_eval_batch_size=args.batch_size,
            num_generations_eval=1,
            max_rollout_tokens=args.max_rollout_tokens,
            max_turns=args.max_turns if args.task == "retool" else None,
            reasoning_effort=args.reasoning_effort,
            temperature=args.temperature or 1.0,
            top_k=0 if args.temperature else 1,
            use_vllm=args.backend == "vllm",
            vllm_mode="colocate",
            model_init_kwargs={"dtype": args.dtype},
            bf16=False,  # as it was saved, without autocast
            seed=args.seed,
            report_to="none",
        )
        environments = None
        if args.task == "retool":
            environments = task.environments(stateful=args.stateful)
            problems = task.with_environment(problems)
        trainer = GptOssGRPOTrainer(
            model=args.model,
            args=config,
            train_dataset=problems,
            environment_factory=environments,
            reward_funcs=outcomes.reward,
        )
        result = outcomes.evaluate(trainer, problems, args.answers)
    return {
        "task": args.task,
        "model": args.model,
        "dataset": args.dataset or "generated, held out",
        **result,
        "backend": args.backend,
        "temperature": args.temperature,
        "max_turns": config.max_turns,
        "max_rollout_tokens": args.max_rollout_tokens,
        "reasoning_effort": args.reasoning_effort,
        "seed": args.seed,
        "versions": {"trl_gptoss": __version__} | {name: importlib.metadata.version(name) for name in VERSIONS},
        "date": date.today().isoformat(),
    }


def card_line(result: dict[str, Any]) -> str:
    """One line of Markdown for a model card."""
    measure = "pass@1" if result["answers"] == 1 else f"avg@{result['answers']}"
    return (
        f"{result['task']} ({result['dataset']}): {measure} = {100 * result['accuracy']:.1f} % "
        f"(95 % interval {100 * result['low']:.1f} to {100 * result['high']:.1f}, {result['interval']}; "
        f"{result['problems']} problems, temperature {result['temperature']:g}, at most "
        f"{result['max_rollout_tokens']} tokens, {result['reasoning_effort']} effort, {result['date']})"
    )


def _check(args: argparse.Namespace) -> None:
    if args.stateful and args.task != "retool":
        args.parser.error(f"--stateful is for the tool of retool; {args.task} has none")
    if args.dataset_config is not None and args.dataset is None:
        args.parser.error("--dataset-config is for --dataset, which is not given")
    folder = Path(args.model)
    if (folder / "adapter_config.json").is_file() and not (folder / "config.json").is_file():
        raise ValueError(f"{folder} holds an adapter; make a model of it first: trl-gptoss export {folder} OUT")


def run(args: argparse.Namespace) -> int:
    _check(args)
    if args.out is not None:  # now, and not after hours of sampling
        Path(args.out).parent.mkdir(parents=True, exist_ok=True)
        Path(args.out).open("a").close()
    result = measure(args)
    print(card_line(result))
    if args.out is not None:
        Path(args.out).write_text(json.dumps(result, indent=2) + "\n")
    return 0
