"""Problems of the ReTool task: determinism, disjoint splits, right answers, the formats people have on disk."""

import json
import os
import re
from itertools import islice
from pathlib import Path

import pytest

from trl_gptoss.recipe import TaskArguments
from trl_gptoss.tasks import retool, verify_if

DATA = Path(os.environ.get("TRL_GPTOSS_TEST_DATA", Path(__file__).parents[2] / "../shared/data"))


def questions(dataset):
    return [prompt[-1]["content"] for prompt in dataset["prompt"]]


def test_a_seed_determines_the_problems():
    first = list(islice(retool.arithmetic_problems(3), 50))
    assert first == list(islice(retool.arithmetic_problems(3), 50))
    assert first != list(islice(retool.arithmetic_problems(4), 50))


@pytest.mark.parametrize("seed", [0, 1])
def test_training_and_held_out_problems_share_no_calculation(seed):
    """Not only no question: no wording of a held-out calculation is trained on."""
    train = {(a, o, b) for a, o, b, _ in islice(retool.arithmetic_problems(seed), 20000)}
    held_out = {(a, o, b) for a, o, b, _ in islice(retool.arithmetic_problems(seed, held_out=True), 2000)}
    assert len(train) > 10000 and len(held_out) > 1000
    assert not train & held_out


def test_the_held_out_problems_do_not_depend_on_the_seed():
    _, first = retool.load_problems(seed=0, train_size=10)
    _, second = retool.load_problems(seed=1, train_size=10)
    assert len(first) == 200 and first.to_list() == second.to_list()


def test_answers_are_right_and_every_wording_occurs():
    """The answer is recomputed from the question's own words."""
    verbs = {"plus": "+", "Add": "+", "sum": "+", "minus": "-", "away": "-", "larger": "-", "times": "*", "Mult": "*"}
    train, _ = retool.load_problems(train_size=600)
    seen = set()
    for question, answer in zip(questions(train), train["answer"]):
        a, b = map(int, re.findall(r"\d+", question))
        operator = next((o for word, o in verbs.items() if word in question), "*")
        assert answer == str(eval(f"{a}{operator}{b}"))
        seen.add(re.sub(r"\d+", "n", question))
    assert seen == {w.format(a="n", b="n") for wordings in retool.WORDINGS.values() for w in wordings}
    assert len(seen) == 9


def test_questions_do_not_repeat_and_too_many_are_refused():
    train, _ = retool.load_problems(train_size=5000)
    assert len(set(questions(train))) == 5000
    with pytest.raises(ValueError, match="lower the number"):
        retool.load_problems(held_out_size=7000)


def test_reasoning_gym_problems_are_split_without_overlap():
    pytest.importorskip("reasoning_gym")
    train, held_out = retool.load_problems("reasoning_gym/chain_sum,gcd", train_size=60, held_out_size=40)
    assert (len(train), len(held_out)) == (60, 40)
    assert not set(questions(train)) & set(questions(held_out))
    assert all(re.fullmatch(r"-?\d+", a) for a in train["answer"])


