"""Which ids the tiny model is warm-started on, and what the small tokenizer is trained on."""

import os
from itertools import islice

from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from ..harmony import HarmonyVocabulary, render_prompt
from .demonstrations import Demonstration, demonstrations
from .tokenizer import byte_tokenizer, train_small_tokenizer

# The small tokenizer is the same for every seed of the model.
CORPUS_SEED, CORPUS_SIZE = 0, 1500
REASONING_EFFORTS = ("low", "medium", "high")


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


def small_tokenizer(vocab_size: int = 448) -> PreTrainedTokenizerFast:
    """The small tokenizer, trained on demonstrations that are first rendered byte by byte.

    One token each become: what the system messages share before and after the reasoning effort, and, for prompts with
    a date, their lines of three words or more.
    """
    bytes_only = byte_tokenizer()
    vocabulary = HarmonyVocabulary.of(bytes_only)
    corpus = [_plain_texts(d.ids, vocabulary) for d in islice(demonstrations(bytes_only, CORPUS_SEED), CORPUS_SIZE)]
    prompts = [render_prompt([], bytes_only, ["python"], effort) for effort in REASONING_EFFORTS]
    system_texts = [_plain_texts(ids, vocabulary)[1] for ids in prompts]  # after the role
    shared_start = os.path.commonprefix(system_texts)
    shared_end = os.path.commonprefix([text[::-1] for text in system_texts])[::-1]
    lines = [line for line in (shared_start + shared_end).split("\n") if len(line.split()) >= 3]
    texts = (text for texts in corpus for text in texts)
    return train_small_tokenizer(texts, [shared_start, shared_end, *lines], vocab_size)


def used_ids(tokenizer: PreTrainedTokenizerBase, sample: list[Demonstration]) -> list[int]:
    """Ids, in increasing order, of every control token and of every token in `sample`."""
    vocabulary = HarmonyVocabulary.of(tokenizer)
    stops_and_pad = {*vocabulary.stop_ids, tokenizer.pad_token_id, tokenizer.bos_token_id}
    return sorted(stops_and_pad.union(*(d.ids for d in sample)))
