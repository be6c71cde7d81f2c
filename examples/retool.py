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

import sys
from argparse import ArgumentParser
from dataclasses import dataclass, field
from pathlib import Path

import yaml
from trl import TrlParser, get_peft_config, get_quantization_config

from trl_gptoss import GptOssGRPOConfig, GptOssGRPOTrainer, GptOssPPOConfig, GptOssPPOTrainer
from trl_gptoss.evaluation import Outcomes, train_and_measure
from trl_gptoss.recipe import ModelArguments, TaskArguments
from trl_gptoss.tasks import retool

ALGORITHMS = {"grpo": (GptOssGRPOConfig, GptOssGRPOTrainer), "ppo": (GptOssPPOConfig, GptOssPPOTrainer)}


@dataclass
class RetoolArguments(TaskArguments):
    algorithm: str = field(default="grpo", metadata={"help": "'grpo', or 'ppo': with a critic."})
    dataset_name: str = field(
        default="arithmetic",
        metadata={"help": "'arithmetic', 'reasoning_gym/<task>[,<task>]', a Hub id, or a local file or folder."},
    )
    stateful: bool = field(default=False, metadata={"help": "Keep Python's variables between the calls of a rollout."})


def main(script_args: RetoolArguments, args: GptOssGRPOConfig, model_args: ModelArguments) -> None:
    train_problems, held_out = script_args.load(retool, args.seed)
    math_reward, format_reward = retool.REWARDS  # a right final answer; well-formed turns that were not cut off
    outcomes = Outcomes(math_reward)
    _, trainer_class = ALGORITHMS[script_args.algorithm]
    trainer = trainer_class(
        model=model_args.prepare(args, task="retool"),
        args=args,
        train_dataset=retool.with_environment(train_problems),
        environment_factory=retool.environments(stateful=script_args.stateful),
        reward_funcs=[outcomes.reward, format_reward],
        peft_config=get_peft_config(model_args),
        quantization_config=get_quantization_config(model_args),
    )

    def measure(*tools: str) -> list[dict]:
        """One row per tool: the Python tool in order, or out of order."""
        return [
            {"environment": tool}
            | outcomes.evaluate(trainer, retool.with_environment(held_out, tool), script_args.answers)
            for tool in tools
            if len(held_out)
        ]

    train_and_measure(trainer, before=lambda: measure("python"), after=lambda: measure("python", "unavailable"))
    if args.push_to_hub:
        trainer.push_to_hub(dataset_name=script_args.dataset_name)


def parse(command_line: list[str]) -> tuple[RetoolArguments, GptOssGRPOConfig, ModelArguments]:
    """The recipe's arguments and the command line's; --algorithm, from either, decides which trainer they are for."""
    first = ArgumentParser(add_help=False, allow_abbrev=False)
    first.add_argument("--config")
    first.add_argument("--algorithm", choices=sorted(ALGORITHMS))
    known, _ = first.parse_known_args(command_line)
    recipe = (yaml.safe_load(Path(known.config).read_text()) or {}) if known.config else {}
    algorithm = known.algorithm or recipe.get("algorithm", "grpo")
    if algorithm not in ALGORITHMS:
        raise ValueError(f"algorithm is {algorithm!r} in {known.config}, expected one of {sorted(ALGORITHMS)}.")
    config_class, _ = ALGORITHMS[algorithm]
    return TrlParser((RetoolArguments, config_class, ModelArguments)).parse_args_and_config(command_line)


if __name__ == "__main__":
    main(*parse(sys.argv[1:]))
