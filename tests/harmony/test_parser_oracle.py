"""The parser against openai-harmony's, on what that one can read."""

import random

import pytest

from trl_gptoss.harmony import parse

harmony = pytest.importorskip("openai_harmony", reason="openai-harmony is the oracle of these tests")
Message, Role = harmony.Message, harmony.Role

TEXTS = ["", "t", "naïve 東京 🧑🏽‍🚀", ' {"a": [1, {"b": null}]}\n', "<|end|> spelled <|call|>", "to=functions.f json"]


def view_ours(turn) -> list[tuple]:
    return [(m.role, m.channel, m.recipient, m.content_type, m.text) for m in turn.messages]


def view_theirs(messages) -> list[tuple]:
    return [
        (
            m.author.role.value,
            m.channel,
            m.recipient,
            (m.content_type or "").replace("<|constrain|>", "").strip() or None,
            m.content[0].text,
        )
        for m in messages
    ]


def well_formed_turn(random_: random.Random) -> list:
    """Messages of the assistant that end with a call or a final answer."""

    def message(channel: str):
        return Message.from_role_and_content(Role.ASSISTANT, random_.choice(TEXTS)).with_channel(channel)

    messages = [message(random_.choice(["analysis", "commentary"])) for _ in range(random_.randint(0, 3))]
    ending = random_.choice(["final", "functions.f", "functions.a-b_9", "python", "browser.search"])
    last = message("final" if ending == "final" else random_.choice(["analysis", "commentary"]))
    if ending != "final":
        last = last.with_recipient(ending)
    # openai-harmony takes the format of a final answer (`final <|constrain|>json`) for its recipient.
    content_type = random_.choice([None, "<|constrain|>json", "json", "code"]) if ending != "final" else None
    return [*messages, last.with_content_type(content_type) if content_type else last]


def test_500_well_formed_turns(oracle, gpt_oss_tokenizer) -> None:
    for seed in range(500):
        messages = well_formed_turn(random.Random(seed))
        rendered = oracle.render_conversation_for_training(
            harmony.Conversation.from_messages(messages),
            config=harmony.RenderConversationConfig(auto_drop_analysis=False),
        )
        ids = rendered[2:]  # after <|start|>assistant
        turn = parse(ids, gpt_oss_tokenizer)
        expected = view_theirs(oracle.parse_messages_from_completion_tokens(ids, Role.ASSISTANT))
        assert view_ours(turn) == expected == view_theirs(messages), seed
        assert [a for a in turn.anomalies if a not in ("invalid_json", "arguments_not_object")] == [], seed


def test_what_is_not_flagged_is_read_alike(oracle, gpt_oss_tokenizer) -> None:
    """On random and mutated ids: no anomaly means that openai-harmony in its strict mode reads the same messages."""
    compared = 0
    for ids in mutated(gpt_oss_tokenizer, 4000):
        turn = parse(ids, gpt_oss_tokenizer)
        if turn.anomalies or "<|constrain|> json" in gpt_oss_tokenizer.decode(ids):  # shown in Harmony's own samples
            continue
        compared += 1
        theirs = oracle.parse_messages_from_completion_tokens(ids, Role.ASSISTANT, strict=True)
        assert view_ours(turn) == view_theirs(theirs), gpt_oss_tokenizer.decode(ids)
    assert compared > 300


def test_documented_differences(oracle, gpt_oss_tokenizer) -> None:
    ids = gpt_oss_tokenizer.encode("<|channel|>final <|constrain|>json<|message|>{}<|return|>")
    (theirs,) = oracle.parse_messages_from_completion_tokens(ids, Role.ASSISTANT)
    assert theirs.recipient == "<|constrain|>json"
    (ours,) = parse(ids, gpt_oss_tokenizer).messages
    assert (ours.recipient, ours.content_type) == (None, "json")

    ids = gpt_oss_tokenizer.encode("<|channel|>commentary to=functions.f <|constrain|> json<|message|>{}<|call|>")
    with pytest.raises(harmony.HarmonyError):
        oracle.parse_messages_from_completion_tokens(ids, Role.ASSISTANT, strict=True)
    assert parse(ids, gpt_oss_tokenizer).anomalies == []


def mutated(tokenizer, count: int) -> list[list[int]]:
    """Well-formed turns with one edit: an id lost, doubled, exchanged for another of the turn, or everything after it."""
    random_ = random.Random(0)
    seeds = [
        '<|channel|>analysis<|message|>t<|end|><|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a":1}<|call|>',
        " to=functions.f<|channel|>commentary json<|message|>{}<|call|><|start|>assistant to=python<|channel|>analysis code<|message|>1<|call|>",
        "<|channel|>commentary<|message|>wait<|end|><|start|>assistant<|channel|>final<|message|>🚀 42<|return|>",
    ]
    encoded = [tokenizer.encode(seed) for seed in seeds]
    sequences = []
    for _ in range(count):
        ids = list(random_.choice(encoded))
        for _ in range(random_.randint(0, 2)):
            at, other = random_.randrange(len(ids)), random_.randrange(len(ids))
            edit = random_.randrange(4)
            if edit == 0:
                del ids[at]
            elif edit == 1:
                ids.insert(at, ids[other])
            elif edit == 2:
                ids[at] = ids[other]
            else:
                ids = ids[: at + 1]
        sequences.append(ids)
    return sequences
