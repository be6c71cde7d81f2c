"""Observations, contexts and training samples: append-only ids and exact masks."""

import pytest

from trl_gptoss.harmony import (
    HarmonyVocabulary,
    new_context,
    parse,
    render_missing_terminator,
    render_prompt,
    render_tool_result,
    training_samples,
)

CALL = '<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a":1}<|call|>'
THINK = "<|channel|>analysis<|message|>t<|end|><|start|>assistant"
CONVERSATION = [
    {"role": "user", "content": "u1"},
    {"role": "assistant", "thinking": "a1", "tool_calls": [{"function": {"name": "f", "arguments": {"a": 1}}}]},
    {"role": "tool", "content": "r1"},
    {"role": "assistant", "thinking": "a2", "content": "final one"},
    {"role": "user", "content": "u2"},
    {"role": "assistant", "thinking": "a3", "content": "final two"},
]


def decode(tokenizer, ids: list[int]) -> str:
    return tokenizer.decode(ids)


def test_tool_result(tokenizer) -> None:
    (call,) = parse(tokenizer.encode(CALL), tokenizer).tool_calls
    ids = render_tool_result(call, '"quoted" \\ {1}\n', tokenizer)
    expected = (
        '<|start|>functions.f to=assistant<|channel|>commentary<|message|>"quoted" \\ {1}\n<|end|><|start|>assistant'
    )
    assert decode(tokenizer, ids) == expected
    assert (
        render_tool_result(call, "x", tokenizer, generation_prompt=False)
        == render_tool_result(call, "x", tokenizer)[
            : -len(HarmonyVocabulary.of(tokenizer).encode_text("assistant")) - 1
        ]
    )
    with pytest.raises(TypeError, match="must be a str, got int"):
        render_tool_result(call, 3, tokenizer)


@pytest.mark.parametrize(
    ("header", "result"),
    [
        ("analysis to=python code", "python to=assistant<|channel|>analysis"),
        ("commentary to=python code", "python to=assistant<|channel|>commentary"),
        ("final to=python code", "python to=assistant<|channel|>analysis"),
        ("anything to=python code", "python to=assistant<|channel|>analysis"),
        ("analysis to=browser.open code", "browser.open to=assistant<|channel|>analysis"),
        ("analysis to=functions.g", "functions.g to=assistant<|channel|>commentary"),
        ("analysis to=g", "functions.g to=assistant<|channel|>commentary"),
        ("analysis to=functions.python", "functions.python to=assistant<|channel|>commentary"),
    ],
)
def test_result_headers(header: str, result: str, tokenizer) -> None:
    (call,) = parse(tokenizer.encode(f"<|channel|>{header}<|message|>1<|call|>"), tokenizer).tool_calls
    assert decode(tokenizer, render_tool_result(call, "x", tokenizer)).startswith(f"<|start|>{result}<|message|>x")


def test_trajectory_in_ids_is_the_conversation_rendered(tokenizer) -> None:
    """Prompt, sampled call and observation together are what `render_prompt` makes of the messages."""
    opening = "<|start|>assistant"
    rendered = render_prompt(CONVERSATION[:3], tokenizer)
    prompt = render_prompt(CONVERSATION[:1], tokenizer)
    call_id = HarmonyVocabulary.of(tokenizer).call
    policy = rendered[len(prompt) : rendered.index(call_id) + 1]
    assert decode(tokenizer, policy).startswith("<|channel|>analysis<|message|>a1<|end|>" + opening)
    (call,) = parse(policy, tokenizer).tool_calls
    assert rendered == prompt + policy + render_tool_result(call, "r1", tokenizer)


def test_samples_of_two_contexts(tokenizer) -> None:
    first, second = training_samples(CONVERSATION, tokenizer, reasoning_effort="low", date="2025-06-28")
    assert first[0] == render_prompt(CONVERSATION[:1], tokenizer, reasoning_effort="low", date="2025-06-28")
    assert second[0] == render_prompt(CONVERSATION[:5], tokenizer, reasoning_effort="low", date="2025-06-28")
    assert "a1" not in decode(tokenizer, second[0]) and "<|return|>" not in decode(tokenizer, second[0])
    for prompt, completion, mask in (first, second):
        assert decode(tokenizer, prompt).endswith("<|start|>assistant")
        assert len(completion) == len(mask)
        assert decode(tokenizer, completion[-1:]) == "<|return|>"
    assert masked(tokenizer, first) == [
        (1, "<|channel|>analysis<|message|>a1<|end|><|start|>assistant to=functions.f<|channel|>commentary <|constrain|>json<|message|>{\"a\": 1}<|call|>"),
        (0, "<|start|>functions.f to=assistant<|channel|>commentary<|message|>r1<|end|><|start|>assistant"),
        (1, "<|channel|>analysis<|message|>a2<|end|><|start|>assistant<|channel|>final<|message|>final one<|return|>"),
    ]  # fmt: skip
    assert masked(tokenizer, second) == [
        (1, "<|channel|>analysis<|message|>a3<|end|><|start|>assistant<|channel|>final<|message|>final two<|return|>")
    ]


