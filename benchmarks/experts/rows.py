"""CSV rows with what is needed to repeat them."""

import csv
import datetime
import importlib.metadata
import os
import subprocess
from pathlib import Path
from typing import Any

import torch
import transformers


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _first_line(*command: str) -> str:
    try:
        result = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return "unknown"
    return result.stdout.strip().splitlines()[0] if result.returncode == 0 and result.stdout.strip() else "unknown"


class Rows:
    """Appends dictionaries to a CSV file and prints them. An export without git history takes BENCHMARK_COMMIT."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.stamp = {
            "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else "none",
            "driver": _first_line("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
            "torch": torch.__version__,
            "triton": _version("triton"),
            "transformers": transformers.__version__,
            "commit": os.environ.get("BENCHMARK_COMMIT") or _first_line("git", "rev-parse", "--short", "HEAD"),
            "date": datetime.date.today().isoformat(),
        }

    def add(self, **row: Any) -> None:
        print("  ".join(f"{key}={value}" for key, value in row.items()), flush=True)
        row = self.stamp | row
        new = not self.path.exists()
        with self.path.open("a", newline="") as file:
            writer = csv.DictWriter(file, row.keys())
            if new:
                writer.writeheader()
            writer.writerow(row)
