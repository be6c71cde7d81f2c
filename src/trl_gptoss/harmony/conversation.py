"""Chat messages as data sets have them -> Harmony messages, still as text.

    {"role": "assistant", "thinking": "hm",           assistant, channel analysis:                     hm
     "tool_calls": [f(a=1)]}                     ->   assistant to=functions.f, channel commentary:    {"a": 1}
    {"role": "tool", "content": "2"}                  functions.f to=assistant, channel commentary:    2

A message that has a `channel` or a `recipient` is a Harmony message already and is taken as it is.
"""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from .tools import ToolSpec

JSON_ARGUMENTS = "<|constrain|>json"
ROLES = ("system", "developer", "user", "assistant", "tool")


@dataclass(kw_only=True, slots=True)
class HarmonyMessage:
    """One message between `<|start|>` and its terminator.

    role (`str`): `"developer"`, `"user"`, `"assistant"` or `"tool"`.
    author (`str`): what the header says: the role, for a tool its full name (`functions.f`, `python`).
    content (`str`): the body, plain text.
    name (`str`, *optional*): name of a user or assistant, written `user:name`.
    channel, recipient, content_type (`str`, *optional*): rest of the header.
    """

    role: str
    author: str
    content: str
    name: str | None = None
    channel: str | None = None
    recipient: str | None = None
    content_type: str | None = None

    def __post_init__(self) -> None:
        for name in ("author", "content", "name", "channel", "recipient", "content_type"):
            value = getattr(self, name)
            if value is not None and not isinstance(value, str):
                raise ValueError(
                    f"The {name} of a message with role {self.role!r} must be a string, got {type(value).__name__}: "
                    f"{value!r}."
                )

    @property
    def is_call(self) -> bool:
        return self.role == "assistant" and self.recipient not in (None, "all")

    @property
    def is_final(self) -> bool:
        return self.role == "assistant" and self.channel == "final" and not self.is_call


class Conversation:
    """A conversation in Harmony's terms.

    instructions (`str` or `None`): text of the system and developer messages it begins with.
    messages (`list[HarmonyMessage]`): everything after them.

    Args:
        messages (`Iterable[dict]`): chat messages, see `render_prompt`.
        tools (`list[ToolSpec]`): declared tools; they tell a builtin `python` from a function of that name.
    """

    def __init__(self, messages: Iterable[dict[str, Any]], tools: list[ToolSpec]):
        self._builtins = {tool.name for tool in tools if tool.builtin}
        self._functions = {tool.name for tool in tools if not tool.builtin}
        self._calls_by_id: dict[str, HarmonyMessage] = {}
        self._pending: list[HarmonyMessage] = []
        self.messages: list[HarmonyMessage] = []
        instructions: list[str] = []
        for i, message in enumerate(messages):
            if not isinstance(message, dict) or message.get("role") not in ROLES:
                raise ValueError(
                    f"Message {i} has no known role: expected a dict with role {', '.join(ROLES)}, got {message!r}."
                )
            if message["role"] in ("system", "developer") and not self.messages:
                instructions.append(text_of(message))
            else:
                self.messages += self._convert(message)
        self.instructions = "\n\n".join(text for text in instructions if text) or None

    def _convert(self, message: dict[str, Any]) -> list[HarmonyMessage]:
        role = message["role"]
        if role == "tool":
            return [self._tool_result(message)]
        if role in ("system", "developer"):
            return [instructions_message(text_of(message))]
        if role == "user":
            return [HarmonyMessage(role=role, author=role, content=text_of(message), name=message.get("name"))]
        if _is_harmony(message):
            if message.get("tool_calls") or message.get("thinking") or message.get("reasoning_content"):
                raise ValueError(
                    "A message with a channel or a recipient is one Harmony message; give its thinking and its tool_calls "
                    f"as messages of their own, or leave out channel and recipient. Got {message!r}."
                )
            return [self._remember(_as_given(message, "assistant"))]
        return self._assistant(message)

    def _assistant(self, message: dict[str, Any]) -> list[HarmonyMessage]:
        def say(channel: str, text: str) -> HarmonyMessage:
            name = message.get("name")
            return HarmonyMessage(role="assistant", author="assistant", content=text, name=name, channel=channel)

        thinking = message.get("thinking") or message.get("reasoning_content")
        calls = _list_of_calls(message)
        said = [say("analysis", thinking)] if thinking else []
        if message.get("content") is not None:
            text = text_of(message)
            # An empty content next to thinking or calls is how chat formats say "none".
            if text or not (thinking or calls):
                said.append(say("commentary" if calls else "final", text))
        elif not said and not calls:
            raise ValueError(
                f"An assistant message needs content, thinking, reasoning_content or tool_calls; got {message!r}."
            )
        return said + [self._call(call) for call in calls]

    def _call(self, call: dict[str, Any]) -> HarmonyMessage:
        function = call.get("function", call) if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise ValueError(f"A tool call needs a function with a name; got {call!r}.")
        arguments = function.get("arguments")
        builtin = self._is_builtin(function["name"])
        if isinstance(arguments, str):
            text = arguments
        elif builtin and isinstance(arguments, dict) and set(arguments) == {"code"}:
            text = arguments["code"]
        else:
            text = _json(function["name"], {} if arguments is None else arguments)
        message = HarmonyMessage(
            role="assistant",
            author="assistant",
            content=text,
            recipient=function["name"] if builtin else f"functions.{function['name'].removeprefix('functions.')}",
            channel="analysis" if builtin else "commentary",
            content_type="code" if builtin else function.get("content_type", JSON_ARGUMENTS),
        )
        if call.get("id") is not None:
            self._calls_by_id[str(call["id"])] = message
        return self._remember(message)

    def _is_builtin(self, name: str) -> bool:
        return name.split(".")[0] in self._builtins and name not in self._functions

    def _remember(self, message: HarmonyMessage) -> HarmonyMessage:
        if message.is_call:
            self._pending.append(message)
        return message

    def _tool_result(self, message: dict[str, Any]) -> HarmonyMessage:
        call_id = message.get("tool_call_id")
        call = self._calls_by_id.get(str(call_id))
        name = message.get("name") or (call.recipient if call else None)
        wrong_id = call_id not in (None, "") and self._calls_by_id
        if name is None and (wrong_id or not self._pending):
            raise ValueError(
                f"A tool message answers no call. Give it the name of the tool or the tool_call_id of an earlier call "
                f"({', '.join(self._calls_by_id) or 'none has an id'}); without either it answers the calls in order, of "
                f"which {len(self._pending)} are left. Got {message!r}."
            )
        if name is not None and not isinstance(name, str):
            raise ValueError(f"The name of a tool message must be a string, got {name!r}.")
        if call is None:
            call = next((c for c in self._pending if name is None or name in _names(c.recipient)), None)
        if call is not None and call in self._pending:
            self._pending = [c for c in self._pending if c is not call]
        if _is_harmony(message):
            return _as_given(message, name or call.recipient)
        if call is not None and (name is None or name in (call.recipient, call.recipient.removeprefix("functions."))):
            author, channel = call.recipient, result_channel(call.recipient, call.channel)
        else:
            author = name if "." in name or self._is_builtin(name) else f"functions.{name}"
            channel = result_channel(author, None)
        return HarmonyMessage(
            role="tool", author=author, content=text_of(message), recipient="assistant", channel=channel
        )


