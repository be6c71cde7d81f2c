"""The kernels project says the same thing in its sources, its build file and its description."""

import re
import subprocess
import tomllib
from pathlib import Path

import pytest

from trl_gptoss.attention import build, loading

PROJECT = Path(__file__).resolve().parents[2] / "kernels" / "sink_fa3"


def schemas(text):
    """Name to (arguments, results) of every op schema, names and defaults of results stripped."""
    text = re.sub(r'"\s*"', "", text)
    found = re.findall(r"\b((?:window_)?(?:fwd|bwd))\(([^)]*)\)\s*->\s*\(([^)]*)\)", text)
    return {name: (re.sub(r"\s+", " ", args), re.sub(r"\s+", " ", results)) for name, args, results in found}


@pytest.fixture(scope="module")
def settings():
    return tomllib.loads((PROJECT / "build.toml").read_text())


def test_build_file_lists_every_source(settings):
    kernels = {
        str(path.relative_to(PROJECT)) for path in (PROJECT / "csrc").iterdir() if path.suffix in (".cu", ".cuh", ".h")
    }
    assert set(settings["kernel"]["sink_fa3"]["src"]) == kernels
    bindings = {
        str(path.relative_to(PROJECT)) for path in (PROJECT / "torch-ext").iterdir() if path.suffix in (".cpp", ".h")
    }
    assert set(settings["torch"]["src"]) == bindings
    units = {str(path.relative_to(PROJECT)) for path in build.translation_units(PROJECT)}
    assert units == {name for name in kernels | bindings if name.endswith((".cu", ".cpp"))}


def test_versions_agree(settings):
    major, minor = map(int, settings["torch"]["stable-abi"]["cuda"].split("."))
    assert int(build.TORCH_TARGET_VERSION, 16) == major << 56 | minor << 48
    assert settings["general"]["hub"]["repo-id"] == loading.HUB_REPO
    assert settings["general"]["version"] == loading.HUB_VERSION
    assert tuple(map(int, settings["kernel"]["sink_fa3"]["cuda-minver"].split("."))) == build.MIN_NVCC


def test_operators_are_the_described_ones():
    code = {}
    for path in (PROJECT / "torch-ext").glob("*.cpp"):
        code |= schemas(path.read_text())
    assert set(code) == set(loading.OPS)
    described = schemas((PROJECT / "OPS.md").read_text())
    assert described["fwd"] == code["fwd"] and described["bwd"] == code["bwd"]
    assert code["window_fwd"] == code["fwd"] and code["window_bwd"] == code["bwd"]


def test_no_word_of_torch_in_the_kernels():
    for path in (PROJECT / "csrc").iterdir():
        if path.suffix in (".cu", ".cuh", ".h"):
            assert "#include <torch" not in path.read_text(), path.name


@pytest.mark.timeout(600)
def test_the_library_builds(tmp_path):
    """Compiles everything with nvcc; minutes."""
    try:
        build.find_nvcc()
    except build.BuildError as why:
        pytest.skip(str(why))
    library = build.build_kernels(tmp_path / loading.LIBRARY)
    assert library.stat().st_size > 2**20


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_every_tile_is_handed_out_once(tmp_path):
    """The kernels' own scheduling functions, compiled for the CPU: random batches, each key block exactly once."""
    try:
        nvcc = build.find_nvcc()
    except build.BuildError as why:
        pytest.skip(str(why))
    program, source = tmp_path / "scheduler", PROJECT / "tests" / "scheduler_host.cu"
    arch = ["-gencode", "arch=compute_90a,code=sm_90a", "--expt-relaxed-constexpr"]
    subprocess.run([nvcc, "-std=c++17", *arch, f"-I{PROJECT / 'csrc'}", "-o", program, source], check=True)
    done = subprocess.run([program], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "ok\n")
