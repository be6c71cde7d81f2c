"""PPO by two processes is PPO by one, for every critic: with DDP, and with sequences shared between the two."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = [pytest.mark.distributed, pytest.mark.slow]
SCRIPT = Path(__file__).with_name("ppo_trainer_ranks.py")
CRITICS = ("separate", "shared", "lora")
SHARING = ("separate-sp", "lora-sp")  # a shared critic refuses sequence parallelism


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("ppo_ranks")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    two = ["-m", "torch.distributed.run", "--nproc_per_node=2", f"--master_port={port}"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}
    for launcher, what in (([], CRITICS), (two, (*CRITICS, *SHARING, "shared_broken"))):
        done = subprocess.run(
            [sys.executable, *launcher, str(SCRIPT), str(folder), *what],
            env=environment,
            capture_output=True,
            text=True,
            timeout=1500,
        )
        assert done.returncode == 0, done.stderr[-4000:]
    return folder


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("what", [*CRITICS, *SHARING])
def test_two_processes_are_one(folder, what):
    one = torch.load(folder / f"{what.partition('-')[0]}_1_0.pt")
    first, second = (torch.load(folder / f"{what}_2_{rank}.pt") for rank in (0, 1))
    assert first["weights"].keys() == one["weights"].keys()
    for name, value in one["weights"].items():
        torch.testing.assert_close(
            first["weights"][name], value, atol=2e-6, rtol=1e-5, msg=lambda m, n=name: f"{n}: {m}"
        )
        assert torch.equal(first["weights"][name], second["weights"][name]), name
    for name, values in one["curves"].items():
        assert first["curves"][name] == pytest.approx(values, rel=1e-4, abs=1e-6), name


def test_own_gradients_of_the_head_would_part_the_processes(folder):
    """The control."""
    first, second = (torch.load(folder / f"shared_broken_2_{rank}.pt")["weights"] for rank in (0, 1))
    assert (first["critic head.weight"] - second["critic head.weight"]).abs().max() > 1e-3
