# /// script
# requires-python = ">=3.11"
# dependencies = ["trl-gptoss[peft]"]
# ///
"""Supervised fine-tuning on Harmony conversations with TRL's SFTTrainer, in the very ids that rollouts use.

    accelerate launch --config_file configs/accelerate/cpu.yaml examples/sft_harmony.py --config configs/recipes/tiny_sft.yaml

Every conversation becomes one sample per context, with labels exactly on what a policy samples: no prompt, no tool
result. Rows of --dataset_name have a column `messages` (with `channel`, or with `thinking` and `tool_calls`); without it
conversations with the Python tool are made here. At the end OUTPUT_DIR holds the model, to continue with
examples/retool.py --model_name_or_path OUTPUT_DIR.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

from datasets import Dataset
from transformers import AutoTokenizer, PreTrainedTokenizerBase
from trl import SFTConfig, SFTTrainer, TrlParser, get_peft_config

from trl_gptoss.harmony import training_samples
from trl_gptoss.recipe import ModelArguments
from trl_gptoss.tasks import retool
from trl_gptoss.tasks.stored import load, split_of
from trl_gptoss.trainers import check_model
from trl_gptoss.trainers.loading import model_init_kwargs


@dataclass
class SftArguments:
    dataset_name: str | None = field(default=None, metadata={"help": "A Hub id, or a local file or folder."})
    dataset_config: str | None = field(default=None, metadata={"help": "Configuration of a Hub data set."})
    dataset_train_split: str = field(default="train", metadata={"help": "Split to train on."})
    train_size: int = field(default=2000, metadata={"help": "The most conversations to train on."})
    python_tool: bool = field(default=True, metadata={"help": "Declare the Python tool in the prompts."})
    reasoning_effort: str = field(default="medium", metadata={"help": "'low', 'medium' or 'high', in the prompts."})


def made_conversations(n: int, seed: int) -> list[list[dict]]:
    """Problems that are solved, correctly, with one call of the Python tool."""
    conversations = []
    for a, operator, b, question in retool.arithmetic_problems(seed):
        result = str(retool.compute(a, operator, b))
        conversations.append(
            [
                {"role": "user", "content": question},
                {"role": "assistant", "channel": "analysis", "recipient": "python", "content_type": "code", "content": f"{a}{operator}{b}"},
                {"role": "tool", "name": "python", "content": f"{result}\n"},
                {"role": "assistant", "channel": "final", "content": result},
            ]
        )  # fmt: skip
        if len(conversations) == n:
            return conversations


def samples(
    conversations: Iterable[list[dict]],
    tokenizer: PreTrainedTokenizerBase,
    tools: list[str],
    effort: str,
    longest: int | None,
) -> Dataset:
    """Columns `input_ids` and `labels`; samples longer than `longest` are left out rather than cut."""
    rows = []
    for messages in conversations:
        for prompt, completion, mask in training_samples(messages, tokenizer, tools, effort):
            labels = [-100] * len(prompt) + [i if m else -100 for i, m in zip(completion, mask)]
            if longest is None or len(labels) <= longest:
                rows.append({"input_ids": prompt + completion, "labels": labels})
    if not rows:
        raise ValueError(f"no conversation gives a sample of at most {longest} tokens: raise max_length")
    return Dataset.from_list(rows)


def main(script_args: SftArguments, args: SFTConfig, model_args: ModelArguments) -> None:
    model = model_args.prepare(args, task="retool")
    args.model_init_kwargs = model_init_kwargs(model, args.model_init_kwargs, args.trust_remote_code)
    if args.router_aux_loss_coef is None:
        args.router_aux_loss_coef = 0.0  # TRL would take 0.9 from GPT-OSS's configuration
    tokenizer = AutoTokenizer.from_pretrained(model)
    if script_args.dataset_name is None:
        conversations = made_conversations(script_args.train_size, args.seed)
    else:
        data = load(script_args.dataset_name, script_args.dataset_config)
        split = split_of(data, script_args.dataset_name, script_args.dataset_train_split, "--dataset_train_split")
        if "messages" not in split.column_names:
            raise ValueError(
                f"{script_args.dataset_name} has the columns {split.column_names}; rename that of the conversations to messages"
            )
        conversations = split["messages"][: script_args.train_size]
    tools = ["python"] if script_args.python_tool else []
    train = samples(conversations, tokenizer, tools, script_args.reasoning_effort, args.max_length)
    trainer = SFTTrainer(
        model=model,
        args=args,
        train_dataset=train,
        processing_class=tokenizer,
        peft_config=get_peft_config(model_args),
    )
    check_model(trainer.model, packed=args.packing or args.padding_free)  # sinks have a gradient, experts too
    trainer.train()
    trainer.save_model()
    trainer.save_state()
    if args.push_to_hub:
        trainer.push_to_hub(dataset_name=script_args.dataset_name)


if __name__ == "__main__":
    main(*TrlParser((SftArguments, SFTConfig, ModelArguments)).parse_args_and_config())
