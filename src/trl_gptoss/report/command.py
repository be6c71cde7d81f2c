"""`trl-gptoss report RUN_DIR`."""

import argparse
from pathlib import Path

from . import make_report


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run_dir", type=Path, help="output_dir of a TRL run")
    parser.add_argument("--output", type=Path, help="file to write (default: RUN_DIR/report.html)")


def run(args: argparse.Namespace) -> int:
    print(make_report(args.run_dir, args.output))
    return 0
