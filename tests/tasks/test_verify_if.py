"""Constraints that contradict each other are found, generated prompts can be followed, stored sets are read."""

import json
import os
import random
from pathlib import Path

import pytest

pytest.importorskip("if_verifiable")
from if_verifiable.ifeval.instructions_registry import INSTRUCTION_DICT

from trl_gptoss.rewards import instruction_reward
from trl_gptoss.tasks import verify_if
from trl_gptoss.tasks.constraints import GENERATED, SIMPLE, Constraint, contradiction, describe, draw
from trl_gptoss.tiny import single_turn

DATA = Path(os.environ.get("TRL_GPTOSS_TEST_DATA", Path(__file__).parents[2] / "../shared/data"))


def c(id, **kwargs):
    return Constraint(id=id, kwargs=kwargs)


WORDS, SENTENCES = "length_constraints:number_words", "length_constraints:number_sentences"
NO_COMMA, LOWER, UPPER = (
    c("punctuation:no_comma"),
    c("change_case:english_lowercase"),
    c("change_case:english_capital"),
)
SECTIONS = c("detectable_format:multiple_sections", section_spliter="Section", num_sections=2)
FIRST = c("length_constraints:nth_paragraph_first_word", num_paragraphs=2, nth_paragraph=1, first_word="storm")
RIVER = c("keywords:existence", keywords=["river"])
END = c("startend:end_checker", end_phrase="Well, goodbye.")


@pytest.mark.parametrize("constraints", [
    [LOWER, UPPER],
    [NO_COMMA, NO_COMMA],
    [RIVER, c("keywords:forbidden_words", forbidden_words=["RIVER"])],
    [FIRST, c("keywords:forbidden_words", forbidden_words=["storm", "x"])],
    [c("keywords:frequency", keyword="tea", frequency=1, relation="less than"), c("keywords:existence", keywords=["tea"])],
    [NO_COMMA, END],
    [SECTIONS, LOWER],
    [SECTIONS, UPPER],
    [c(WORDS, num_words=5, relation="less than"), c(SENTENCES, num_sentences=6, relation="at least")],
    [c(WORDS, num_words=3, relation="less than"), c("keywords:frequency", keyword="tea", frequency=2, relation="at least"),
     c("keywords:existence", keywords=["river", "storm"])],
    [c("keywords:letter_frequency", letter="r", let_frequency=2, let_relation="less than"), RIVER],
    [c("length_constraints:nth_paragraph_first_word", num_paragraphs=2, nth_paragraph=3, first_word="a"), NO_COMMA],
    [c("detectable_format:json_format"), c("detectable_format:title")],
    [c("language:response_language", language="fr"), LOWER],
    [c("startend:quotation"), c("detectable_format:title")],
])  # fmt: skip
def test_contradictions_are_found(constraints):
    assert contradiction(constraints) is not None
    assert contradiction(constraints[::-1]) is not None
    assert all(contradiction([each]) is None for each in constraints if each.kwargs.get("nth_paragraph") != 3)


@pytest.mark.parametrize(("constraints", "witness"), [
    ([NO_COMMA, RIVER], "A river."),
    ([c("keywords:forbidden_words", forbidden_words=["rain"]), c("keywords:existence", keywords=["raincoat"])], "Raincoat."),
    ([c(WORDS, num_words=8, relation="less than"), c(SENTENCES, num_sentences=3, relation="at least")], "One. Two. Three."),
    ([c("keywords:frequency", keyword="tea", frequency=3, relation="less than"), c("keywords:existence", keywords=["tea"])], "Tea."),
    ([c("detectable_format:multiple_sections", section_spliter="SECTION", num_sections=1), UPPER],
     "SECTION 1\nTHE RAIN FALLS ON THE ROOFS OF THE OLD TOWN AND ON THE HILLS BEHIND IT."),
    ([c("detectable_content:postscript", postscript_marker="P.S."), c("startend:quotation")], '"Hello. P.S. Bye."'),
])  # fmt: skip
def test_what_can_be_followed_is_not_refused(constraints, witness):
    """The witness shows it: the checkers themselves accept it."""
    assert contradiction(constraints) is None
    column = [json.dumps([{"id": each.id, "kwargs": each.kwargs} for each in constraints])]
    assert instruction_reward(["x"], [witness], constraints=column, benchmark=["ifeval"]) == [1.0]


