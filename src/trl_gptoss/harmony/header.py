"""What the text between `<|start|>` and `<|message|>` says: who speaks, on which channel, to whom, in which format.

    <|start|> assistant to=functions.f <|channel|> commentary             <|constrain|> json <|message|>
              role section             channel section                    constrain section
    <|start|> assistant                <|channel|> commentary to=functions.f <|constrain|> json <|message|>

A header arrives here as its sections, each already decoded. A well-formed one has at most one of each; models write the
recipient in either place, repeat sections, forget spaces and glue words together. `anomalies` names each repair.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum

CHANNELS = ("analysis", "commentary", "final")
CONTENT_TYPES = ("json", "code", "text")
OTHER_ROLES = ("user", "system", "developer", "tool")
NOT_TOOLS = ("assistant", "all", "functions", *OTHER_ROLES, *CHANNELS)

# Either `to=` with the word after it, or a word; both go up to the next blank or the next `to=`.
_ITEM = re.compile(r"to\s*=\s*(?P<recipient>(?:(?!to\s*=\s*\w)\S)*)|(?P<word>(?:(?!to\s*=)\S)+)")
_ASSISTANT = re.compile(r"^(?:assistant)+")
RECIPIENT_NAME = re.compile(r"[\w-](?:[\w.:/-]*[\w-])?")
_TOOL_NAME = re.compile(r"functions\.|browser\.|python$")


class Opening(Enum):
    """How a message begins."""

    PROMPT = "prompt"  # the prompt ended with `<|start|>assistant`
    START = "start"  # the policy sampled `<|start|>`
    MISSING = "missing"  # the policy forgot `<|start|>`


@dataclass(kw_only=True, slots=True)
class Header:
    """A header read.

    role (`str`): `"assistant"`, or what the header says instead.
    channel (`str` or `None`): channel name as written; `None` if none is named.
    recipient (`str` or `None`): the tool named after `to=`.
    content_type (`str` or `None`): `"json"`, `"code"`, ...
    rest (`str`): what belongs to nothing above. It is message text if no `<|message|>` follows.
    conflicting (`bool`): two different recipients are named.
    anomalies (`list[str]`): what was repaired.
    """

    role: str = "assistant"
    channel: str | None = None
    recipient: str | None = None
    content_type: str | None = None
    rest: str = ""
    conflicting: bool = False
    anomalies: list[str] = field(default_factory=list)


class HeaderReader:
    """Reads one header, section by section: `role`, then any number of `channel` and `constrain`, then `finish`."""

    def __init__(self, opening: Opening):
        self.header = Header()
        self._opening = opening
        self._recipients: list[str] = []
        self._channels: list[str] = []
        self._constrained = 0

    def _note(self, anomaly: str) -> None:
        self.header.anomalies.append(anomaly)

    def role(self, section: str) -> None:
        """The section before the first `<|channel|>` or `<|constrain|>`."""
        words = self._words(section)
        first = next(words, None)
        if self._opening is Opening.MISSING:
            self._note("missing_start")
        if first is None:
            if self._opening is Opening.START:
                self._note("missing_role")
        elif not self._read_role(first[0], section):
            self._word_after_role(section, *first)
        for word in words:
            self._word_after_role(section, *word)

    def _read_role(self, word: str, section: str) -> bool:
        """Takes `word` for the role; `False` if it is none."""
        if word.startswith("assistant"):
            self._assistant(word)
        elif self._opening is not Opening.PROMPT and self._is_other_role(word, section):
            self.header.role = word
        elif word in CHANNELS:
            self._note("missing_channel_token" if self._opening is Opening.PROMPT else "channel_as_role")
            self._channels.append(word)
        elif self._opening is Opening.START:
            self._note("unknown_role")
            self.header.role = word
        else:
            return False
        return True

    def _word_after_role(self, section: str, word: str, position: int) -> None:
        if not self._channels and word in CHANNELS:
            self._note("missing_channel_token")
            self._channels.append(word)
            return
        if word == "assistant" and not self.header.rest:
            self._note("repeated_role")
            return
        if word in CONTENT_TYPES:
            self._note("misplaced_content_type")
        self._format_or_rest(section, word, position)

    def _assistant(self, word: str) -> None:
        """`assistant`, perhaps several times, and what is glued to it."""
        glued = _ASSISTANT.sub("", word)
        if self._opening is Opening.PROMPT or len(word) - len(glued) > len("assistant"):
            self._note("repeated_role")
        if glued in CHANNELS:
            self._note("missing_channel_token")
            self._channels.append(glued)
        elif glued and not glued.startswith(":"):  # `assistant:name` is well-formed
            self._note("unknown_role")
            self.header.role = "assistant" + glued

    def _is_other_role(self, word: str, section: str) -> bool:
        return (
            word.split(":")[0] in OTHER_ROLES
            or _TOOL_NAME.match(word) is not None
            or "assistant" in (m["recipient"] for m in _ITEM.finditer(section))
        )

    def channel(self, section: str) -> None:
        """The section after a `<|channel|>`."""
        if self._constrained:
            self._note("misplaced_constrain")
        words = self._words(section)
        first = next(words, None)
        if first is None:
            self._channels.append("")
        else:
            name = first[0].rstrip(",;:")
            if name != first[0]:
                self._note("malformed_channel")
            end = first[1] + len(first[0])
            if end < len(section) and not section[end].isspace():
                self._note("missing_space")  # `commentaryto=functions.f`
            if first[1] > 0:
                self._note("extra_space")  # `<|channel|> final`
            self._channels.append(name)
        for word in words:
            self._format_or_rest(section, *word)

    def constrain(self, section: str) -> None:
        """The section after a `<|constrain|>`."""
        self._constrained += 1
        recipients = len(self._recipients)
        words = self._words(section)
        first = next(words, None)
        if first is None:
            self._note("empty_content_type")
        elif first[0] in CONTENT_TYPES:
            if self.header.content_type is not None and self._constrained == 1:
                self._note("repeated_content_type")
            self.header.content_type = first[0]
        else:
            self._note("unknown_content_type")
            self._keep_rest(section, first[1])
        for _, position in words:
            self._note("malformed_content_type")
            self._keep_rest(section, position)
        if len(self._recipients) > recipients:
            self._note("misplaced_recipient")

    def finish(self) -> Header:
        """The header, after its last section."""
        header = self.header
        self._choose_channel()
        if self._constrained > 1:
            self._note("repeated_constrain")
        named = [name for written in self._recipients for name in self._names(written)]
        if max(len(self._recipients), len(named)) > 1:
            self._note("duplicate_recipient")
        if len(set(named)) > 1:
            self._note("conflicting_recipient")
            header.conflicting = True
        header.recipient = named[0] if named else None
        if header.recipient in NOT_TOOLS or ".." in (header.recipient or ""):
            self._note("invalid_recipient")
            header.recipient = None
        header.anomalies = list(dict.fromkeys(header.anomalies))
        return header

    def _choose_channel(self) -> None:
        if not self._channels:
            self._note("missing_channel")
            return
        if len(self._channels) > 1:
            self._note("repeated_channel")
        written = [name for name in self._channels if name]
        known = [name for name in written if name in CHANNELS]
        if len(written) < len(self._channels):
            self._note("empty_channel")
        if len(known) < len(written):
            self._note("unknown_channel")
        self.header.channel = (known or written or [None])[-1]

    def _words(self, section: str) -> Iterator[tuple[str, int]]:
        """Words of a section with their positions; recipients are set aside."""
        for item in _ITEM.finditer(section):
            if item["word"] is None:
                if item["recipient"] and item[0] != f"to={item['recipient']}":
                    self._note("extra_space")  # `to = functions.f`
                self._recipients.append(item["recipient"])
            else:
                yield item["word"], item.start()

    def _format_or_rest(self, section: str, word: str, position: int) -> None:
        if self.header.content_type is None and not self.header.rest and word in CONTENT_TYPES:
            self.header.content_type = word
        elif not self.header.rest and _TOOL_NAME.match(word) and (not self._recipients or "." in word):
            self._note("bare_recipient")
            self._recipients.append(word)
        else:
            self._keep_rest(section, position)

    def _keep_rest(self, section: str, position: int) -> None:
        if not self.header.rest:
            self.header.rest = section[position:].strip()

    def _names(self, written: str) -> list[str]:
        """Names in the word after `to=`: one as a rule, several functions in `functions.f,functions.g`."""
        if written in CONTENT_TYPES and self.header.content_type is None:  # `to= json`
            self.header.content_type, written = written, ""
        if not written:
            self._note("empty_recipient")
            return []
        names = RECIPIENT_NAME.findall(written)
        if names != [written]:
            self._note("malformed_recipient")
        return names[:1] + [name for name in names[1:] if name.startswith("functions.")]
