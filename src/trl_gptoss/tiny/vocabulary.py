"""Which ids the tiny model is warm-started on, and what the small tokenizer is trained on."""

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice

from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from ..harmony import HarmonyVocabulary, render_prompt
from ..tasks.constraints import SIMPLE, Constraint, describe
from .demonstrations import Demonstration, demonstrations
from .single_turn import constraint_demonstrations, story_demonstrations
from .tokenizer import byte_tokenizer, train_small_tokenizer

# The small tokenizer is the same for every seed of the model.
CORPUS_SEED, CORPUS_SIZE = 0, 1500
REASONING_EFFORTS = ("low", "medium", "high")


def _no_phrases() -> list[str]:
    return []


def _constraint_phrases() -> list[str]:
    """The sentences of the constraints without arguments, whole; the others are learned as merges."""
    kinds = ("punctuation:no_comma", "startend:quotation", "detectable_format:title")
    return [describe(Constraint(id=kind)) for kind in kinds if kind in SIMPLE]


@dataclass(frozen=True, kw_only=True, slots=True)
class TinyTask:
    """What a tiny model is warm-started on.

    demonstrations (`Callable`): the endless stream for a tokenizer and a seed.
    tools (`tuple[str, ...]`): declared in its prompts.
    vocab_size (`int`): of its small tokenizer.
    phrases (`Callable[[], list[str]]`): texts that become one token each in it.
    can (`str`): what the model can do, for its card.
    """

    demonstrations: Callable[[PreTrainedTokenizerBase, int], Iterator[Demonstration]]
    tools: tuple[str, ...] = ()
    vocab_size: int = 448
    phrases: Callable[[], list[str]] = _no_phrases
    can: str


TASKS = {
    "retool": TinyTask(
        demonstrations=demonstrations,
        tools=("python",),
        can="calls a Python tool to solve problems with two 2-digit numbers",
    ),
    "gsm8k": TinyTask(
        demonstrations=story_demonstrations, can="thinks in one line to solve word problems with two numbers up to 9"
    ),
    "verify_if": TinyTask(
        demonstrations=constraint_demonstrations,
        vocab_size=512,
        phrases=_constraint_phrases,
        can="writes a few words about a topic under two formal constraints",
    ),
}


def _plain_texts(ids: list[int], vocabulary: HarmonyVocabulary) -> list[str]:
    """The texts between control tokens."""
    texts, run = [], []
    for i in [*ids, vocabulary.end]:
        if i in vocabulary.control_ids:
            texts.append(vocabulary.decode(run))
            run = []
        else:
            run.append(i)
    return [text for text in texts if text]


def small_tokenizer(task: str = "retool") -> PreTrainedTokenizerFast:
    """The small tokenizer of a task, trained on demonstrations that are first rendered byte by byte.

    One token each become: what the system messages share before and after the reasoning effort, for prompts with a date
    their lines of three words or more, and the task's own phrases.

    Args:
        task (`str`, *optional*, defaults to `"retool"`): a key of `TASKS`.
    """
    spec = TASKS[task]
    bytes_only = byte_tokenizer()
    vocabulary = HarmonyVocabulary.of(bytes_only)
    corpus = [
        _plain_texts(d.ids, vocabulary) for d in islice(spec.demonstrations(bytes_only, CORPUS_SEED), CORPUS_SIZE)
    ]
    prompts = [render_prompt([], bytes_only, list(spec.tools), effort) for effort in REASONING_EFFORTS]
    system_texts = [_plain_texts(ids, vocabulary)[1] for ids in prompts]  # after the role
    shared_start = os.path.commonprefix(system_texts)
    shared_end = os.path.commonprefix([text[::-1] for text in system_texts])[::-1]
    lines = [line for line in (shared_start + shared_end).split("\n") if len(line.split()) >= 3]
    texts = (text for texts in corpus for text in texts)
    return train_small_tokenizer(texts, [shared_start, shared_end, *lines, *spec.phrases()], spec.vocab_size)


def used_ids(tokenizer: PreTrainedTokenizerBase, sample: list[Demonstration]) -> list[int]:
    """Ids, in increasing order, of every control token and of every token in `sample`."""
    vocabulary = HarmonyVocabulary.of(tokenizer)
    stops_and_pad = {*vocabulary.stop_ids, tokenizer.pad_token_id, tokenizer.bos_token_id}
    return sorted(stops_and_pad.union(*(d.ids for d in sample)))
