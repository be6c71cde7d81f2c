"""Contexts: what the model sees when it samples, and where a conversation splits into several training samples.

Within a turn everything is appended. When a new message to the model follows a final answer, the analysis of the turns
before it goes, and the `<|return|>` of the answer becomes `<|end|>`. The ids before are thus no longer a prefix of the
ids after: a new context, and a second training sample.

    context 1   prompt: user 1 <|start|>assistant
                completion: analysis 1, final 1 <|return|>                  loss mask 1
    context 2   prompt: user 1, final 1 <|end|>, user 2 <|start|>assistant  loss mask: no completion
                completion: analysis 2, final 2 <|return|>                  loss mask 1
"""

from collections.abc import Iterable
from typing import Any

from transformers import PreTrainedTokenizerBase

from .conversation import Conversation, HarmonyMessage, instructions_message
from .render import (
    generation_prompt,
    last_boundary,
    render_message,
    render_missing_terminator,
    render_preamble,
    without_old_analysis,
)
from .system import DEFAULT_IDENTITY
from .tools import Tool, tool_specs
from .vocabulary import HarmonyVocabulary


def training_samples(
    messages: Iterable[dict[str, Any]],
    tokenizer: PreTrainedTokenizerBase,
    tools: Iterable[Tool] | None = None,
    reasoning_effort: str = "medium",
    date: str | None = None,
    model_identity: str = DEFAULT_IDENTITY,
) -> list[tuple[list[int], list[int], list[int]]]:
    """One sample for each context of a conversation: `(prompt_ids, completion_ids, loss_mask)`.

    The arguments are those of `render_prompt`. A completion begins after the prompt's `<|start|>assistant` and runs to
    the end of its context; its last final answer ends with `<|return|>`. The mask, aligned with `completion_ids`, is 1
    exactly on what a policy samples: 0 on tool results, on messages of the user that interrupt a turn, and on the
    `<|start|>assistant` after them and after `<|call|>`, where sampling stops. A conversation that no assistant message
    ends gives no sample for its last turn.
    """
    specs = tool_specs(tools)
    conversation = Conversation(messages, specs)
    vocabulary = HarmonyVocabulary.of(tokenizer)
    preamble = render_preamble(conversation.instructions, vocabulary, specs, reasoning_effort, date, model_identity)
    samples = []
    for begin, end in _contexts(conversation.messages):
        first = next((i for i in range(begin, end) if conversation.messages[i].role == "assistant"), None)
        if first is None:
            continue
        prompt = list(preamble)
        for message in without_old_analysis(conversation.messages[:first]):
            prompt += render_message(message, vocabulary)
        completion, mask = _completion(conversation.messages[first:end], vocabulary)
        opening = generation_prompt(vocabulary)
        samples.append((prompt + opening, completion[len(opening) :], mask[len(opening) :]))
    return samples


def _contexts(messages: list[HarmonyMessage]) -> list[tuple[int, int]]:
    """Half-open ranges of the messages that each context adds to the one before."""
    ends = [len(messages)]
    while (boundary := last_boundary(messages[: ends[0]])) > 0:
        ends.insert(0, boundary)
    return list(zip([0, *ends], ends))


def _completion(messages: list[HarmonyMessage], vocabulary: HarmonyVocabulary) -> tuple[list[int], list[int]]:
    """Ids of the messages and their loss mask, the first `<|start|>assistant` included."""
    ids: list[int] = []
    mask: list[int] = []
    opening = len(generation_prompt(vocabulary))
    sampled_before = False
    for i, message in enumerate(messages):
        rendered = render_message(message, vocabulary)
        if message.is_final and i == len(messages) - 1:
            rendered[-1] = vocabulary.return_
        sampled = message.role == "assistant"
        first = 1 if sampled and sampled_before else 0
        ids += rendered
        mask += [first] * opening + [int(sampled)] * (len(rendered) - opening)
        sampled_before = sampled and not message.is_call
    return ids, mask


def new_context(ids: list[int], messages: Iterable[dict[str, Any]], tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """The prompt of the next context, made from the ids of the one before. Nothing that was sampled is re-tokenised.

    Args:
        ids (`list[int]`): prompt and completion so far, (sequence_length,), ending with a final answer.
        messages (`Iterable[dict]`): what comes next, in the forms of `render_prompt`; as a rule one `user` message.
        tokenizer (`PreTrainedTokenizerBase`): a tokenizer with Harmony's control tokens.

    Returns:
        `list[int]`: `ids` without the messages on the analysis channel and with `<|end|>` for `<|return|>`, the new
        messages, and `<|start|>assistant`.
    """
    vocabulary = HarmonyVocabulary.of(tokenizer)
    ids = ids + render_missing_terminator(ids, tokenizer)
    kept: list[int] = []
    begin = 0
    for i in range(1, len(ids) + 1):
        # A message that was not terminated ends where the next one starts.
        if ids[i - 1] in (vocabulary.end, vocabulary.call, vocabulary.return_) or ids[i : i + 1] == [vocabulary.start]:
            message = ids[begin:i]
            if not _is_analysis(message, vocabulary):
                kept += message[:-1] + [vocabulary.end if message[-1] == vocabulary.return_ else message[-1]]
            begin = i
    conversation = Conversation(messages, [])
    if conversation.instructions:
        kept += render_message(instructions_message(conversation.instructions), vocabulary)
    for message in conversation.messages:
        kept += render_message(message, vocabulary)
    return kept + generation_prompt(vocabulary)


def _is_analysis(message: list[int], vocabulary: HarmonyVocabulary) -> bool:
    header = message[: message.index(vocabulary.message)] if vocabulary.message in message else message
    if vocabulary.channel not in header:
        return False
    return vocabulary.decode(header[header.index(vocabulary.channel) + 1 :]).strip().startswith("analysis")
