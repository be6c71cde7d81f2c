"""How tests start processes of their own: a free port, the repository's Accelerate configurations, and what went wrong."""

import os
import socket
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

CONFIGS = Path(__file__).parents[2] / "configs/accelerate"
needs_deepspeed = pytest.mark.skipif(find_spec("deepspeed") is None, reason="needs the extra `deepspeed`")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def torchrun(processes: int) -> list[str]:
    return [
        *(sys.executable, "-m", "torch.distributed.run"),
        *(f"--nproc_per_node={processes}", f"--master_port={free_port()}"),
    ]


def accelerate(config: str, processes: int, *options: str) -> list[str]:
    """`accelerate launch` with the configuration of this name."""
    return [
        *(sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(CONFIGS / f"{config}.yaml")),
        *(f"--num_processes={processes}", f"--main_process_port={free_port()}", *options),
    ]


def run(command: list, timeout: float, **environment: str) -> subprocess.CompletedProcess:
    """Run to the end on CPUs, one thread for each process, with what it prints."""
    fixed = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}
    return subprocess.run(
        [str(part) for part in command],
        env={**os.environ, **fixed, **environment},
        capture_output=True,
        text=True,
        timeout=timeout,
    )


def run_well(command: list, timeout: float, **environment: str) -> None:
    """The same, and it has to succeed."""
    done = run(command, timeout, **environment)
    assert done.returncode == 0, done.stderr[-6000:]
