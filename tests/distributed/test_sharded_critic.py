"""A sharded critic is saved in shards, and a run that is resumed from them is the one that was not stopped (FSDP2, ZeRO-3).

Both runs have the curves of DDP, too, with all that Accelerate does around the models: old log-probs of a second epoch, clipping,
Adam.
"""

import shutil
from pathlib import Path

import pytest
import torch
from launching import accelerate, needs_deepspeed, run_well

pytestmark = [pytest.mark.distributed, pytest.mark.slow, pytest.mark.timeout(3600)]
SCRIPT = Path(__file__).with_name("sharded_critic.py")
# DeepSpeed compiles an operator at its first start, for minutes; set TORCH_EXTENSIONS_DIR to keep it.
SHARDINGS = ["fsdp2", pytest.param("zero3", marks=needs_deepspeed)]
SHARDS = {
    "fsdp2": [f"{part}/__{rank}_0.distcp" for part in ("pytorch_model_fsdp_0", "optimizer_0") for rank in (0, 1)],
    "zero3": [
        f"global_step*/*zero_pp_rank_{rank}_mp_rank_00_{part}_states.pt"
        for part in ("model", "optim")
        for rank in (0, 1)
    ],
}


def run(folder: Path, sharding: str, critic: str, what: str) -> list[dict]:
    """What each rank found."""
    run_well([*accelerate(sharding, 2, "--mixed_precision=no"), SCRIPT, folder, critic, what], timeout=1500)
    return [torch.load(folder / f"{what}_{rank}.pt") for rank in (0, 1)]


def resume(folder: Path, sharding: str, critic: str, what: str) -> list[dict]:
    shutil.copytree(folder / "straight/checkpoint-3", folder / what / "checkpoint-3")
    return run(folder, sharding, critic, what)


def same(first: dict, second: dict) -> bool:
    weights, others = first["weights"], second["weights"]
    assert weights.keys() == others.keys() and first["curves"] and len(first["curves"]) == len(second["curves"])
    return first["curves"] == second["curves"] and all(torch.equal(w, others[name]) for name, w in weights.items())


@pytest.fixture(scope="module")
def ddp(tmp_path_factory):
    """The curves of a critic without sharding."""
    folder, found = tmp_path_factory.mktemp("ddp"), {}

    def curves(critic: str) -> list[dict]:
        if critic not in found:
            (folder / critic).mkdir()
            found[critic] = run(folder / critic, "ddp", critic, "straight")[0]["curves"]
        return [dict(entry) for entry in found[critic]]

    return curves


@pytest.mark.parametrize("critic", ["separate", "shared"])  # the LoRA critic refuses FSDP and DeepSpeed
@pytest.mark.parametrize("sharding", SHARDINGS)
def test_three_steps_and_three_more_are_six(tmp_path, ddp, sharding, critic):
    straight = run(tmp_path, sharding, critic, "straight")
    saved = tmp_path / "straight/checkpoint-3/critic"
    for pattern in SHARDS[sharding]:
        assert bool(list(saved.glob(pattern))) == (critic == "separate"), (pattern, sorted(saved.rglob("*")))
    for rank, seen in enumerate(resume(tmp_path, sharding, critic, "resumed")):
        assert same(straight[rank], seen), rank
    for expected, found in zip(ddp(critic), straight[0]["curves"], strict=True):
        if "grad_norm" not in found:  # DeepSpeed has none for a policy that is not trained yet
            assert expected.pop("grad_norm", 0) == 0
        assert found == pytest.approx(expected, rel=1e-3, abs=1e-5)


@pytest.mark.parametrize("sharding", SHARDINGS)
def test_without_the_critic_the_runs_would_part(tmp_path, sharding):
    """The control."""
    straight = run(tmp_path, sharding, "separate", "straight")
    for rank, seen in enumerate(resume(tmp_path, sharding, "separate", "forgetful")):
        assert not same(straight[rank], seen)
