"""Harmony as a [`TurnFormat`]: the parser and the renderer of `trl_gptoss.harmony`, in the words of the loop."""

from typing import Any

from transformers import PreTrainedTokenizerBase

from ..harmony import parse, render_tool_result
from ..trajectory import ToolResult
from .loop import Observation, ParsedSample
from .tools import Toolbox, ToolCall


class HarmonyFormat:
    """Reads and writes Harmony turns.

    Args:
        tokenizer (`PreTrainedTokenizerBase`): a Harmony tokenizer.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer = tokenizer

    def parse(self, ids: list[int], toolbox: Toolbox) -> ParsedSample:
        """See [`TurnFormat`]. A built-in call hands its text over as it is, the others their JSON object."""
        turn = parse(ids, self.tokenizer, toolbox.declared)
        calls = [
            ToolCall(
                name=call.name,
                arguments=call.arguments,
                raw_arguments=call.raw_arguments,
                raw=call.builtin,
                source=call,
            )
            for call in turn.tool_calls
        ]
        return ParsedSample(
            messages=turn.as_messages(), calls=calls, anomalies=list(turn.anomalies), final_text=turn.final_text
        )

    def observe(self, calls: list[ToolCall], results: list[ToolResult]) -> Observation:
        """See [`TurnFormat`]. The generation prompt follows the last result only."""
        ids: list[int] = []
        messages: list[dict[str, Any]] = []
        for number, (call, result) in enumerate(zip(calls, results, strict=True), start=1):
            ids += render_tool_result(call.source, result.text, self.tokenizer, generation_prompt=number == len(calls))
            messages.append({"role": "tool", "name": call.name, "content": result.text})
        return Observation(ids=ids, messages=messages)
