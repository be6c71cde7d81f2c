"""The critic in a checkpoint: `checkpoint-N/critic`, beside the policy and never in what is saved or pushed as the model.

    critic_state.pt             head, adapter, their optimizer, schedules, KL coefficient
    config.json, model...       backbone of a separate critic, and value_head.safetensors: a critic_model_name_or_path
    optimizer.pt                its optimizer
    pytorch_model_fsdp..., optimizer..., global_step...     the two instead, where FSDP or DeepSpeed shards the backbone

Whole files get their name last, so that a folder with `critic_state.pt` is complete.
"""

from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import (
    DistributedType,
    load_fsdp_model,
    load_fsdp_optimizer,
    save_fsdp_model,
    save_fsdp_optimizer,
)
from safetensors.torch import save_file
from transformers import AutoModel

from ..losses import FixedKLController
from .checkpointing import save_whole
from .critic_optimizer import CriticOptimizer
from .critics import HEAD_FILE, BackboneCritic

FOLDER = "critic"
_STATE, _OPTIMIZER = "critic_state.pt", "optimizer.pt"


def save_critic(
    checkpoint: str | Path, optimizer: CriticOptimizer, kl: FixedKLController, accelerator: Accelerator
) -> None:
    """Write the critic to `checkpoint`; every rank calls it.

    Args:
        checkpoint (`str` or `Path`): the folder of the policy's checkpoint.
        optimizer ([`CriticOptimizer`]): with the critic it trains.
        kl ([`~trl_gptoss.losses.FixedKLController`]): the coefficient goes along.
        accelerator (`Accelerator`): that prepared the backbone.
    """
    folder = Path(checkpoint) / FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    if isinstance(optimizer.critic, BackboneCritic):
        _save_backbone(folder, optimizer, accelerator)
    if not accelerator.is_main_process:
        return
    critic = optimizer.critic
    state = {
        "local": {name: parameter.detach().cpu() for name, parameter in critic.local_parameters().items()},
        "local_optimizer": optimizer.local.state_dict(),
        "schedulers": [scheduler.state_dict() for scheduler in optimizer.schedulers],
        "kl": kl.state_dict(),
    }
    save_file({name: p.detach().cpu() for name, p in critic.head.named_parameters()}, folder / HEAD_FILE)
    save_whole(state, folder / _STATE)


def load_critic(
    checkpoint: str | Path, optimizer: CriticOptimizer, kl: FixedKLController, accelerator: Accelerator
) -> None:
    """Read what [`save_critic`] wrote, in place.

    Raises:
        FileNotFoundError: a checkpoint without a critic.
        ValueError: the checkpoint of another kind of critic.
    """
    folder = Path(checkpoint) / FOLDER
    file = folder / _STATE
    if not file.is_file():
        raise FileNotFoundError(
            f"{checkpoint} has no critic ({file} is missing): it was written by another trainer, or with "
            "save_only_model=True. Resuming PPO without its critic would not go on where it stopped. To start PPO from "
            "its policy, pass it as the model and do not resume."
        )
    state = torch.load(file, map_location="cpu", weights_only=True)
    parameters = optimizer.critic.local_parameters()
    if state["local"].keys() != parameters.keys() or len(state["schedulers"]) != len(optimizer.schedulers):
        raise ValueError(
            f"{folder} holds a critic of another kind ({len(state['local'])} parameters and {len(state['schedulers'])} "
            f"optimizers; this one has {len(parameters)} and {len(optimizer.schedulers)}). Resume with the `critic` and "
            "the peft_config of the run that wrote it."
        )
    if isinstance(optimizer.critic, BackboneCritic):
        _load_backbone(folder, optimizer, accelerator)
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(state["local"][name])
    optimizer.local.load_state_dict(state["local_optimizer"])
    for scheduler, saved in zip(optimizer.schedulers, state["schedulers"], strict=True):
        scheduler.load_state_dict(saved)
    kl.load_state_dict(state["kl"])


def _save_backbone(folder: Path, optimizer: CriticOptimizer, accelerator: Accelerator) -> None:
    wrapped, backbone = optimizer.critic.model.backbone, optimizer.critic.backbone
    if accelerator.distributed_type == DistributedType.DEEPSPEED:
        wrapped.save_checkpoint(str(folder))
    elif accelerator.distributed_type == DistributedType.FSDP:
        plugin = accelerator.state.fsdp_plugin
        save_fsdp_model(plugin, accelerator, wrapped, str(folder))
        save_fsdp_optimizer(plugin, accelerator, optimizer.backbone, wrapped, str(folder))
    elif accelerator.is_main_process:
        backbone.save_pretrained(folder)
        save_whole(optimizer.backbone.state_dict(), folder / _OPTIMIZER)


def _load_backbone(folder: Path, optimizer: CriticOptimizer, accelerator: Accelerator) -> None:
    wrapped, backbone = optimizer.critic.model.backbone, optimizer.critic.backbone
    if accelerator.distributed_type == DistributedType.DEEPSPEED:
        wrapped.load_checkpoint(str(folder))
    elif accelerator.distributed_type == DistributedType.FSDP:
        plugin = accelerator.state.fsdp_plugin
        load_fsdp_model(plugin, accelerator, wrapped, str(folder))
        load_fsdp_optimizer(plugin, accelerator, optimizer.backbone, wrapped, str(folder))
    else:
        saved = AutoModel.from_pretrained(folder, dtype=backbone.dtype)
        backbone.load_state_dict(saved.state_dict())
        optimizer.backbone.load_state_dict(torch.load(folder / _OPTIMIZER, map_location="cpu", weights_only=True))
