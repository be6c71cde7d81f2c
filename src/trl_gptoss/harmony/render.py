"""Messages -> ids. Prompts are rendered once; after that only observations are appended to what was sampled.

    prompt        <|start|>system ...<|end|><|start|>user<|message|>2+2?<|end|><|start|>assistant
    sampled        <|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a":1}<|call|>
    observation     <|start|>functions.f to=assistant<|channel|>commentary<|message|>4<|end|><|start|>assistant
    sampled          <|channel|>final<|message|>4<|return|>

Control ids come from this file only. Every string of a message, a tool or a schema is encoded as ordinary text.
"""

from collections.abc import Iterable
from typing import Any

from transformers import PreTrainedTokenizerBase

from .calls import ToolCall
from .conversation import Conversation, HarmonyMessage, result_channel
from .system import DEFAULT_IDENTITY, developer_text, system_text
from .tools import Tool, ToolSpec, tool_specs
from .vocabulary import HarmonyVocabulary

_CONSTRAIN = "<|constrain|>"


def render_prompt(
    messages: Iterable[dict[str, Any]],
    tokenizer: PreTrainedTokenizerBase,
    tools: Iterable[Tool] | None = None,
    reasoning_effort: str = "medium",
    date: str | None = None,
    model_identity: str = DEFAULT_IDENTITY,
    *,
    drop_analysis: bool = True,
) -> list[int]:
    """Ids of a whole prompt, ending with `<|start|>assistant`.

    Args:
        messages (`Iterable[dict]`):
            The conversation so far. `system` and `developer` messages it begins with become the instructions of the
            developer message. Assistant messages may have `thinking` (or `reasoning_content`), `content` and
            `tool_calls`; `tool` messages answer them by `tool_call_id`, by `name`, or in order. Messages with a
            `channel` or `recipient` are Harmony messages and are rendered as they are.
        tokenizer (`PreTrainedTokenizerBase`):
            A tokenizer with Harmony's control tokens.
        tools (`Iterable`, *optional*):
            What `tool_spec` takes: functions, JSON schemas, `ToolSpec`s, `"python"`, `"browser"`.
        reasoning_effort (`str`, *optional*, defaults to `"medium"`):
            `"low"`, `"medium"` or `"high"`.
        date (`str`, *optional*):
            Current date as the model is told it, such as `"2025-06-28"`; without it no date is told. Never read from
            the clock, so that a prompt is the same on every day and every machine.
        model_identity (`str`, *optional*):
            First line of the system message.
        drop_analysis (`bool`, *optional*, defaults to `True`):
            Leave out the analysis of turns that ended with a final answer and were followed by a new message to the
            model. The model is never shown it at inference.

    Returns:
        `list[int]`, (prompt_length,). Raises `ValueError` for messages, tools or efforts it cannot render.
    """
    specs = tool_specs(tools)
    conversation = Conversation(messages, specs)
    vocabulary = HarmonyVocabulary.of(tokenizer)
    ids = render_preamble(conversation.instructions, vocabulary, specs, reasoning_effort, date, model_identity)
    kept = without_old_analysis(conversation.messages) if drop_analysis else conversation.messages
    for message in kept:
        ids += render_message(message, vocabulary)
    return ids + generation_prompt(vocabulary)


def render_preamble(
    instructions: str | None,
    vocabulary: HarmonyVocabulary,
    tools: list[ToolSpec],
    reasoning_effort: str,
    date: str | None,
    model_identity: str,
) -> list[int]:
    """Ids of the system message and, where there is something to say, the developer message."""
    system = HarmonyMessage(
        role="system", author="system", content=system_text(tools, reasoning_effort, date, model_identity)
    )
    ids = render_message(system, vocabulary)
    text = developer_text(instructions, tools)
    if text is not None:
        ids += render_message(HarmonyMessage(role="developer", author="developer", content=text), vocabulary)
    return ids


def render_message(message: HarmonyMessage, vocabulary: HarmonyVocabulary) -> list[int]:
    """Ids of one message, from `<|start|>` to its terminator: `<|call|>` for calls, else `<|end|>`."""
    encode = vocabulary.encode_text
    ids = [vocabulary.start, *encode(message.author)]
    if message.name is not None:
        ids += encode(f":{message.name}")
    if message.recipient not in (None, "all"):
        ids += encode(f" to={message.recipient}")
    if message.channel is not None:
        ids += [vocabulary.channel, *encode(message.channel)]
    if message.content_type is not None:
        if message.content_type.startswith(_CONSTRAIN):
            ids += [*encode(" "), vocabulary.constrain, *encode(message.content_type.removeprefix(_CONSTRAIN))]
        else:
            ids += encode(f" {message.content_type}")
    terminator = vocabulary.call if message.is_call else vocabulary.end
    return [*ids, vocabulary.message, *encode(message.content), terminator]


def generation_prompt(vocabulary: HarmonyVocabulary) -> list[int]:
    """`<|start|>assistant`."""
    return [vocabulary.start, *vocabulary.encode_text("assistant")]


def without_old_analysis(messages: list[HarmonyMessage]) -> list[HarmonyMessage]:
    """Drops the analysis before the last final answer that something other than the assistant or a tool follows."""
    boundary = last_boundary(messages)
    return [m for i, m in enumerate(messages) if i >= boundary or m.channel != "analysis"]


def last_boundary(messages: list[HarmonyMessage]) -> int:
    """Index after the last final answer that a new turn follows; 0 if there is none."""
    new_turn = False
    for i in range(len(messages) - 1, -1, -1):
        if new_turn and messages[i].is_final:
            return i + 1
        new_turn = new_turn or messages[i].role in ("user", "developer")
    return 0


def render_tool_result(
    call: ToolCall, text: str, tokenizer: PreTrainedTokenizerBase, *, generation_prompt: bool = True
) -> list[int]:
    """Ids to append after the sampled ids of a turn, to answer one of its calls. Their loss mask is 0.

    Args:
        call (`ToolCall`): a call of `ParsedTurn.tool_calls`.
        text (`str`): what the tool answered, or an error message for a call that could not run. Taken as it is:
            nothing is escaped, and nothing in it can become a control id.
        tokenizer (`PreTrainedTokenizerBase`): a tokenizer with Harmony's control tokens.
        generation_prompt (`bool`, *optional*, defaults to `True`): append `<|start|>assistant`. With several calls in
            a turn, only the last result has it.
    """
    if not isinstance(text, str):
        raise TypeError(
            f"The result of tool {call.name!r} must be a str, got {type(text).__name__}; convert it first."
        )
    vocabulary = HarmonyVocabulary.of(tokenizer)
    result = HarmonyMessage(
        role="tool",
        author=call.recipient,
        content=text,
        recipient="assistant",
        channel=result_channel(call.recipient, call.channel),
    )
    ids = render_message(result, vocabulary)
    return [*ids, vocabulary.start, *vocabulary.encode_text("assistant")] if generation_prompt else ids


def render_missing_terminator(ids: list[int], tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Ids to append to a turn's sampled `ids` before anything else may follow; `[]` if the turn was closed.

    A turn that was cut off inside a body gets `<|end|>`, inside a header `<|message|><|end|>`. Sampled ids are never
    exchanged: a call that the policy ended with `<|return|>` keeps it, and its result follows.
    """
    vocabulary = HarmonyVocabulary.of(tokenizer)
    closed = (vocabulary.end, vocabulary.call, vocabulary.return_)
    for token in reversed(ids):
        if token in closed:
            return []
        if token == vocabulary.message:
            return [vocabulary.end]
        if token == vocabulary.start:
            break
    return [vocabulary.message, vocabulary.end]
