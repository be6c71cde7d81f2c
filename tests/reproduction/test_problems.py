"""Problems mean what they say, and demonstrations are what rollouts look like."""

import re
from itertools import islice

import pytest
from cell import Cell
from pretrain import (
    CORPUS,
    SIZES,
    Phase,
    batches,
    count,
    dense_config,
    drawn_pool,
    make_model,
    moe_config,
    pretrain,
    train,
)
from problems import EVENTS, TASKS, WORDINGS, demonstrations, load_problems, problems
from transformers import GptOssForCausalLM, Qwen3ForCausalLM

from trl_gptoss.harmony import parse


def solve(task, question):
    """The answer, read off the text."""
    patterns = WORDINGS if task == "tool" else EVENTS
    first, *sentences, _ = re.split(r"(?<=[.?]) ", question)
    value = int(re.search(r"\d+", first)[0])
    for sentence in sentences:
        sentence = re.sub(r"^(Ann|Ben|Eva|Tom|Kim|Leo) ", "{name} ", sentence)
        b = int(re.search(r"\d+", sentence)[0])
        (operator,) = [o for o, forms in patterns.items() if re.sub(r"\d+", "{b}", sentence) in forms]
        value = {"+": value + b, "-": value - b, "*": value * b}[operator]
        assert value >= 0
    return value


@pytest.mark.parametrize("task", ["tool", "single_turn"])
def test_the_answer_is_that_of_the_text(task):
    for problem in islice(problems(task, 0), 200):
        assert problem.answer == solve(task, problem.question)


@pytest.mark.parametrize("task", ["tool", "single_turn"])
def test_held_out_problems_are_not_trained_on(task):
    train_rows, held_out = load_problems(task, 300, 40, seed=1)
    _, same = load_problems(task, 10, 40, seed=2)
    assert held_out["prompt"] == same["prompt"] and (len(train_rows), len(held_out)) == (300, 40)
    asked = {p[0]["content"] for p in held_out["prompt"]}
    streams = (q.question for seed in range(3) for q in islice(problems(task, seed), 2000))
    assert not asked.intersection(streams)
    with pytest.raises(ValueError, match="expected one of"):
        load_problems("chess", 1, 1, 0)


@pytest.mark.parametrize("task", TASKS)
def test_there_are_as_many_problems_as_a_run_asks_for(task):
    if task == "instruction":
        pytest.importorskip("if_verifiable")
    cell = Cell(task=task, cause="right")
    for seed in (0, 2):
        rows, held_out = load_problems(task, cell.train_size, cell.held_out, seed)
        assert len(rows) >= 2000 and len(held_out) == 200


@pytest.mark.parametrize("task", TASKS)
def test_the_mask_is_on_what_the_policy_says(task, tokenizer):
    for demonstration in islice(demonstrations(task, tokenizer, 0), 20):
        said = tokenizer.decode([i for i, m in zip(demonstration.ids, demonstration.policy_mask) if m])
        assert said.startswith("<|channel|>") and said.endswith("<|return|>")
        assert "<|start|>user" not in said and "<|start|>python" not in said
        heard = tokenizer.decode([i for i, m in zip(demonstration.ids, demonstration.policy_mask) if not m])
        assert heard.count("<|start|>python") == said.count("<|call|>") and "<|return|>" not in heard


def test_the_tool_is_called_for_every_step_and_says_what_python_says(tokenizer):
    for demonstration in islice(demonstrations("tool", tokenizer, 0), 30):
        text = tokenizer.decode(demonstration.ids)
        calls = re.findall(r"<\|message\|>([^<]*)<\|call\|>", text)
        results = re.findall(r"<\|start\|>python[^<]*<\|channel\|>analysis<\|message\|>([^<]*)\n<\|end\|>", text)
        assert [str(eval(call)) for call in calls] == results and 2 <= len(calls) <= 4
        assert text.endswith(f"<|message|>{results[-1]}<|return|>")
        last = demonstration.ids[len(demonstration.ids) - demonstration.policy_mask[::-1].index(0) :]
        assert parse(last, tokenizer, ["python"]).tool_calls == []


@pytest.mark.parametrize("task", ["tool", "single_turn"])
@pytest.mark.parametrize("p_right, low, high", [(1.0, 1.0, 1.0), (0.7, 0.25, 0.6)])
def test_the_demonstrator_is_as_reliable_as_asked(task, tokenizer, p_right, low, high):
    stream = demonstrations(task, tokenizer, 0, p_right)
    right = []
    for problem, demonstration in islice(zip(problems(task, 0), stream), 100):
        text = tokenizer.decode(demonstration.ids)
        assert problem.question in text
        right.append(text.endswith(f"<|message|>{problem.answer}<|return|>"))
    assert low <= sum(right) / len(right) <= high


def test_every_feature_is_on_and_the_control_is_as_large(tokenizer):
    for size in SIZES:
        moe = moe_config(size, tokenizer)
        assert set(moe.layer_types) == {"sliding_attention", "full_attention"}
        assert moe.rope_parameters["rope_type"] == "yarn" and moe.rope_parameters["factor"] > 1
        assert moe.num_local_experts > moe.num_experts_per_tok > 1 and moe.attention_bias
        assert moe.sliding_window < 88  # the shortest conversation with the tool
        parameters = count(GptOssForCausalLM, moe)
        control = count(Qwen3ForCausalLM, dense_config(size, tokenizer))
        assert parameters <= 25_000_000 and abs(control / parameters - 1) < 0.01
    names = dict(make_model("test", tokenizer, False, 0, sink_start=3.0).named_parameters())
    assert all(2 < value < 4 for name in names if name.endswith("sinks") for value in names[name].tolist())
    for kind in ("sinks", "q_proj.bias", "experts.gate_up_proj_bias", "router.bias"):
        assert any(name.endswith(kind) for name in names), kind
    assert len(tokenizer) == 640 and CORPUS > 100


def test_the_pool_does_not_depend_on_the_number_of_processes(tokenizer):
    alone = drawn_pool(tokenizer, 0.7, 96, seed=1)
    assert len(alone) == 96 and alone == drawn_pool(tokenizer, 0.7, 96, seed=1, workers=3)
    assert len({tuple(d.ids) for d in alone}) > 80  # the parts are not the same stream again
    assert alone != drawn_pool(tokenizer, 0.7, 96, seed=2)


@pytest.mark.parametrize("dense", [False, True])
def test_pretraining_lowers_the_loss(tokenizer, dense):
    import torch

    phase = Phase(steps=12, batch_size=4, learning_rate=1e-2, p_right=1.0)
    model = make_model("test", tokenizer, dense, 0)
    losses = train(model, batches(tokenizer, phase, 30, 0), phase, torch.device("cpu"))
    assert len(losses) == 12 and losses[-1] < losses[0] - 0.5


def test_a_folder_with_something_in_it_is_left_alone(tmp_path):
    (tmp_path / "precious").write_text("")
    with pytest.raises(ValueError, match="not empty"):
        pretrain(tmp_path, "test", False, [], 3, 0, None)
    with pytest.raises(ValueError, match="expected one of"):
        make_model("huge", None, False, 0)
