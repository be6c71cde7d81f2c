"""Two real processes over gloo."""

import json
from pathlib import Path

import pytest
from launching import run_well, torchrun
from logged_curves import TIMES

pytestmark = pytest.mark.distributed
SCRIPT = Path(__file__).with_name("two_ranks.py")


def launch(folder, *what, timeout=240):
    run_well([*torchrun(2), SCRIPT, folder, *what], timeout)
    return {w: [json.loads((folder / f"{w}_{rank}.json").read_text()) for rank in range(2)] for w in what}


@pytest.fixture(scope="module")
def seen(tmp_path_factory):
    """Starting processes takes longer than what they do: one launch for the fast tests."""
    return launch(
        tmp_path_factory.mktemp("ranks"), "unequal", "collective", "vllm", "server_mode", "sharded", "giving_up"
    )


@pytest.mark.parametrize("backend", ["unequal", "collective"])
def test_unequal_rollouts_do_not_hang_and_every_rank_keeps_its_own(seen, backend):
    ranks = seen[backend]
    for rank, result in enumerate(ranks):
        assert len(result["seen"]) == 3 * 4
        for own, text, turns in result["seen"]:
            assert own and text == f"rank {rank}" and turns == (5 if rank else 1)
    assert ranks[0]["weights"] == ranks[1]["weights"]
    [first, *_] = ranks[0]["logs"]
    assert first["tools/call_frequency"] == 2.0 and first["tools/failure_frequency"] == 1.0  # of both ranks


def test_vllm_server_mode_gives_every_rank_its_own_completions(seen):
    ranks = seen["vllm"]
    assert all(result["seen"] for result in ranks)
    assert all(ours for result in ranks for ours, _, _ in result["seen"])
    # The control: TRL's client alone mixes the ranks up as soon as rank 1 has another number of prompts than rank 0.
    for (_, control_0, safe), (_, control_1, _) in zip(*(result["seen"] for result in ranks)):
        assert (control_0 and control_1) == safe


def test_sharded_weights_with_unequal_rollouts(seen):
    assert [result["right"] for result in seen["sharded"]] == [[True] * 4] * 2


def test_sharded_weights_are_sent_whole(seen):
    assert [result["weights"] for result in seen["sharded"]] == [True, True]


def test_server_mode_with_unequal_turns_and_a_crashing_tool(seen):
    ranks = seen["server_mode"]
    for result in ranks:
        assert len(result["seen"]) == 2 * 4
        for number, text, turns, logp in result["seen"]:
            assert text == str(number) and turns == (4 if number % 2 else 1) and logp == -1.0
    assert {turns for result in ranks for _, _, turns, _ in result["seen"]} == {1, 4}
    sent = [version for _, version in ranks[0]["calls"]]
    assert len(sent) == len(set(sent)) == 2  # once for each generation, not once for each turn or rank
    assert ranks[0]["probes"] == ranks[1]["probes"] and max(ranks[0]["probes"]) < 1e-5


def test_a_reward_that_keeps_failing_on_one_rank_ends_the_run_on_both(seen):
    other, failing = seen["giving_up"]
    assert other == ["SystemExit", "143", 3]
    assert failing[0] == "RuntimeError" and "failed 3 times in a row" in failing[1] and failing[2] == 3


@pytest.mark.slow
def test_a_signal_to_one_rank_stops_both_after_the_step_and_the_run_resumes(tmp_path):
    straight, stopped = launch(tmp_path, "straight", "stopped").values()
    assert [s["code"] for s in stopped] == [143, 143] and stopped[0]["step"] == stopped[1]["step"] < 4
    resumed = launch(tmp_path, "resumed")["resumed"]

    def curves(result):
        return [{k: v for k, v in e.items() if k not in TIMES} for e in result["logs"]]

    def renamed(entries):
        return json.loads(json.dumps(entries).replace("rewards/reward/", "rewards/reward_of_length/"))

    for a, b in zip(resumed, straight):
        assert a["weights"] == b["weights"]
        assert renamed(curves(a)) == curves(b)
