"""What the parser makes of well-formed and of damaged generations, form by form."""

import json
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from trl_gptoss.harmony import ParsedTurn, parse

THINK = "<|channel|>analysis<|message|>t<|end|><|start|>assistant"
CALL = '<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a":1}<|call|>'
FINAL = "<|channel|>final<|message|>y<|return|>"


def names(turn: ParsedTurn) -> tuple[list[str], list[str]]:
    return [call.name for call in turn.tool_calls], [call.name for call in turn.incomplete_calls]


@dataclass
class Case:
    """A generation and what must come of it; `anomalies` is compared exactly."""

    text: str
    calls: list[str] = field(default_factory=list)
    incomplete: list[str] = field(default_factory=list)
    final: str | None = None
    anomalies: list[str] = field(default_factory=list)


WELL_FORMED = {
    "recipient in the channel section": Case(CALL, ["f"]),
    "recipient in the role section": Case(
        " to=functions.f<|channel|>commentary <|constrain|>json<|message|>{}<|call|>", ["f"]
    ),
    "role section, no constrain": Case(" to=functions.f<|channel|>commentary json<|message|>{}<|call|>", ["f"]),
    "no format": Case("<|channel|>commentary to=functions.f<|message|>{}<|call|>", ["f"]),
    "format without constrain": Case("<|channel|>commentary to=functions.f json<|message|>{}<|call|>", ["f"]),
    "no space before constrain": Case(
        "<|channel|>commentary to=functions.f<|constrain|>json<|message|>{}<|call|>", ["f"]
    ),
    "space after constrain": Case(
        "<|channel|>commentary to=functions.f <|constrain|> json<|message|>{}<|call|>", ["f"]
    ),
    "line breaks in the header": Case(
        "<|channel|>commentary\n to=functions.f\t<|constrain|>json <|message|>{}<|call|>", ["f"]
    ),
    "call on analysis": Case("<|channel|>analysis to=functions.f <|constrain|>json<|message|>{}<|call|>", ["f"]),
    "python": Case("<|channel|>analysis to=python code<|message|>print(1)<|call|>", ["python"]),
    "python on commentary": Case("<|channel|>commentary to=python <|constrain|>code<|message|>1<|call|>", ["python"]),
    "browser": Case('<|channel|>analysis to=browser.open code<|message|>{"id":1}<|call|>', ["browser.open"]),
    "preamble": Case("<|channel|>commentary<|message|>I will<|end|><|start|>assistant" + CALL, ["f"]),
    "several analysis messages": Case(THINK + THINK + FINAL, final="y"),
    "several calls": Case(CALL + "<|start|>assistant" + CALL.replace(".f", ".g"), ["f", "g"]),
    "analysis between calls": Case(CALL + "<|start|>assistant" + THINK + CALL, ["f", "f"]),
    "final with a format": Case("<|channel|>final <|constrain|>json<|message|>{}<|return|>", final="{}"),
    "final with a bare format": Case("<|channel|>final json<|message|>{}<|return|>", final="{}"),
    "final ended by end": Case("<|channel|>final<|message|>y<|end|>", final="y"),
    "two finals": Case("<|channel|>final<|message|>x<|end|><|start|>assistant" + FINAL, final="y"),
    "empty final": Case("<|channel|>final<|message|><|return|>", final=""),
    "assistant with a name": Case(THINK[:-9] + "assistant:bob" + FINAL, final="y"),
    "dotted and dashed names": Case(CALL.replace(".f", ".a.b-c_9"), ["a.b-c_9"]),
    "nested arguments": Case(CALL.replace('{"a":1}', ' {"a": {"b": [1, {"c": "é}"}]}}\n'), ["f"]),
}