def write_jsonl(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.mark.parametrize(
    "rows, expected",
    [
        (
            [{"question": f"q{i}", "answer": f"think\n#### {i}"} for i in range(10)],
            {f"q{i}": str(i) for i in range(10)},
        ),
        ([{"input": f"q{i}", "output": str(i)} for i in range(10)], {f"q{i}": str(i) for i in range(10)}),
        (
            [{"problem": f"q{i}", "question": "other", "solution": "long", "answer": str(i)} for i in range(10)],
            {f"q{i}": str(i) for i in range(10)},
        ),
        (
            [{"prompt": [{"role": "user", "content": f"q{i}"}], "answer": str(i)} for i in range(10)],
            {f"q{i}": str(i) for i in range(10)},
        ),
    ],
    ids=["gsm8k", "retool", "aime", "conversations"],
)
def test_stored_formats(tmp_path, rows, expected):
    name = write_jsonl(tmp_path / "data.jsonl", rows)
    train, held_out = retool.load_problems(name, instructions="Use Python.")
    assert (len(train), len(held_out)) == (8, 2)  # a fifth is held out where there is no test split
    found = dict(zip(questions(train) + questions(held_out), [*train["answer"], *held_out["answer"]]))
    assert found == expected
    assert train[0]["prompt"][0] == {"role": "system", "content": "Use Python."}


def test_duplicate_questions_cannot_cross_the_split(tmp_path):
    rows = [{"question": f"q{i % 5}", "answer": str(i % 5)} for i in range(40)]
    train, held_out = retool.load_problems(write_jsonl(tmp_path / "data.jsonl", rows))
    assert len(train) == 4 and len(held_out) == 1
    assert not set(questions(train)) & set(questions(held_out))


def test_a_test_split_is_the_held_out_data(tmp_path):
    write_jsonl(tmp_path / "train.jsonl", [{"question": f"q{i}", "answer": "1"} for i in range(6)])
    write_jsonl(tmp_path / "test.jsonl", [{"question": f"q{i}", "answer": "1"} for i in range(5, 9)])
    train, held_out = retool.load_problems(str(tmp_path))
    assert sorted(questions(held_out)) == ["q5", "q6", "q7", "q8"]
    assert sorted(questions(train)) == [f"q{i}" for i in range(5)]  # q5 is asked in the test split


@pytest.mark.parametrize("task", [retool, verify_if])
def test_a_test_split_of_another_name_has_to_be_there(tmp_path, task):
    for split in ("train", "validation"):
        row = {"answer": "1", "instruction_id_list": ["punctuation:no_comma"], "kwargs": [{"n": None}]}
        rows = [{"prompt": f"q{i}", **row} for i in range(5)]
        write_jsonl(tmp_path / f"{split}.jsonl", rows)
    with pytest.raises(
        ValueError, match=r"splits \['train', 'validation'\], not 'vaildation': set --dataset_test_split"
    ):
        task.load_problems(str(tmp_path), test_split="vaildation")


def test_unusable_data_says_why(tmp_path):
    name = write_jsonl(tmp_path / "data.jsonl", [{"text": "x"}])
    with pytest.raises(ValueError, match=r"has the columns \['text'\]"):
        retool.load_problems(name)
    with pytest.raises(FileNotFoundError, match="missing.jsonl"):
        retool.load_problems(str(tmp_path / "missing.jsonl"))
    write_jsonl(tmp_path / "good.jsonl", [{"question": "q", "answer": "1"}])
    with pytest.raises(ValueError, match="dataset_train_split"):
        retool.load_problems(str(tmp_path / "good.jsonl"), train_split="training")


def test_rows_without_a_question_or_an_answer_are_left_out(tmp_path, caplog):
    entries = [("q1", "1"), ("q2", None), (None, "3"), ("q4", ""), ("", "5"), ("q6", "0")]
    name = write_jsonl(tmp_path / "data.jsonl", [{"question": q, "answer": a} for q, a in entries])
    train, held_out = retool.load_problems(name, held_out_size=0)
    assert sorted(zip(questions(train), train["answer"])) == [("q1", "1"), ("q6", "0")] and not len(held_out)
    assert "4 of 6 rows are left out" in caplog.text


@pytest.mark.parametrize("roles", [["system", "user"], ["user", "assistant", "user"], []])
def test_a_conversation_is_not_cut_down_to_its_last_message(tmp_path, roles):
    rows = [{"prompt": [{"role": role, "content": "x"} for role in roles], "answer": "1"}]
    with pytest.raises(ValueError, match=r"row 0 of .* has a conversation of the roles .*instructions"):
        retool.load_problems(write_jsonl(tmp_path / "data.jsonl", rows))


def test_a_training_set_that_is_held_out_as_a_whole_is_refused(tmp_path):
    name = write_jsonl(tmp_path / "data.jsonl", [{"question": f"q{i}", "answer": "1"} for i in range(6)])
    with pytest.raises(ValueError, match="leaves nothing to train on.*6 problems that are held out"):
        TaskArguments(dataset_name=name, test_dataset_name=name).load(retool, seed=0)


@pytest.mark.parametrize(
    "name, n_train, n_held_out", [("gsm8k/train.jsonl", 500, 200), ("math/AIME24_retool.jsonl", 24, 6)]
)
def test_real_files(name, n_train, n_held_out):
    if not (DATA / name).is_file():
        pytest.skip(f"{DATA / name} is not there; set TRL_GPTOSS_TEST_DATA")
    train, held_out = retool.load_problems(str(DATA / name), train_size=500)
    assert (len(train), len(held_out)) == (n_train, n_held_out)
    assert all(re.fullmatch(r"-?[\d.,]+", answer) for answer in [*train["answer"], *held_out["answer"]])
