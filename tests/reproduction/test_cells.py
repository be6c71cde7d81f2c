"""Runs of the harness on the CPU, with a model that is not trained: what reaches the trainer, and what is written down."""

import csv
import json
import subprocess
import sys
from pathlib import Path

import cell as cells
import pytest
import torch
from causes import CAUSES, CORRECTIONS
from cell import Cell, make_trainer, run_cell
from faults import RIGHT
from results import read_result
from safetensors.torch import load_file

from trl_gptoss.harmony import render_prompt

ROOT = Path(__file__).parents[2]
SMALL = {
    "steps": 2, "prompts": 2, "generations": 4, "micro_batches": 2, "train_size": 40, "held_out": 4, "precision": "float32",
    "tool_tokens": 24,
}  # fmt: skip


def length_reward(completion_ids, **kwargs):
    """A random model solves nothing; this differs between its rollouts, so that there is a gradient."""
    return [float(sum(ids) % 7) for ids in completion_ids]


def check_prompts(work, tokenizer, tools):
    """The rollouts' prompts are those that the model was pretrained on."""
    records = [json.loads(line) for line in (work / "trajectories.jsonl").read_text().splitlines()]
    assert records
    for record in records:
        assert record["prompt_ids"] == render_prompt(record["prompt"], tokenizer, tools, "medium")
        assert len(record["prompt_ids"]) < 100  # the system message is one token


@pytest.fixture(autouse=True)
def something_to_learn(monkeypatch):
    monkeypatch.setattr(
        cells, "REWARDS", {task: [rewards[0], length_reward] for task, rewards in cells.REWARDS.items()}
    )
    monkeypatch.setitem(cells.BUDGETS, "single_turn", (1, 12))
    monkeypatch.setitem(cells.BUDGETS, "tool", (2, None))


def run(folders, tmp_path, cause, task="single_turn", **settings):
    cell = Cell(**{"task": task, "cause": cause, **SMALL, **settings})
    places = {"work": tmp_path / "work", "results": tmp_path / "results", "executor": "bubblewrap", "budget": None}
    assert run_cell(cell, folders[CAUSES[cause].dense], **places)
    return read_result(tmp_path / "results" / f"{cell.name}.csv"), tmp_path / "work" / cell.name


def test_the_sampler_keeps_the_right_model(folders, tmp_path):
    """Without sinks the trainer disagrees with what was sampled; the sampler is the one that everything right has."""
    right, _ = run(folders, tmp_path, "right", steps=1)
    found, _ = run(folders, tmp_path, "no_sinks", steps=1)
    assert right.curve("reward") == found.curve("reward") and right.accuracies[0] == found.accuracies[0]
    assert right.curve("mismatch_kl")[1] < 1e-9 < 1e-6 < found.curve("mismatch_kl")[1]
    assert right.curve("max_log_ratio") == found.curve("max_log_ratio") == {1: 0.0}
    assert (right.about["attention"], found.about["attention"]) == (RIGHT, "reproduction_no_sinks")


def test_the_fault_is_in_policy_and_reference_but_not_in_the_sampler(folders, tmp_path):
    cell = Cell(task="single_turn", cause="no_sinks", strength=0.5, **SMALL)
    trainer, _, _ = make_trainer(cell, folders[False], tmp_path, "bubblewrap")
    fault = "reproduction_no_sinks_0.5"
    assert trainer.model.config._attn_implementation == trainer.ref_model.config._attn_implementation == fault
    with trainer._open_model() as model:
        assert model.config._attn_implementation == RIGHT
    assert trainer.model.config._attn_implementation == fault