DAMAGED = {
    # recipients
    "repeated recipient": Case(CALL.replace(" <|con", " to=functions.f <|con"), ["f"], anomalies=["duplicate_recipient"]),
    "recipient in both sections": Case(" to=functions.f" + CALL, ["f"], anomalies=["duplicate_recipient"]),
    "two recipients": Case(
        CALL.replace(" <|con", " to=functions.g <|con"), [], ["f"],
        anomalies=["duplicate_recipient", "conflicting_recipient"],
    ),
    "bare recipient": Case(CALL.replace("to=", ""), ["f"], anomalies=["bare_recipient"]),
    "blanks around the equals sign": Case(CALL.replace("to=", "to = "), ["f"], anomalies=["extra_space"]),
    "blank before the channel": Case(FINAL.replace("final", " final"), final="y", anomalies=["extra_space"]),
    "format in the role section": Case("json" + FINAL, final="y", anomalies=["misplaced_content_type"]),
    "format twice": Case(CALL.replace(" <|con", " json<|con"), ["f"], anomalies=["repeated_content_type"]),
    "role glued twice": Case(THINK + "assistant" + FINAL, final="y", anomalies=["repeated_role"]),
    "not quite JSON": Case(CALL.replace("1", "NaN"), ["f"], anomalies=["invalid_json"]),
    "glued channel": Case(CALL.replace(" to=", "to="), ["f"], anomalies=["missing_space"]),
    "comma after the channel": Case(CALL.replace(" to=", ", to="), ["f"], anomalies=["malformed_channel"]),
    "quoted recipient": Case(CALL.replace("functions.f", '"functions.f"'), ["f"], anomalies=["malformed_recipient"]),
    "junk after recipient": Case(CALL.replace(".f", ".f?commentary?"), ["f"], anomalies=["malformed_recipient"]),
    "empty recipient": Case(
        CALL.replace("functions.f", ""), anomalies=["empty_recipient", "call_without_recipient"]
    ),
    "empty recipient before the format": Case(
        "<|channel|>commentary to= json<|message|>{}<|call|>",
        anomalies=["extra_space", "empty_recipient", "call_without_recipient"]
    ),
    "recipient twice without a blank": Case(CALL.replace(" <|con", "to=functions.f <|con"), ["f"], anomalies=["duplicate_recipient"]),
    "two recipients without a blank": Case(
        CALL.replace(" <|con", "to=functions.g <|con"), [], ["f"],
        anomalies=["duplicate_recipient", "conflicting_recipient"],
    ),
    "to twice": Case(CALL.replace("to=", "to=to="), ["f"], anomalies=["empty_recipient", "duplicate_recipient"]),
    "a name with to": Case(CALL.replace(".f", ".photo"), ["photo"]),
    "arguments after the name": Case(CALL.replace(".f", '.photo={"a":1}'), ["photo"], anomalies=["malformed_recipient"]),
    "a list of recipients": Case(
        CALL.replace(".f", ".f,functions.g"), [], ["f"],
        anomalies=["malformed_recipient", "duplicate_recipient", "conflicting_recipient"],
    ),
    "a second recipient without to": Case(
        CALL.replace(".f", ".f functions.g"), [], ["f"],
        anomalies=["bare_recipient", "duplicate_recipient", "conflicting_recipient"],
    ),
    "colon after recipient": Case(CALL.replace(".f", ".f:"), ["f"], anomalies=["malformed_recipient"]),
    "dot after recipient": Case(CALL.replace(".f", ".f."), ["f"], anomalies=["malformed_recipient"]),
    "two dots in recipient": Case(CALL.replace(".f", "..f"), anomalies=["invalid_recipient"]),
    "namespace without a name": Case(
        CALL.replace("functions.f", "functions."), anomalies=["malformed_recipient", "invalid_recipient"]
    ),
    "namespace only": Case(CALL.replace("functions.f", "functions"), anomalies=["invalid_recipient"]),
    "to the assistant": Case(CALL.replace("functions.f", "assistant"), anomalies=["invalid_recipient"]),
    "to the user": Case(CALL.replace("functions.f", "user"), anomalies=["invalid_recipient"]),
    "answer to the user": Case(
        " to=user" + FINAL, final="y", anomalies=["invalid_recipient"]
    ),
    "answer to the assistant": Case(
        "<|channel|>commentary to=assistant" + FINAL, final="y", anomalies=["repeated_channel", "invalid_recipient"]
    ),
    "no recipient": Case("<|channel|>commentary<|message|>{}<|call|>", anomalies=["call_without_recipient"]),
    "no namespace": Case(CALL.replace("functions.", ""), ["f"], anomalies=["missing_namespace"]),
    "namespace twice": Case(CALL.replace(".f", ".functions.f"), ["f"], anomalies=["repeated_namespace"]),
    "other namespace": Case(CALL.replace("functions.", "container."), ["container.f"], anomalies=["unknown_namespace"]),
    "glued python code": Case(
        "<|channel|>analysis to=pythoncode<|message|>1<|call|>", ["python"], anomalies=["glued_recipient"]
    ),
    "recipient in the constrain section": Case(
        "<|channel|>commentary <|constrain|>json to=functions.f<|message|>{}<|call|>", ["f"],
        anomalies=["misplaced_recipient"],
    ),
    # channels
    "unknown channel": Case("<|channel|>finalx<|message|>y<|return|>", anomalies=["unknown_channel"]),
    "call on an unknown channel": Case(CALL.replace("commentary", "comment"), ["f"], anomalies=["unknown_channel"]),
    "call on final": Case(CALL.replace("commentary", "final"), ["f"], anomalies=["call_on_final"]),
    "empty channel": Case("<|channel|><|message|>y<|return|>", anomalies=["empty_channel"]),
    "no channel": Case("<|message|>y<|return|>", anomalies=["missing_channel"]),
    "call without a channel": Case(" to=functions.f<|message|>{}<|call|>", ["f"], anomalies=["missing_channel"]),
    "two channels": Case("<|channel|>analysis" + FINAL, final="y", anomalies=["repeated_channel"]),
    "three channels": Case("<|channel|>commentary<|channel|>x" + FINAL, final="y", anomalies=["repeated_channel", "unknown_channel"]),
    "channel token missing": Case("final<|message|>y<|return|>", final="y", anomalies=["missing_channel_token"]),
    "channel glued to the role": Case(
        THINK + "final<|message|>y<|return|>", final="y", anomalies=["missing_channel_token"]
    ),
    "channel as role": Case(THINK[:-9] + "final<|message|>y<|return|>", final="y", anomalies=["channel_as_role"]),
    # formats
    "prose after constrain": Case(
        CALL.replace("json", "control the thing"), ["f"],
        anomalies=["unknown_content_type", "malformed_content_type", "malformed_header"],
    ),
    "words after the format": Case(
        CALL.replace("json", "json ––commentary"), ["f"], anomalies=["malformed_content_type", "malformed_header"]
    ),
    "nothing after constrain": Case(CALL.replace("json", ""), ["f"], anomalies=["empty_content_type"]),
    "constrain twice": Case(CALL.replace("json<", "json<|constrain|>json<"), ["f"], anomalies=["repeated_constrain"]),
    "constrain before the channel": Case(
        " to=functions.f<|constrain|>json<|channel|>commentary<|message|>{}<|call|>", ["f"],
        anomalies=["misplaced_constrain"],
    ),
    "words in the header": Case("<|channel|>final answer<|message|>y<|return|>", final="y", anomalies=["malformed_header"]),
    # borders of messages
    "two starts": Case(THINK[:-9] + "<|start|>assistant" + FINAL, final="y", anomalies=["double_start"]),
    "start first": Case("<|start|>assistant" + FINAL, final="y", anomalies=["double_start"]),
    "role repeated": Case("assistant" + FINAL, final="y", anomalies=["repeated_role"]),
    "no start": Case(THINK[:-18] + "assistant" + CALL, ["f"], anomalies=["missing_start"]),
    "no start, no role": Case(THINK[:-18] + FINAL, final="y", anomalies=["missing_start"]),
    "no role": Case(THINK[:-9] + FINAL, final="y", anomalies=["missing_role"]),
    "unknown role": Case(THINK[:-9] + "asistant" + CALL, [], ["f"], anomalies=["unknown_role"]),
    "no end": Case(
        "<|channel|>analysis<|message|>t<|start|>assistant" + FINAL, final="y", anomalies=["missing_terminator"]
    ),
    "no end, no start": Case(
        "<|channel|>analysis<|message|>t" + FINAL, final="y", anomalies=["missing_terminator", "missing_start"]
    ),
    "call without an end": Case(
        CALL.removesuffix("<|call|>") + "<|start|>assistant" + FINAL, [], ["f"], "y", ["missing_terminator"]
    ),
    "no message token": Case("<|channel|>analysis I think<|end|><|start|>assistant" + FINAL, final="y", anomalies=["missing_message"]),
    "no message token, no end": Case(
        "<|channel|>analysis I think<|start|>assistant" + FINAL, final="y",
        anomalies=["missing_message", "missing_terminator"],
    ),
    "call without a message token": Case(
        '<|channel|>commentary to=functions.f <|constrain|>json{"a":1}<|call|>', [], ["f"],
        anomalies=["unknown_content_type", "missing_message"],
    ),
    "message token twice": Case(FINAL.replace("<|message|>", "<|message|>" * 2), final="y", anomalies=["repeated_message"]),
    "start and role twice": Case(THINK + "<|start|>assistant" + FINAL, final="y", anomalies=["double_start"]),
    "role twice with a blank": Case(THINK + " assistant" + FINAL, final="y", anomalies=["repeated_role"]),
    "prose only": Case("I think<|return|>", anomalies=["missing_channel", "missing_message"]),
    "prose between messages": Case(THINK[:-18] + "blah<|start|>assistant" + FINAL, final="y", anomalies=["stray_text"]),
    "end twice": Case(THINK[:-18] + "<|end|><|start|>assistant" + FINAL, final="y", anomalies=["stray_terminator"]),
    "control token in text": Case(
        "<|channel|>final<|message|>Use <|channel|> and<|constrain|><|return|>",
        final="Use <|channel|> and<|constrain|>", anomalies=["control_in_text"],
    ),
    "endoftext": Case("<|channel|>final<|message|>y<|endoftext|>", final="y", anomalies=["endoftext"]),
    "endoftext after a call's text": Case(CALL.replace("<|call|>", "<|endoftext|>"), [], ["f"], anomalies=["endoftext"]),
    "endoftext after end": Case(THINK[:-18] + "<|endoftext|>", anomalies=["endoftext"]),
    # ends of calls
    "call ended by return": Case(CALL.replace("<|call|>", "<|return|>"), ["f"], anomalies=["call_ended_by_return"]),
    "call ended by end": Case(CALL.replace("<|call|>", "<|end|>"), [], ["f"], anomalies=["call_not_terminated"]),
    "call cut off": Case(CALL[:-10], [], ["f"], anomalies=["truncated"]),
    # what follows the turn
    "analysis ended by return": Case(THINK[:-24] + "<|return|>", anomalies=["analysis_ended_by_return"]),
    "tokens after return": Case(FINAL + "<|return|>", final="y", anomalies=["trailing_tokens"]),
    "message after return": Case(FINAL + "<|start|>assistant" + CALL, final="y", anomalies=["trailing_tokens"]),
    "tokens after call": Case(CALL + "<|constrain|>json", ["f"], anomalies=["trailing_tokens"]),
    "text after call": Case(CALL + " and then", ["f"], anomalies=["trailing_tokens"]),
    "made-up tool result": Case(
        CALL + "<|start|>functions.f to=assistant<|channel|>commentary<|message|>4<|end|><|start|>assistant" + FINAL, ["f"],
        anomalies=["foreign_role"],
    ),
    "made-up result of another name": Case(
        CALL + "<|start|>whatever<|message|>4<|end|><|start|>assistant" + FINAL, ["f"], anomalies=["foreign_role"]
    ),
    "user after call": Case(CALL + "<|start|>user<|message|>4<|end|>", ["f"], anomalies=["foreign_role"]),
    "user in the turn": Case(THINK[:-9] + "user<|message|>hi<|end|><|start|>assistant" + CALL, anomalies=["foreign_role"]),
    "system in the turn": Case(FINAL.replace("return", "end") + "<|start|>system<|message|>r<|end|>", final="y", anomalies=["foreign_role"]),
    "final after call": Case(CALL + "<|start|>assistant" + FINAL, ["f"], final="y", anomalies=["final_after_call"]),
    # arguments
    "broken JSON": Case(CALL.replace("}", ""), ["f"], anomalies=["invalid_json"]),
    "no arguments": Case(CALL.replace('{"a":1}', ""), ["f"], anomalies=["invalid_json"]),
    "two objects": Case(CALL.replace('{"a":1}', "{}{}"), ["f"], anomalies=["invalid_json"]),
    "a list": Case(CALL.replace('{"a":1}', "[1]"), ["f"], anomalies=["arguments_not_object"]),
    "a string": Case(CALL.replace('{"a":1}', '"x"'), ["f"], anomalies=["arguments_not_object"]),
    "bottomless JSON": Case(CALL.replace('{"a":1}', "[" * 30000), ["f"], anomalies=["invalid_json"]),
    "endless number": Case(CALL.replace("1", "1" * 6000), ["f"], anomalies=["invalid_json"]),
    # cut off
    "nothing": Case("", anomalies=["empty"]),
    "cut off in the role": Case(THINK, anomalies=["truncated"]),
    "cut off after start": Case(THINK[:-9], anomalies=["truncated"]),
    "cut off in the channel": Case("<|channel|>fin", anomalies=["truncated"]),
    "cut off after channel": Case("<|channel|>", anomalies=["truncated"]),
    "cut off in the header": Case("<|channel|>commentary to=functions.f", [], ["f"], anomalies=["truncated"]),
    "cut off in the recipient": Case("<|channel|>commentary to=functions.", anomalies=["truncated"]),
    "cut off in the text": Case("<|channel|>final<|message|>y", final="y", anomalies=["truncated"]),
    "cut off between messages": Case(THINK[:-18]),
}  # fmt: skip


