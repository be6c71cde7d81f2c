"""examples/retool.py as users launch it: a short run always, the figures of the README and real data in the slow suite."""

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from trl_gptoss.harmony import HarmonyVocabulary
from trl_gptoss.tiny import make_tiny_model

ROOT = Path(__file__).parents[2]
DATA = Path(os.environ.get("TRL_GPTOSS_TEST_DATA", ROOT / "../shared/data"))


def run_example(out, *arguments, recipe="tiny"):
    """Launch the example on the CPU; returns the rows of evaluation.json."""
    command = [sys.executable, "-m", "accelerate.commands.accelerate_cli", "launch"]
    command += ["--config_file", "configs/accelerate/cpu.yaml", "examples/retool.py"]
    command += ["--config", f"configs/recipes/{recipe}.yaml", "--output_dir", str(out), *map(str, arguments)]
    environment = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
    run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout[-2000:] + run.stderr[-4000:]
    rows = json.loads((out / "evaluation.json").read_text())
    for row in rows:
        assert f"{row['correct']}/{row['problems']}" in run.stdout
    return rows


def check_trajectories(out, tokenizer, steps):
    """Masks and prompts of every written rollout, against its turns; returns the records."""
    records = [json.loads(line) for line in (out / "trajectories.jsonl").read_text().splitlines()]
    assert {r["step"] for r in records} == set(range(1, steps + 1))
    vocabulary = HarmonyVocabulary.of(tokenizer)
    for record in records:
        ids, mask = [], []
        for turn in record["turns"]:
            ids += turn["policy_ids"] + turn["observation_ids"]
            mask += [1] * len(turn["policy_ids"]) + [0] * len(turn["observation_ids"])
        assert (record["completion_ids"], record["loss_mask"]) == (ids, mask)
        for turn in record["turns"][:-1]:  # a turn that was answered ended with its call, or with a flagged return
            assert turn["policy_ids"][-1] in (vocabulary.call, vocabulary.return_)
            assert tokenizer.decode(turn["observation_ids"]).endswith("<|end|><|start|>assistant")
            for result in turn["tool_results"]:
                assert result["text"] in turn["observation_text"]
    return records


def history(out):
    return json.loads((out / "trainer_state.json").read_text())["log_history"]


def test_a_short_run_leaves_everything_behind(tmp_path):
    model = make_tiny_model(tmp_path / "model", steps=2, cache_dir=tmp_path / "cache")
    out = tmp_path / "out"
    small = [
        "--model_name_or_path", model, "--held_out_size", 6, "--per_device_eval_batch_size", 6,
        "--per_device_train_batch_size", 8, "--num_generations", 4, "--max_rollout_tokens", 24,
        "--save_strategy", "steps", "--save_steps", 1,
    ]  # fmt: skip
    first = run_example(out, *small, "--max_steps", 1)
    rows = run_example(out, *small, "--max_steps", 2, "--resume_from_checkpoint", "true")
    assert rows[0] == first[0]  # the measurement before training survives the interruption
    assert [(r["policy"], r["environment"], r["problems"]) for r in rows] == [
        ("before RL", "python", 6),
        ("after RL", "python", 6),
        ("after RL", "unavailable", 6),
    ]
    assert (out / "model.safetensors").is_file() and "<svg" in (out / "report.html").read_text()
    check_trajectories(out, AutoTokenizer.from_pretrained(out), steps=2)
    rewards = [e for e in history(out) if "reward" in e]
    assert len(rewards) == 2 and all(e["on_policy/forced"] == 1 for e in rewards)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_short_run_of_ppo_goes_on_with_its_critic(tmp_path):
    model = make_tiny_model(tmp_path / "model", steps=2, cache_dir=tmp_path / "cache")
    small = [
        "--model_name_or_path", model, "--held_out_size", 6, "--per_device_eval_batch_size", 6,
        "--per_device_train_batch_size", 8, "--max_rollout_tokens", 24, "--critic_warmup_steps", 1,
        "--save_strategy", "steps", "--save_steps", 1,
    ]  # fmt: skip
    run_example(tmp_path / "out", *small, "--max_steps", 1, recipe="tiny_ppo")
    rows = run_example(
        tmp_path / "out", *small, "--max_steps", 2, "--resume_from_checkpoint", "true", recipe="tiny_ppo"
    )
    assert len(rows) == 3
    steps = [e for e in history(tmp_path / "out") if "value_loss" in e]
    assert [e["critic/warmup"] for e in steps] == [1, 0] and steps[1]["ratio/std"] == 0


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    ("recipe", "seed"),
    [(recipe, seed) for recipe in ("tiny", "tiny_ppo") for seed in range(3)],
)
def test_rl_turns_the_warm_started_policy_around(tmp_path, recipe, seed):
    rows = run_example(tmp_path, "--seed", seed, recipe=recipe)
    before, after, unavailable = (row["accuracy"] for row in rows)
    assert 0.15 <= before <= 0.6
    assert after >= before + 0.2
    assert unavailable <= after - 0.2
    if recipe == "tiny_ppo":
        explained = [e["explained_variance"] for e in history(tmp_path) if e.get("explained_variance") is not None]
        assert sum(explained[-10:]) / 10 > 0.3


@pytest.fixture(scope="module")
def real_tokenizer_model():
    """The tiny model in gpt-oss's own vocabulary."""
    given = os.environ.get("TRL_GPTOSS_TOKENIZER")
    if given is None:
        script = DATA.parent / "tools" / "gptoss_tokenizer.py"
        if not script.is_file():
            pytest.skip("no gpt-oss tokenizer: set TRL_GPTOSS_TOKENIZER")
        spec = importlib.util.spec_from_file_location("gptoss_tokenizer", script)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        given, _ = module.ensure(Path(tempfile.gettempdir()) / "trl_gptoss-test-tokenizer")
    return make_tiny_model(tokenizer="gpt-oss", tokenizer_path=str(given))


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    "name, steps, instructions", [("gsm8k/train.jsonl", 20, None), ("math/AIME24_retool.jsonl", 5, "Use Python.")]
)
def test_real_problems_in_the_real_vocabulary(tmp_path, real_tokenizer_model, name, steps, instructions):
    """The tiny model solves none of them; everything around it works."""
    if not (DATA / name).is_file():
        pytest.skip(f"{DATA / name} is not there; set TRL_GPTOSS_TEST_DATA")
    arguments = ["--instructions", instructions] if instructions else []
    rows = run_example(
        tmp_path, "--model_name_or_path", real_tokenizer_model, "--dataset_name", DATA / name, "--max_steps", steps,
        "--held_out_size", 4, "--per_device_eval_batch_size", 4, "--per_device_train_batch_size", 4,
        "--num_generations", 4, "--max_rollout_tokens", 64, "--learning_rate", "1e-5", *arguments,
    )  # fmt: skip
    assert len(rows) == 3
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    assert tokenizer.convert_tokens_to_ids("<|call|>") == 200012
    records = check_trajectories(tmp_path, tokenizer, steps)
    # What it says is mostly nonsense, but nonsense with a header: some of it is a call, and some a final answer.
    assert any(r["final_text"] for r in records)
    if steps == 20:
        assert any(turn["tool_results"] for r in records for turn in r["turns"]), "the policy never called the tool"
    assert {e["on_policy/max_log_ratio"] for e in history(tmp_path) if "on_policy/max_log_ratio" in e} == {0.0}
