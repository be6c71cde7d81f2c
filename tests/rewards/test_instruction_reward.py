"""Verifiable instructions: hand-made passes and fails for each kind, all of IFEval offline, and checkers that misbehave."""

import json
import os
import time
from pathlib import Path

import pytest

pytest.importorskip("if_verifiable")
from if_verifiable.ifeval.instructions_registry import INSTRUCTION_DICT

from trl_gptoss.rewards import instruction_reward
from trl_gptoss.rewards.instruction_checker import InstructionChecker, shared_instruction_checker
from trl_gptoss.trajectory import Trajectory

DATA = Path(os.environ.get("TRL_GPTOSS_TEST_DATA", Path(__file__).parents[2] / "../shared/data"))
FRENCH = "Le chat dort tranquillement sur le tapis du salon pendant que la pluie tombe sur les toits de la ville."
ENGLISH = "The cat sleeps quietly on the carpet of the living room while the rain falls on the roofs of the town."

# kind, its arguments, a response that follows it, one that does not
KINDS = [
    ("keywords:existence", {"keywords": ["river", "storm"]}, "A STORM on the river.", "A storm on the sea."),
    ("keywords:frequency", {"keyword": "tea", "frequency": 3, "relation": "at least"}, "tea, Tea, tea", "tea, tea"),
    ("keywords:forbidden_words", {"forbidden_words": ["rain", "sun"]}, "It is raining.", "The sun shines."),
    ("keywords:letter_frequency", {"letter": "z", "let_frequency": 2, "let_relation": "at least"}, "Zz", "z"),
    ("language:response_language", {"language": "fr"}, FRENCH, ENGLISH),
    ("length_constraints:number_sentences", {"num_sentences": 3, "relation": "less than"},
     "Dr. Smith went home. He slept.", "One. Two. Three."),
    ("length_constraints:number_paragraphs", {"num_paragraphs": 2}, "One\n***\nTwo", "One\n\nTwo"),
    ("length_constraints:number_words", {"num_words": 4, "relation": "at least"}, "one two three four", "one two three"),
    ("length_constraints:nth_paragraph_first_word", {"num_paragraphs": 2, "nth_paragraph": 2, "first_word": "garden"},
     "Here.\n\nGarden, there.", "Garden.\n\nThere."),
    ("detectable_content:number_placeholders", {"num_placeholders": 2}, "[name] of [town]", "[name] of town"),
    ("detectable_content:postscript", {"postscript_marker": "P.S."}, "Hello.\nP.S. Bye.", "Hello. PS Bye."),
    ("detectable_format:number_bullet_lists", {"num_bullets": 2}, "* one\n- two", "* one\n* two\n* three"),
    ("detectable_format:constrained_response", {}, "My answer is maybe.", "Maybe."),
    ("detectable_format:number_highlighted_sections", {"num_highlights": 2}, "*one* and *two*", "*one* and two"),
    ("detectable_format:multiple_sections", {"section_spliter": "Section", "num_sections": 2},
     "Section 1\na\nSection 2\nb", "Section 1\na\nPart 2\nb"),
    ("detectable_format:json_format", {}, '```json\n{"a": [1, 2]}\n```', "{a: 1}"),
    ("detectable_format:title", {}, "<<rain>>\nIt falls.", "<< >>\nIt falls."),
    ("combination:two_responses", {}, "One.\n******\nTwo.", "One.\n******\nOne."),
    ("combination:repeat_prompt", {"prompt_to_repeat": "Write a poem."}, "write a poem. Roses.", "Roses. Write a poem."),
    ("startend:end_checker", {"end_phrase": "That is all."}, "Hello. that is all.", "That is all. Bye."),
    ("startend:quotation", {}, '"Hello."', '"Hello." she said'),
    ("change_case:capital_word_frequency", {"capital_frequency": 2, "capital_relation": "less than"},
     "Only ONE word", "TWO WORDS"),
    ("change_case:english_capital", {}, ENGLISH.upper(), ENGLISH),
    ("change_case:english_lowercase", {}, ENGLISH.lower(), ENGLISH),
    ("punctuation:no_comma", {}, "one; two", "one, two"),
]  # fmt: skip


def check(kind, kwargs, response, benchmark="ifeval", checker=shared_instruction_checker):
    [result] = checker.check([benchmark], ["Write a poem."], [[{"id": kind, "kwargs": kwargs}]], [response])
    return result


def test_every_kind_is_judged_right():
    assert {kind for kind, *_ in KINDS} == set(INSTRUCTION_DICT) and len(KINDS) == 25
    for kind, kwargs, good, bad in KINDS:
        followed, broken = check(kind, kwargs, good), check(kind, kwargs, bad)
        assert (followed.strict, followed.errors) == ([True], [None]), kind
        assert (broken.strict, broken.errors) == ([False], [None]), kind


def constraints_of(row):
    kwargs = [{name: value for name, value in k.items() if value is not None} for k in row["kwargs"]]
    return [{"id": i, "kwargs": k} for i, k in zip(row["instruction_id_list"], kwargs)]