@pytest.mark.parametrize("case", WELL_FORMED.values(), ids=WELL_FORMED.keys())
def test_well_formed(case: Case, tokenizer) -> None:
    check(case, tokenizer)


@pytest.mark.parametrize("case", DAMAGED.values(), ids=DAMAGED.keys())
def test_damaged(case: Case, tokenizer) -> None:
    check(case, tokenizer)


def check(case: Case, tokenizer) -> None:
    turn = parse(tokenizer.encode(case.text, add_special_tokens=False), tokenizer)
    assert names(turn) == (case.calls, case.incomplete)
    assert turn.final_text == case.final
    assert turn.anomalies == case.anomalies


def test_fields(tokenizer) -> None:
    ids = tokenizer.encode(THINK + CALL, add_special_tokens=False)
    turn = parse(ids, tokenizer)
    analysis, message = turn.messages
    assert (analysis.role, analysis.channel, analysis.text, analysis.terminator) == (
        "assistant",
        "analysis",
        "t",
        "end",
    )
    assert (message.channel, message.recipient, message.content_type) == ("commentary", "functions.f", "json")
    assert (message.text, message.terminator, message.anomalies) == ('{"a":1}', "call", [])
    boundary = ids.index(tokenizer.convert_tokens_to_ids("<|end|>")) + 1
    assert (analysis.span, message.span) == ((0, boundary), (boundary, len(ids)))
    (call,) = turn.tool_calls
    assert (call.name, call.arguments, call.raw_arguments, call.builtin) == ("f", {"a": 1}, '{"a":1}', False)
    assert turn.terminator == "call"
    assert turn.as_messages()[1] == {
        "role": "assistant",
        "channel": "commentary",
        "recipient": "functions.f",
        "content_type": "json",
        "content": '{"a":1}',
    }


