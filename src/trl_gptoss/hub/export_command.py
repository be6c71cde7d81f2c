"""`trl-gptoss export`: a trained adapter or checkpoint as a model that others load."""

import argparse
from pathlib import Path

import torch
from huggingface_hub import HfApi

from .card import ModelCardFacts, hardware, write_card
from .publish import (
    SAVE_FORMATS,
    check_save_format,
    is_adapter,
    load_full,
    load_tokenizer,
    merge_to_full,
    save_model,
    save_tokenizer,
)
from .upload import clean_name, model_files, upload


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "source", help="adapter or model: a folder (an output directory, a checkpoint) or an id on the Hub"
    )
    parser.add_argument("output", type=Path, help="folder to write; must not exist yet, or be empty")
    parser.add_argument(
        "--save-format",
        choices=SAVE_FORMATS,
        default="bf16",
        help="bf16 (default: the dtype of the weights), mxfp4 (the layout of openai/gpt-oss), or both, mxfp4 in a subfolder",
    )
    parser.add_argument(
        "--device",
        type=device,
        default="cpu",
        help="where the weights are loaded, merged and quantised, which must hold all of them (default: cpu; cuda is faster)",
    )
    parser.add_argument("--base", help="base model of an adapter, if it is not where the adapter says")
    parser.add_argument(
        "--push-to-hub", metavar="REPO", help="upload the result to this repository, with a model card"
    )
    parser.add_argument(
        "--private", action="store_true", default=None, help="make the repository private if it is new"
    )
    parser.set_defaults(parser=parser)


def device(name: str) -> torch.device:
    """An argument of the command line as a device that can hold a model: the CPU, or a GPU that is there."""
    try:
        device = torch.device(name)
    except RuntimeError:
        raise argparse.ArgumentTypeError(f"{name!r} is no device of torch, expected cpu, cuda or cuda:1") from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise argparse.ArgumentTypeError(f"{name}: torch finds no CUDA GPU; take --device cpu")
    if device.type not in ("cpu", "cuda"):
        raise argparse.ArgumentTypeError(f"{name!r} cannot hold the weights, expected cpu, cuda or cuda:1")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise argparse.ArgumentTypeError(
            f"{name}: torch finds {torch.cuda.device_count()} CUDA GPU(s), counted from cuda:0; choose one of them"
        )
    return device


def run(args: argparse.Namespace) -> int:
    if args.private and not args.push_to_hub:
        args.parser.error("--private is for the repository of --push-to-hub, which is not given")
    check_save_format(args.save_format)
    if args.output.exists() and (not args.output.is_dir() or any(args.output.iterdir())):
        raise ValueError(f"{args.output} exists and is not an empty folder; remove it or choose another one")
    adapter = is_adapter(args.source)
    if args.base is not None and not adapter:
        raise ValueError(f"--base is for adapters, but {args.source} has no adapter_config.json")
    repo_id = None
    if args.push_to_hub:  # before the work: a token that may not write is found out now
        repo_id = HfApi().create_repo(args.push_to_hub, private=args.private, exist_ok=True).repo_id
    if adapter:
        model, tokenizer = merge_to_full(args.source, args.base, args.device)
    else:
        model = load_full(args.source, args.device)
        tokenizer = load_tokenizer(args.source, model)
    check_save_format(args.save_format, model.config)
    save_model(model, args.output, args.save_format)
    save_tokenizer(tokenizer, args.output)
    print(args.output)
    if repo_id is not None:
        kind = "mxfp4" if args.save_format == "mxfp4" else "full"
        facts = ModelCardFacts(
            name=clean_name(repo_id), repo_id=repo_id, base_model=model.config._name_or_path or None
        )
        facts.kind, facts.has_mxfp4, facts.hardware = kind, args.save_format == "both", hardware()
        write_card(facts, args.output)
        info = upload(repo_id, model_files(args.output), commit_message="Upload model", replace=True)
        print(info.commit_url)
    return 0
