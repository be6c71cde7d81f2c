"""How many calls TRL reads with its own template for gpt-oss, and with ours."""

import copy
import itertools
import json
from pathlib import Path
from typing import Any

import pytest
from trl.chat_template_utils import add_response_schema, parse_response

from trl_gptoss.harmony import RESPONSE_TEMPLATE, parse, set_response_template

PROMPT = "<|start|>user<|message|>x<|end|><|start|>assistant"
PREAMBLES = [
    "",
    "<|channel|>analysis<|message|>t<|end|><|start|>assistant",
    "<|channel|>commentary<|message|>I will<|end|><|start|>assistant",
]
FORMATS = ["", " json", " <|constrain|>json", "<|constrain|>json", " <|constrain|> json"]


def documented_forms() -> list[str]:
    """Every way to write a call that the format's documents and samples show, combined."""
    forms = []
    for preamble, channel, form in itertools.product(PREAMBLES, ["commentary", "analysis"], FORMATS):
        body = '<|message|>{"a": 1}<|call|>'
        forms.append(f"{preamble} to=functions.f<|channel|>{channel}{form}{body}")
        forms.append(f"{preamble}<|channel|>{channel} to=functions.f{form}{body}")
    forms += [
        "<|channel|>analysis to=python code<|message|>print(1)<|call|>",
        " to=python<|channel|>analysis code<|message|>print(1)<|call|>",
        '<|channel|>analysis to=browser.search code<|message|>{"query": "x"}<|call|>',
        '<|channel|>commentary to=browser.open code<|message|>{"id": 1}<|call|>',
    ]
    return forms


def calls_of_trl(ids: list[int], tokenizer) -> list[tuple[str, Any]]:
    message = parse_response(tokenizer, ids, prefix=tokenizer.encode(PROMPT))
    return [(c["function"]["name"], c["function"]["arguments"]) for c in message.get("tool_calls", [])]


def calls_of_ours(ids: list[int], tokenizer) -> list[tuple[str, Any]]:
    calls = parse(ids, tokenizer).tool_calls
    return [(c.name, c.raw_arguments if c.arguments is None else c.arguments) for c in calls]


@pytest.fixture(scope="module")
def stock(gpt_oss_tokenizer):
    return add_response_schema(copy.deepcopy(gpt_oss_tokenizer))


@pytest.fixture(scope="module")
def with_ours(gpt_oss_tokenizer):
    tokenizer = copy.deepcopy(gpt_oss_tokenizer)
    set_response_template(tokenizer)
    return tokenizer


def count(sequences: list[list[int]], stock, with_ours) -> tuple[int, int, int]:
    """`(sequences with calls, read by stock TRL, read by TRL with our template)`; ours is the judge."""
    wanted = [calls_of_ours(ids, with_ours) for ids in sequences]
    assert all(wanted)
    by_stock = sum(calls_of_trl(ids, stock) == calls for ids, calls in zip(sequences, wanted))
    by_ours = sum(calls_of_trl(ids, with_ours) == calls for ids, calls in zip(sequences, wanted))
    return len(sequences), by_stock, by_ours


def test_documented_forms(stock, with_ours) -> None:
    sequences = [with_ours.encode(form) for form in documented_forms()]
    assert all(len(calls_of_ours(ids, with_ours)) == 1 for ids in sequences)
    assert count(sequences, stock, with_ours) == (64, 3, 64)


def test_reported_cases(data_folder: Path, stock, with_ours) -> None:
    path = data_folder / "harmony_cases.jsonl"
    if not path.exists():
        pytest.skip(f"{path} is not there; set TRL_GPTOSS_TEST_DATA")
    cases = [json.loads(line) for line in path.read_text().splitlines()]
    sequences = [case["ids"] for case in cases if case["check"]["calls"]]
    assert count(sequences, stock, with_ours) == (16, 0, 16)


def test_thinking_and_content(with_ours) -> None:
    text = (
        "<|channel|>analysis<|message|> one<|end|><|start|>assistant<|channel|>analysis<|message|>two <|end|>"
        "<|start|>assistant<|channel|>final <|constrain|>json<|message|> {}\n<|return|>"
    )
    message = parse_response(with_ours, with_ours.encode(text), prefix=with_ours.encode(PROMPT))
    assert message == {"role": "assistant", "thinking": " one\ntwo ", "content": " {}\n"}


@pytest.mark.parametrize(
    "text",
    [
        '<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a": 1}',
        '<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a": 1}<|end|>',
        '<|channel|>commentary to=functions.f<|message|>{"a": 1}<|end|><|start|>assistant<|channel|>final<|message|>y<|return|>',
        "<|channel|>commentary to=assistant<|message|>{}<|call|>",
        "<|channel|>commentary to=user<|message|>{}<|call|>",
        "<|channel|>commentary to=functions<|message|>{}<|call|>",
        "<|channel|>commentary<|message|>{}<|call|>",
    ],
)
def test_what_must_not_run_does_not(text: str, with_ours) -> None:
    ids = with_ours.encode(text)
    assert calls_of_ours(ids, with_ours) == []
    assert calls_of_trl(ids, with_ours) == []


def test_a_function_may_bear_the_name_of_a_role(with_ours) -> None:
    ids = with_ours.encode("<|channel|>commentary to=functions.user<|message|>{}<|call|>")
    assert calls_of_trl(ids, with_ours) == calls_of_ours(ids, with_ours) == [("user", {})]


def test_several_calls(with_ours) -> None:
    call = '<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a": 1}<|call|>'
    ids = with_ours.encode(call + "<|start|>assistant" + call.replace(".f", ".g"))
    assert calls_of_trl(ids, with_ours) == [("f", {"a": 1}), ("g", {"a": 1})]


def test_each_tokenizer_gets_its_own_copy(small_tokenizer) -> None:
    tokenizer = copy.deepcopy(small_tokenizer)
    set_response_template(tokenizer)
    tokenizer.response_template["fields"].clear()
    assert RESPONSE_TEMPLATE["fields"]


def test_other_tokenizers_are_refused() -> None:
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE()))
    with pytest.raises(ValueError, match="lacks some of its special tokens"):
        set_response_template(tokenizer)