def test_builtins(tokenizer) -> None:
    code = "<|channel|>analysis to=python code<|message|>x = 1\nprint(x)<|call|>"
    (call,) = parse(tokenizer.encode(code), tokenizer).tool_calls
    assert (call.builtin, call.arguments, call.raw_arguments) == (True, None, "x = 1\nprint(x)")
    search = '<|channel|>analysis to=browser.search code<|message|>{"query":"x"}<|call|>'
    (call,) = parse(tokenizer.encode(search), tokenizer).tool_calls
    assert (call.builtin, call.arguments, call.recipient) == (True, {"query": "x"}, "browser.search")
    function = CALL.replace("functions.f", "functions.python")
    (call,) = parse(tokenizer.encode(function), tokenizer).tool_calls
    assert (call.builtin, call.name, call.recipient) == (False, "python", "functions.python")


DECLARED = [
    ("functions.shelljson", ["shell"], ["shell"], [], ["glued_recipient"]),
    ("functions.shelljson", ["shell", "shelljson"], ["shelljson"], [], []),
    ("functions.shelljson", ["other"], ["shelljson"], [], []),
    ("functions.shelljson", None, ["shelljson"], [], []),
    ("functions.shellcommentary", ["shell"], ["shell"], [], ["glued_recipient"]),
    ("shell", ["shell"], ["shell"], [], ["missing_namespace"]),
    ("shelljson", ["shell"], ["shell"], [], ["missing_namespace", "glued_recipient"]),
    ("tools.shell", ["shell"], ["shell"], [], ["missing_namespace"]),
    ("shell", ["functions.shell"], ["shell"], [], ["missing_namespace"]),
    ("other", ["shell"], [], ["other"], ["unknown_recipient"]),
    ("functions.nope", ["shell"], ["nope"], [], []),
    ("python", ["shell"], ["python"], [], []),
    ("python", ["python"], ["python"], [], []),
    ("browser.search", ["browser"], ["browser.search"], [], []),
    ("browser.searchcode", ["browser"], ["browser.search"], [], ["glued_recipient"]),
    ("browser.fly", None, ["browser.fly"], [], ["unknown_namespace"]),
]


