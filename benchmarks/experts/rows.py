"""CSV rows with what is needed to repeat them."""

import csv
import datetime
import subprocess
from pathlib import Path
from typing import Any

import torch
import transformers
import triton


def _first_line(*command: str) -> str:
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    return result.stdout.strip().splitlines()[0] if result.returncode == 0 and result.stdout.strip() else "unknown"


class Rows:
    """Appends dictionaries to a CSV file and prints them."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.stamp = {
            "gpu": torch.cuda.get_device_name(),
            "driver": _first_line("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
            "torch": torch.__version__,
            "triton": triton.__version__,
            "transformers": transformers.__version__,
            "commit": _first_line("git", "rev-parse", "--short", "HEAD"),
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
