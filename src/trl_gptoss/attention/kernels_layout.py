"""A compiled library in the layout that the `kernels` package loads: `build/<variant>/` with sources, library and metadata.

    <folder>/build/torch-stable-abi211-cu130-x86_64-linux/
        __init__.py     of torch-ext/sink_fa3
        _ops.py         loads the library, names its operators
        libsink_fa3.so
        metadata.json   name, version, backend

kernel-builder makes the same from build.toml, for all versions of CUDA at once, but needs Nix; this makes the one of this
machine. `get_local_kernel(folder)` and `LOCAL_KERNELS="<repository>=<folder>"` take the folder.
"""

import json
import platform
import shutil
import tomllib
from pathlib import Path

from .build import LIBRARY, TORCH_TARGET_VERSION

_OPS = '''"""Loads the library beside this file; `ops` holds its operators."""

from pathlib import Path

import torch

torch.ops.load_library(str(Path(__file__).parent / "{library}"))
ops = torch.ops.sink_fa3
'''


def variant_name(cuda: tuple[int, int]) -> str:
    """The name of a build for this processor, such as `torch-stable-abi211-cu130-x86_64-linux`.

    Args:
        cuda (`tuple[int, int]`): version of the nvcc that compiled it.
    """
    target = int(TORCH_TARGET_VERSION, 16)
    abi = f"{target >> 56}{(target >> 48) & 0xFF}"
    return f"torch-stable-abi{abi}-cu{cuda[0]}{cuda[1]}-{platform.machine()}-{platform.system().lower()}"


def write_kernels_folder(library: Path, source: Path, folder: Path, cuda: tuple[int, int]) -> Path:
    """Lay a compiled library out for `kernels`.

    Args:
        library (`Path`): what `build_kernels` wrote.
        source (`Path`): the `sink_fa3` project it was built from.
        folder (`Path`): to write into; a build of the same variant is replaced.
        cuda (`tuple[int, int]`): version of the nvcc that compiled it.

    Returns:
        `Path`: the folder of the variant.
    """
    settings = tomllib.loads((source / "build.toml").read_text())
    general, kernel = settings["general"], settings["kernel"]["sink_fa3"]
    variant = folder / "build" / variant_name(cuda)
    shutil.rmtree(variant, ignore_errors=True)
    package = source / "torch-ext" / "sink_fa3"
    shutil.copytree(package, variant, ignore=shutil.ignore_patterns("*.py[co]", "__pycache__"))
    shutil.copyfile(library, variant / LIBRARY)
    (variant / "_ops.py").write_text(_OPS.format(library=LIBRARY), encoding="utf-8")
    metadata = {
        "id": f"sink_fa3_{general['version']}_cuda",
        "name": general["name"],
        "version": general["version"],
        "license": general["license"],
        "python-depends": [],
        "backend": {"type": kernel["backend"], "archs": kernel["cuda-capabilities"]},
    }
    (variant / "metadata.json").write_text(json.dumps(metadata, indent=2) + "\n", encoding="utf-8")
    return variant