def test_every_kind_can_be_drawn_and_described():
    assert set(GENERATED) == set(INSTRUCTION_DICT) - {"detectable_format:constrained_response"}
    rng = random.Random(0)
    seen = set()
    for _ in range(600):
        constraints = draw(rng, 3, GENERATED, "Write.")
        assert len({each.id for each in constraints}) == 3 and contradiction(constraints) is None
        seen |= {each.id for each in constraints}
    # these go with two others so rarely that 600 draws need not show them
    assert set(GENERATED) - seen <= {
        "detectable_format:json_format",
        "combination:repeat_prompt",
        "combination:two_responses",
    }
    for kind, arguments in GENERATED.items():
        kwargs = {"prompt_to_repeat": "Write."} if kind == "combination:repeat_prompt" else arguments(rng)
        assert describe(c(kind, **kwargs))
    with pytest.raises(ValueError, match="no kind of constraint"):
        describe(c("keywords:rhyme"))


@pytest.mark.parametrize("name", ["simple", "generated"])
def test_generated_prompts(name):
    train, held_out = verify_if.load_problems(name, train_size=150, held_out_size=20, seed=3)
    again, same = verify_if.load_problems(name, train_size=150, held_out_size=20, seed=3)
    _, other_seed = verify_if.load_problems(name, train_size=10, held_out_size=20, seed=4)
    assert train.to_list() == again.to_list() and held_out.to_list() == same.to_list() == other_seed.to_list()
    prompts = [row["prompt"][-1]["content"] for row in train]
    assert len(set(prompts)) == 150 and not set(prompts) & {row["prompt"][-1]["content"] for row in held_out}
    for row in train:
        constraints = [Constraint(**each) for each in json.loads(row["constraints"])]
        assert 2 <= len(constraints) <= 4
        assert all(describe(each) in row["prompt"][-1]["content"] for each in constraints)


def test_every_simple_prompt_can_be_followed():
    """By the tiny model's own demonstrator, if it is made reliable."""
    rng = random.Random(0)
    prompts = [next(stream) for stream in [verify_if.generated_prompts(0, simple=True)] for _ in range(150)]
    assert {each.id for _, _, constraints in prompts for each in constraints} == set(SIMPLE)
    columns = [json.dumps([{"id": each.id, "kwargs": each.kwargs} for each in cs]) for _, _, cs in prompts]
    reliable, unreliable = [], [single_turn.imperfect_response(topic, cs, rng) for _, topic, cs in prompts]
    before = single_turn.P_FOLLOW
    try:
        single_turn.P_FOLLOW = 1.0
        reliable = [single_turn.imperfect_response(topic, cs, rng) for _, topic, cs in prompts]
    finally:
        single_turn.P_FOLLOW = before
    texts = [text for text, _, _ in prompts]
    names = ["ifeval"] * len(texts)
    assert instruction_reward(texts, reliable, constraints=columns, benchmark=names) == [1.0] * len(texts)
    share = [v == 1.0 for v in instruction_reward(texts, unreliable, constraints=columns, benchmark=names)]
    assert 0.1 < sum(share) / len(share) < 0.45  # two constraints, each followed half of the time


def test_stored_sets():
    ifeval, ifbench = DATA / "ifeval/input_data.jsonl", DATA / "ifbench/IFBench_test.jsonl"
    if not ifeval.is_file():
        pytest.skip(f"{ifeval} is not there; set TRL_GPTOSS_TEST_DATA")
    train, held_out = verify_if.load_problems(str(ifeval), test_dataset_name=str(ifbench), held_out_size=1000)
    assert set(train["benchmark"]) == {"ifeval"} and set(held_out["benchmark"]) == {"ifbench"}
    assert len(held_out) in (282, 300)  # 18 prompts need NLTK data that no package brings
    assert 480 < len(train) < 541  # the rest contradicts itself, by IFEval's own table or by its arguments
    trained = {each["id"] for row in train["constraints"] for each in json.loads(row)}
    measured = {each["id"] for row in held_out["constraints"] for each in json.loads(row)}
    assert not trained & measured  # out of domain


def test_unusable_data_says_why(tmp_path):
    def load(*rows):
        path = tmp_path / f"{len(list(tmp_path.iterdir()))}.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return verify_if.load_problems(str(path))

    with pytest.raises(ValueError, match="'kwargs'.* are missing"):
        load({"prompt": "p", "instruction_id_list": []})
    with pytest.raises(ValueError, match="1 kinds and 0 sets"):
        load({"prompt": "p", "instruction_id_list": ["punctuation:no_comma"], "kwargs": []})
    with pytest.raises(ValueError, match="mixes kinds"):
        load(
            {"prompt": "p", "instruction_id_list": ["punctuation:no_comma", "format:emoji"], "kwargs": [{"a": 1}, {}]}
        )
