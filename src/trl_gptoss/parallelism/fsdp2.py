"""FSDP2 for transformers models: what is a unit, what stays in float32, and the plugin for Accelerate.

A decoder layer is a unit: its parameters are gathered before it runs and freed after. Embedding, final norm and head belong
to the root. With mixed precision the master weights, gradient reduction and optimizer are float32 and the matrices compute
in bfloat16; the norms are a unit of their own that computes in float32. Sinks belong to their attention module, which FSDP2
cannot split: they are float32 in storage and in the attention arithmetic, and travel as bfloat16 in between, the type in
which OpenAI released them.
"""

from dataclasses import replace

import torch
from accelerate import FullyShardedDataParallelPlugin
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor


def layers_of(model: nn.Module) -> list[nn.Module]:
    """The decoder layers, by the class names that transformers says not to split.

    Args:
        model (`nn.Module`): A transformers model, with or without PEFT.

    Raises:
        ValueError: a model without such layers.
    """
    names = {name for module in model.modules() for name in _unsplit(module)}
    layers = [module for module in model.modules() if type(module).__name__ in names]
    if not layers:
        raise ValueError(f"{type(model).__name__} names no module class that must not be split (`_no_split_modules`).")
    return layers


def _unsplit(module: nn.Module) -> list[str]:
    from transformers import PreTrainedModel

    return list(module._no_split_modules or []) if isinstance(module, PreTrainedModel) else []


def shard_model(
    model: nn.Module,
    mesh: DeviceMesh,
    *,
    mixed_precision: bool = False,
    reshard_after_forward: bool = True,
    cpu_offload: bool = False,
) -> nn.Module:
    """Apply FSDP2 to `model`, in place. Accelerate leaves a model that is sharded already as it is.

    Args:
        model (`nn.Module`): Whole, the same on all ranks; with or without PEFT.
        mesh (`DeviceMesh`): Of `shard_mesh`: every rank of the world, whatever `sequence_parallel_size`.
        mixed_precision (`bool`, *optional*, defaults to `False`): Trainable parameters become float32 master weights; see
            the top of this file. Otherwise everything computes in the types the parameters have.
        reshard_after_forward (`bool`, *optional*, defaults to `True`): Free gathered parameters between forward and
            backward.
        cpu_offload (`bool`, *optional*, defaults to `False`): Keep the shards in host memory.

    Returns:
        `nn.Module`: `model`.
    """
    policy, exact = MixedPrecisionPolicy(), MixedPrecisionPolicy()
    if mixed_precision:
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.data = parameter.data.float()
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        exact = MixedPrecisionPolicy(param_dtype=torch.float32, reduce_dtype=torch.float32, cast_forward_inputs=False)
    common = {
        "mesh": mesh,
        "reshard_after_forward": reshard_after_forward,
        "offload_policy": CPUOffloadPolicy() if cpu_offload else OffloadPolicy(),
    }
    layers = layers_of(model)
    inside = {module for layer in layers for module in layer.modules()}
    for layer in layers:
        _shard_norms(list(layer.modules()), mixed_precision, exact, common)
        fully_shard(layer, mp_policy=policy, **common)
    _shard_norms([module for module in model.modules() if module not in inside], mixed_precision, exact, common)
    fully_shard(model, mp_policy=policy, **common)
    return model


def _shard_norms(modules: list[nn.Module], apart: bool, policy: MixedPrecisionPolicy, common: dict) -> None:
    norms = [module for module in modules if type(module).__name__.endswith("Norm")]
    if apart and norms:
        fully_shard(norms, mp_policy=policy, **common)


def assert_sharded(model: nn.Module) -> None:
    """Raise unless every parameter is a shard.

    Accelerate without GPUs ignores an fsdp2 configuration and trains plain copies; nothing else tells.

    Raises:
        RuntimeError: names a parameter that is whole.
    """
    for name, parameter in model.named_parameters():
        if not isinstance(parameter, DTensor):
            raise RuntimeError(f"{name} is not sharded: FSDP2 was asked for and has not been applied.")


def fsdp2_plugin(
    layer_classes: list[str] | None = None, *, mixed_precision: bool = True, cpu_offload: bool = False
) -> FullyShardedDataParallelPlugin:
    """The plugin for `Accelerator(fsdp_plugin=...)`; `configs/accelerate/fsdp2.yaml` says the same to `accelerate launch`.

    Args:
        layer_classes (`list[str]`, *optional*): Names of the units, `["GptOssDecoderLayer"]` by default.
        mixed_precision (`bool`, *optional*, defaults to `True`): Compute in bfloat16, reduce in float32. Accelerate has one
            policy for all units, so the norms' weights are rounded to bfloat16 here; `shard_model` keeps them.
        cpu_offload (`bool`, *optional*, defaults to `False`): Keep the shards in host memory.

    Returns:
        `FullyShardedDataParallelPlugin`: Version 2, loading on one rank and sending shards, sharded (DCP) checkpoints.
    """
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32) if mixed_precision else None
    return FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=layer_classes or ["GptOssDecoderLayer"],
        reshard_after_forward=True,
        mixed_precision_policy=policy,
        cpu_offload=cpu_offload,
        cpu_ram_efficient_loading=True,
        state_dict_type="SHARDED_STATE_DICT",
        activation_checkpointing=False,
    )


def keep_float32_results(plugin: FullyShardedDataParallelPlugin) -> None:
    """Under `mixed_precision: bf16`, leave what the model returns as it is, and reduce gradients in float32.

    Accelerate's own policy for FSDP2 rounds every floating-point output to bfloat16, and with a fused head the outputs are
    log-probs: of -5.4 nothing smaller than 0.03 is left, which is noise in every ratio. Called before anything is sharded.

    Args:
        plugin ([`~accelerate.FullyShardedDataParallelPlugin`]): Of version 2.
    """
    policy = plugin.mixed_precision_policy
    if policy is not None:
        plugin.mixed_precision_policy = replace(policy, output_dtype=None, reduce_dtype=torch.float32)
