"""Where the sandbox cannot be made, it is refused with what to do; nothing falls back by itself."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from trl_gptoss.environments import ExecutorUnavailable, PythonTool, bubblewrap
from trl_gptoss.environments.bubblewrap import BubblewrapExecutor
from trl_gptoss.environments.runtime_files import find_runtime_files

SOURCE = Path(__file__).parents[2] / "src/trl_gptoss"


def test_without_user_namespaces(sandbox):
    """A user namespace in which no further one may be made stands for a host that allows none."""
    program = """
from environments import ExecutorUnavailable, PythonTool  # without trl_gptoss, whose import takes seconds
try:
    PythonTool()
except ExecutorUnavailable as error:
    print(error)
else:
    raise SystemExit("no error")"""
    shell = 'echo 0 > /proc/sys/user/max_user_namespaces && exec "$0" -c "$1"'
    run = subprocess.run(
        ["unshare", "--user", "--map-root-user", "sh", "-c", shell, sys.executable, program],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": str(SOURCE)},
    )
    if "unshare" in run.stderr:
        pytest.skip(f"cannot set the scene: {run.stderr}")
    assert run.returncode == 0, run.stderr
    assert "namespace" in run.stdout and "sysctl -w user.max_user_namespaces" in run.stdout
    assert "unsafe_subprocess" in run.stdout


def test_old_linux(monkeypatch):
    monkeypatch.setattr(bubblewrap, "MINIMUM_LINUX", (99, 0))
    with pytest.raises(ExecutorUnavailable, match="needs 5.14 or newer"):
        BubblewrapExecutor().probe()


def test_missing_package():
    with pytest.raises(ExecutorUnavailable, match="'no-such-package', which is not installed"):
        PythonTool(packages=("no-such-package",))


def test_spawner_that_dies_is_replaced(sandbox):
    executor = BubblewrapExecutor(warm=0)
    try:
        assert executor.run("1", timeout=5, output_limit=100).text == "1\n"
        executor._spawner._process.kill()
        executor._spawner._process.wait()
        assert executor.run("2", timeout=5, output_limit=100).text == "2\n"
    finally:
        executor.close()


def test_packages_are_importable_with_what_they_require(sandbox):
    executor = BubblewrapExecutor(packages=("sympy",), warm=0)
    code = "import sympy, mpmath\nprint(sympy.factor('x**2 - 1'))\nimport transformers"
    try:
        result = executor.run(code, timeout=30, output_limit=2000)
        assert result.text.startswith("(x - 1)*(x + 1)\n")
        assert "No module named 'transformers'" in result.text  # control: only what was asked for
    finally:
        executor.close()


def test_runtime_files_hold_no_site_packages():
    files = find_runtime_files()
    for _, inside in files.binds:
        for folder in Path(inside).rglob("*-packages") if Path(inside).is_dir() else ():
            if folder.name in ("site-packages", "dist-packages"):
                assert any(folder.is_relative_to(mask) for mask in files.masks), folder
