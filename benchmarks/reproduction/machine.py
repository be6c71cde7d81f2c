"""What a row of results says about where it comes from."""

import platform
import sys
from datetime import date
from importlib import metadata
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1] / "common"))

import torch
from stamp import commit, driver

COLUMNS = ("date", "commit", "hardware", "driver", "python", "torch", "transformers", "trl")


def machine_info() -> dict[str, str]:
    """The values of `COLUMNS`."""
    cuda = torch.cuda.is_available()
    threads = f"CPU, {torch.get_num_threads()} thread(s)"
    return {
        "date": date.today().isoformat(),
        "commit": commit(),
        "hardware": torch.cuda.get_device_name() if cuda else threads,
        "driver": driver() if cuda else "none",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": metadata.version("transformers"),
        "trl": metadata.version("trl"),
    }
