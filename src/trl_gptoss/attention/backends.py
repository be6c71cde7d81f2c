"""Which implementation computes the attention: the first of hopper, fa4, fa2, reference that can.

Each backend is a module with `NAME`, `unusable(device, dtype, head_dim)`, which answers None or the reason why not, and
`forward` and `backward` in the signatures of `reference`. All return the same out and lse, so a backward may follow
another backend's forward. Sinks are float32 (float64 for float64 queries); a backend with `SINKS_AS_THEY_ARE` takes the queries'
dtype too. `TRL_GPTOSS_ATTENTION=<name>` forces one.
"""

import logging
import os
from functools import lru_cache
from types import ModuleType

import torch

from . import fa2, fa4, hopper, reference

logger = logging.getLogger(__name__)

ENV = "TRL_GPTOSS_ATTENTION"
ORDER = (hopper, fa4, fa2, reference)


def choose(q: torch.Tensor) -> ModuleType:
    """The backend for queries like `q`.

    Raises:
        `ValueError`: `TRL_GPTOSS_ATTENTION` names no backend.
        `RuntimeError`: The forced backend cannot run here; says why.
    """
    return _choose(q.device, q.dtype, q.shape[-1], os.environ.get(ENV))


def active_backend(
    device: torch.device | str | None = None, dtype: torch.dtype = torch.bfloat16, head_dim: int = 64
) -> str:
    """Name of the backend that attention runs on.

    Args:
        device (`torch.device` or `str`, *optional*): Defaults to the current CUDA device, else the CPU.
        dtype (`torch.dtype`, defaults to `torch.bfloat16`): Of the queries.
        head_dim (`int`, defaults to 64): Of the queries.

    Returns:
        `str`: "hopper", "fa4", "fa2" or "reference".
    """
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(device)
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    return _choose(device, dtype, head_dim, os.environ.get(ENV)).NAME


def reasons(device: torch.device, dtype: torch.dtype = torch.bfloat16, head_dim: int = 64) -> dict[str, str | None]:
    """For every backend in order: why it cannot run there, or None."""
    return {backend.NAME: backend.unusable(device, dtype, head_dim) for backend in ORDER}


@lru_cache(maxsize=256)
def _choose(device: torch.device, dtype: torch.dtype, head_dim: int, forced: str | None) -> ModuleType:
    where = f"{device}, {dtype}, head_dim {head_dim}"
    if forced:
        names = {backend.NAME: backend for backend in ORDER}
        if forced not in names:
            raise ValueError(f"{ENV}={forced!r} names no backend. Use one of {', '.join(names)}, or unset it.")
        if why := names[forced].unusable(device, dtype, head_dim):
            raise RuntimeError(f"{ENV}={forced} cannot run ({where}): {why}")
        logger.info("sink_fa3 runs on the %s backend (%s), forced by %s", forced, where, ENV)
        return names[forced]
    refused = []
    for backend in ORDER:
        why = backend.unusable(device, dtype, head_dim)
        if why is None:
            break
        refused.append(f"{backend.NAME}: {why}")
    slow = backend is reference and device.type == "cuda"
    logger.log(
        logging.WARNING if slow else logging.INFO,
        "sink_fa3 runs on the %s backend (%s)%s",
        backend.NAME,
        where,
        "".join(f"; not {line}" for line in refused),
    )
    return backend
