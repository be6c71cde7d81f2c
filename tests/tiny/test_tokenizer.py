"""The small tokenizer: round trips, special tokens, digits, and that it speaks the rollouts' own Harmony."""

import pytest
from transformers import AutoTokenizer
from trl.chat_template_utils import gptoss_chat_template

from trl_gptoss.harmony import HarmonyVocabulary, is_harmony, render_prompt
from trl_gptoss.tiny.tokenizer import SPECIAL_TOKENS, byte_tokenizer, train_small_tokenizer
from trl_gptoss.tiny.vocabulary import small_tokenizer

TEXTS = [
    "What is 12 plus 34?",
    "ünïcödé 漢字 🙂 \x00 \t\r\n\n  spaces  ",
    "a line\n\nand \\boxed{42} $x^2$",
    "<|call|> spelled, not meant",
    "",
]


@pytest.fixture(scope="module")
def tokenizer():
    return small_tokenizer()


@pytest.mark.parametrize("text", TEXTS)
def test_text_survives_a_round_trip(tokenizer, text):
    ids = tokenizer.encode(text, add_special_tokens=False, split_special_tokens=True)
    assert tokenizer.decode(ids) == text


def test_size_and_special_tokens(tokenizer):
    assert 300 < len(tokenizer) < 448
    ids = tokenizer.convert_tokens_to_ids(list(SPECIAL_TOKENS))
    assert ids == sorted(ids) and len(set(ids)) == len(SPECIAL_TOKENS)  # the order of gpt-oss's ids
    assert is_harmony(tokenizer)
    assert (tokenizer.pad_token, tokenizer.eos_token, tokenizer.bos_token) == (
        "<|endoftext|>",
        "<|return|>",
        "<|startoftext|>",
    )


def test_spelled_special_tokens_become_ordinary_text(tokenizer):
    vocabulary = HarmonyVocabulary.of(tokenizer)
    for token in SPECIAL_TOKENS:
        assert vocabulary.control_ids.isdisjoint(vocabulary.encode_text(f"x{token}y"))
        assert tokenizer.encode(token, add_special_tokens=False)[0] in vocabulary.control_ids  # the control


def test_digits_are_single_tokens(tokenizer):
    ids = tokenizer.encode("1234*56", add_special_tokens=False)
    assert [tokenizer.decode([i]) for i in ids] == ["1", "2", "3", "4", "*", "5", "6"]


def test_a_prompt_takes_few_tokens(tokenizer):
    """The system message, some 700 bytes, is three tokens."""
    prompt = render_prompt([{"role": "user", "content": "Add 10 and 28."}], tokenizer, ["python"])
    assert len(prompt) < 25
    assert len(render_prompt([{"role": "user", "content": "Add 10 and 28."}], byte_tokenizer(), ["python"])) > 700


@pytest.mark.parametrize("date", [None, "2026-11-29"])
@pytest.mark.parametrize("effort", ["low", "medium", "high"])
def test_prompts_read_the_same_as_with_plain_bytes(tokenizer, effort, date):
    messages = [{"role": "user", "content": "Add 10 and 28."}]
    bytes_only = byte_tokenizer()
    expected = bytes_only.decode(render_prompt(messages, bytes_only, ["python"], effort, date))
    assert tokenizer.decode(render_prompt(messages, tokenizer, ["python"], effort, date)) == expected


def test_training_is_deterministic_and_saved_files_load(tokenizer, tmp_path):
    again = small_tokenizer()
    assert again.backend_tokenizer.to_str() == tokenizer.backend_tokenizer.to_str()
    tokenizer.save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    assert loaded.get_vocab() == tokenizer.get_vocab()
    assert loaded.chat_template == gptoss_chat_template  # by equality TRL recognises the model family
    for text in TEXTS:
        assert loaded.encode(text) == tokenizer.encode(text)


def test_a_vocabulary_without_room_is_refused():
    with pytest.raises(ValueError, match="alone need 267"):
        train_small_tokenizer(["text"], ["a phrase"], vocab_size=260)
