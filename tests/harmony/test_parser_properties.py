"""Properties of the parser that hold for any ids at all."""

import gc
import json
import random
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trl_gptoss.harmony import HarmonyVocabulary, ParsedTurn, parse, render_prompt

PIECES = [
    "assistant", "user", "functions.f", " to=functions.f", " to=", "commentary", "analysis", "final", " json", " code",
    "hello world", '{"a": 1}', "{", " to=python", "to=browser.search", "assistantfinal", " ", "\n", "é", "functions.",
]  # fmt: skip
SEEDS = [
    '<|channel|>analysis<|message|>t<|end|><|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a":1}<|call|>',
    " to=functions.f<|channel|>commentary json<|message|>{}<|call|><|start|>functions.f to=assistant<|channel|>commentary<|message|>4<|end|>",
    "<|channel|>analysis to=python code<|message|>print(1)<|call|>",
    "<|channel|>commentary<|message|>wait<|end|><|start|>assistant<|channel|>final<|message|>🚀 42<|return|>",
]


class Mutator:
    """Random id sequences: control tokens and header words at random, or a well-formed turn with a few edits."""

    def __init__(self, tokenizer, seed: int):
        self.random = random.Random(seed)
        self.vocabulary = HarmonyVocabulary.of(tokenizer)
        self.control = sorted(self.vocabulary.control_ids)
        self.pieces = [self.vocabulary.encode_text(piece) for piece in PIECES]
        self.seeds = [tokenizer.encode(text, add_special_tokens=False) for text in SEEDS]

    def token(self) -> int:
        kind = self.random.random()
        if kind < 0.6:
            return self.random.choice(self.control)
        if kind < 0.95:
            return self.random.randrange(self.vocabulary.size)
        return self.random.choice([-1, -(2**70), self.vocabulary.size, 201087, 2**31, 2**64])

    def sequence(self) -> list[int]:
        if self.random.random() < 0.4:
            ids: list[int] = []
            for _ in range(self.random.randint(0, 14)):
                ids += [self.token()] if self.random.random() < 0.7 else self.random.choice(self.pieces)
            return ids
        ids = list(self.random.choice(self.seeds))
        for _ in range(self.random.randint(1, 4)):
            at = self.random.randint(0, len(ids))
            edit = self.random.randrange(5)
            if edit == 0:
                ids.insert(at, self.token())
            elif edit == 1:
                ids[at:at] = self.random.choice(self.pieces)
            elif edit == 2:
                del ids[at : at + self.random.randint(1, 4)]
            elif edit == 3:
                ids[at:] = ids[self.random.randint(0, len(ids)) :]
            else:
                ids = ids[:at] if self.random.random() < 0.5 else ids + self.random.choice(self.seeds)
        return ids


def check_turn(turn: ParsedTurn, ids: list[int], vocabulary: HarmonyVocabulary) -> None:
    # Spans and garbage cover every id exactly once.
    ranges = sorted([m.span for m in turn.messages] + turn.garbage)
    assert all(begin < end for begin, end in ranges)
    assert [0, *(end for _, end in ranges)] == [*(begin for begin, _ in ranges), len(ids)]
    assert [m.span for m in turn.messages] == sorted(m.span for m in turn.messages)
    # A message ends with the token that its terminator names.
    ends = {"end": vocabulary.end, "call": vocabulary.call, "return": vocabulary.return_}
    for message in turn.messages:
        last = ids[message.span[1] - 1]
        assert last == ends[message.terminator] if message.terminator in ends else last not in ends.values()
        # Body and header are opened and closed by real tokens, never by text.
        if message.terminator != "truncated" and "missing_message" not in message.anomalies:
            assert vocabulary.message in ids[slice(*message.span)]
    # Nothing is lost in silence.
    assert bool(turn.garbage) <= bool(turn.anomalies)
    assert turn.cut_at is None or (turn.cut_at, len(ids)) == turn.garbage[-1]
    assert bool(ids) or turn.anomalies == ["empty"]
    runnable = [
        m for m in turn.messages if m.recipient and m.terminator in ("call", "return") and m.role == "assistant"
    ]
    assert len(turn.tool_calls) <= len(runnable)
    for call in turn.tool_calls:
        assert any(call.raw_arguments == m.text for m in runnable)
        assert call.name and not call.name.startswith("functions.")
    for message in turn.as_messages():
        json.dumps(message)
        vocabulary.encode_text(message["content"])


def fuzz(tokenizer, count: int, seed: int) -> int:
    mutator = Mutator(tokenizer, seed)
    flagged = 0
    for _ in range(count):
        ids = mutator.sequence()
        turn = parse(ids, tokenizer, mutator.random.choice([None, ["f"], ["fjson", "python"]]))
        check_turn(turn, ids, mutator.vocabulary)
        flagged += bool(turn.anomalies)
    return flagged


