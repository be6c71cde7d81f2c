"""Problems of the GSM8K task: determinism, disjoint splits, right answers, and the real files."""

import json
import os
import re
from itertools import islice
from pathlib import Path

import pytest

from trl_gptoss.rewards import math_reward
from trl_gptoss.tasks import gsm8k, retool

DATA = Path(os.environ.get("TRL_GPTOSS_TEST_DATA", Path(__file__).parents[2] / "../shared/data"))


def questions(dataset):
    return [prompt[-1]["content"] for prompt in dataset["prompt"]]


def test_stories_are_deterministic_disjoint_and_right():
    """The answer is recomputed from the question's own words."""
    train, held_out = gsm8k.load_problems(train_size=800, seed=1)
    again, same = gsm8k.load_problems(train_size=800, seed=1)
    other, same_too = gsm8k.load_problems(train_size=800, seed=2)
    assert train.to_list() == again.to_list() != other.to_list()
    assert held_out.to_list() == same.to_list() == same_too.to_list()  # for every seed, so that runs can be compared
    assert len(set(questions(train))) == 800 and not set(questions(train)) & set(questions(held_out))
    words = {"more": "+", "finds": "+", "left": "-", "boxes": "*", "bags": "*", "packs": "*"}
    for question, answer in zip(questions(train), train["answer"]):
        a, b = map(int, re.findall(r"\d+", question))
        [operator] = {words[w] for w in words if re.search(rf"\b{w}\b", question)}
        assert answer == str(eval(f"{a}{operator}{b}")) and int(answer) >= 0


def test_too_many_stories_are_refused_and_none_is_fine():
    with pytest.raises(ValueError, match="lower the number"):
        gsm8k.load_problems(train_size=10, held_out_size=3000)
    assert len(gsm8k.load_problems(train_size=10, held_out_size=0)[1]) == 0


def test_every_gold_answer_of_gsm8k_is_accepted():
    path = DATA / "gsm8k/test.jsonl"
    if not path.is_file():
        pytest.skip(f"{path} is not there; set TRL_GPTOSS_TEST_DATA")
    train, held_out = gsm8k.load_problems(str(DATA / "gsm8k"), held_out_size=1319, train_size=8000)
    solutions = {row["question"]: row["answer"] for row in map(json.loads, path.read_text().splitlines())}
    texts = [f"So it is \\boxed{{{solutions[q].rsplit('####', 1)[1].strip()}}}." for q in questions(held_out)]
    assert math_reward(texts, answer=list(held_out["answer"])) == [1.0] * 1319
    assert len(train) == 7473 and not set(questions(train)) & set(questions(held_out))


@pytest.mark.parametrize(("task", "source"), [(gsm8k, "stories"), (retool, "arithmetic")])
@pytest.mark.parametrize(
    "name", ["AIME24_retool", "AIME25_retool", "qwen_minerva_math_test", "qwen_olympiadbench_test"]
)
def test_another_data_set_can_be_held_out(task, source, name):
    path = DATA / f"math/{name}.jsonl"
    if not path.is_file():
        pytest.skip(f"{path} is not there; set TRL_GPTOSS_TEST_DATA")
    train, held_out = task.load_problems(source, train_size=5, test_dataset_name=str(path), held_out_size=30)
    assert (len(train), len(held_out)) == (5, 30)
    assert all(isinstance(a, str) and a for a in held_out["answer"])


def test_what_is_held_out_is_not_trained_on(tmp_path):
    rows = [{"question": f"q{i}", "answer": str(i)} for i in range(10)]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    (tmp_path / "test.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows[:3]))
    train, held_out = gsm8k.load_problems(
        str(tmp_path / "train.jsonl"), test_dataset_name=str(tmp_path / "test.jsonl"), instructions="Think."
    )
    assert sorted(questions(held_out)) == ["q0", "q1", "q2"] and len(train) == 7
    assert train[0]["prompt"][0] == {"role": "system", "content": "Think."}


def test_the_stream_of_one_seed_goes_on():
    assert list(islice(gsm8k.stories(3), 40))[:20] == list(islice(gsm8k.stories(3), 20))
