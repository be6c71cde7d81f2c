"""PPO by two processes is PPO by one, for every critic: with DDP, with sequences shared between the two, with FSDP2 and ZeRO-3."""

import sys
from pathlib import Path

import pytest
import torch
from launching import accelerate, needs_deepspeed, run_well, torchrun

pytestmark = [pytest.mark.distributed, pytest.mark.slow]
SCRIPT = Path(__file__).with_name("ppo_trainer_ranks.py")
CRITICS = ("separate", "shared", "lora")
SHARING = ("separate-sp", "lora-sp")  # a shared critic refuses sequence parallelism
SHARDED = ("separate-fsdp2", "shared-fsdp2")  # the LoRA critic refuses FSDP and DeepSpeed
ZERO3 = ("separate-zero3", "shared-zero3")


def launch(launcher: list[str], folder: Path, what: tuple[str, ...]) -> None:
    run_well([*launcher, SCRIPT, folder, *what], timeout=1500)


@pytest.fixture(scope="module")
def one(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("one")
    launch([sys.executable], folder, (*CRITICS, "separate-epochs"))
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("ppo_ranks")
    # fsdp2 last: from there on Accelerate wraps nothing
    launch(torchrun(2), folder, (*CRITICS, "separate-epochs", *SHARING, "shared_broken", *SHARDED))
    return folder


def compare(one: Path, folder: Path, what: str, ranks: int = 2, atol: float = 2e-6) -> float:
    """The largest difference of a weight."""
    critic, _, how = what.partition("-")
    expected = torch.load(one / f"{what if how == 'epochs' else critic}_1_0.pt")
    seen = [torch.load(folder / f"{what}_2_{rank}.pt") for rank in range(ranks)]
    assert seen[0]["weights"].keys() == expected["weights"].keys()
    largest = 0.0
    for name, value in expected["weights"].items():
        found = seen[0]["weights"][name].float()
        torch.testing.assert_close(found, value, atol=atol, rtol=1e-5, msg=lambda m, n=name: f"{n}: {m}")
        assert all(torch.equal(seen[0]["weights"][name], other["weights"][name]) for other in seen[1:]), name
        largest = max(largest, (found - value).abs().max().item())
    for name, values in expected["curves"].items():
        assert seen[0]["curves"][name] == pytest.approx(values, rel=1e-4, abs=1e-6), name
    return largest


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("what", [*CRITICS, "separate-epochs", *SHARING, *SHARDED])
def test_two_processes_are_one(one, folder, what):
    print(what, compare(one, folder, what))


@pytest.mark.timeout(3600)
@needs_deepspeed
@pytest.mark.parametrize("what", ZERO3)
def test_two_processes_with_zero3_are_one(one, tmp_path, what):
    """DeepSpeed compiles an operator at its first start, for minutes; set TORCH_EXTENSIONS_DIR to keep it."""
    launch(accelerate("zero3", 2), tmp_path, (what,))
    print(what, compare(one, tmp_path, what, ranks=1))


def test_own_gradients_of_the_head_would_part_the_processes(folder):
    """The control."""
    first, second = (torch.load(folder / f"shared_broken_2_{rank}.pt")["weights"] for rank in (0, 1))
    assert (first["critic head.weight"] - second["critic head.weight"]).abs().max() > 1e-3
