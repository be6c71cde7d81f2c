"""A conversation for the terminal: who speaks on which channel to whom, in colours.

What a policy, a user or a tool wrote is shown as text and nothing else: it is never read as console markup, and
characters that would move the cursor, recolour the screen or reorder the line are shown as escapes (`\\x1b`).
"""

import unicodedata
from collections.abc import Iterable
from typing import Any

from rich.text import Text
from transformers import PreTrainedTokenizerBase

from .conversation import Conversation, HarmonyMessage
from .vocabulary import HarmonyVocabulary

_ROLE_STYLES = {"system": "blue", "developer": "blue", "user": "green", "assistant": "cyan"}
_CHANNEL_STYLES = {"analysis": "bright_black", "commentary": "yellow", "final": "bold cyan"}
_TOOL_STYLE = "magenta"
_CONTROL_STYLE = "bold red"


def format_conversation(
    conversation: Iterable[int] | Iterable[dict[str, Any]], tokenizer: PreTrainedTokenizerBase
) -> Text:
    """A conversation as coloured text.

    Args:
        conversation (`Iterable[int]` or `Iterable[dict]`):
            Ids, (sequence_length,): a whole conversation, or what was sampled after `<|start|>assistant`; or messages
            in the forms of `render_prompt` or `ParsedTurn.as_messages()`.
        tokenizer (`PreTrainedTokenizerBase`): a tokenizer with Harmony's control tokens.

    Returns:
        `rich.text.Text`. Control tokens that stand where none belongs are shown in red.
    """
    items = list(conversation)
    text = Text()
    if items and isinstance(items[0], dict):
        harmony = Conversation(items, [])
        messages = list(harmony.messages)
        if harmony.instructions:
            messages.insert(0, HarmonyMessage(role="developer", author="developer", content=harmony.instructions))
        for message in messages:
            _append_message(text, message)
    else:
        _append_ids(text, [int(i) for i in items], HarmonyVocabulary.of(tokenizer))
    text.rstrip()
    return text


def _append_message(text: Text, message: HarmonyMessage) -> None:
    parts = [message.author, message.channel, message.content_type]
    header = " ".join(part for part in parts if part)
    if message.recipient:
        header += f" -> {message.recipient}"
    style = _style(message.author, message.channel, message.recipient)
    text.append(f"{visible(header)}\n", style=f"{style} reverse")
    text.append(f"{visible(message.content)}\n\n", style=style)


def _append_ids(text: Text, ids: list[int], vocabulary: HarmonyVocabulary) -> None:
    """Shows every id: headers, bodies, and whatever is out of place."""
    names = {vocabulary.channel: " ", vocabulary.constrain: " ", vocabulary.start: ""}
    in_header, style, begin = True, _ROLE_STYLES["assistant"], 0
    if ids[:1] != [vocabulary.start]:
        text.append("assistant", style=f"{style} reverse")
    for i in [*(i for i, token in enumerate(ids) if token in vocabulary.control_ids), len(ids)]:
        token = ids[i] if i < len(ids) else None
        written = visible(vocabulary.decode(ids[begin:i]))
        if in_header:
            style = _header_style(written, style)
        text.append(written, style=f"{style} reverse" if in_header else style)
        begin = i + 1
        if token is None:
            break
        if token == vocabulary.message and in_header:
            in_header = False
            text.append("\n")
        elif token in (vocabulary.end, vocabulary.call, vocabulary.return_) and not in_header:
            in_header, style = True, _ROLE_STYLES["assistant"]
            text.append("\n\n")
        elif in_header and token in names:
            text.append(names[token], style=f"{style} reverse")
        else:
            text.append(vocabulary.decode([token]), style=_CONTROL_STYLE)
            in_header = in_header or token == vocabulary.start


def _header_style(written: str, style: str) -> str:
    words = written.split()
    if not words:
        return style
    if words[0] in _CHANNEL_STYLES:
        return (
            _TOOL_STYLE
            if style == _TOOL_STYLE or any(w.startswith("to=") for w in words)
            else _CHANNEL_STYLES[words[0]]
        )
    if any(word.startswith("to=") for word in words) or words[0].startswith(("functions.", "browser", "python")):
        return _TOOL_STYLE
    return _ROLE_STYLES.get(words[0].split(":")[0], style)


def _style(author: str, channel: str | None, recipient: str | None) -> str:
    if recipient or author not in _ROLE_STYLES:
        return _TOOL_STYLE
    return _CHANNEL_STYLES.get(channel or "", _ROLE_STYLES[author])


def visible(text: str) -> str:
    """`text` with every character that a terminal would obey, rather than show, written as an escape."""
    return "".join(character if _is_printed(character) else ascii(character)[1:-1] for character in text)


def _is_printed(character: str) -> bool:
    # Cc: ESC and the other control characters. Cs: lone surrogates. Cf: invisible, among them the bidirectional
    # overrides; zero-width joiners (emoji, Indic and Persian writing) are harmless.
    if character in "\n\t\u200c\u200d":
        return True
    return unicodedata.category(character) not in ("Cc", "Cs", "Cf")
