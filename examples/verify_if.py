# /// script
# requires-python = ">=3.11"
# dependencies = ["trl-gptoss[peft,tasks]"]
# ///
"""Verifiable instruction following: GRPO on prompts with several constraints that a program checks.

    accelerate launch --config_file configs/accelerate/cpu.yaml examples/verify_if.py --config configs/recipes/tiny_verify_if.yaml

Without --model_name_or_path it makes a tiny GPT-OSS, without --dataset_name it generates prompts. On your own:

    ... examples/verify_if.py --config configs/recipes/gptoss_20b_1gpu_verify_if.yaml

Before and after training the policy is measured on held-out prompts, counting the answers that follow all constraints;
--test_dataset_name allenai/IFBench_test measures on constraints that do not occur in training. At the end OUTPUT_DIR holds
the model, evaluation.json and report.html.
"""

from dataclasses import dataclass, field

from trl import TrlParser, get_peft_config, get_quantization_config

from trl_gptoss import GptOssGRPOConfig, GptOssGRPOTrainer
from trl_gptoss.evaluation import Outcomes, train_and_measure
from trl_gptoss.recipe import ModelArguments, TaskArguments
from trl_gptoss.tasks import verify_if


@dataclass
class VerifyIfArguments(TaskArguments):
    dataset_name: str = field(
        default="simple", metadata={"help": "'generated', 'simple', a Hub id, or a local file or folder."}
    )


def main(script_args: VerifyIfArguments, args: GptOssGRPOConfig, model_args: ModelArguments) -> None:
    train_prompts, held_out = script_args.load(verify_if, args.seed)
    instruction_reward, format_reward = verify_if.REWARDS  # the share of constraints followed; well-formed turns
    outcomes = Outcomes(instruction_reward)
    trainer = GptOssGRPOTrainer(
        model=model_args.prepare(args, task="verify_if"),
        args=args,
        train_dataset=train_prompts,
        reward_funcs=[outcomes.reward, format_reward],
        peft_config=get_peft_config(model_args),
        quantization_config=get_quantization_config(model_args),
    )

    def measure() -> list[dict]:
        return [outcomes.evaluate(trainer, held_out, script_args.answers)] if len(held_out) else []

    train_and_measure(trainer, before=measure, after=measure)
    if args.push_to_hub:
        trainer.push_to_hub(dataset_name=script_args.dataset_name)


if __name__ == "__main__":
    main(*TrlParser((VerifyIfArguments, GptOssGRPOConfig, ModelArguments)).parse_args_and_config())