@pytest.mark.parametrize(("recipient", "tools", "calls", "incomplete", "anomalies"), DECLARED)
def test_declared_tools(recipient, tools, calls, incomplete, anomalies, tokenizer) -> None:
    turn = parse(tokenizer.encode(CALL.replace("functions.f", recipient)), tokenizer, tools)
    assert names(turn) == (calls, incomplete)
    assert turn.anomalies == anomalies


def test_declared_tools_in_every_form(small_tokenizer) -> None:
    def f(a: int) -> str:
        """Undocumented argument: no schema could be made of it, and none is needed."""

    ids = small_tokenizer.encode(CALL.replace("functions.f", "fjson"))
    schema = {"name": "f", "parameters": {}}
    for tool in (f, schema, {"type": "function", "function": schema}, "f"):
        assert names(parse(ids, small_tokenizer, [tool]))[0] == ["f"]


@pytest.mark.parametrize("text", [THINK + CALL, THINK + FINAL, CALL, THINK + WELL_FORMED["python"].text])
def test_no_prefix_of_a_generation_runs(text: str, tokenizer) -> None:
    """A call runs when its last token is there, not one token earlier, wherever the cut falls."""
    ids = tokenizer.encode(text)
    for cut in range(len(ids)):
        turn = parse(ids[:cut], tokenizer)
        assert turn.tool_calls == []
        assert turn.terminator in ("truncated", "end")


