"""Adapters of GPT-OSS: sinks trained beside LoRA, and LoRA merged into the weights, for good or for a while.

A sink is one number per head, which LoRA cannot factor. It is trained itself, in place, and its value goes into the adapter
file under its own name. PEFT loads every tensor of an adapter file that the model knows (its `bias="all"` rests on that),
so that plain PEFT restores the sinks, too. What PEFT cannot do is undo it: with the adapter disabled the trained sinks stay.

Merging adds the low-rank update in float32 and rounds once. PEFT's own `merge` rounds the update to the dtype of the weight
first, which costs a second rounding in bfloat16.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from accelerate.utils import is_peft_model
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.tensor import DTensor

if TYPE_CHECKING:
    from peft import PeftModel
    from peft.tuners.lora import LoraLayer

_SINKS = ".self_attn.sinks"


def sink_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """The sinks of a GPT-OSS model by name; empty for other models."""
    return {name: parameter for name, parameter in model.named_parameters() if name.endswith(_SINKS)}


def train_sinks(model: "PeftModel") -> int:
    """Let the sinks of a PEFT model be trained along with its adapters.

    Call it before the optimizer is made, and save with `adapter_sinks` afterwards (the trainers of this package do both with
    `train_sinks=True`).

    They become float32, as PEFT's own factors are: a bfloat16 number near 1 does not move by steps of less than 0.004.
    Loading the adapter rounds them to the dtype of the base model.

    Args:
        model (`PeftModel`): with a GPT-OSS base model.

    Returns:
        `int`: how many numbers became trainable, layers times heads.

    Raises:
        `ValueError`: the model has no sinks.
    """
    sinks = sink_parameters(model)
    if not sinks:
        raise ValueError(
            "train_sinks: the model has no attention sinks (no parameter named '*.self_attn.sinks'); it is for GPT-OSS"
        )
    for parameter in sinks.values():
        parameter.data = parameter.data.to(torch.promote_types(parameter.dtype, torch.float32))
        parameter.requires_grad_(True)
    return sum(parameter.numel() for parameter in sinks.values())


def adapter_sinks(
    model: "PeftModel", directory: str | os.PathLike, state_dict: dict[str, torch.Tensor] | None = None
) -> None:
    """Add the trained sinks to an adapter that `save_pretrained` has written. Does nothing if none is trainable.

    Args:
        model (`PeftModel`): as it was saved.
        directory (`str` or `os.PathLike`): holds `adapter_model.safetensors`.
        state_dict (`dict[str, torch.Tensor]`, *optional*): the gathered weights of a sharded model.

    Raises:
        `ValueError`: the sinks are sharded and no `state_dict` was given.
    """
    trained = {name: p for name, p in sink_parameters(model).items() if p.requires_grad}
    if not trained:
        return
    values = {}
    for name, parameter in trained.items():
        tensor = parameter if state_dict is None else state_dict[name]
        if isinstance(tensor, DTensor) or tensor.numel() == 0:
            raise ValueError(
                f"{name} is sharded ({type(tensor).__name__}); pass state_dict=accelerator.get_state_dict(model)"
            )
        values[name] = tensor.detach().to("cpu", copy=True).contiguous()
    file = Path(directory) / "adapter_model.safetensors"
    with safe_open(file, framework="pt") as opened:
        metadata = opened.metadata()
    partial = file.with_suffix(".partial")
    save_file(load_file(file) | values, partial, metadata=metadata)
    os.replace(partial, file)


@contextmanager
def merged_weights(
    model: nn.Module, transform: Callable[[str, torch.Tensor], torch.Tensor] | None = None
) -> Iterator[None]:
    """Inside, the active adapters are merged into the weights; afterwards every weight is the former one, bit for bit.

    Args:
        model (`torch.nn.Module`): with or without PEFT; whole weights (not sharded). Needs memory for the weights that
            change once more, on the device they are on.
        transform (`Callable[[str, torch.Tensor], torch.Tensor]`, *optional*): called with the name (as in the base model)
            and the merged value of every parameter; what it returns takes its place. Returning its argument changes
            nothing; changing it in place is an error of the caller.

    Raises:
        `ValueError`: sharded weights, or an adapter that is not LoRA.
    """
    _check_whole(model)
    layers = _adapted_layers(model)
    originals: list[tuple[nn.Parameter, torch.Tensor]] = []
    try:
        for layer in layers:
            originals += [(parameter, parameter.data) for parameter in _changed_by(layer)]
            _merge(layer)
        if transform is not None:
            for name, parameter in model.named_parameters():
                if "lora_" in name:
                    continue
                value = transform(base_name(name), parameter.data)
                originals.append((parameter, parameter.data))
                parameter.data = value
        yield
    finally:
        for parameter, data in reversed(originals):
            parameter.data = data
        for layer in layers:
            layer.merged_adapters.clear()


def merge_adapters_(model: "PeftModel") -> nn.Module:
    """Merge the active adapters for good, rounding once, and take PEFT's layers away.

    Args:
        model (`PeftModel`): changed in place. Weights that are not adapted keep their bits.

    Returns:
        `nn.Module`: the base model with the merged weights.

    Raises:
        `ValueError`: a model without adapters, sharded weights, or an adapter that is not LoRA.
    """
    if not is_peft_model(model):
        raise ValueError(
            f"merge_adapters_ needs a PeftModel, found {type(model).__name__}, which has no adapters to merge"
        )
    _check_whole(model)
    for layer in _adapted_layers(model):
        _merge(layer)
    return model.unload()


def base_name(name: str) -> str:
    """The name that a weight of a PEFT model has in the base model."""
    name = name.removeprefix("base_model.model.").replace(".base_layer", "").replace(".original_module", "")
    head, found, tail = name.partition(".modules_to_save.")  # then the name of the adapter
    return f"{head}.{tail.partition('.')[2]}" if found else name


def base_state_dict(model: nn.Module) -> dict[str, torch.Tensor]:
    """The weights under the names of the base model, without those of adapters; for a model without PEFT all of them.

    Of modules that are trained whole (`modules_to_save`) those of the active adapter; the original ones if none is active.
    """
    used = {}
    for name, module in model.named_modules():
        if any(child == "modules_to_save" for child, _ in module.named_children()):
            active = [a for a in module.active_adapters if a in module.modules_to_save and not module.disable_adapters]
            used[f"{name}."] = f"modules_to_save.{active[0]}." if active else "original_module."

    def is_base(name: str) -> bool:
        wrapper = next((prefix for prefix in used if name.startswith(prefix)), None)
        return "lora_" not in name if wrapper is None else name.startswith(wrapper + used[wrapper])

    return {base_name(name): tensor for name, tensor in model.state_dict().items() if is_base(name)}


def _check_whole(model: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        if isinstance(parameter, DTensor) or parameter.numel() == 0:
            raise ValueError(
                f"merging needs whole weights, but {name} is sharded ({type(parameter).__name__}, "
                f"{parameter.numel()} elements here); save the adapter and merge it in one process: trl-gptoss export"
            )


def _adapted_layers(model: nn.Module) -> "list[LoraLayer]":
    """Every layer with an active adapter that is not merged yet."""
    if not any("lora_" in name or ".base_layer" in name for name, _ in model.named_parameters()):
        return []  # PEFT may not even be installed
    from peft.tuners.lora import LoraLayer
    from peft.tuners.tuners_utils import BaseTunerLayer

    layers = [(name, module) for name, module in model.named_modules() if isinstance(module, BaseTunerLayer)]
    for name, module in layers:
        if not isinstance(module, LoraLayer):
            raise ValueError(
                f"only LoRA can be merged here, found {type(module).__name__} at {name}; merge it with PEFT"
            )
    return [module for _, module in layers if not module.merged and not module.disable_adapters]


def _changed_by(layer: "LoraLayer") -> list[nn.Parameter]:
    """The parameters of the base layer that merging changes."""
    from peft.tuners.lora import ParamWrapper

    if isinstance(layer, ParamWrapper):
        return [layer.get_param()]
    base = layer.get_base_layer()
    biases = any(layer.lora_bias.get(name) for name in layer.active_adapters)
    return [base.weight, base.bias] if biases else [base.weight]


def _merge(layer: "LoraLayer") -> None:
    """PEFT's merge on float32 copies, rounded once."""
    changed = _changed_by(layer)
    factors = [p for name, p in layer.named_parameters() if "lora_" in name and "base_layer" not in name]
    kept = [(p, p.data) for p in factors]
    dtypes = [p.dtype for p in changed]
    with torch.no_grad():
        try:
            for p in (*changed, *factors):
                p.data = p.data.to(torch.promote_types(p.dtype, torch.float32), copy=True)
            layer.merge()
        finally:
            for p, data in kept:
                p.data = data
            for p, dtype in zip(changed, dtypes):
                p.data = p.data.to(dtype)
