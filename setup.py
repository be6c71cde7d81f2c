"""What pyproject.toml cannot say: the Hopper kernels are compiled into the wheel where nvcc and torch are installed.

`TRL_GPTOSS_BUILD_KERNELS=0` makes a pure wheel anywhere; `=1` fails instead of falling back to one. An editable install
compiles nothing: run `trl-gptoss build-kernels`. torch is not a build requirement, because an isolated build would
download it a second time with all of CUDA; only its headers are needed, and those of the environment's torch are used.
"""

import functools
import importlib.util
import os
import shutil
import sys
import sysconfig
from pathlib import Path

from setuptools import Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent
PROJECT = ROOT / "kernels" / "sink_fa3"
INSIDE = Path("trl_gptoss", "attention", "_kernels")
FALLBACK = "sink_fa3 will use flash-attn-4 or FlashAttention-2 on CUDA and the PyTorch reference on CPU"


def load_build_module():
    spec = importlib.util.spec_from_file_location("sink_fa3_build", ROOT / "src/trl_gptoss/attention/build.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


BUILD = load_build_module()


def say(line: str) -> None:
    print(f"trl-gptoss: {line}", file=sys.stderr, flush=True)


@functools.cache  # asked for the tag and for the build; said once
def kernels_can_be_built() -> bool:
    """Whether nvcc and torch's headers are here. Raises if they are not although they were asked for."""
    choice = os.environ.get("TRL_GPTOSS_BUILD_KERNELS", "auto")
    if choice not in ("0", "1", "auto"):
        raise SystemExit(
            f"TRL_GPTOSS_BUILD_KERNELS is {choice!r}, expected 0 (never), 1 (or fail) or auto (if possible)"
        )
    if choice == "0":
        return False
    try:
        BUILD.find_nvcc()
        BUILD.find_torch()
    except BUILD.BuildError as missing:
        if choice == "1":
            raise SystemExit(f"TRL_GPTOSS_BUILD_KERNELS=1, but {missing}") from None
        say(f"no Hopper kernels in this build: {missing} Until `trl-gptoss build-kernels` is run, {FALLBACK}.")
        return False
    return True


class BuildPyWithKernels(build_py):
    """Adds the kernel sources (for `trl-gptoss build-kernels`) and, where possible, the compiled library."""

    def run(self) -> None:
        super().run()
        if self.editable_mode:
            return
        target = Path(self.build_lib) / INSIDE
        shutil.rmtree(target, ignore_errors=True)
        target.joinpath("sink_fa3").mkdir(parents=True)
        shutil.copyfile(PROJECT / "build.toml", target / "sink_fa3" / "build.toml")
        for part in ("csrc", "torch-ext"):
            shutil.copytree(
                PROJECT / part, target / "sink_fa3" / part, ignore=shutil.ignore_patterns("*.py[co]", "__pycache__")
            )
        if kernels_can_be_built():
            BUILD.build_kernels(target / BUILD.LIBRARY, source=PROJECT, log=say)


class DistributionWithKernels(Distribution):
    """The library is no extension module of Python, but what belongs to one platform lies and is tagged as if it were."""

    def has_ext_modules(self) -> bool:
        return super().has_ext_modules() or kernels_can_be_built()


class PlatformWheel(bdist_wheel):
    """A wheel with the library depends on the platform, but on no Python version: the library uses torch's stable ABI."""

    def get_tag(self) -> tuple[str, str, str]:
        if self.root_is_pure:
            return super().get_tag()
        return "py3", "none", sysconfig.get_platform().replace("-", "_").replace(".", "_")


setup(distclass=DistributionWithKernels, cmdclass={"build_py": BuildPyWithKernels, "bdist_wheel": PlatformWheel})
