"""Where a row of a benchmark comes from."""

import os
import subprocess
from pathlib import Path


def output_of(*command: str) -> str:
    """The first line that a program prints, run in this folder; "unknown" if it is not there, fails, or prints nothing."""
    try:
        done = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return "unknown"
    lines = done.stdout.strip().splitlines()
    return lines[0] if done.returncode == 0 and lines else "unknown"


def commit() -> str:
    """The short hash of the checkout, with "+" if tracked files differ from it. A copy without git history takes it from
    BENCHMARK_COMMIT, and is "unknown" without that."""
    return os.environ.get("BENCHMARK_COMMIT") or output_of("git", "describe", "--always", "--match=", "--dirty=+")


def driver() -> str:
    """Of the GPU."""
    return output_of("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
