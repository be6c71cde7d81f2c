"""Find the kernel library: `TRL_GPTOSS_KERNELS`, the build inside the package, the `kernels` package.

`kernels` is asked last and only if it is installed: `LOCAL_KERNELS="kernels-community/sink-fa3=<folder>"` names a local
build, otherwise it looks in its cache and on the Hub (not with HF_HUB_OFFLINE=1). Importing trl_gptoss loads nothing.
"""

import importlib.metadata
import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from packaging.version import Version

logger = logging.getLogger(__name__)

ENV = "TRL_GPTOSS_KERNELS"
LIBRARY = "libsink_fa3.so"
PACKAGED = Path(__file__).parent / "_kernels" / LIBRARY
HUB_REPO = "kernels-community/sink-fa3"
HUB_VERSION = 1
MIN_KERNELS = Version("0.17")  # what the calls below were written against
OPS = ("fwd", "bwd", "window_fwd", "window_bwd")


@dataclass(frozen=True, slots=True)
class Kernels:
    """Outcome of the search.

    Args:
        ops (`Any`): Namespace with the operators of `OPS`; None if none was found.
        source (`str`): Where they came from.
        missing (`str`, *optional*): One line that says what was tried and why it failed.
    """

    ops: Any
    source: str
    missing: str | None


class Unavailable(Exception):
    """A source has no usable library; the message says why in one line."""


@lru_cache(maxsize=1)
def kernels() -> Kernels:
    """The kernel library, searched for once per process."""
    return find(os.environ.get(ENV))


def find(path: str | None) -> Kernels:
    """Try the sources in order.

    Args:
        path (`str`, *optional*): A library file, or a folder that holds `libsink_fa3.so`.
    """
    sources: list[tuple[str, Callable[[], Any]]] = [
        ("packaged build", lambda: from_file(PACKAGED)),
        (f"kernels ({HUB_REPO})", from_hub),
    ]
    if path:
        sources.insert(0, (f"{ENV}={path}", lambda: from_file(Path(path))))
    tried = []
    for name, load in sources:
        try:
            ops = load()
        except Unavailable as why:
            tried.append(f"{name}: {why}")
            continue
        if path and tried:  # the user asked for that one, so falling past it is worth a line
            logger.warning("sink_fa3 kernels: %s; using %s", tried[0], name)
        return Kernels(ops, name, None)
    return Kernels(None, "", "no kernel library (" + "; ".join(tried) + "). Build one: trl-gptoss build-kernels")


def from_file(path: Path) -> Any:
    """Load a library file; its operators appear as `torch.ops.sink_fa3`."""
    if path.is_dir():
        path = path / LIBRARY
    if not path.is_file():
        raise Unavailable(f"{path} does not exist")
    try:
        torch.ops.load_library(str(path))
    except (OSError, RuntimeError) as error:
        raise Unavailable(f"{path} does not load: {_one_line(error)}") from error
    return _complete(torch.ops.sink_fa3, str(path))


def from_hub() -> Any:
    """Load through the `kernels` package."""
    try:
        # by distribution: a folder named kernels would answer an import
        version = Version(importlib.metadata.version("kernels"))
    except importlib.metadata.PackageNotFoundError:
        raise Unavailable("the package is not installed") from None
    if version < MIN_KERNELS:
        raise Unavailable(f"the package is {version}, needs >= {MIN_KERNELS}")
    from kernels import get_kernel

    try:
        module = get_kernel(HUB_REPO, version=HUB_VERSION)
    except (OSError, RuntimeError, ValueError, ImportError) as error:  # no network, no such repository or build
        raise Unavailable(_one_line(error)) from error
    return _complete(module.ops, HUB_REPO)


def _complete(ops: Any, where: str) -> Any:
    for name in OPS:
        try:
            getattr(ops, name)
        except AttributeError:
            raise Unavailable(f"{where} lacks the operator {name}; rebuild it from this version's sources") from None
    return ops


def _one_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
