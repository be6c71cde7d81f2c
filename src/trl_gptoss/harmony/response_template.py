r"""`tokenizer.response_template` for Harmony: how TRL and transformers read a generation where our parser is not asked.

TRL picks its own template by comparing chat templates, and accepts one form of call only
(`to=functions.f<|channel|>commentary json`). This one reads every documented form:

    <|channel|>commentary to=functions.f <|constrain|>json<|message|>{...}<|call|>
     to=functions.f<|channel|>commentary json<|message|>{...}<|call|>
    <|channel|>analysis to=python code<|message|>...<|call|>

It works on decoded text, so it cannot tell a control token from text that spells one, and it repairs little. The
trainers of this package read ids with `parse`.
"""

import copy
from typing import Any

from transformers import PreTrainedTokenizerBase

from .header import NOT_TOOLS
from .vocabulary import CONTROL_TOKENS, is_harmony

_FORMAT = r"(?:\s*<\|constrain\|>[^<]*|\s*\w+)?\s*<\|message\|>"
_NO_TOOL = rf"(?!(?:{'|'.join(NOT_TOOLS)})(?![\w.-]))"
_RECIPIENT = rf"to={_NO_TOOL}(?:functions\.)?(?P<name>[\w-]+(?:\.[\w-]+)*)"
_SAME_RECIPIENT = r"(?:\s*to=(?:functions\.)?(?P=name)(?![\w.-]))?"
_CHANNEL = r"<\|channel\|>(?:analysis|commentary)"
_ENDED_AS_CALL = r"(?=(?:(?!<\|(?:end|call|return|start)\|>).)*<\|(?:call|return)\|>)"
_END_OF_TEXT = r"<\|(?:end|return|call)\|>|(?=<\|start\|>)"

RESPONSE_TEMPLATE: dict[str, Any] = {
    "defaults": {"role": "assistant"},
    "start_anchor": "<|start|>assistant",
    "fields": {
        "thinking": {
            "open_pattern": rf"<\|channel\|>analysis{_FORMAT}",
            "close_pattern": _END_OF_TEXT,
            "content": "text",
            "content_args": {"strip": False},
            "repeats": True,
            "join": "\n",
        },
        "content": {
            "open_pattern": rf"<\|channel\|>final{_FORMAT}",
            "close_pattern": _END_OF_TEXT,
            "content": "text",
            "content_args": {"strip": False},
        },
        "tool_calls": {
            # A call cut off or ended by <|end|> must not run, so its end is looked for before it counts as a call.
            # Both alternatives name the same group, which the `regex` package allows.
            "open_pattern": (
                rf"(?:{_RECIPIENT}\s*{_CHANNEL}|{_CHANNEL}\s*{_RECIPIENT}){_SAME_RECIPIENT}{_FORMAT}{_ENDED_AS_CALL}"
            ),
            "close_pattern": r"<\|(?:call|return)\|>",
            "content": "json",
            # Code for the builtin `python`, and damaged JSON, reach the tool loop as text.
            "content_args": {"allow_non_json": True},
            "repeats": True,
            "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}},
        },
    },
}


def set_response_template(tokenizer: PreTrainedTokenizerBase) -> None:
    """Sets `tokenizer.response_template` to `RESPONSE_TEMPLATE`.

    Do it before a TRL trainer is constructed: TRL leaves a template that it finds alone. Raises `ValueError` for a
    tokenizer that is not a Harmony tokenizer.
    """
    if not is_harmony(tokenizer):
        raise ValueError(
            f"The response template is Harmony's, but the tokenizer ({tokenizer.name_or_path or 'unnamed'}) lacks some of "
            f"its special tokens {', '.join(CONTROL_TOKENS)}."
        )
    tokenizer.response_template = copy.deepcopy(RESPONSE_TEMPLATE)