def test_garbage_and_cut(small_tokenizer) -> None:
    head = small_tokenizer.encode(CALL)
    tail = small_tokenizer.encode("<|start|>user<|message|>hi<|end|>")
    turn = parse(head + tail, small_tokenizer)
    assert turn.cut_at == len(head)
    assert turn.garbage == [(len(head), len(head) + len(tail))]
    assert parse(head, small_tokenizer).cut_at is None


def test_ids_without_a_token(tokenizer) -> None:
    ids = tokenizer.encode(FINAL)
    body = ids.index(tokenizer.convert_tokens_to_ids("<|message|>")) + 1
    for wrong in (len(tokenizer), 201087, 2**40, -1, -(2**70)):
        turn = parse(ids[:body] + [wrong] + ids[body:], tokenizer)
        assert (turn.final_text, turn.anomalies) == ("y", ["invalid_id"])
        turn = parse([wrong] + ids, tokenizer)
        assert (turn.final_text, turn.anomalies) == ("y", ["invalid_id"])


def test_other_special_ids(small_tokenizer) -> None:
    reserved = small_tokenizer.convert_tokens_to_ids("<|reserved_7|>")
    ids = small_tokenizer.encode(FINAL)
    assert parse([reserved] + ids, small_tokenizer).anomalies == ["unexpected_control"]
    turn = parse(ids[:-1] + [reserved] + ids[-1:], small_tokenizer)
    assert (turn.final_text, turn.anomalies) == ("y<|reserved_7|>", ["control_in_text"])


