"""Evaluation through the trainer: every answer is counted once, under its problem, whatever the batches look like."""

import functools
import json
import sys
from pathlib import Path

import pytest
from datasets import Dataset

from trl_gptoss.cli import main
from trl_gptoss.evaluation.command import card_line
from trl_gptoss.evaluation.outcomes import Outcomes, repeated, summary
from trl_gptoss.tasks import retool
from trl_gptoss.trainers import GptOssGRPOConfig, GptOssGRPOTrainer

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))
from tiny_policy import byte_tokenizer, tiny_model  # noqa: E402

PROBLEMS = Dataset.from_list([{"prompt": [{"role": "user", "content": f"q{i}"}], "answer": str(i)} for i in range(7)])


def trainer(tmp_path, outcomes, **settings):
    args = GptOssGRPOConfig(
        str(tmp_path), per_device_train_batch_size=2, num_generations=2, per_device_eval_batch_size=4, bf16=False,
        num_generations_eval=settings.pop("num_generations_eval", 1), max_rollout_tokens=4, use_cpu=True,
        report_to="none", disable_tqdm=True, max_steps=1, **settings,
    )  # fmt: skip
    return GptOssGRPOTrainer(tiny_model(), outcomes.reward, args, PROBLEMS, processing_class=byte_tokenizer())


def test_every_answer_is_counted_under_its_problem(tmp_path):
    """7 problems x 3 answers in batches of 4: the last one is not full. The reward is a function of the problem."""
    seen = []

    def reward(completions, answer, **kwargs):
        assert not [k for k in kwargs if k.startswith("evaluation_")]
        seen.extend(answer)
        return [1.0 if int(a) % 2 else 0.5 for a in answer]

    outcomes = Outcomes(reward)
    row = outcomes.evaluate(trainer(tmp_path, outcomes), PROBLEMS, answers=3)
    assert sorted(seen) == sorted(str(i) for i in range(7) for _ in range(3))
    assert (row["problems"], row["answers"], row["correct"], row["unscored"]) == (7, 3, 9, 0)  # 1, 3, 5; 0.5 is wrong
    assert row["accuracy"] == pytest.approx(3 / 7) and row["pass@2"] == pytest.approx(3 / 7)
    assert row["low"] < 3 / 7 < row["high"]


def test_training_is_not_recorded_and_the_name_stays(tmp_path):
    def my_reward(completions, **kwargs):
        return [1.0] * len(completions)

    outcomes = Outcomes(my_reward)
    instance = trainer(tmp_path, outcomes)
    assert instance.reward_func_names == ["my_reward"]
    instance.train()
    assert outcomes._seen == {}


def test_answers_without_a_verdict_are_said_to_be_missing(tmp_path):
    def reward(completions, answer, **kwargs):
        return [{"3": None, "4": float("nan")}.get(a, 1.0) for a in answer]

    outcomes = Outcomes(reward)
    row = outcomes.evaluate(trainer(tmp_path, outcomes), PROBLEMS, answers=1)
    assert (row["correct"], row["unscored"], row["accuracy"]) == (5, 2, 1.0)
    with pytest.raises(RuntimeError, match="no answer of the evaluation got a verdict"):
        summary({}, 7, 1)


def test_an_async_judge_is_awaited(tmp_path):
    class Judge:
        async def __call__(self, completions, answer, strict, **kwargs):
            return [float(int(a) % 2) for a in answer]

    outcomes = Outcomes(functools.partial(Judge(), strict=True))
    row = outcomes.evaluate(trainer(tmp_path, outcomes), PROBLEMS, answers=1)
    assert (row["correct"], row["unscored"]) == (3, 0)


def test_groups_in_the_evaluation_are_refused(tmp_path):
    outcomes = Outcomes(lambda completions, **kwargs: [1.0] * len(completions))
    with pytest.raises(ValueError, match="num_generations_eval is 2"):
        outcomes.evaluate(trainer(tmp_path, outcomes, num_generations_eval=2), PROBLEMS)


