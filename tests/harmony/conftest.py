"""Tokenizers and the oracle for the Harmony tests.

The small tokenizer is always there. The real one is read from the folder in `TRL_GPTOSS_TOKENIZER`, or built offline by
`tools/gptoss_tokenizer.py` next to the test data (`TRL_GPTOSS_TEST_DATA`); without either, tests that need it skip.
"""

import importlib.metadata
import importlib.util
import os
import tempfile
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

DATA = Path(os.environ.get("TRL_GPTOSS_TEST_DATA", Path(__file__).parents[2] / ".." / "shared" / "data"))
SPECIAL = [
    "<|endoftext|>",
    "<|call|>",
    "<|start|>",
    "<|channel|>",
    "<|reserved_7|>",
    "<|message|>",
    "<|constrain|>",
    "<|end|>",
    "<|return|>",
]
TEXT = [
    'assistant user system developer analysis commentary final to=functions.f json code {"a": 1} print(2 + 2) the answer',
    "<|start|>assistant<|channel|>final<|message|>hello world<|end|>",
]


def build_small_tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level BPE whose control tokens have other ids, in another order, than those of gpt-oss."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    backend.train_from_iterator(TEXT, trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|return|>", pad_token="<|endoftext|>")
    tokenizer.add_special_tokens({"additional_special_tokens": SPECIAL})
    return tokenizer


@pytest.fixture(scope="session")
def small_tokenizer() -> PreTrainedTokenizerFast:
    return build_small_tokenizer()


@pytest.fixture(scope="session")
def gpt_oss_files() -> tuple[Path, Path]:
    """Folders of the real tokenizer and of the merge ranks that openai-harmony reads."""
    given, encodings = os.environ.get("TRL_GPTOSS_TOKENIZER"), os.environ.get("TIKTOKEN_ENCODINGS_BASE")
    if given and encodings:
        return Path(given), Path(encodings)
    script = DATA.parent / "tools" / "gptoss_tokenizer.py"
    if not script.exists():
        pytest.skip("no gpt-oss tokenizer: set TRL_GPTOSS_TOKENIZER and TIKTOKEN_ENCODINGS_BASE")
    spec = importlib.util.spec_from_file_location("gptoss_tokenizer", script)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    # Building it takes half a minute, so it stays for the next run.
    default = Path(tempfile.gettempdir()) / "trl_gptoss-test-tokenizer"
    cache = Path(os.environ.get("TRL_GPTOSS_TOKENIZER_CACHE", default))
    try:
        return tuple(map(Path, module.ensure(cache)))
    except importlib.metadata.PackageNotFoundError as error:
        pytest.skip(f"the gpt-oss tokenizer is built from the package {error.name}, which is not installed")


@pytest.fixture(scope="session")
def gpt_oss_tokenizer(gpt_oss_files: tuple[Path, Path]):
    return AutoTokenizer.from_pretrained(gpt_oss_files[0])


@pytest.fixture(scope="session")
def oracle(gpt_oss_files: tuple[Path, Path]):
    """openai-harmony's encoding."""
    harmony = pytest.importorskip("openai_harmony", reason="openai-harmony is the oracle of these tests")
    os.environ["TIKTOKEN_ENCODINGS_BASE"] = str(gpt_oss_files[1])
    return harmony.load_harmony_encoding("HarmonyGptOss")


@pytest.fixture(scope="session", params=["small", "gpt-oss"])
def tokenizer(request: pytest.FixtureRequest):
    """Both tokenizers, one after the other."""
    return request.getfixturevalue("small_tokenizer" if request.param == "small" else "gpt_oss_tokenizer")


@pytest.fixture(scope="session")
def data_folder() -> Path:
    return DATA