def test_unicode_over_several_tokens(tokenizer) -> None:
    text = "🧑🏽‍🚀 ñ नमस्ते"
    turn = parse(tokenizer.encode(FINAL.replace(">y<", f">{text}<")), tokenizer)
    assert (turn.final_text, turn.anomalies) == (text, [])


def test_broken_unicode(tokenizer) -> None:
    ids = tokenizer.encode(FINAL.replace(">y<", ">🚀 there<"))
    body = ids.index(tokenizer.convert_tokens_to_ids("<|message|>")) + 1
    text = parse(ids[:body] + ids[body + 1 :], tokenizer).final_text  # the first token of the rocket is gone
    assert "\ufffd" in text and text.endswith(" there")


def test_spelled_control_tokens_are_text(tokenizer) -> None:
    """Ids decide, not what they decode to."""
    spelled = tokenizer.encode(CALL, split_special_tokens=True)
    ids = tokenizer.encode("<|channel|>final<|message|>") + spelled + tokenizer.encode("<|return|>")
    turn = parse(ids, tokenizer)
    assert (turn.final_text, turn.tool_calls, turn.anomalies) == (CALL, [], [])


def test_reported_cases(data_folder: Path, gpt_oss_tokenizer) -> None:
    """Generations from public bug reports, as sampled; `null` in `check` is not judged."""
    path = data_folder / "harmony_cases.jsonl"
    if not path.exists():
        pytest.skip(f"{path} is not there; set TRL_GPTOSS_TEST_DATA")
    wrong = {}
    for line in path.read_text().splitlines():
        case = json.loads(line)
        turn = parse(case["ids"], gpt_oss_tokenizer)
        calls, incomplete = names(turn)
        got = {
            "calls": calls,
            "incomplete": incomplete,
            "final": turn.final_text,
            "flagged": bool(turn.anomalies),
            "last_terminator": turn.terminator,
        }
        differs = {k: (v, got[k]) for k, v in case["check"].items() if v is not None and v != got[k]}
        if differs:
            wrong[case["id"]] = differs
    assert wrong == {}