def test_duplicates_of_a_sampler_are_counted_once():
    rows = repeated(PROBLEMS, 2)
    assert rows["evaluation_problem"] == [i // 2 for i in range(14)] and rows["evaluation_answer"] == [0, 1] * 7
    assert summary({(0, 0): 1.0, (0, 1): 0.0, (1, 0): 1.0, (1, 1): 1.0}, 2, 2)["accuracy"] == 0.75


def test_problems_with_too_few_verdicts_have_no_pass_at_k():
    row = summary({(0, 0): 1.0, (1, 3): 0.0, (1, 2): 1.0}, 2, 4)
    assert (row["pass@2"], row["unscored"], row["accuracy"]) == (1.0, 5, 0.75) and "pass@4" not in row


@pytest.mark.parametrize("temperature", [0.7, 0])
def test_the_command(tmp_path, capsys, monkeypatch, temperature):
    """On a model of 40 thousand parameters that knows nothing: the JSON, the line, and the file of problems."""
    answers = {}

    def wrong(completion_ids, prompts, **_):
        for prompt, ids in zip(prompts, completion_ids):
            answers.setdefault(str(prompt), []).append(ids)
        return [0.0] * len(prompts)

    monkeypatch.setattr(retool, "REWARDS", [wrong])
    model = tmp_path / "model"
    tiny_model().save_pretrained(model)
    byte_tokenizer().save_pretrained(model)
    data = tmp_path / "aime.jsonl"
    data.write_text("".join(json.dumps({"input": f"What is {i}?", "output": str(i)}) + "\n" for i in range(3)))
    out = tmp_path / "result.json"
    arguments = [
        "eval", "retool", str(model), "--dataset", str(data), "--answers", "2", "--batch-size", "4",
        "--max-rollout-tokens", "6", "--out", str(out), "--temperature", str(temperature),
    ]  # fmt: skip
    assert main(arguments) == 0
    result = json.loads(out.read_text())
    assert (result["problems"], result["answers"], result["accuracy"]) == (3, 2, 0.0)
    assert result["low"] == 0.0 < result["high"] < 1.0 and result["temperature"] == temperature
    assert [len(ids) for ids in answers.values()] == [2, 2, 2]
    assert all(one == other for one, other in answers.values()) == (temperature == 0)
    line = capsys.readouterr().out.strip().splitlines()[-1]
    assert line == card_line(result) and "avg@2 = 0.0 %" in line and "3 problems" in line


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--backend", "vllm"], "vLLM"),
        (["--answers", "0"], "--answers is 0"),
        (["--dataset", "none.jsonl"], "does not exist"),
    ],
)
def test_what_cannot_be_measured_is_one_line(arguments, message, capsys):
    if "vllm" in arguments:
        try:
            import vllm  # noqa: F401

            pytest.skip("vLLM is installed")
        except ModuleNotFoundError:
            pass
    assert main(["eval", "gsm8k", "nowhere", *arguments]) == 1
    assert message in capsys.readouterr().err


def test_what_the_command_cannot_do_is_said_before_anything_is_sampled(tmp_path, capsys):
    for wrong in (["gsm8k", "model", "--stateful"], ["gsm8k", "model", "--dataset-config", "main"]):
        with pytest.raises(SystemExit):
            main(["eval", *wrong])
        assert wrong[2] in capsys.readouterr().err
    (tmp_path / "adapter_config.json").write_text("{}")
    assert main(["eval", "gsm8k", str(tmp_path)]) == 1
    assert f"trl-gptoss export {tmp_path} OUT" in capsys.readouterr().err
    (tmp_path / "file").touch()
    assert main(["eval", "gsm8k", str(tmp_path / "model"), "--out", str(tmp_path / "file/result.json")]) == 1
    assert str(tmp_path / "file") in capsys.readouterr().err
