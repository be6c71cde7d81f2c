"""`trl-gptoss tiny-model OUT`."""

import argparse

from .make import DEFAULT_WARM_START, make_tiny_model
from .vocabulary import TASKS


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Make a GPT-OSS of a million parameters with every architectural feature, warm-started on "
        "conversations of a demonstrator that is unreliable on purpose. Made once: the result is cached by content."
    )
    parser.add_argument("out", help="folder for the model and its tokenizer")
    parser.add_argument("--task", choices=list(TASKS), default="retool", help="what it learns (default: retool)")
    parser.add_argument(
        "--tokenizer",
        choices=list(DEFAULT_WARM_START),
        default="small",
        help="small (default): a few hundred tokens; gpt-oss: the real 201088",
    )
    parser.add_argument("--tokenizer-path", help="local folder with gpt-oss's tokenizer, for --tokenizer gpt-oss")
    parser.add_argument("--seed", type=int, default=0, help="initialisation and demonstrations (default: 0)")
    parser.add_argument("--steps", type=int, help="steps of the warm start (default: 150 to 300)")
    parser.add_argument("--cache-dir", help="default: $TRL_GPTOSS_CACHE or ~/.cache/trl_gptoss")


def run(args: argparse.Namespace) -> int:
    folder = make_tiny_model(
        args.out,
        task=args.task,
        tokenizer=args.tokenizer,
        tokenizer_path=args.tokenizer_path,
        seed=args.seed,
        steps=args.steps,
        cache_dir=args.cache_dir,
    )
    print(folder)
    return 0
