import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "benchmarks/reproduction"))


@pytest.fixture(autouse=True)
def executors_as_before(monkeypatch):
    """Cells register executors of their own; other tests name all there are."""
    from trl_gptoss.environments import executor

    monkeypatch.setattr(executor, "_FACTORIES", dict(executor._FACTORIES))


@pytest.fixture(scope="session")
def tokenizer():
    from pretrain import make_tokenizer

    return make_tokenizer()


@pytest.fixture(scope="session")
def folders(tokenizer, tmp_path_factory):
    """Untrained models of the test size: {False: GPT-OSS shape, True: dense control}."""
    from pretrain import make_model

    made = {}
    for dense in (False, True):
        made[dense] = tmp_path_factory.mktemp("dense" if dense else "moe")
        make_model("test", tokenizer, dense, seed=0).save_pretrained(made[dense])
        tokenizer.save_pretrained(made[dense])
    return made
