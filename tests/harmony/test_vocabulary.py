import copy
import threading

import pytest
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from trl_gptoss.harmony import HarmonyVocabulary, is_harmony
from trl_gptoss.harmony.vocabulary import CONTROL_TOKENS


def test_real_ids(gpt_oss_tokenizer) -> None:
    v = HarmonyVocabulary.of(gpt_oss_tokenizer)
    ids = (v.start, v.end, v.message, v.channel, v.constrain, v.call, v.return_, v.endoftext)
    assert ids == (200006, 200007, 200008, 200005, 200003, 200012, 200002, 199999)
    assert v.stop_ids == [200002, 199999, 200012]
    assert v.control_ids == frozenset(range(199998, 200019))
    assert v.size == 200019
    assert v.decode([201000, 200019, -5, 40]) == "I"


def test_ids_by_name(small_tokenizer) -> None:
    v = HarmonyVocabulary.of(small_tokenizer)
    names = ["<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|constrain|>", "<|call|>", "<|return|>"]
    ids = [v.start, v.end, v.message, v.channel, v.constrain, v.call, v.return_]
    assert small_tokenizer.convert_ids_to_tokens(ids) == names
    assert small_tokenizer.convert_ids_to_tokens(v.stop_ids) == ["<|return|>", "<|endoftext|>", "<|call|>"]
    assert small_tokenizer.convert_tokens_to_ids("<|reserved_7|>") in v.control_ids


def test_is_harmony_needs_every_control_token_as_special(small_tokenizer) -> None:
    assert is_harmony(small_tokenizer)
    for missing in CONTROL_TOKENS:
        backend = Tokenizer(models.WordLevel({"a": 0, "[UNK]": 1}, unk_token="[UNK]"))
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="[UNK]")
        tokenizer.add_special_tokens({"additional_special_tokens": [t for t in CONTROL_TOKENS if t != missing]})
        tokenizer.add_tokens([missing])  # in the vocabulary, but not special
        assert not is_harmony(tokenizer)
        with pytest.raises(ValueError, match="not a Harmony tokenizer"):
            HarmonyVocabulary.of(tokenizer)
        tokenizer.add_tokens([missing], special_tokens=True)


def test_cached_until_the_tokenizer_grows(small_tokenizer) -> None:
    tokenizer = copy.deepcopy(small_tokenizer)
    first = HarmonyVocabulary.of(tokenizer)
    assert HarmonyVocabulary.of(tokenizer) is first
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|new|>"]})
    grown = HarmonyVocabulary.of(tokenizer)
    assert grown is not first
    assert tokenizer.convert_tokens_to_ids("<|new|>") in grown.control_ids
    assert grown.control_ids.isdisjoint(grown.encode_text("<|new|>"))


def test_text_round_trip(tokenizer) -> None:
    v = HarmonyVocabulary.of(tokenizer)
    for text in ["", " ", "a\r\n\tb", "🧑🏽‍🚀 東京 \x00\x7f", *CONTROL_TOKENS]:
        assert v.decode(v.encode_text(text)) == text
    assert v.decode(v.encode_text("a\ud83d\ude80b\ud800c")) == "a🚀b\ufffdc"


def test_encoding_beside_other_threads(small_tokenizer) -> None:
    """A thread that tokenises in the usual way must not open the door for control tokens in another."""
    v = HarmonyVocabulary.of(small_tokenizer)
    stop, leaks = threading.Event(), []

    def tokenize() -> None:
        while not stop.is_set():
            small_tokenizer("<|start|>assistant", split_special_tokens=False)

    thread = threading.Thread(target=tokenize)
    thread.start()
    try:
        for _ in range(2000):
            leaks += [i for i in v.encode_text("<|end|><|start|>system") if i in v.control_ids]
    finally:
        stop.set()
        thread.join()
    assert leaks == []


def test_padding_and_truncation_of_the_tokenizer_do_not_reach_texts(small_tokenizer) -> None:
    tokenizer = copy.deepcopy(small_tokenizer)
    tokenizer.backend_tokenizer.enable_truncation(4)
    tokenizer.backend_tokenizer.enable_padding(length=64)
    v = HarmonyVocabulary.of(tokenizer)
    text = "hello world, this is longer than four tokens"
    assert v.decode(v.encode_text(text)) == text
