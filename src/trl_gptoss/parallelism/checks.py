"""What sequence parallelism cannot be right with, said before anything is loaded to a GPU."""

import os

import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import DistributedType
from transformers import PretrainedConfig

from ..attention import NAME
from .ulysses import check_heads

# What `accelerate launch` sets, and Accelerate drops without a word on machines without GPUs.
_LAUNCHED = {"ACCELERATE_USE_FSDP": DistributedType.FSDP, "ACCELERATE_USE_DEEPSPEED": DistributedType.DEEPSPEED}
_RECURRENT = ("mamba", "linear_attention", "recurrent", "conv")


def check_sequence_parallel(config: PretrainedConfig, size: int) -> None:
    """Refuse a model whose attention cannot be shared by `size` ranks.

    Args:
        config ([`~transformers.PretrainedConfig`]): Of the model, after its attention was set.
        size (`int`): `sequence_parallel_size`, above 1.

    Raises:
        ValueError: what was found, why it is wrong, and what to set.
    """
    text = config.get_text_config()
    found = text._attn_implementation
    if found != NAME:
        raise ValueError(
            f"sequence_parallel_size={size} with attn_implementation={found!r}: only {NAME!r} exchanges tokens for heads, "
            "slices the sinks and keeps the documents apart. Any other would attend inside each rank's share of the "
            f"sequence and compute another function. Load the model with attn_implementation={NAME!r}."
        )
    kinds = sorted({kind for kind in text.layer_types or () if any(name in kind for name in _RECURRENT)})
    if kinds:
        raise ValueError(
            f"sequence_parallel_size={size} with layers of type {kinds}: they carry a state from token to token, which "
            "does not cross from one rank's share to the next. Set sequence_parallel_size=1."
        )
    check_heads(text.num_attention_heads, text.num_key_value_heads, size)


def check_accelerator(accelerator: Accelerator, size: int) -> None:
    """Refuse a launch that Accelerate has not followed, and a sequence parallelism of somebody else's.

    Args:
        accelerator ([`~accelerate.Accelerator`]): TRL looks at `args.parallelism_config` only, which stays None when
            `accelerate launch` sets it up.
        size (`int`): `sequence_parallel_size`.

    Raises:
        ValueError: what was found, why it is wrong, and what to set.
    """
    world = dist.get_world_size() if dist.is_initialized() else 1
    if world != accelerator.num_processes:
        raise ValueError(
            f"{world} processes were started and Accelerate knows of {accelerator.num_processes}: each would train a model of "
            "its own. Without GPUs set use_cpu=True in the trainer's configuration."
        )
    for variable, expected in _LAUNCHED.items():
        if os.environ.get(variable, "false").lower() == "true" and accelerator.distributed_type != expected:
            raise ValueError(
                f"The launcher asked for {expected} and Accelerate runs {accelerator.distributed_type}: nothing would be "
                "sharded. FSDP needs GPUs; DeepSpeed needs use_cpu=False. Use configs/accelerate/ddp.yaml otherwise."
            )
    theirs = accelerator.parallelism_config
    for name in ("cp_size", "sp_size"):
        if theirs is not None and getattr(theirs, name) > 1:
            raise ValueError(
                f"The accelerator has parallelism_config.{name}={getattr(theirs, name)}: batches of this trainer are made "
                "after generation, so Accelerate never shards them, and ranks that it takes for one data-parallel rank "
                f"would train on different data. Remove it and set sequence_parallel_size (now {size}) in the trainer's "
                "configuration."
            )
    if accelerator.distributed_type == DistributedType.DEEPSPEED:
        deepspeed = accelerator.state.deepspeed_plugin.deepspeed_config.get("sequence_parallel_size", 1)
        if deepspeed not in (1, "auto"):
            raise ValueError(
                f"The DeepSpeed configuration has sequence_parallel_size={deepspeed}, which divides gradients by another "
                "number of ranks. Remove it and set sequence_parallel_size in the trainer's configuration."
            )
    if size == 1:
        return
    if accelerator.distributed_type == DistributedType.MEGATRON_LM or (theirs is not None and theirs.tp_size > 1):
        raise ValueError(
            f"sequence_parallel_size={size} with tensor parallelism or Megatron: it works on DDP, FSDP2 and DeepSpeed."
        )
    if accelerator.distributed_type == DistributedType.FSDP and not accelerator.is_fsdp2:
        raise ValueError(
            f"sequence_parallel_size={size} with FSDP1, which has not been shown to give the gradient of one process. Set "
            "fsdp_version: 2."
        )
