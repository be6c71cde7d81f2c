"""The `kernels` package: the layout of a local build, and what LOCAL_KERNELS brings into `sink_fa3`."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from trl_gptoss.attention import loading
from trl_gptoss.attention.build import LIBRARY
from trl_gptoss.attention.kernels_layout import variant_name, write_kernels_folder

PROJECT = Path(__file__).resolve().parents[2] / "kernels" / "sink_fa3"
SRC = Path(__file__).resolve().parents[2] / "src"
kernels = pytest.importorskip("kernels", reason="needs the extra `kernels`")

# A build for the CPU whose operators are Python: what loads is real, what computes is not.
STAND_IN = """
import torch
library = torch.library.Library("sink_fa3", "DEF")
for name in ("fwd", "bwd", "window_fwd", "window_bwd"):
    library.define(f"{name}(Tensor x) -> Tensor")
    library.impl(name, lambda x: x + 1, "CPU")
ops = torch.ops.sink_fa3
"""


@pytest.fixture
def laid_out(tmp_path):
    (tmp_path / LIBRARY).write_bytes(b"not a library")
    return write_kernels_folder(tmp_path / LIBRARY, PROJECT, tmp_path / "kernel", (13, 0))


def test_the_layout_is_what_kernels_reads(laid_out):
    from kernels._rust import Metadata
    from kernels.variants import ArchVariant, parse_variant

    variant = parse_variant(laid_out.name)
    assert isinstance(variant, ArchVariant) and variant.variant_str == variant_name((13, 0))
    assert str(variant.framework.version) == "2.11" and str(variant.arch.backend.version) == "13.0"
    metadata = Metadata.read_from_file(laid_out / "metadata.json")
    assert metadata.name.python_name == "sink_fa3" and metadata.backend.archs == ["9.0a"]
    assert {path.name for path in laid_out.iterdir()} == {"__init__.py", "_ops.py", LIBRARY, "metadata.json"}


def test_get_local_kernel_loads_the_library(laid_out):
    """As far as it goes without CUDA: to the library itself, which is none."""
    with pytest.raises(OSError, match="libsink_fa3.so"):
        kernels.get_local_kernel(laid_out)
    if not torch.cuda.is_available():
        with pytest.raises(FileNotFoundError, match="cu130"):
            kernels.get_local_kernel(laid_out.parents[1])


def stand_in(folder: Path) -> Path:
    variant = folder / "build" / "torch-cpu"
    variant.mkdir(parents=True)
    (variant / "__init__.py").write_text(STAND_IN)
    metadata = {"id": "stand_in", "name": "sink-fa3", "version": 1, "license": "Apache-2.0", "python-depends": []}
    (variant / "metadata.json").write_text(json.dumps(metadata | {"backend": {"type": "cpu"}}))
    return folder


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="kernels looks for CUDA builds where there is CUDA")
def test_local_kernels_comes_before_the_hub(tmp_path):
    """In a process of its own: libraries and the variable are read once."""
    code = (
        "import torch; from trl_gptoss.attention import loading\n"
        "ops = loading.from_hub(); assert ops.window_bwd(torch.ones(1)).item() == 2\n"
        "found = loading.find(None); assert found.source == 'kernels (kernels-community/sink-fa3)', found\n"
    )
    local = f"{loading.HUB_REPO}={stand_in(tmp_path / 'kernel')}"
    environment = {**os.environ, "LOCAL_KERNELS": local, "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(SRC)}
    if loading.PACKAGED.is_file():
        pytest.skip("this installation has a library of its own, which comes first")
    subprocess.run([sys.executable, "-c", code], check=True, env=environment)


@pytest.mark.slow
def test_a_folder_without_a_build_is_one_line(tmp_path):
    code = (
        "from trl_gptoss.attention import loading\n"
        "try: loading.from_hub()\n"
        "except loading.Unavailable as why: print(why)\n"
    )
    local = f"{loading.HUB_REPO}={tmp_path}"
    environment = {**os.environ, "LOCAL_KERNELS": local, "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(SRC)}
    out = subprocess.run(
        [sys.executable, "-c", code], check=True, env=environment, capture_output=True, text=True
    ).stdout
    assert "FileNotFoundError: Cannot find a build variant" in out and out.count("\n") == 1
