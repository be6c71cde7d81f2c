"""The `trl-gptoss` command.

A command is one entry in `COMMANDS`: a line of help and a module with

    add_arguments(parser: argparse.ArgumentParser) -> None
    run(args: argparse.Namespace) -> int                      the exit status

A module is imported only when its command is used, so `--help` is quick and a command costs what it needs.
"""

import argparse
import importlib
import sys
from typing import NamedTuple

from . import __version__


class Command(NamedTuple):
    help: str
    module: str


COMMANDS = {
    "tiny-model": Command(
        "make a warm-started tiny GPT-OSS that calls tools (CPU, minutes)", "trl_gptoss.tiny.command"
    ),
    "build-kernels": Command(
        "compile the Hopper attention kernels (nvcc, minutes)", "trl_gptoss.attention.build_command"
    ),
    "eval": Command("measure a model on a task: avg@n with a confidence interval", "trl_gptoss.evaluation.command"),
    "export": Command(
        "merge an adapter, convert a checkpoint (bf16, MXFP4), push it", "trl_gptoss.hub.export_command"
    ),
    "plan": Command("predict memory and time of a run, and the settings that make it fit", "trl_gptoss.plan_command"),
    "report": Command("make report.html from a run directory", "trl_gptoss.report.command"),
    "doctor": Command("find out why engine and trainer disagree about log-probs", "trl_gptoss.doctor.command"),
    "env": Command("print the versions and devices a bug report needs", "trl_gptoss.system_info"),
}


def _parser(chosen: str | None) -> argparse.ArgumentParser:
    """The parser with all commands listed and the arguments of the chosen one."""
    parser = argparse.ArgumentParser(
        prog="trl-gptoss",
        description="Agentic RL for GPT-OSS on top of TRL.",
        formatter_class=lambda prog: argparse.HelpFormatter(prog, max_help_position=24, width=100),
    )
    parser.add_argument("--version", action="version", version=f"trl-gptoss {__version__}")
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, command in COMMANDS.items():
        subparser = subparsers.add_parser(name, help=command.help, description=command.help)
        if name == chosen:
            importlib.import_module(command.module).add_arguments(subparser)
    return parser


def main(argv: list[str] | None = None) -> int:
    """Run one command.

    Args:
        argv (`list[str]`, *optional*): arguments without the program's name; `sys.argv[1:]` if not given.

    Returns:
        `int`: exit status: 0 fine, 1 a problem the user can fix (named on stderr), 2 wrong usage.
    """
    argv = sys.argv[1:] if argv is None else argv
    chosen = next((a for a in argv if not a.startswith("-")), None)
    args = _parser(chosen).parse_args(argv)
    try:
        return importlib.import_module(COMMANDS[args.command].module).run(args)
    except Exception as e:
        explained = _explained(e)
        if explained is None:
            raise
        print(f"trl-gptoss {args.command}: {explained}", file=sys.stderr)
        return 1


def _explained(error: Exception) -> str | None:
    """What the user can do about an error: a missing file, a model name or a Hub that is not there. `None`: it is ours."""
    import httpx2
    from huggingface_hub.errors import HFValidationError
    from safetensors import SafetensorError

    if isinstance(error, SafetensorError):
        return f"a file of weights is damaged, or was not written to its end ({error}); download or save it again"
    if isinstance(error, httpx2.TransportError):
        return f"there is no connection ({error}); Hub ids need the network, folders do not"
    if isinstance(error, ModuleNotFoundError) and error.name == "peft":
        return "adapters need the package peft: pip install 'trl-gptoss[peft]'"
    if not isinstance(error, OSError | ModuleNotFoundError | ValueError):
        return None

    # transformers takes a folder that is not there for an id on the Hub
    if isinstance(error, HFValidationError) or isinstance(error.__cause__, HFValidationError):
        return f"there is no such folder, and it cannot be an id on the Hub either. {error}"
    return str(error)


if __name__ == "__main__":
    sys.exit(main())
