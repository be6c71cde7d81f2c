"""CSV rows with what is needed to repeat them."""

import csv
import datetime
import importlib.metadata
import sys
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1] / "common"))

import torch
import transformers
from stamp import commit, driver


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


class Rows:
    """Appends dictionaries to a CSV file and prints them."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.stamp = {
            "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else "none",
            "driver": driver(),
            "torch": torch.__version__,
            "triton": _version("triton"),
            "transformers": transformers.__version__,
            "commit": commit(),
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
