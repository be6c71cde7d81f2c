# /// script
# requires-python = ">=3.11"
# dependencies = ["trl-gptoss[peft,tasks]"]
# ///
"""ReTool: GRPO or PPO on math problems with a multi-turn Python tool.

    accelerate launch --config_file configs/accelerate/cpu.yaml examples/retool.py --config configs/recipes/tiny.yaml
    ... examples/retool.py --algorithm ppo --config configs/recipes/tiny_ppo.yaml

Without --model_name_or_path it makes a tiny GPT-OSS, without --dataset_name it generates problems. On your own:

    ... examples/retool.py --config configs/recipes/gptoss_20b_1gpu.yaml --dataset_name openai/gsm8k --dataset_config main

Before and after training the policy is measured on held-out problems, counting only whether the final answer is right;
at the end OUTPUT_DIR holds the model, evaluation.json and report.html.
"""

import json
import sys
from argparse import ArgumentParser
from dataclasses import dataclass, field
from pathlib import Path

import yaml
from accelerate import PartialState
from trl import ModelConfig, TrlParser, get_peft_config, get_quantization_config

from trl_gptoss import GptOssGRPOConfig, GptOssGRPOTrainer, GptOssPPOConfig, GptOssPPOTrainer
from trl_gptoss.report import make_report
from trl_gptoss.tasks import retool
from trl_gptoss.tiny import make_tiny_model

ALGORITHMS = {"grpo": (GptOssGRPOConfig, GptOssGRPOTrainer), "ppo": (GptOssPPOConfig, GptOssPPOTrainer)}


@dataclass
class RetoolArguments:
    algorithm: str = field(default="grpo", metadata={"help": "'grpo', or 'ppo': with a critic."})
    dataset_name: str = field(
        default="arithmetic",
        metadata={"help": "'arithmetic', 'reasoning_gym/<task>[,<task>]', a Hub id, or a local file or folder."},
    )
    dataset_config: str | None = field(default=None, metadata={"help": "Configuration of a Hub data set."})
    dataset_train_split: str = field(default="train", metadata={"help": "Split to train on."})
    dataset_test_split: str = field(default="test", metadata={"help": "Split to hold out, where it exists."})
    train_size: int = field(default=2000, metadata={"help": "The most problems to train on."})
    held_out_size: int = field(default=200, metadata={"help": "The most problems to hold out; 0 skips evaluation."})
    instructions: str | None = field(default=None, metadata={"help": "System message put before every problem."})


@dataclass
class ModelArguments(ModelConfig):
    dtype: str = field(default="bfloat16", metadata={"help": "Load the model under this dtype."})


def held_out_accuracy(trainer: GptOssGRPOTrainer, problems, environment: str, policy: str) -> dict:
    """A row of evaluation.json: sampled answers to held-out problems, with the tool in order or out of order."""
    batch = trainer.args.eval_batch_size * trainer.args.world_size
    if len(problems) > batch:  # the mean over batches is the mean over problems only if all batches are full
        problems = problems.select(range(len(problems) - len(problems) % batch))
    metrics = trainer.evaluate(retool.with_environment(problems, environment))
    accuracy = metrics["eval_rewards/math_reward/mean"]
    correct = round(accuracy * len(problems))
    return {"policy": policy, "tool": environment, "problems": len(problems), "correct": correct, "accuracy": accuracy}


def main(script_args: RetoolArguments, args: GptOssGRPOConfig, model_args: ModelArguments) -> None:
    model = model_args.model_name_or_path
    if model is None:
        with PartialState().main_process_first():
            model = str(make_tiny_model(seed=args.seed))
    init = {"revision": model_args.model_revision, "dtype": model_args.dtype}
    if model_args.attn_implementation is not None:
        init["attn_implementation"] = model_args.attn_implementation
    args.model_init_kwargs = init | (args.model_init_kwargs or {})

    train_problems, held_out = retool.load_problems(
        script_args.dataset_name,
        dataset_config=script_args.dataset_config,
        train_split=script_args.dataset_train_split,
        test_split=script_args.dataset_test_split,
        train_size=script_args.train_size,
        held_out_size=script_args.held_out_size,
        seed=args.seed,
        instructions=script_args.instructions,
    )
    _, trainer_class = ALGORITHMS[script_args.algorithm]
    trainer = trainer_class(
        model=model,
        args=args,
        train_dataset=retool.with_environment(train_problems),
        environment_factory=retool.ENVIRONMENTS,
        reward_funcs=retool.REWARDS,  # a right final answer; well-formed turns that were not cut off
        peft_config=get_peft_config(model_args),
        quantization_config=get_quantization_config(model_args),
    )

    out = Path(args.output_dir)
    file = out / "evaluation.json"
    resume = args.resume_from_checkpoint
    resume = True if str(resume).lower() == "true" else resume  # "true": the last one
    rows = []
    if resume and file.is_file():
        rows = [row for row in json.loads(file.read_text()) if row["policy"] == "before RL"]
    elif len(held_out) and not resume:
        rows.append(held_out_accuracy(trainer, held_out, "python", "before RL"))
        if trainer.is_world_process_zero():  # now, so that a run that is interrupted and resumed still has it
            out.mkdir(parents=True, exist_ok=True)
            file.write_text(json.dumps(rows, indent=2) + "\n")
    trainer.train(resume_from_checkpoint=resume)
    if len(held_out):
        rows.append(held_out_accuracy(trainer, held_out, "python", "after RL"))
        rows.append(held_out_accuracy(trainer, held_out, "unavailable", "after RL"))

    trainer.save_model()
    trainer.save_state()
    if trainer.is_world_process_zero():
        file.write_text(json.dumps(rows, indent=2) + "\n")
        print(f"\n{'policy':<12}{'tool':<14}{'correct':>12}{'accuracy':>10}")
        for row in rows:
            correct = f"{row['correct']}/{row['problems']}"
            print(f"{row['policy']:<12}{row['tool']:<14}{correct:>12}{row['accuracy']:>10.3f}")
        print(f"\nreport: {make_report(out)}")
    if args.push_to_hub:
        trainer.push_to_hub(dataset_name=script_args.dataset_name)


def parse(command_line: list[str]) -> tuple[RetoolArguments, GptOssGRPOConfig, ModelArguments]:
    """The recipe's arguments and the command line's; --algorithm, from either, decides which trainer they are for."""
    first = ArgumentParser(add_help=False, allow_abbrev=False)
    first.add_argument("--config")
    first.add_argument("--algorithm", choices=sorted(ALGORITHMS))
    known, _ = first.parse_known_args(command_line)
    recipe = yaml.safe_load(Path(known.config).read_text()) if known.config else {}
    algorithm = known.algorithm or recipe.get("algorithm", "grpo")
    if algorithm not in ALGORITHMS:
        raise ValueError(f"algorithm is {algorithm!r} in {known.config}, expected one of {sorted(ALGORITHMS)}.")
    config_class, _ = ALGORITHMS[algorithm]
    return TrlParser((RetoolArguments, config_class, ModelArguments)).parse_args_and_config(command_line)


if __name__ == "__main__":
    main(*parse(sys.argv[1:]))