def masked(tokenizer, sample: tuple[list[int], list[int], list[int]]) -> list[tuple[int, str]]:
    runs: list[tuple[int, list[int]]] = []
    for token, bit in zip(sample[1], sample[2]):
        if not runs or runs[-1][0] != bit:
            runs.append((bit, []))
        runs[-1][1].append(token)
    return [(bit, decode(tokenizer, ids)) for bit, ids in runs]


def test_masked_parts_are_what_a_policy_samples(tokenizer) -> None:
    """Each masked run, read by the parser, is a turn without anomalies that ends where sampling stops."""
    for sample in training_samples(CONVERSATION, tokenizer):
        run: list[int] = []
        for token, bit in zip(sample[1] + [0], sample[2] + [0]):
            if bit:
                run.append(token)
            elif run:
                turn = parse(run, tokenizer)
                assert turn.anomalies == [] and turn.terminator in ("call", "return")
                run = []


def test_several_calls_in_one_message(tokenizer) -> None:
    """Sampling stops at each `<|call|>`, so the header that opens the next call is not the policy's."""
    calls = [{"function": {"name": name, "arguments": "{}"}} for name in "fg"]
    messages = [{"role": "user", "content": "u"}, {"role": "assistant", "tool_calls": calls}]
    messages += [{"role": "tool", "content": "1"}, {"role": "tool", "content": "2"}]
    (sample,) = training_samples(messages, tokenizer)
    bits = [bit for bit, _ in masked(tokenizer, sample)]
    texts = [text for _, text in masked(tokenizer, sample)]
    assert bits == [1, 0, 1, 0]
    assert texts[1] == "<|start|>assistant"
    assert texts[3].count("<|start|>functions.") == 2 and texts[3].endswith("<|end|>")


def test_interrupted_turns_share_a_context(tokenizer) -> None:
    messages = [
        {"role": "user", "content": "u1"},
        {"role": "assistant", "thinking": "a1"},
        {"role": "user", "content": "u2"},
        {"role": "assistant", "content": "f"},
    ]
    (sample,) = training_samples(messages, tokenizer)
    assert masked(tokenizer, sample)[0] == (1, "<|channel|>analysis<|message|>a1<|end|>")
    assert masked(tokenizer, sample)[1] == (0, "<|start|>user<|message|>u2<|end|><|start|>assistant")


@pytest.mark.parametrize("messages", [[], CONVERSATION[:1], CONVERSATION[4:5]])
def test_nothing_to_train_on(messages: list[dict], tokenizer) -> None:
    assert training_samples(messages, tokenizer) == []


def test_new_context_equals_the_rendered_one(tokenizer) -> None:
    first, second = training_samples(CONVERSATION, tokenizer)
    assert new_context(first[0] + first[1], CONVERSATION[4:5], tokenizer) == second[0]
    twice = second[0] + second[1]
    third = [{"role": "user", "content": "u3"}]
    assert new_context(twice, third, tokenizer) == render_prompt(CONVERSATION + third, tokenizer)


def test_new_context_keeps_sampled_ids(tokenizer) -> None:
    """A tokenisation that the encoder would not choose survives; rendering the text again loses it."""
    v = HarmonyVocabulary.of(tokenizer)
    odd = [i for letter in "hello" for i in v.encode_text(letter)]
    assert odd != v.encode_text("hello")
    prompt = render_prompt(CONVERSATION[:1], tokenizer)
    sampled = [v.channel, *v.encode_text("final"), v.message, *odd, v.return_]
    ids = new_context(prompt + sampled, CONVERSATION[4:5], tokenizer)
    assert ids[: len(prompt) + len(sampled)] == prompt + sampled[:-1] + [v.end]


def test_new_context_with_new_instructions(tokenizer) -> None:
    first, _ = training_samples(CONVERSATION, tokenizer)
    new = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "u2"}]
    rendered = render_prompt([*CONVERSATION[:4], *new], tokenizer)
    assert new_context(first[0] + first[1], new, tokenizer) == rendered


def test_new_context_after_a_missing_terminator(tokenizer) -> None:
    """The analysis was not ended; the answer after it stays all the same."""
    prompt = render_prompt(CONVERSATION[:1], tokenizer)
    sampled = tokenizer.encode(
        "<|channel|>analysis<|message|>t<|start|>assistant<|channel|>final<|message|>y<|return|>"
    )
    text = decode(tokenizer, new_context(prompt + sampled, CONVERSATION[4:5], tokenizer))
    assert "<|start|>assistant<|channel|>final<|message|>y<|end|>" in text
    assert "analysis<|message|>" not in text


@pytest.mark.parametrize(
    ("text", "appended"),
    [
        (CALL, ""),
        (CALL.replace("<|call|>", "<|return|>"), ""),
        (THINK.removesuffix("<|start|>assistant"), ""),
        (CALL.removesuffix("<|call|>"), "<|end|>"),
        (THINK, "<|message|><|end|>"),
        ("<|channel|>final", "<|message|><|end|>"),
        ("", "<|message|><|end|>"),
    ],
)
def test_missing_terminator(text: str, appended: str, tokenizer) -> None:
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert decode(tokenizer, render_missing_terminator(ids, tokenizer)) == appended
