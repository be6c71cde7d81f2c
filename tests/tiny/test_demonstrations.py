"""The demonstrator: well-formed, what rollouts look like, unreliable in the stated measure, never on held-out problems."""

import re
from collections import Counter
from itertools import islice

import pytest

from trl_gptoss.environments import ExecutorUnavailable, PythonTool
from trl_gptoss.harmony import HarmonyVocabulary, parse, render_prompt, render_tool_result
from trl_gptoss.tasks.retool import OPERATORS, compute, is_held_out
from trl_gptoss.tiny.demonstrations import P_FAVOURITE_MISTAKE, P_RIGHT, demonstrate, demonstrations, with_filler
from trl_gptoss.tiny.vocabulary import small_tokenizer, used_ids


@pytest.fixture(scope="module")
def tokenizer():
    return small_tokenizer()


def policy_turns(demonstration):
    turns, previous = [], 0
    for i, mask in zip(demonstration.ids, demonstration.policy_mask, strict=True):
        if mask and not previous:
            turns.append([])
        if mask:
            turns[-1].append(i)
        previous = mask
    return turns


def test_a_conversation_is_exactly_a_rollout(tokenizer):
    """Prompt and observation ids are those of the loop, the policy's turns parse without an anomaly."""
    demonstration = demonstrate("Add 10 and 28.", "10-28", "-18", tokenizer)
    call, answer = policy_turns(demonstration)
    parsed = parse(call, tokenizer, ["python"])
    assert [c.raw_arguments for c in parsed.tool_calls] == ["10-28"] and parsed.anomalies == []
    final = parse(answer, tokenizer)
    assert final.final_text == "-18" and final.anomalies == []
    prompt = render_prompt([{"role": "user", "content": "Add 10 and 28."}], tokenizer, ["python"])
    observation = render_tool_result(parsed.tool_calls[0], "-18\n", tokenizer)
    assert demonstration.ids == prompt + call + observation + answer


def test_the_tool_says_what_demonstrations_say_it_says():
    try:
        tool = PythonTool()
        assert tool.python("10-28") == "-18\n"
    except ExecutorUnavailable as e:
        pytest.skip(str(e))


def test_the_demonstrator_is_unreliable_in_the_stated_measure(tokenizer):
    """And every operator is used for every problem: what never occurs cannot be reinforced."""
    used = Counter()
    for demonstration in islice(demonstrations(tokenizer, seed=5), 3000):
        text = tokenizer.decode(demonstration.ids)
        question = text.split("<|start|>user<|message|>")[1].split("<|end|>")[0]
        a, operator, b = re.search(r"code<\|message\|>(\d+)(\D)(\d+)<\|call\|>", text).groups()
        right = right_operator(question)
        assert not is_held_out(int(a), right, int(b))
        assert f"final<|message|>{compute(int(a), operator, int(b))}<|return|>" in text  # it trusts the tool
        used[right, operator] += 1
    for right in OPERATORS:
        total = sum(used[right, o] for o in OPERATORS)
        assert used[right, right] / total == pytest.approx(P_RIGHT, abs=0.05)
        assert max(used[right, o] / total for o in OPERATORS if o != right) == pytest.approx(
            P_FAVOURITE_MISTAKE, abs=0.05
        )
        assert min(used[right, o] / total for o in OPERATORS) > 0.05


def right_operator(question):
    if re.search("plus|Add|sum", question):
        return "+"
    return "-" if re.search("minus|take|larger", question) else "*"


def test_seeds_give_different_conversations(tokenizer):
    first, again, second = ([d.ids for d in islice(demonstrations(tokenizer, seed), 20)] for seed in (1, 1, 2))
    assert first == again and first != second


def test_used_ids_hold_every_token_and_every_terminator(tokenizer):
    sample = list(islice(demonstrations(tokenizer, 0), 50))
    ids = used_ids(tokenizer, sample)
    assert ids == sorted(set(ids))
    assert set(HarmonyVocabulary.of(tokenizer).stop_ids) | {i for d in sample for i in d.ids} <= set(ids)


def test_filler_goes_before_the_question_and_nowhere_else(tokenizer):
    vocabulary = HarmonyVocabulary.of(tokenizer)
    plain = demonstrate("Add 10 and 28.", "10-28", "-18", tokenizer)
    filler = vocabulary.encode_text("q")
    (filled,) = with_filler(iter([plain]), filler, vocabulary.message, longest=9, seed=3)
    n = len(filled.ids) - len(plain.ids)
    assert 0 < n <= 9
    text = tokenizer.decode(filled.ids)
    assert text == tokenizer.decode(plain.ids).replace("<|message|>Add", f"<|message|>{'q' * n}Add")
    assert [policy_turns(filled), len(filled.policy_mask)] == [policy_turns(plain), len(filled.ids)]