def instructions_message(text: str) -> HarmonyMessage:
    """New instructions in the middle of a conversation."""
    return HarmonyMessage(role="developer", author="developer", content=f"# Instructions\n\n{text}")


def _names(recipient: str) -> tuple[str, ...]:
    """What a result may call the tool `recipient`: `functions.f` or `f`; `browser.search` or `search`."""
    return recipient, recipient.removeprefix("functions."), recipient.split(".")[-1]


def _list_of_calls(message: dict[str, Any]) -> list[dict[str, Any]]:
    calls = message.get("tool_calls") or []
    if not isinstance(calls, list):
        raise ValueError(f"tool_calls must be a list of calls, got {type(calls).__name__}: {calls!r}.")
    return calls


def _json(name: str, arguments: Any) -> str:
    try:
        return json.dumps(arguments, ensure_ascii=False)
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"The arguments of a call to {name!r} have no JSON form ({error}); got {arguments!r}."
        ) from error


def result_channel(recipient: str, call_channel: str | None) -> str:
    """Channel of a tool's answer: commentary for functions; a builtin answers on the channel it was called on."""
    if recipient.startswith("functions."):
        return "commentary"
    return call_channel if call_channel in ("analysis", "commentary") else "analysis"


def _is_harmony(message: dict[str, Any]) -> bool:
    # Not by the keys alone: `datasets` gives every message of a column the keys of all of them, with None.
    return message.get("channel") is not None or message.get("recipient") is not None


def _as_given(message: dict[str, Any], author: str) -> HarmonyMessage:
    return HarmonyMessage(
        role=message["role"],
        author=author,
        content=text_of(message),
        name=message.get("name") if message["role"] != "tool" else None,
        channel=message.get("channel"),
        recipient=message.get("recipient"),
        content_type=message.get("content_type"),
    )


def text_of(message: dict[str, Any]) -> str:
    """Text of a message whose content is a string or a list of text parts. Raises `ValueError` for anything else."""
    content = message.get("content")
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else [None]
    if all(isinstance(part, dict) and isinstance(part.get("text"), str) for part in parts):
        return "".join(part["text"] for part in parts)
    raise ValueError(
        f"The content of a message with role {message['role']!r} must be a string or a list of {{'type': 'text', 'text': ...}}; GPT-OSS "
        f"reads text only. Got {content!r}."
    )