def test_random_and_mutated_sequences(tokenizer) -> None:
    flagged = fuzz(tokenizer, 4000, seed=0)
    assert 0.8 < flagged / 4000 < 1.0  # the mutations do break things, and not everything


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(10))
def test_100000_random_and_mutated_sequences(seed: int, small_tokenizer, gpt_oss_tokenizer) -> None:
    fuzz(gpt_oss_tokenizer, 5000, seed=1000 + seed)
    fuzz(small_tokenizer, 5000, seed=2000 + seed)


@given(ids=st.lists(st.integers(-(2**70), 2**70) | st.integers(0, 420), max_size=30))
@settings(max_examples=300, deadline=None)
def test_any_integers(ids: list[int], small_tokenizer) -> None:
    check_turn(parse(ids, small_tokenizer), ids, HarmonyVocabulary.of(small_tokenizer))


@given(
    prefix=st.sampled_from(SEEDS),
    text=st.text(max_size=40) | st.sampled_from(SEEDS),
    channel=st.sampled_from(["analysis", "commentary", "final"]),
)
@settings(max_examples=200, deadline=None)
def test_ordinary_text_is_kept_exactly(prefix: str, text: str, channel: str, small_tokenizer) -> None:
    """Whatever a body says in ordinary tokens, even a whole generation spelled out, is its text and nothing else."""
    vocabulary = HarmonyVocabulary.of(small_tokenizer)
    ids = [
        vocabulary.channel,
        *vocabulary.encode_text(channel),
        vocabulary.message,
        *vocabulary.encode_text(prefix + text),
    ]
    turn = parse([*ids, vocabulary.end], small_tokenizer)
    assert [(m.channel, m.text) for m in turn.messages] == [(channel, prefix + text)]
    assert (turn.anomalies, turn.tool_calls, turn.incomplete_calls) == ([], [], [])


@given(
    texts=st.lists(st.tuples(st.sampled_from(["analysis", "commentary"]), st.text(max_size=20)), max_size=3),
    arguments=st.dictionaries(st.text(max_size=5), st.integers() | st.text(max_size=5) | st.none(), max_size=3),
    name=st.from_regex(r"[A-Za-z_][A-Za-z0-9_-]{0,8}", fullmatch=True),
)
@settings(max_examples=100, deadline=None)
def test_what_is_rendered_is_parsed(texts: list, arguments: dict, name: str, small_tokenizer) -> None:
    messages = [{"role": "assistant", "channel": channel, "content": text} for channel, text in texts]
    messages.append({"role": "assistant", "tool_calls": [{"function": {"name": name, "arguments": arguments}}]})
    ids = render_prompt(messages, small_tokenizer, drop_analysis=False)
    empty = render_prompt([], small_tokenizer)
    call = HarmonyVocabulary.of(small_tokenizer).call
    turn = parse(ids[len(empty) : ids.index(call) + 1], small_tokenizer)
    assert [(m.channel, m.text) for m in turn.messages[:-1]] == texts
    assert [(c.name, c.arguments) for c in turn.tool_calls] == [(name, arguments)]
    assert turn.anomalies == []


def hostile(name: str, vocabulary: HarmonyVocabulary, n: int) -> list[int]:
    encode, v = vocabulary.encode_text, vocabulary
    piece = {
        "text": encode(" hello to = x"),
        "starts": [v.start],
        "channels": [v.channel],
        "channels in a body": [v.channel, *encode("x")],
        "headers": [v.start, *encode("assistant"), v.channel],
        "messages": [v.message, v.end],
        "ends": [v.end],
        "constrains": [v.constrain, *encode("json")],
        "recipients": encode(" to=f to"),
        "namespaces": encode("functions."),
        "calls": [
            v.channel,
            *encode("commentary to=f"),
            v.message,
            *encode("{}"),
            v.call,
            v.start,
            *encode("assistant"),
        ],
        "brackets": encode("["),
    }[name]
    opening = {
        "channels in a body": [v.message],
        "text": [v.channel],
        "recipients": [v.channel],
        "namespaces": [v.channel, *encode("commentary to=")],
        "brackets": [v.channel, *encode("commentary to=functions.f"), v.message],
    }.get(name, [])
    return (opening + piece * (n // len(piece) + 1))[:n]


@pytest.mark.parametrize(
    "name",
    [
        "text",
        "starts",
        "channels",
        "channels in a body",
        "headers",
        "messages",
        "ends",
        "constrains",
        "recipients",
        "namespaces",
        "calls",
        "brackets",
    ],
)
def test_linear_time(name: str, small_tokenizer) -> None:
    """100000 ids in less than 2 seconds, and no worse than in proportion."""
    vocabulary = HarmonyVocabulary.of(small_tokenizer)
    long, short = hostile(name, vocabulary, 100_000), hostile(name, vocabulary, 12_500)

    def seconds(ids: list[int]) -> float:
        gc.disable()  # a collection takes as long as all that other tests have left takes to look at
        try:
            begin = time.process_time()
            parse(ids, small_tokenizer)
            return time.process_time() - begin
        finally:
            gc.enable()

    long_time, short_time = min(seconds(long) for _ in range(3)), min(seconds(short) for _ in range(3))
    assert long_time < 2
    assert long_time < 24 * short_time + 0.05  # 8 times is linear, 64 times would be quadratic
