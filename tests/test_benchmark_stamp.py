"""Of benchmarks/common/stamp.py: what rows say about where they come from."""

import importlib.util
import re
import subprocess
from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parents[1] / "benchmarks"


@pytest.fixture
def stamp(tmp_path, monkeypatch):
    """The file in a checkout of its own."""
    for command in (["init", "-q"], ["add", "."], ["-c", "user.name=a", "-c", "user.email=a@b", "commit", "-qm", "x"]):
        (tmp_path / "stamp.py").write_text((FOLDER / "common/stamp.py").read_text())
        subprocess.run(["git", *command], cwd=tmp_path, check=True)
    monkeypatch.delenv("BENCHMARK_COMMIT", raising=False)
    spec = importlib.util.spec_from_file_location("stamp_in_a_checkout", tmp_path / "stamp.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_commit_says_whether_files_differ_from_it(stamp, tmp_path, monkeypatch):
    head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=tmp_path, capture_output=True, text=True).stdout
    found = stamp.commit()
    assert re.fullmatch("[0-9a-f]{7,}", found) and head.startswith(found)
    (tmp_path / "new.csv").write_text("")  # results are written before they are committed
    assert stamp.commit() == found
    (tmp_path / "stamp.py").write_text("")
    assert stamp.commit() == found + "+"
    monkeypatch.setenv("BENCHMARK_COMMIT", "abc")
    assert stamp.commit() == "abc"


def test_without_git_or_a_gpu_it_is_unknown(stamp, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert stamp.commit() == stamp.driver() == "unknown"


def test_every_benchmark_takes_the_commit_from_there():
    own = [
        p.name
        for p in FOLDER.rglob("*.py")
        if re.search("rev-parse|git.*describe", p.read_text()) and p.name != "stamp.py"
    ]
    assert not own
