"""Checkpoints of sharded training: every rank writes its shards, any number of ranks reads them (DCP)."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)


def save_sharded(folder: str | Path, model: nn.Module, optimizers: torch.optim.Optimizer | Iterable) -> None:
    """Write weights and optimizer states as shards. Every rank calls it.

    Args:
        folder (`str` or `Path`): On storage that all ranks share.
        model (`nn.Module`): Sharded by FSDP2, or plain.
        optimizers (`torch.optim.Optimizer` or several): Of its parameters.
    """
    weights, states = get_state_dict(model, optimizers)
    dcp.save({"model": weights, "optimizer": states}, checkpoint_id=str(folder))


def load_sharded(folder: str | Path, model: nn.Module, optimizers: torch.optim.Optimizer | Iterable) -> None:
    """Read what `save_sharded` wrote, with any number of ranks and any mesh.

    Args:
        folder (`str` or `Path`): Of `save_sharded`.
        model (`nn.Module`): The same architecture, sharded in any way.
        optimizers (`torch.optim.Optimizer` or several): New ones.

    Raises:
        FileNotFoundError: the folder holds no complete checkpoint.
    """
    if not (Path(folder) / ".metadata").is_file():  # written last, by one rank
        raise FileNotFoundError(f"{folder} holds no complete sharded checkpoint (its .metadata is missing).")
    weights, states = get_state_dict(model, optimizers)
    dcp.load({"model": weights, "optimizer": states}, checkpoint_id=str(folder))
    set_state_dict(model, optimizers, model_state_dict=weights, optim_state_dict=states)


def full_state_dict(model: nn.Module) -> dict[str, Any]:
    """Whole weights in host memory on rank 0, for `save_pretrained(state_dict=...)`; empty on the other ranks.

    Every rank calls it.
    """
    return get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))


def load_full_state_dict(model: nn.Module, weights: dict[str, Any]) -> None:
    """Send whole weights that only rank 0 has to the shards of all ranks, so that a host holds one copy and not one per GPU.

    Args:
        model (`nn.Module`): Sharded; on the other ranks its weights may be anything.
        weights (`dict`): On rank 0; ignored elsewhere.
    """
    given = weights if not dist.is_initialized() or dist.get_rank() == 0 else {}
    set_model_state_dict(model, given, options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True))
