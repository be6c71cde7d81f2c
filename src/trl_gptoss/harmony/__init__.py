"""Harmony, the chat format of GPT-OSS, on token ids: messages -> ids (`render`), ids -> messages (`parser`)."""

from .calls import ToolCall
from .console import format_conversation
from .contexts import new_context, training_samples
from .parser import ParsedMessage, ParsedTurn, parse
from .render import render_missing_terminator, render_prompt, render_tool_result
from .response_template import RESPONSE_TEMPLATE, set_response_template
from .tools import ToolSpec, tool_name, tool_spec
from .vocabulary import HarmonyVocabulary, is_harmony

__all__ = [
    "RESPONSE_TEMPLATE",
    "HarmonyVocabulary",
    "ParsedMessage",
    "ParsedTurn",
    "ToolCall",
    "ToolSpec",
    "format_conversation",
    "is_harmony",
    "new_context",
    "parse",
    "render_missing_terminator",
    "render_prompt",
    "render_tool_result",
    "set_response_template",
    "tool_name",
    "tool_spec",
    "training_samples",
]
