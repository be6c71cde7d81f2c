"""Sampled ids -> messages and tool calls. One pass over the ids, linear time, no exception whatever was sampled.

The prompt ends with `<|start|>assistant`, so the ids begin in the middle of a header:

    ids   <|channel|> analysis <|message|> hm <|end|> <|start|> assistant <|channel|> final <|message|> 4 <|return|>
    state HEADER                           BODY        HEADER                                        BODY
    span  [0 ........................... 5)           [5 ..................................................... 12)

Ids that belong to no message (stray terminators, whatever follows the end of the turn) are listed in `garbage`; spans
and garbage together cover every id exactly once. Every repair and every loss is named in `anomalies`.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from transformers import PreTrainedTokenizerBase

from .calls import KnownTools, ToolCall, read_arguments
from .header import CHANNELS, Header, HeaderReader, Opening
from .tools import Tool
from .vocabulary import HarmonyVocabulary

# Anomalies of a header that may only mean that the rest of it was cut off.
_UNFINISHED = ("missing_channel", "missing_role", "empty_", "unknown_", "malformed_recipient", "invalid_recipient")

_SAID_NOTHING = ([(None, "")], [(None, "assistant")])

# A header that a model really writes is shorter; only used to tell a forgotten boundary from `<|channel|>` in prose.
_LONGEST_HEADER = 64


@dataclass(kw_only=True, slots=True)
class ParsedMessage:
    """One message of the policy.

    role (`str`): `"assistant"`; anything else is an anomaly.
    channel, recipient, content_type (`str` or `None`): from the header.
    text (`str`): the body, decoded exactly.
    terminator (`str`): `"end"`, `"call"`, `"return"`, or `"truncated"` if none of these ended it.
    span (`tuple[int, int]`): half-open range of its ids, header and terminator included.
    anomalies (`list[str]`): what had to be repaired in it.
    """

    role: str
    channel: str | None
    recipient: str | None
    content_type: str | None
    text: str
    terminator: str
    span: tuple[int, int]
    anomalies: list[str] = field(default_factory=list)


@dataclass(kw_only=True, slots=True)
class ParsedTurn:
    """What the policy sampled in one go, read.

    messages (`list[ParsedMessage]`): in order.
    tool_calls (`list[ToolCall]`): the calls to execute, in order.
    incomplete_calls (`list[ToolCall]`): messages to a tool that must not run: not ended by `<|call|>` or `<|return|>`,
        never opened by `<|message|>`, or addressed to two tools or to a tool that was not declared.
    garbage (`list[tuple[int, int]]`): half-open ranges of ids that belong to no message.
    cut_at (`int` or `None`): index of the first id that was dropped because the turn was over before it, or because the
        policy went on in somebody else's role; `None` if nothing was cut.
    anomalies (`list[str]`): all names, those of the messages included, in order of position.
    """

    messages: list[ParsedMessage] = field(default_factory=list)
    tool_calls: list[ToolCall] = field(default_factory=list)
    incomplete_calls: list[ToolCall] = field(default_factory=list)
    garbage: list[tuple[int, int]] = field(default_factory=list)
    cut_at: int | None = None
    anomalies: list[str] = field(default_factory=list)

    @property
    def final_text(self) -> str | None:
        """Text of the last final message, `None` if there is none."""
        finals = [m for m in self.messages if m.role == "assistant" and m.channel == "final" and m.recipient is None]
        return finals[-1].text if finals else None

    @property
    def terminator(self) -> str:
        """How the last message ended; `"truncated"` for an empty turn."""
        return self.messages[-1].terminator if self.messages else "truncated"

    def as_messages(self) -> list[dict[str, Any]]:
        """Plain dicts `role, channel, recipient, content_type, content`, for rewards, printing and `render_prompt`.

        The role is always `"assistant"`, who wrote them all; a message in a misspelt role counts for no channel.
        """
        return [
            {
                "role": "assistant",
                "channel": m.channel if m.role == "assistant" else None,
                "recipient": m.recipient,
                "content_type": m.content_type,
                "content": m.text,
            }
            for m in self.messages
        ]


def parse(ids: Iterable[int], tokenizer: PreTrainedTokenizerBase, tools: Iterable[Tool] | None = None) -> ParsedTurn:
    """Reads what a policy sampled after a prompt that ends with `<|start|>assistant`.

    Args:
        ids (`Iterable[int]`):
            Sampled ids, (sequence_length,), as sampled. Any integers are taken.
        tokenizer (`PreTrainedTokenizerBase`):
            A tokenizer with Harmony's control tokens.
        tools (`Iterable`, *optional*):
            The tools the prompt declared, as `render_prompt` takes them, or their names. They only serve to repair
            recipients (`to=shelljson`, `to=shell`); a call to an undeclared `functions.x` is still a call, which the
            environment answers with an error.

    Returns:
        `ParsedTurn`. Never raises for any ids; `TypeError` if `tools` is not a list of tools.
    """
    return _Parser([int(i) for i in ids], HarmonyVocabulary.of(tokenizer), KnownTools(tools)).run()


class _Parser:
    def __init__(self, ids: list[int], vocabulary: HarmonyVocabulary, tools: KnownTools):
        self.ids = ids
        self.v = vocabulary
        self.tools = tools
        self.turn = ParsedTurn()
        self.terminators = {vocabulary.end: "end", vocabulary.call: "call", vocabulary.return_: "return"}
        self.called = False  # a `<|call|>` was sampled: only further messages of the assistant may follow
        self.over = False  # a stop token ended the turn: nothing may follow
        # Position of the first control id at or after each position, so that looking ahead costs nothing.
        self.next_control = [len(ids)] * (len(ids) + 1)
        for i in range(len(ids) - 1, -1, -1):
            self.next_control[i] = i if ids[i] in vocabulary.control_ids else self.next_control[i + 1]

    def run(self) -> ParsedTurn:
        position, opening = 0, Opening.PROMPT
        while position < len(self.ids):
            position = self.read_message(position, opening)
            position, opening = self.between(position)
        if not self.ids:
            self.turn.anomalies.append("empty")
        return self.turn

    # Between two messages -------------------------------------------------------------------------------------------

    def between(self, position: int) -> tuple[int, Opening]:
        """Where the next message begins, and how. Stray terminators are passed over."""
        begin = position
        while position < len(self.ids) and not (self.called or self.over) and self.is_stop(self.ids[position]):
            self.note("endoftext" if self.ids[position] == self.v.endoftext else "stray_terminator")
            self.over = self.ids[position] != self.v.end
            position += 1
        self.drop(begin, position)
        if position == len(self.ids):
            return position, Opening.START
        starts = self.ids[position] == self.v.start
        if self.over or (self.called and not starts):
            return self.cut(position, "trailing_tokens"), Opening.START
        return position, Opening.START if starts else Opening.MISSING

    def is_stop(self, token: int) -> bool:
        return token in self.terminators or token == self.v.endoftext

    def note(self, anomaly: str) -> None:
        if anomaly not in self.turn.anomalies[-1:]:
            self.turn.anomalies.append(anomaly)

    def drop(self, begin: int, end: int) -> None:
        if begin < end:
            self.turn.garbage.append((begin, end))

    def cut(self, position: int, anomaly: str) -> int:
        """Drops everything from `position` on."""
        self.note(anomaly)
        self.drop(position, len(self.ids))
        self.turn.cut_at = position
        return len(self.ids)

    # One message ----------------------------------------------------------------------------------------------------

    def read_message(self, begin: int, opening: Opening) -> int:
        """Reads one message and returns the position after it."""
        notes: list[str] = []
        position = begin + 1 if opening is Opening.START else begin
        sections, position = self.header_sections(position, notes)
        # `<|start|><|start|>` and `<|start|>assistant<|start|>`: nothing was said yet.
        while self.ids[position : position + 1] == [self.v.start] and sections in _SAID_NOTHING:
            notes.append("double_start")
            opening = Opening.START
            sections, position = self.header_sections(position + 1, notes)
        opened = position < len(self.ids) and self.ids[position] == self.v.message
        if not opened and len(sections) == 1 and opening is not Opening.START:
            return self.prose(begin, position, sections[0][1], opening)
        header = self.read_sections(sections, opening)
        if self.is_foreign(header):
            return self.cut(begin, "foreign_role")
        text = header.rest
        if opened:
            if header.rest:
                notes.append("malformed_header")
            text, position = self.read_body(position + 1, notes)
        elif position < len(self.ids):
            notes.append("missing_message")
        self.add(header, text, begin, position, opened, notes)
        return self.after_terminator(position)

    def header_sections(self, position: int, notes: list[str]) -> tuple[list[tuple[int | None, str]], int]:
        """`(control id or None, text)` of each section of a header, and the position of the token that ends it."""
        sections, opener, begin = [], None, position
        while True:
            position = self.next_control[position]
            token = self.ids[position] if position < len(self.ids) else None
            inside = token is not None and token not in (self.v.message, self.v.start) and not self.is_stop(token)
            if inside and token not in (self.v.channel, self.v.constrain):
                notes.append("unexpected_control")
                position += 1
                continue
            sections.append((opener, self.v.decode([i for i in self.ids[begin:position] if not self.is_control(i)])))
            if not inside:
                return sections, position
            opener, begin, position = token, position + 1, position + 1

    def is_control(self, token: int) -> bool:
        return token in self.v.control_ids

    def read_sections(self, sections: list[tuple[int | None, str]], opening: Opening) -> Header:
        reader = HeaderReader(opening)
        for opener, text in sections:
            if opener is None:
                reader.role(text)
            elif opener == self.v.channel:
                reader.channel(text)
            else:
                reader.constrain(text)
        return reader.finish()

    def is_foreign(self, header: Header) -> bool:
        """Whether the policy speaks for somebody else; after a call anybody but the plain assistant."""
        if self.called:
            return header.role != "assistant" or "missing_role" in header.anomalies
        return header.role != "assistant" and "unknown_role" not in header.anomalies

    def read_body(self, begin: int, notes: list[str]) -> tuple[str, int]:
        """Text of the body that begins at `begin`, and the position of the token that ends it."""
        while begin < len(self.ids) and self.ids[begin] == self.v.message:
            notes.append("repeated_message")
            begin += 1
        position = begin
        while True:
            position = self.next_control[position]
            if position == len(self.ids) or self.is_stop(self.ids[position]) or self.ids[position] == self.v.start:
                break
            if self.ids[position] == self.v.channel and self.begins_message(position):
                break
            notes.append("control_in_text")
            position += 1
        return self.v.decode(self.ids[begin:position]), position

    def begins_message(self, position: int) -> bool:
        """Whether the `<|channel|>` at `position` inside a body opens a message whose beginning was forgotten."""
        end = self.next_control[position + 1]
        if end == len(self.ids) or end - position > _LONGEST_HEADER:
            return False
        if self.ids[end] not in (self.v.message, self.v.constrain):
            return False
        return self.v.decode(self.ids[position + 1 : end]).strip().startswith(CHANNELS)

    def prose(self, begin: int, position: int, text: str, opening: Opening) -> int:
        """Ordinary tokens where a header belongs, with no `<|channel|>` and no `<|message|>`."""
        end = self.after_terminator(position)
        if opening is Opening.MISSING:
            self.note("stray_text")
            self.drop(begin, end)
        else:
            header = Header(anomalies=["missing_channel"])
            notes = ["missing_message"] if position < len(self.ids) else []
            self.add(header, text, begin, position, False, notes)
        return end

    def after_terminator(self, position: int) -> int:
        """The position after the token at `position` if that token ends a message, else `position`."""
        if position == len(self.ids) or not self.is_stop(self.ids[position]):
            return position
        self.called = self.called or self.ids[position] == self.v.call
        self.over = self.ids[position] in (self.v.return_, self.v.endoftext)
        return position + 1

    # What it means --------------------------------------------------------------------------------------------------

    def add(self, header: Header, text: str, begin: int, position: int, opened: bool, notes: list[str]) -> None:
        """Adds the message that ends with the token at `position`, and the call it makes."""
        token = self.ids[position] if position < len(self.ids) else None
        terminator = self.terminators.get(token, "truncated")
        end = position + 1 if token is not None and self.is_stop(token) else position
        if token is None:
            if not opened:  # what is missing may have been about to come
                header.anomalies = [name for name in header.anomalies if not name.startswith(_UNFINISHED)]
            notes.append("truncated")
        elif token == self.v.endoftext:
            notes.append("endoftext")
        elif terminator == "truncated":
            notes.append("missing_terminator")
        if begin < end and not 0 <= min(self.ids[begin:end]) <= max(self.ids[begin:end]) < self.v.size:
            notes.append("invalid_id")
        message = ParsedMessage(
            role=header.role,
            channel=header.channel,
            recipient=header.recipient,
            content_type=header.content_type,
            text=text,
            terminator=terminator,
            span=(begin, end),
        )
        if header.recipient is not None:
            notes += self.add_call(message, header, opened)
        elif terminator == "call" and "invalid_recipient" not in header.anomalies:
            notes.append("call_without_recipient")
        elif terminator == "return" and header.channel == "analysis":
            notes.append("analysis_ended_by_return")
        elif self.called and header.channel == "final":
            notes.append("final_after_call")
        message.anomalies = list(dict.fromkeys([*header.anomalies, *notes]))
        self.turn.messages.append(message)
        self.turn.anomalies += message.anomalies

    def add_call(self, message: ParsedMessage, header: Header, opened: bool) -> list[str]:
        """Adds the call that `message` makes and returns the anomalies of it."""
        resolved = self.tools.resolve(message.recipient)
        recipient, builtin, notes = resolved or (message.recipient, False, ["unknown_recipient"])
        arguments, problem = read_arguments(message.text)
        call = ToolCall(
            name=recipient.removeprefix("functions."),
            arguments=arguments,
            raw_arguments=message.text,
            builtin=builtin,
            recipient=recipient,
            channel=message.channel,
            content_type=message.content_type,
        )
        if problem and opened and not builtin and message.terminator != "truncated":
            notes = [*notes, problem]
        if message.channel == "final":
            notes = [*notes, "call_on_final"]
        if message.terminator == "return":
            notes = [*notes, "call_ended_by_return"]
        elif message.terminator == "end":
            notes = [*notes, "call_not_terminated"]
        complete = opened and message.terminator in ("call", "return") and message.role == "assistant"
        executable = complete and resolved is not None and not header.conflicting
        (self.turn.tool_calls if executable else self.turn.incomplete_calls).append(call)
        return notes
