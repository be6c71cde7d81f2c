"""From a recipient and a message text to a tool call: which tool, with which arguments."""

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NoReturn

from .builtin_tools import BUILTIN_FUNCTIONS
from .header import CHANNELS, CONTENT_TYPES
from .tools import Tool, listed, tool_name

_NAMESPACES = re.compile(r"^(functions\.)+")


@dataclass(kw_only=True, slots=True)
class ToolCall:
    """A call that the policy wrote.

    name (`str`): tool name without the `functions.` namespace; for a builtin the whole recipient (`browser.search`).
    arguments (`dict` or `None`): the arguments object; `None` if the text is not a JSON object. A builtin's text is
        code as a rule: read `raw_arguments`.
    raw_arguments (`str`): the message text.
    builtin (`bool`): addressed to one of Harmony's builtin tools, without the `functions.` namespace.
    recipient (`str`): full name of the tool, the author of its result: `functions.f`, `python`, `browser.search`.
    channel (`str` or `None`): channel of the call.
    content_type (`str` or `None`): format that the header announced.
    """

    name: str
    arguments: dict[str, Any] | None
    raw_arguments: str
    builtin: bool
    recipient: str
    channel: str | None = None
    content_type: str | None = None


class KnownTools:
    """Names of the tools that a prompt declared, to repair damaged recipients with.

    tools (`Iterable`, *optional*): tools as `render_prompt` takes them, or names. `None`: not known, any name passes.
    """

    def __init__(self, tools: Iterable[Tool] | None = None):
        self.names = None if tools is None else {tool_name(tool).removeprefix("functions.") for tool in listed(tools)}

    def _declared(self, name: str) -> bool:
        return self.names is not None and name in self.names

    def resolve(self, recipient: str) -> tuple[str, bool, list[str]] | None:
        """`(full recipient, builtin, anomalies)` of the tool that `recipient` means; `None` if it was not declared."""
        namespace, dot, name = recipient.partition(".")
        if namespace == "functions":
            bare = _NAMESPACES.sub("", name)
            full, builtin, repairs = self._resolve_function(bare)
            return full, builtin, repairs if bare == name else ["repeated_namespace", *repairs]
        if self._is_builtin(recipient):
            return recipient, True, []
        for stem in _without_glued_word(recipient):
            if self._is_builtin(stem) and not self._declared(recipient):
                return stem, True, ["glued_recipient"]
        if self.names is None:
            return (
                (recipient, False, ["unknown_namespace"])
                if dot
                else (f"functions.{recipient}", False, ["missing_namespace"])
            )
        for candidate in (recipient, recipient.rpartition(".")[2]):
            full, _, anomalies = self._resolve_function(candidate)
            if self._declared(full.removeprefix("functions.")):
                return full, False, ["missing_namespace", *anomalies]
        return None

    def _resolve_function(self, name: str) -> tuple[str, bool, list[str]]:
        if self.names is not None and name not in self.names:
            for stem in _without_glued_word(name):
                if stem in self.names:
                    return f"functions.{stem}", False, ["glued_recipient"]
        return f"functions.{name}", False, []

    @staticmethod
    def _is_builtin(recipient: str) -> bool:
        namespace, dot, function = recipient.partition(".")
        return namespace in BUILTIN_FUNCTIONS and (not dot or function in BUILTIN_FUNCTIONS[namespace])


def _without_glued_word(name: str) -> list[str]:
    """`shelljson` -> `shell`: what is left when a format or channel that was glued to a name is taken off."""
    return [name.removesuffix(word) for word in (*CONTENT_TYPES, *CHANNELS) if name.endswith(word) and name != word]


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON")  # Python's parser lets NaN and Infinity pass


def read_arguments(text: str) -> tuple[dict[str, Any] | None, str | None]:
    """`(arguments, None)`, or `(None, anomaly)` if `text` is not a JSON object."""
    try:
        value = json.loads(text, parse_constant=_no_constant)
    except (ValueError, RecursionError):  # ValueError also covers integers beyond Python's digit limit
        return None, "invalid_json"
    if not isinstance(value, dict):
        return None, "arguments_not_object"
    return value, None
