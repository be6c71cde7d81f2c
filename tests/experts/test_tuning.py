"""Configuration lookup: shipped tables, cache file, defaults."""

import json

import pytest
import torch

from trl_gptoss.experts import tuning
from trl_gptoss.experts.tables import TABLES
from trl_gptoss.experts.tuning import (
    KERNELS,
    NARROWED,
    PRESORTED,
    STORED_BY_TMA,
    TileConfig,
    bucket,
    candidates,
    default_config,
)


@pytest.fixture(autouse=True)
def fresh_caches():
    tuning._table.cache_clear()
    tuning._config.cache_clear()
    yield
    tuning._table.cache_clear()
    tuning._config.cache_clear()


def test_bucket() -> None:
    assert [bucket(4, 32), bucket(256, 32), bucket(131072, 32), bucket(131072, 128)] == [1, 8, 4096, 1024]
    assert bucket(10**9, 4) == 8192


def shared_bytes(kernel: str, config: TileConfig) -> int:
    narrow = (5760 if kernel == "wgrad_up" else 2880) % config.bn if config.narrow else 0
    stages = config.stages * max(config.bm + config.bn, 2 * config.bm * (narrow > 0) + narrow) * config.bk * 2
    return stages + ((config.bm * config.bn + 2 * config.bm * narrow) * 2 if config.tma_store else 0)


@pytest.mark.parametrize("gpu", TABLES)
def test_shipped_entries_are_launchable(gpu: str) -> None:
    assert set(TABLES[gpu]) == set(KERNELS)
    for kernel, entries in TABLES[gpu].items():
        for rows, values in entries.items():
            config = TileConfig(*values)
            assert rows == 2 ** (rows.bit_length() - 1)
            assert all(size >= 16 and size & (size - 1) == 0 for size in (config.bm, config.bn, config.bk))
            assert shared_bytes(kernel, config) <= 227 * 1024
            assert not config.presort or kernel in PRESORTED
            assert not config.tma_store or kernel in STORED_BY_TMA
            assert not config.narrow or (kernel in NARROWED and config.tma)


@pytest.mark.parametrize("kernel", KERNELS)
def test_defaults_and_candidates_fit(kernel: str) -> None:
    for rows in (1, 8, 16, 32, 64, 128, 4096):
        assert shared_bytes(kernel, default_config(kernel, rows, False)) <= 99 * 1024
        assert shared_bytes(kernel, default_config(kernel, rows, True)) <= 227 * 1024
        assert all(shared_bytes(kernel, config) <= 227 * 1024 for config in candidates(kernel, rows))


def test_cache_file_comes_before_the_shipped_table(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRL_GPTOSS_CACHE", str(tmp_path))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "NVIDIA H200")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (9, 0))
    shipped = tuning._config("down", 4096, 0, False)
    assert shipped == TileConfig(*TABLES["NVIDIA H200"]["down"][4096])
    mine = TileConfig(64, 64, 32, 4, 2)
    path = tuning.save_configs("NVIDIA H200", {"down": {4096: mine}})
    assert path.is_relative_to(tmp_path) and json.loads(path.read_text())["down"]["4096"]["bm"] == 64
    assert tuning._config("down", 4096, 0, False) == mine
    assert tuning._config("down", 1024, 0, False) == TileConfig(*TABLES["NVIDIA H200"]["down"][1024])
    tuning.save_configs("NVIDIA H200", {"up": {8: mine}})
    assert tuning._config("down", 4096, 0, False) == mine  # merged, not replaced


def test_unknown_gpu_and_wide_dtypes() -> None:
    narrow = tuning.tile_config("up", 4096 * 32, 32, torch.empty(1, dtype=torch.bfloat16))
    wide = tuning.tile_config("up", 4096 * 32, 32, torch.empty(1, dtype=torch.float32))
    assert narrow == default_config("up", 4096, False) and wide.bm * wide.bk < narrow.bm * narrow.bk * 2
