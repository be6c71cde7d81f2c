"""Harmony, the chat format of GPT-OSS, on token ids: messages -> ids (`render`), ids -> messages (`parser`)."""

from .calls import ToolCall
from .contexts import new_context, training_samples
from .parser import ParsedMessage, ParsedTurn, parse
from .render import render_missing_terminator, render_prompt, render_tool_result
from .tools import ToolSpec, tool_name, tool_spec
from .vocabulary import HarmonyVocabulary, is_harmony

__all__ = [
    "HarmonyVocabulary",
    "ParsedMessage",
    "ParsedTurn",
    "ToolCall",
    "ToolSpec",
    "is_harmony",
    "new_context",
    "parse",
    "render_missing_terminator",
    "render_prompt",
    "render_tool_result",
    "tool_name",
    "tool_spec",
    "training_samples",
]
