# /// script
# requires-python = ">=3.11"
# dependencies = ["trl-gptoss[peft,tasks]"]
# ///
"""GSM8K: GRPO on word problems, one turn without tools.

    accelerate launch --config_file configs/accelerate/cpu.yaml examples/gsm8k.py --config configs/recipes/tiny_gsm8k.yaml

Without --model_name_or_path it makes a tiny GPT-OSS, without --dataset_name it generates problems. On your own:

    ... examples/gsm8k.py --config configs/recipes/gptoss_20b_1gpu_gsm8k.yaml

Before and after training the policy is measured on held-out problems, counting only whether the final answer is right;
at the end OUTPUT_DIR holds the model, evaluation.json and report.html.
"""

from dataclasses import dataclass, field

from trl import TrlParser, get_peft_config, get_quantization_config

from trl_gptoss import GptOssGRPOConfig, GptOssGRPOTrainer
from trl_gptoss.evaluation import Outcomes, train_and_measure
from trl_gptoss.recipe import ModelArguments, TaskArguments
from trl_gptoss.tasks import gsm8k


@dataclass
class Gsm8kArguments(TaskArguments):
    dataset_name: str = field(default="stories", metadata={"help": "'stories', a Hub id, or a local file or folder."})


def main(script_args: Gsm8kArguments, args: GptOssGRPOConfig, model_args: ModelArguments) -> None:
    train_problems, held_out = script_args.load(gsm8k, args.seed)
    math_reward, format_reward = gsm8k.REWARDS  # a right final answer; well-formed turns that were not cut off
    outcomes = Outcomes(math_reward)
    trainer = GptOssGRPOTrainer(
        model=model_args.prepare(args, task="gsm8k"),
        args=args,
        train_dataset=train_problems,
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
    main(*TrlParser((Gsm8kArguments, GptOssGRPOConfig, ModelArguments)).parse_args_and_config())
