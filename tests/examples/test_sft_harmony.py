"""examples/sft_harmony.py: the labels are exactly what a policy samples, and training on them works."""

import json
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from trl_gptoss.tiny import make_tiny_model
from trl_gptoss.tiny.vocabulary import small_tokenizer

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tests/examples"))
from test_recipes import example, parse  # noqa: E402

RECIPE = ROOT / "configs/recipes/tiny_sft.yaml"


def test_labels_are_what_a_policy_samples():
    """Read back as text: nothing of the user and of the tool, everything of the assistant."""
    module, tokenizer = example(RECIPE), small_tokenizer()
    rows = module.samples(module.made_conversations(20, seed=0), tokenizer, ["python"], "medium", longest=128)
    assert len(rows) == 20
    for row, conversation in zip(rows, module.made_conversations(20, seed=0)):
        user, call, result, final = (m["content"] for m in conversation)
        assert len(row["labels"]) == len(row["input_ids"])
        trained = tokenizer.decode([i for i in row["labels"] if i != -100])
        masked = tokenizer.decode([i for i, label in zip(row["input_ids"], row["labels"]) if label == -100])
        assert trained == (
            f" to=python<|channel|>analysis code<|message|>{call}<|call|><|channel|>final<|message|>{final}<|return|>"
        )
        assert f"<|message|>{user}<|end|>" in masked and f"<|message|>{result}<|end|>" in masked
        assert all(label in (-100, i) for i, label in zip(row["input_ids"], row["labels"]))
    whole = module.samples(module.made_conversations(20, seed=0), tokenizer, ["python"], "medium", longest=None)
    assert whole["labels"] == rows["labels"]
    with pytest.raises(ValueError, match="at most 10 tokens: raise max_length"):
        module.samples(module.made_conversations(2, seed=0), tokenizer, ["python"], "medium", longest=10)


def test_training_on_stored_conversations(tmp_path):
    model = make_tiny_model(tmp_path / "model", steps=0, cache_dir=tmp_path / "cache")
    data = tmp_path / "conversations.jsonl"
    messages = [
        {"role": "user", "content": "Add 1 and 2."},
        {"role": "assistant", "thinking": "1+2=3", "content": "3"},
        {"role": "user", "content": "And 3?"},
        {"role": "assistant", "thinking": "3+3=6", "content": "6"},
    ]
    data.write_text((json.dumps({"messages": messages}) + "\n") * 4)
    out = tmp_path / "out"
    options = {
        "model_name_or_path": model, "dataset_name": data, "output_dir": out, "max_steps": 3, "logging_steps": 1,
        "per_device_train_batch_size": 4, "warmup_steps": 0, "disable_tqdm": "true", "max_length": 200,
        "learning_rate": 1e-2,
    }  # fmt: skip
    module = example(RECIPE)
    module.main(*parse(module, RECIPE, *[part for n, v in options.items() for part in (f"--{n}", str(v))]))
    history = json.loads((out / "trainer_state.json").read_text())["log_history"]
    losses = [entry["loss"] for entry in history if "loss" in entry]
    assert len(losses) == 3 and losses[-1] < losses[0]
    before, after = load_file(model / "model.safetensors"), load_file(out / "model.safetensors")
    sinks = [name for name in before if name.endswith("sinks")]
    assert sinks and all(not torch.equal(before[name], after[name]) for name in sinks)
