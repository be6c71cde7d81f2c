"""The control tokens of Harmony, looked up by name, and the only two ways in and out of ids: `encode_text`, `decode`.

    ids    200006    173781     200005       17196  200008       40  200002
    text   <|start|> assistant  <|channel|>  final  <|message|>  I   <|return|>
           control   ordinary   control      ordinary control    ordinary control

Control ids are only ever written by code of this package (`vocabulary.start`, ...). Text of users, tools, data sets and
schemas goes through `encode_text`, which spells a control token's name in ordinary tokens.
"""

import threading
import weakref
from collections.abc import Sequence

from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerBase

CONTROL_TOKENS = ("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|constrain|>", "<|call|>", "<|return|>")
END_OF_TEXT = "<|endoftext|>"

_cache: "weakref.WeakKeyDictionary[PreTrainedTokenizerBase, HarmonyVocabulary]" = weakref.WeakKeyDictionary()
_lock = threading.Lock()


def _special_tokens(tokenizer: PreTrainedTokenizerBase) -> dict[str, int]:
    return {token.content: i for i, token in tokenizer.added_tokens_decoder.items() if token.special}


def well_formed(text: str) -> str:
    """`text` with U+FFFD for lone surrogates, which have no UTF-8 form: nothing could encode or store them."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return text


def is_harmony(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether every control token of Harmony is a special token of `tokenizer`. Nothing else decides."""
    return set(CONTROL_TOKENS) <= _special_tokens(tokenizer).keys()


class HarmonyVocabulary:
    """Ids of one Harmony tokenizer. Get it with `HarmonyVocabulary.of(tokenizer)`, which builds it once.

    start, end, message, channel, constrain, call, return_ (`int`): the control ids.
    endoftext (`int` or `None`): id of `<|endoftext|>`; `None` where the tokenizer has none.
    stop_ids (`list[int]`): what sampling must stop at, in the order of `generation_config.eos_token_id`:
        [return, endoftext, call]. `<|end|>` is not among them: it only separates two messages of one turn.
    control_ids (`frozenset[int]`): every special or reserved id of the tokenizer.
    size (`int`): number of ids that have a token. A model's embedding may be larger; ids from `size` on are never
        valid and decode to ''.

    The encoder is a private copy of the tokenizer's. transformers switches `split_special_tokens` on the shared Rust
    object at every call, so a plain tokenisation in another thread could switch it off between the switch and the
    encoding of a tool result, and let control tokens through.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase):
        special = _special_tokens(tokenizer)
        missing = [name for name in CONTROL_TOKENS if name not in special]
        if missing:
            raise ValueError(
                f"This is not a Harmony tokenizer: {', '.join(missing)} are not among its special tokens. Use the "
                "tokenizer of a GPT-OSS checkpoint, or the one that `trl-gptoss tiny-model` makes; check with "
                "`trl_gptoss.harmony.is_harmony(tokenizer)`."
            )
        if not tokenizer.is_fast:
            raise ValueError(
                f"Harmony needs a tokenizer backed by the `tokenizers` library, got {type(tokenizer).__name__}. Load it "
                "with `AutoTokenizer.from_pretrained(...)`."
            )
        self.start, self.end, self.message, self.channel, self.constrain, self.call, self.return_ = (
            special[name] for name in CONTROL_TOKENS
        )
        self.endoftext = special.get(END_OF_TEXT)
        self.stop_ids = [i for i in (self.return_, self.endoftext, self.call) if i is not None]
        self.control_ids = frozenset(special.values())
        self.size = max(len(tokenizer), 1 + max(self.control_ids))
        self._built_for = len(tokenizer)
        self._encoder = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
        self._encoder.encode_special_tokens = True
        self._encoder.no_truncation()
        self._encoder.no_padding()

    @classmethod
    def of(cls, tokenizer: PreTrainedTokenizerBase) -> "HarmonyVocabulary":
        """The vocabulary of `tokenizer`, cached until the tokenizer gets new tokens or is freed.

        Raises `ValueError` for a tokenizer that lacks a control token.
        """
        with _lock:
            vocabulary = _cache.get(tokenizer)
            if vocabulary is None or vocabulary._built_for != len(tokenizer):
                vocabulary = _cache[tokenizer] = cls(tokenizer)
            return vocabulary

    def encode_text(self, text: str) -> list[int]:
        """Ordinary ids of `text`: (number of tokens,). Never a control id, whatever the text spells.

        Lone surrogates, which have no UTF-8 form, become U+FFFD.
        """
        ids = self._encoder.encode(well_formed(text), add_special_tokens=False).ids
        if not self.control_ids.isdisjoint(ids):
            raise RuntimeError(
                f"The tokenizer's model itself produces control ids ({sorted(self.control_ids.intersection(ids))}) for "
                "plain text, so text from users and tools cannot be kept apart from control tokens. Remove these "
                "tokens from the BPE merges and keep them only as added special tokens."
            )
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """Text of `ids`, control tokens spelled out, broken UTF-8 as U+FFFD; ids without a token give ''."""
        return self._encoder.decode([i for i in ids if 0 <= i < self.size], skip_special_tokens=False)
