"""`trl-gptoss build-kernels`: compile the Hopper kernels for this installation."""

import argparse
import sys
from pathlib import Path

from .build import LIBRARY, BuildError, build_kernels, find_nvcc, find_source, nvcc_version
from .kernels_layout import write_kernels_folder
from .loading import HUB_REPO


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--output",
        type=Path,
        help=f"file to write, or folder to write {LIBRARY} into (default: where this installation looks for it)",
    )
    parser.add_argument(
        "--kernels-layout",
        type=Path,
        metavar="FOLDER",
        help="also write FOLDER/build/<variant>/, which get_local_kernel and LOCAL_KERNELS of the `kernels` package load",
    )
    parser.add_argument("--jobs", type=int, help="compilers at a time (default: the number of CPU cores)")


def run(args: argparse.Namespace) -> int:
    output = args.output
    if output is not None and (output.is_dir() or output.suffix != ".so"):
        output = output / LIBRARY
    try:
        library = build_kernels(output, jobs=args.jobs)
    except BuildError as error:
        print(f"trl-gptoss build-kernels: {error}", file=sys.stderr)
        return 1
    if args.kernels_layout is not None:
        variant = write_kernels_folder(library, find_source(), args.kernels_layout, nvcc_version(find_nvcc()))
        print(f'wrote {variant}; use it with LOCAL_KERNELS="{HUB_REPO}={args.kernels_layout}"')
    if args.output is not None:
        print(f"use it with TRL_GPTOSS_KERNELS={library}")
    return 0
