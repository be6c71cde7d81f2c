"""Jobs are started while those before them still run, import, and wait here; see `run_all.py`."""

import os
import time
from pathlib import Path

VARIABLE = "MULTI_GPU_GO"


def wait() -> None:
    """Until the file exists that `MULTI_GPU_GO` names. Called before anything is put on a GPU."""
    path = os.environ.get(VARIABLE)
    while path is not None and not Path(path).exists():
        time.sleep(0.05)
