"""Training with shared sequences, and what is left of a run when one of its ranks is killed."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from launching import accelerate, free_port, run_well

pytestmark = [pytest.mark.distributed, pytest.mark.slow]
SCRIPT = Path(__file__).with_name("curves.py")


def start(folder, what, world, processes=None):
    """Plain processes, so that no launcher ends the others when one dies."""
    environment = {
        **os.environ,
        **{"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1", "ACCELERATE_USE_CPU": "true"},
        **{"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(world)},
    }
    return [
        subprocess.Popen(
            [sys.executable, str(SCRIPT), str(folder), *what],
            env={**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.DEVNULL,
            stderr=(folder / f"stderr_{rank}").open("w"),
        )
        for rank in range(world)
    ]


def run(folder, what, world=2, timeout=800):
    processes = start(folder, what, world)
    codes = [process.wait(timeout) for process in processes]
    assert codes == [0] * world, (folder / "stderr_0").read_text()[-4000:]
    return {w: [json.loads((folder / f"{w}_{rank}.json").read_text()) for rank in range(world)] for w in what}


# Divergences between trainer and sampler are rounding here: nothing to be compared relatively.
NOISE = (
    "rollout_correction/chi2",
    "rollout_correction/kl",
    "rollout_correction/log_ppl",
    "rollout_correction/abs_log_ratio",
)


@pytest.mark.timeout(900)
@pytest.mark.parametrize("kind", ["", "_lora", "_ppo"])
def test_twenty_steps_follow_the_curve_of_unshared_sequences(tmp_path, kind):
    """`_lora` has a KL term, two visits of every batch, expert adapters and a token budget for the sharing run only."""
    seen = run(tmp_path, [f"own{kind}", f"shared{kind}"])
    for own, shared in zip(seen[f"own{kind}"], seen[f"shared{kind}"]):
        own, shared = ([e for e in log if "loss" in e] for log in (own, shared))
        assert len(own) == len(shared) == 20
        assert len({e["reward"] for e in own if "reward" in e}) > 5  # something happens; second visits sample nothing
        for ours, theirs in zip(shared, own):
            assert ours.keys() == theirs.keys()
            for name in theirs.keys() - {"step_time"}:
                tolerance = {"abs": 1e-5} if name.startswith(NOISE) else {"rel": 1e-3, "abs": 1e-5}
                assert ours[name] == pytest.approx(theirs[name], nan_ok=True, **tolerance), name
            assert kind or ours["on_policy/forced"] == 0 or ours["on_policy/max_log_ratio"] == 0


def test_a_killed_rank_ends_the_run_and_another_number_of_ranks_resumes_it(tmp_path):
    survivor, victim = start(tmp_path, ["killed"], 2)
    assert victim.wait(280) == -signal.SIGKILL
    began = time.monotonic()
    assert survivor.wait(120) not in (0, None)
    waited = time.monotonic() - began
    message = (tmp_path / "stderr_0").read_text()
    assert "has died or hangs" in message and "Resume from the last one" in message, message[-3000:]
    assert waited < 60
    assert (tmp_path / "killed/checkpoint-2/trainer_state.json").is_file()
    [seen] = run(tmp_path, ["resumed"], world=1)["resumed"]
    assert seen["steps"] == [2, 3, 4] and seen["logged"][-1] == 5
    assert "was written with 2 process(es) (now 1)" in (tmp_path / "stderr_0").read_text()


@pytest.mark.timeout(900)
def test_accelerates_fsdp2_trains_as_ddp_does(tmp_path):
    """Weights that are updated between two visits of a batch, and clipping, which has to see every gradient. In bf16 the
    log-probs stay float32, which Accelerate would round; the head belongs to the root, since it is never run as a module."""
    seen = {"ddp": run(make(tmp_path / "ddp"), ["visits"])["visits"]}
    for precision in ("no", "bf16"):
        seen[precision] = accelerate_run(make(tmp_path / precision), "fsdp2", precision)
    for own, exact, half in zip(*seen.values()):
        assert "lm_head.weight" in exact["root"] and "model.embed_tokens.weight" in exact["root"] and not own["root"]
        assert exact["logps"] == half["logps"] == "torch.float32"
        for ours, theirs in zip(exact["log"], own["log"], strict=True):
            for name in ("loss", "grad_norm", "entropy", "clip_ratio/region_mean"):
                assert ours[name] == pytest.approx(theirs[name], rel=1e-3, abs=1e-5), name
        assert len({e["grad_norm"] for e in own["log"]}) == 6 and all(e["grad_norm"] > 0.5 for e in own["log"])


def make(folder):
    folder.mkdir()
    return folder


def accelerate_run(folder, config, precision):
    launcher = accelerate(config, 2, f"--mixed_precision={precision}")
    run_well([*launcher, SCRIPT, folder, "visits"], timeout=800)
    return [json.loads((folder / f"visits_{rank}.json").read_text()) for rank in range(2)]
