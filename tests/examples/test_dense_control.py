"""The same three scripts and trainers on a model without Harmony, sinks or experts: a tiny Qwen3 with its own template."""

import json
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tests/support"))
sys.path.insert(0, str(ROOT / "tests/examples"))
from test_recipes import example, parse  # noqa: E402
from tiny_qwen import make_tiny_qwen  # noqa: E402


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "recipe",
    [
        pytest.param("tiny", marks=pytest.mark.slow),
        "tiny_gsm8k",
        pytest.param("tiny_verify_if", marks=pytest.mark.slow),
    ],
)
def test_qwen_runs_every_task(tmp_path, recipe):
    if recipe == "tiny_verify_if":
        pytest.importorskip("if_verifiable")
    model = make_tiny_qwen(tmp_path / "model")
    out = tmp_path / "out"
    path = ROOT / f"configs/recipes/{recipe}.yaml"
    module = example(path)
    small = {
        "model_name_or_path": model, "output_dir": out, "max_steps": 2, "per_device_train_batch_size": 4,
        "num_generations": 4, "max_rollout_tokens": 12, "held_out_size": 2, "train_size": 20, "answers": 2,
        "per_device_eval_batch_size": 4, "learning_rate": 1e-2, "log_completions": "false", "disable_tqdm": "true",
    }  # fmt: skip
    parsed = parse(module, path, *[part for name, value in small.items() for part in (f"--{name}", str(value))])
    # a random model solves nothing; reward what moves, so that there is something to learn
    task = getattr(module, recipe.removeprefix("tiny_").replace("tiny", "retool"))
    rewards = list(task.REWARDS)

    def length_reward(completion_ids, **kwargs):
        return [float(sum(ids) % 7) for ids in completion_ids]

    task.REWARDS = [rewards[0], length_reward]
    try:
        module.main(*parsed)
    finally:
        task.REWARDS = rewards
    rows = json.loads((out / "evaluation.json").read_text())
    assert [r["policy"] for r in rows][:2] == ["before RL", "after RL"]
    assert all(
        r["problems"] == 2 and r["answers"] == 2 and r["unscored"] == 0 and r["low"] <= r["accuracy"] for r in rows
    )
    history = json.loads((out / "trainer_state.json").read_text())["log_history"]
    assert all(e["on_policy/forced"] == 1 for e in history if "on_policy/forced" in e)
    assert any("on_policy/forced" in e for e in history)
    before, after = load_file(model / "model.safetensors"), load_file(out / "model.safetensors")
    assert any(not torch.equal(before[name], after[name]) for name in before)


def test_the_tokenizer_decides(tmp_path):
    from transformers import AutoTokenizer

    from trl_gptoss.harmony import is_harmony

    assert not is_harmony(AutoTokenizer.from_pretrained(make_tiny_qwen(tmp_path / "model")))