class Noisy(cells.ReproductionTrainer):
    """No two training forwards of this policy are the same, as if routes flipped: noise on its last hidden states."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)

        def noise(norm, inputs, hidden):
            return hidden + 0.3 * torch.randn_like(hidden) if norm.training else None

        self.model.model.norm.register_forward_hook(noise)


def test_two_forwards_are_two_and_their_ratio_is_not_forced(folders, tmp_path, monkeypatch):
    monkeypatch.setattr(cells, "ReproductionTrainer", Noisy)
    found, _ = run(folders, tmp_path, "two_forwards", steps=1)
    assert found.curve("max_log_ratio")[1] > 0.02
    assert found.about["on_policy"] == "off"
    right, _ = run(folders, tmp_path, "right", steps=1)
    assert right.curve("max_log_ratio") == {1: 0.0} and right.curve("max_log_ratio_recomputed")[1] > 0.02
    assert right.curve("reward") == found.curve("reward")  # the batch that both have sampled


@pytest.mark.parametrize("sampler", ["transformers", "vllm"])
@pytest.mark.parametrize("cause", list(CAUSES))
def test_a_cause_changes_the_configuration_as_it_says(tmp_path, cause, sampler):
    right = cells.config_of(
        Cell(task="tool", cause="right", sampler=sampler, **SMALL), tmp_path, "bubblewrap"
    ).to_dict()
    found = cells.config_of(Cell(task="tool", cause=cause, sampler=sampler, **SMALL), tmp_path, "bubblewrap").to_dict()
    changed = {name for name in found if found[name] != right[name]}
    what, expected = CAUSES[cause], set()
    expected |= {"on_policy"} if what.two_forwards else set()
    expected |= {"freeze"} if what.freeze else set()
    expected |= {"router_replay"} if what.router_replay != "off" else set()
    if what.correction != "token":
        own, token = CORRECTIONS[what.correction], CORRECTIONS["token"]
        expected |= {f"rollout_correction_{n}" for n in own.keys() | token.keys() if own.get(n) != token.get(n)}
    assert changed == expected and found["use_vllm"] == (sampler == "vllm")


@pytest.mark.parametrize("cause, dense", [("dense", False), ("right", True)])
def test_a_cause_for_the_other_model_is_an_error(folders, tmp_path, cause, dense):
    cell = Cell(task="single_turn", cause=cause, **SMALL)
    with pytest.raises(ValueError, match="is for"):
        make_trainer(cell, folders[dense], tmp_path, "bubblewrap")


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("cause", list(CAUSES))
def test_every_cause_runs_on_the_tool_task(folders, tokenizer, tmp_path, cause):
    result, work = run(folders, tmp_path, cause, task="tool", learning_rate=1e-2, kl_coefficient=0.01)
    check_prompts(work, tokenizer, ["python"])
    what = CAUSES[cause]
    assert all(result.curve("grad_norm")[step] > 0 for step in (1, 2))
    for column in ("reward", "entropy", "kl", "clip_fraction", "log_ppl_mismatch", "mismatch_max_ratio"):
        assert set(result.curve(column)) == {1, 2}, column
    ratios = list(result.curve("max_log_ratio").values())
    assert all(r < 1e-3 for r in ratios) if what.two_forwards else ratios == [0.0, 0.0]
    mismatch = list(result.curve("mismatch_kl").values())
    assert all(m > 1e-6 for m in mismatch) if what.fault == "no_sinks" else all(m < 1e-8 for m in mismatch)
    assert set(result.curve("routes_differ")) == ({1, 2} if cause == "router_replay" else set())
    before = load_file(folders[what.dense] / "model.safetensors")
    after = load_file(work / "checkpoint-2" / "model.safetensors")
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    assert any("mlp" in name for name in moved)
    sinks = {name for name in moved if name.endswith("sinks")}
    if what.freeze:
        assert not any("self_attn" in name for name in moved)
    elif what.fault is None and not what.dense:
        assert len(sinks) == 2  # control
    else:
        assert not sinks and any("q_proj" in name for name in moved)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("task", ["single_turn", "instruction"])
def test_the_other_tasks_run(folders, tokenizer, tmp_path, task):
    if task == "instruction":
        pytest.importorskip("if_verifiable")
    result, work = run(folders, tmp_path, "right", task=task)
    assert len(result.steps) == 3
    check_prompts(work, tokenizer, [])


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_run_in_parts_is_the_run_in_one(folders, tmp_path, monkeypatch):
    """Stopped after every step, and once more before its last measurement: the same steps."""
    whole, _ = run(folders, tmp_path / "whole", "no_sinks", steps=3)
    cell = Cell(task="single_turn", cause="no_sinks", **{**SMALL, "steps": 3})
    places = {"work": tmp_path / "work", "results": tmp_path / "results", "executor": "bubblewrap"}
    assert [run_cell(cell, folders[False], budget=0.0, **places) for _ in range(2)] == [False, False]
    with (tmp_path / "work" / cell.name / "unfinished.csv").open(encoding="utf-8") as file:
        so_far = list(csv.DictReader(file))
    assert [row["step"] for row in so_far] == ["0", "1", "2"] and so_far[0]["accuracy"] and not so_far[2]["accuracy"]
    assert [float(row["reward"]) for row in so_far[1:]] == [whole.curve("reward")[step] for step in (1, 2)]

    def crash(path, rows):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(cells, "write_csv", crash)
        with pytest.raises(KeyboardInterrupt):
            run_cell(cell, folders[False], budget=0.0, **places)
    assert not (tmp_path / "results").exists()
    assert run_cell(cell, folders[False], budget=None, **places)
    parts = read_result(tmp_path / "results" / f"{cell.name}.csv")
    for column in ("reward", "grad_norm", "kl", "mismatch_kl"):
        assert parts.curve(column) == whole.curve(column), column
    with pytest.raises(ValueError, match="was begun with"):
        run_cell(
            Cell(task="single_turn", cause="no_sinks", **{**SMALL, "steps": 4}), folders[False], budget=None, **places
        )
    (tmp_path / "work" / cell.name / "cell.json").unlink()
    with pytest.raises(ValueError, match="no cell.json"):
        run_cell(cell, folders[False], budget=None, **places)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_from_nothing_to_figures_by_the_commands(tmp_path):
    def call(script, *options, status=0):
        command = [sys.executable, str(ROOT / "benchmarks/reproduction" / script), *map(str, options)]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == status, done.stdout[-2000:] + done.stderr[-3000:]
        return done.stdout

    small = [
        "--size",
        "test",
        "--steps",
        2,
        "--warm_start_steps",
        2,
        "--pool",
        60,
        "--batch_size",
        4,
        "--device",
        "cpu",
    ]
    call("pretrain.py", tmp_path / "model", *small)
    assert len(json.loads((tmp_path / "model/pretrain.json").read_text())["losses"]) == 2
    options = ["--model", tmp_path / "model", "--tasks", "single_turn", "--causes", "right", "no_sinks", "dense"]
    options += ["--work", tmp_path / "work", "--results", tmp_path / "results", "--precision", "float32"]
    options += [x for name in SMALL if name != "precision" for x in (f"--{name}", SMALL[name])]
    assert "0 of 2 cells are done" in call("run_all.py", *options, "--list")
    assert "2 of 2 cells are done" in call("run_all.py", *options)
    again = call("run_all.py", *options)
    assert "2 of 2 cells are done" in again and "..." not in again
    drawn = call("figures.py", "--results", tmp_path / "results", "--out", tmp_path / "figures")
    assert "single_turn_causes_reward.svg" in drawn and (tmp_path / "figures/single_turn_causes_entropy.svg").is_file()
