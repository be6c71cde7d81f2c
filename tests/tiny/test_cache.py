"""The cache of tiny models: found again by content, made anew when anything that matters changes, never half made."""

import json
import os

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from trl_gptoss.tiny import make as make_module
from trl_gptoss.tiny import make_tiny_model
from trl_gptoss.tiny.cache import MARKER, cached_folder, content_key, copy_folder, default_cache_dir


def test_the_key_is_the_content():
    recipe = {"seed": 0, "warm_start": {"steps": 3, "lr": 0.1}}
    assert content_key(recipe) == content_key({"warm_start": {"lr": 0.1, "steps": 3}, "seed": 0})
    assert content_key(recipe) != content_key({**recipe, "seed": 1})
    assert content_key(recipe) != content_key({**recipe, "warm_start": {"steps": 4, "lr": 0.1}})


def test_a_folder_is_made_once_and_only_whole_ones_count(tmp_path):
    made = []

    def make(folder):
        made.append(folder)
        (folder / "model").write_text("x")

    def interrupted(folder):
        (folder / "model").write_text("half")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        cached_folder(tmp_path, {"seed": 0}, interrupted)
    assert list((tmp_path / "tiny").iterdir()) == []
    first = cached_folder(tmp_path, {"seed": 0}, make)
    assert cached_folder(tmp_path, {"seed": 0}, make) == first and len(made) == 1
    assert (first / "model").read_text() == "x" and json.loads((first / MARKER).read_text())["recipe"] == {"seed": 0}
    assert cached_folder(tmp_path, {"seed": 1}, make) != first and len(made) == 2


def test_another_process_may_have_been_faster(tmp_path):
    def make(folder):
        if not folder.name.startswith("."):
            return
        (folder / "model").write_text("slow")
        fast = tmp_path / "tiny" / content_key({"seed": 0})[:20]
        fast.mkdir()
        (fast / MARKER).write_text("{}")

    folder = cached_folder(tmp_path, {"seed": 0}, make)
    assert not (folder / "model").exists() and [p.name for p in (tmp_path / "tiny").iterdir()] == [folder.name]


def test_a_copy_never_overwrites_something_else(tmp_path):
    source, out = tmp_path / "source", tmp_path / "out"
    source.mkdir()
    (source / MARKER).write_text("{}")
    copy_folder(source, out)
    copy_folder(source, out)  # an earlier copy is fine
    other = tmp_path / "other"
    other.mkdir()
    (other / "config.json").write_text("{}")
    with pytest.raises(ValueError, match="holds no tiny model made by this command"):
        copy_folder(source, other)


def test_the_cache_can_be_moved(monkeypatch, tmp_path):
    monkeypatch.setenv("TRL_GPTOSS_CACHE", str(tmp_path))
    assert default_cache_dir() == tmp_path
    monkeypatch.delenv("TRL_GPTOSS_CACHE")
    assert str(default_cache_dir()) == os.path.expanduser("~/.cache/trl_gptoss")


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """A tiny model with a warm start of two steps, and the cache it lies in."""
    cache = tmp_path_factory.mktemp("cache")
    return make_tiny_model(steps=2, cache_dir=cache), cache


def test_made_models_load_and_are_found_again(small, tmp_path, monkeypatch):
    folder, cache = small
    monkeypatch.setattr(make_module, "train", lambda *a, **k: pytest.fail("made a second time"))
    copy = make_tiny_model(tmp_path / "copy", steps=2, cache_dir=cache)
    model = AutoModelForCausalLM.from_pretrained(copy)
    tokenizer = AutoTokenizer.from_pretrained(copy)
    assert model.config.vocab_size == len(tokenizer)
    assert model.generation_config.eos_token_id == tokenizer.convert_tokens_to_ids(
        ["<|return|>", "<|endoftext|>", "<|call|>"]
    )
    assert "on purpose" in (copy / "README.md").read_text()


@pytest.mark.parametrize("change", [{"seed": 1}, {"steps": 1}])
def test_what_determines_the_model_determines_the_folder(small, change):
    folder, cache = small
    other = make_tiny_model(**({"steps": 2, "cache_dir": cache} | change))
    assert other != folder
    weights = [AutoModelForCausalLM.from_pretrained(f).lm_head.weight for f in (folder, other)]
    assert not torch.equal(*weights)


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"tokenizer": "other"}, "expected one of small, gpt-oss"),
        ({"tokenizer": "gpt-oss"}, "needs --tokenizer-path"),
        ({"tokenizer": "small", "tokenizer_path": "x"}, "takes no --tokenizer-path"),
        ({"steps": -1}, "steps is -1; expected"),
    ],
)
def test_wrong_arguments_say_what_to_do(arguments, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        make_tiny_model(cache_dir=tmp_path, **arguments)


@pytest.mark.parametrize("taken, message", [("out/weights.bin", "holds no tiny model"), ("out", "is a file")])
def test_a_folder_that_is_taken_is_refused_before_the_warm_start(taken, message, tmp_path, monkeypatch):
    (tmp_path / taken).parent.mkdir(exist_ok=True)
    (tmp_path / taken).write_text("mine")
    monkeypatch.setattr(make_module, "train", lambda *a, **k: pytest.fail("trained first"))
    with pytest.raises(ValueError, match=message):
        make_tiny_model(tmp_path / "out", steps=1, cache_dir=tmp_path / "cache")


def test_another_tokenizer_is_not_taken_for_gpt_oss(small, tmp_path):
    with pytest.raises(ValueError, match="is not gpt-oss's"):
        make_tiny_model(tokenizer="gpt-oss", tokenizer_path=str(small[0]), cache_dir=tmp_path)
    with pytest.raises(FileNotFoundError, match="has no tokenizer.json"):
        make_tiny_model(tokenizer="gpt-oss", tokenizer_path=str(tmp_path), cache_dir=tmp_path)
