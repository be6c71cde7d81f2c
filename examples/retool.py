# /// script
# requires-python = ">=3.11"
# dependencies = ["trl-gptoss[peft,tasks]"]
# ///
"""ReTool: GRPO on math problems with a multi-turn Python tool.

    accelerate launch --config_file configs/accelerate/cpu.yaml examples/retool.py --config configs/recipes/tiny.yaml

Without --model_name_or_path it makes a tiny GPT-OSS, without --dataset_name it generates problems. On your own:

    ... examples/retool.py --config configs/recipes/gptoss_20b_1gpu.yaml --dataset_name openai/gsm8k --dataset_config main

Before and after training the policy is measured on held-out problems, counting only whether the final answer is right;
at the end OUTPUT_DIR holds the model, evaluation.json and report.html.
"""

from dataclasses import dataclass, field

from trl import TrlParser, get_peft_config, get_quantization_config

from trl_gptoss import GptOssGRPOConfig, GptOssGRPOTrainer
from trl_gptoss.evaluation import Outcomes, train_and_measure
from trl_gptoss.recipe import ModelArguments, TaskArguments
from trl_gptoss.tasks import retool


@dataclass
class RetoolArguments(TaskArguments):
    dataset_name: str = field(
        default="arithmetic",
        metadata={"help": "'arithmetic', 'reasoning_gym/<task>[,<task>]', a Hub id, or a local file or folder."},
    )
    stateful: bool = field(default=False, metadata={"help": "Keep Python's variables between the calls of a rollout."})


def main(script_args: RetoolArguments, args: GptOssGRPOConfig, model_args: ModelArguments) -> None:
    train_problems, held_out = script_args.load(retool, args.seed)
    math_reward, format_reward = retool.REWARDS  # a right final answer; well-formed turns that were not cut off
    outcomes = Outcomes(math_reward)
    trainer = GptOssGRPOTrainer(
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


if __name__ == "__main__":
    main(*TrlParser((RetoolArguments, GptOssGRPOConfig, ModelArguments)).parse_args_and_config())