@pytest.mark.parametrize(("name", "benchmark", "needs_data"), [
    ("ifeval/input_data.jsonl", "ifeval", set()),
    ("ifbench/IFBench_test.jsonl", "ifbench", {"ratio:stop_words", "words:start_verb"}),
])  # fmt: skip
def test_every_checker_of_the_benchmarks_runs_offline(name, benchmark, needs_data):
    """No checker raises, but the two of IFBench that need NLTK data which no package brings."""
    if not (DATA / name).is_file():
        pytest.skip(f"{DATA / name} is not there; set TRL_GPTOSS_TEST_DATA")
    rows = [json.loads(line) for line in (DATA / name).read_text().splitlines()]
    response = "A plain answer, with TWO sentences. Here it is."
    n = len(rows)
    results = shared_instruction_checker.check(
        [benchmark] * n, [r["prompt"] for r in rows], [constraints_of(r) for r in rows], [response] * n
    )
    failed = {}
    for row, result in zip(rows, results, strict=True):
        assert len(result.strict) == len(row["instruction_id_list"])
        failed |= {i: e for i, e in zip(row["instruction_id_list"], result.errors) if e is not None}
    assert set(failed) <= needs_data and all(error.startswith("LookupError") for error in failed.values())
    verdicts = [v for result in results for v in result.strict]
    assert any(verdicts) and not all(verdicts)


def test_verdicts_do_not_depend_on_chance():
    """langdetect draws random numbers; so do checkers with arguments that they cannot read, like the letter '#'."""
    for kind, kwargs, text in (
        ("language:response_language", {"language": "de"}, "Hallo hotel, taxi, restaurant und radio"),
        ("keywords:letter_frequency", {"letter": "#", "let_frequency": 3, "let_relation": "at least"}, ENGLISH),
    ):
        assert len({str(check(kind, kwargs, text)) for _ in range(5)}) == 1


def test_hangs_crashes_and_large_answers_cost_one_verdict():
    """A keyword is a regular expression to IFEval's checker: one that takes for ever stands for every checker that hangs."""
    checker = InstructionChecker(workers=1, seconds=1)
    try:
        assert check("punctuation:no_comma", {}, "x", checker=checker).strict == [True]
        start = time.monotonic()
        hung = check("keywords:existence", {"keywords": ["(a+)+$"]}, "a" * 40 + "b", checker=checker)
        assert (hung.strict, hung.errors) == ([False], ["timed out"]) and time.monotonic() - start < 60
        broken = check("keywords:existence", {"keywords": ["("]}, "x", checker=checker)
        assert broken.strict == [False] and "PatternError" in broken.errors[0] or "error" in broken.errors[0]
        big = check("punctuation:no_comma", {}, "word " * 400_000, checker=checker)
        assert big.strict == [True]
        odd = check("detectable_format:title", {}, "\ud800\x00<<a>>" + "\u202e" * 10, checker=checker)
        assert odd.errors == [None]
        assert check("punctuation:no_comma", {}, "x", checker=checker).strict == [True]
    finally:
        checker.close()


def column(*constraints):
    return [json.dumps([{"id": kind, "kwargs": kwargs} for kind, kwargs in constraints])]


def test_checkers_get_the_question_as_text(monkeypatch):
    given = []

    def check(benchmarks, prompts, constraints, responses):
        given.extend(prompts)
        return []

    monkeypatch.setattr(shared_instruction_checker, "check", check)
    parts = [{"type": "image", "text": None}, {"type": "text", "text": "Say "}, {"type": "text", "text": "it."}]
    prompts = [[{"role": "user", "content": content}] for content in (parts, "Say it.")] + ["Say it."]
    with pytest.raises(ValueError, match="shorter"):  # no verdicts
        instruction_reward(
            prompts, ["It."] * 3, constraints=['[{"id": "x", "kwargs": {}}]'] * 3, benchmark=["ifeval"] * 3
        )
    assert given == ["Say it."] * 3


def test_the_reward_is_the_share_that_is_followed():
    no_comma, title = ("punctuation:no_comma", {}), ("detectable_format:title", {})
    both = column(no_comma, title)
    prompts = [[{"role": "system", "content": "s"}, {"role": "user", "content": "Write."}]]

    def reward(text, constraints=both, **kwargs):
        completions = [[{"role": "assistant", "content": text}]]
        return instruction_reward(prompts, completions, constraints=constraints, benchmark=["ifeval"], **kwargs)[0]

    assert reward("<<t>> one two") == 1.0 and reward("one two") == 0.5 and reward("one, two") == 0.0
    assert reward("") == 0.0 and reward("x", constraints=["[]"]) is None
    # only the final channel counts
    [value] = instruction_reward(
        prompts, [[{"role": "assistant", "content": "<<t>>"}]], constraints=both, benchmark=["ifeval"],
        trajectories=[Trajectory(prompt_ids=[1], final_text=None)],
    )  # fmt: skip
    assert value == 0.0
    logged = {}
    assert reward("a b", column(("keywords:existence", {"keywords": ["("]})), log_metric=logged.__setitem__) == 0.0
    assert logged == {"instruction_reward/checker_errors": 1.0}
    with pytest.raises(ValueError, match="constraints"):
        instruction_reward(prompts, ["x"])
