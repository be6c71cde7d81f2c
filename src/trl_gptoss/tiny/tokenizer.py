"""The `small` tokenizer: a few hundred byte-level BPE tokens with gpt-oss's special tokens, under ids of its own.

It differs from the real one in three ways that keep a conversation of the tiny task near 80 tokens: numbers are split
into single digits (so that the model can copy them), merges are learned on the conversations of the task, and the long
passages that every prompt repeats (the system message's) are one token each.
"""

import re
from collections.abc import Iterable

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AddedToken, PreTrainedTokenizerFast
from trl.chat_template_utils import gptoss_chat_template

# In the order of gpt-oss's ids; the small tokenizer gives them the ids after its byte-level tokens.
SPECIAL_TOKENS = (
    "<|startoftext|>",
    "<|endoftext|>",
    "<|return|>",
    "<|constrain|>",
    "<|channel|>",
    "<|start|>",
    "<|end|>",
    "<|message|>",
    "<|call|>",
    "<|endofprompt|>",
)

# What ends a generated turn: the eos ids of gpt-oss's own generation_config.json, by name and in its order.
TERMINATORS = ("<|return|>", "<|endoftext|>", "<|call|>")


def _pre_tokenizer() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )


def _wrap(backend: Tokenizer) -> PreTrainedTokenizerFast:
    backend.pre_tokenizer = _pre_tokenizer()
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token="<|startoftext|>",
        eos_token="<|return|>",
        pad_token="<|endoftext|>",
        clean_up_tokenization_spaces=False,
        model_input_names=["input_ids", "attention_mask"],
    )
    tokenizer.chat_template = gptoss_chat_template
    return tokenizer


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """The 256 bytes and the special tokens: renders text that the real small tokenizer is then trained on."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    return _wrap(Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[])))


def train_small_tokenizer(texts: Iterable[str], phrases: Iterable[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """Learn the small tokenizer.

    Args:
        texts (`Iterable[str]`): what to learn merges on; no special tokens in it.
        phrases (`Iterable[str]`): texts that become one ordinary token each.
        vocab_size (`int`): of the result, with its special tokens and phrases.

    Raises:
        `ValueError`: `vocab_size` has no room for the 256 bytes, the special tokens and the phrases.
    """
    phrases = list(dict.fromkeys(phrases))
    n_bpe = vocab_size - len(SPECIAL_TOKENS) - len(phrases)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    if n_bpe < len(alphabet):
        needed = len(alphabet) + len(SPECIAL_TOKENS) + len(phrases)
        raise ValueError(f"vocab_size is {vocab_size}; bytes, special tokens and phrases alone need {needed}")
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = _pre_tokenizer()
    trainer = trainers.BpeTrainer(vocab_size=n_bpe, initial_alphabet=sorted(alphabet), show_progress=False)
    # Phrases need no merges; longest first, as the trained tokenizer matches them.
    split = re.compile("|".join(re.escape(p) for p in sorted(phrases, key=len, reverse=True)) or "(?!)")
    backend.train_from_iterator((part for text in texts for part in split.split(text)), trainer)
    tokenizer = _wrap(backend)
    tokenizer.add_tokens([AddedToken(phrase, special=False, normalized=False) for phrase in phrases])
    return tokenizer
