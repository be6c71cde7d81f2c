"""What a row of results says about where it comes from."""

import os
import platform
import subprocess
from datetime import date
from importlib import metadata
from pathlib import Path

import torch

COLUMNS = ("date", "commit", "hardware", "driver", "python", "torch", "transformers", "trl")


def _output(command: list[str]) -> str:
    """What a program prints, "unknown" if it is not there or fails."""
    try:
        done = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return "unknown"
    return done.stdout.strip().split("\n")[0] if done.returncode == 0 else "unknown"


def commit() -> str:
    """The short hash of the checkout, with "+" if tracked files differ from it. A copy without git history takes it from
    BENCHMARK_COMMIT, and is "unknown" without that."""
    if told := os.environ.get("BENCHMARK_COMMIT"):
        return told
    found = _output(["git", "describe", "--always", "--match=", "--dirty=+"])
    return found or "unknown"


def machine_info() -> dict[str, str]:
    """The values of `COLUMNS`."""
    cuda = torch.cuda.is_available()
    threads = f"CPU, {torch.get_num_threads()} thread(s)"
    return {
        "date": date.today().isoformat(),
        "commit": commit(),
        "hardware": torch.cuda.get_device_name() if cuda else threads,
        "driver": _output(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]) if cuda else "none",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": metadata.version("transformers"),
        "trl": metadata.version("trl"),
    }
