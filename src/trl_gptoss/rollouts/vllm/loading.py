"""Inside the engine: new GPT-OSS weights into a model that is running, and what the model holds now.

Both work on vLLM's own module tree. The names are those of the checkpoint (`model.layers.0.self_attn.q_proj.weight`),
which are also the trainer's. Imports of vLLM stay inside of functions: this module is importable without it.
"""

import re
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn

from .checksums import checksum, total
from .versions import LoadingWay

Weights = Iterable[tuple[str, torch.Tensor]]

_EXPERTS = re.compile(r"(.*\.mlp\.experts)\.(gate_up_proj|gate_up_proj_bias|down_proj|down_proj_bias)")
_EXPERT_PARAMETERS = {
    "gate_up_proj": "w13_weight",
    "gate_up_proj_bias": "w13_bias",
    "down_proj": "w2_weight",
    "down_proj_bias": "w2_bias",
}
_EYE_ROWS = 1024  # rows of a packed weight that are read back at a time


# ---- writing ----


def load_policy(model: nn.Module, model_config: Any, weights: Weights, way: LoadingWay) -> None:
    """Load new weights in place.

    Args:
        model (`torch.nn.Module`): vLLM's model.
        model_config (`vllm.config.ModelConfig`): its configuration.
        weights (`Iterable[tuple[str, torch.Tensor]]`): all tensors of the checkpoint under their names there, consumed
            one at a time.
        way (`str`): see [`versions`].
    """
    with torch.no_grad():
        if way == "in_place":
            for name, tensor in weights:
                # Beyond the first tensor-parallel rank vLLM zeroes this bias in place: the trainer's own, if it is not sharded.
                model.load_weights([(name, tensor.clone() if name.endswith("down_proj_bias") else tensor)])
        else:
            _reload(model, model_config, weights)


def _reload(model: nn.Module, model_config: Any, weights: Weights) -> None:
    from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

    sinks: dict[str, torch.Tensor] = {}
    initialize_layerwise_reload(model)
    try:
        model.load_weights(_one_name_per_expert(weights, sinks))
    finally:  # layers that got nothing get their former weights back
        finalize_layerwise_reload(model, model_config)
    # vLLM copies sinks without a weight loader, so the reload does not notice them and restores the old ones.
    from vllm.distributed import get_tensor_model_parallel_rank

    for name, tensor in sinks.items():
        parameter = model.get_parameter(name.replace(".self_attn.", ".attn."))
        heads = parameter.shape[0]
        parameter.data.copy_(tensor.narrow(0, get_tensor_model_parallel_rank() * heads, heads))
    _pack_experts_again(model)


def _one_name_per_expert(weights: Weights, sinks: dict[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    for name, tensor in weights:
        match = _EXPERTS.fullmatch(name)
        if name.endswith(".sinks"):
            sinks[name] = tensor.clone()
        elif match is not None:
            # The reload keeps what it is given until a layer is complete, and the caller may free it before.
            for expert, part in enumerate(tensor):
                yield f"{match[1]}.{expert}.{match[2]}", part.clone()
        else:
            yield name, tensor.clone()


def _pack_experts_again(model: nn.Module) -> None:
    """CPU experts are packed once, when the kernel is built; a reload leaves them unpacked in the same storage."""
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
    from vllm._custom_ops import cpu_prepack_moe_weight

    for module in _routed_experts(model).values():
        for name in ("w13_weight", "w2_weight"):
            weight = module.get_parameter(name)
            kernel = module.quant_method.moe_kernel.fused_experts
            weight.data.copy_(cpu_prepack_moe_weight(weight.data.clone(), kernel.isa))


# ---- reading ----


def policy_checksums(model: nn.Module) -> dict[str, int]:
    """[`checksum`] of everything the engine holds of a GPT-OSS checkpoint, in the dtype in which it holds it.

    Returns:
        `dict[str, int]`: by the names of the checkpoint; experts as `....mlp.experts.{expert}.gate_up_proj`. With
        tensor parallelism of this rank's part only; the parts add up.
    """
    sums: dict[str, torch.Tensor] = {}
    decoder = model.model
    sums["model.embed_tokens.weight"] = checksum(_vocabulary(decoder.embedding))
    for number, layer in enumerate(decoder.layers):
        prefix = f"model.layers.{number}"
        sums |= _attention(layer.attn, f"{prefix}.self_attn")
        sums[f"{prefix}.mlp.router.weight"] = checksum(linear_weight(layer.mlp.router))
        sums[f"{prefix}.mlp.router.bias"] = checksum(layer.mlp.router.bias)
        sums[f"{prefix}.input_layernorm.weight"] = checksum(layer.input_layernorm.weight)
        sums[f"{prefix}.post_attention_layernorm.weight"] = checksum(layer.post_attention_layernorm.weight)
    sums["model.norm.weight"] = checksum(decoder.norm.weight)
    sums["lm_head.weight"] = checksum(_vocabulary(model.lm_head))
    result = {name: int(value) for name, value in sums.items()}
    for prefix, module in _routed_experts(model).items():
        for name, parameter in _EXPERT_PARAMETERS.items():
            values = checksum(module.get_parameter(parameter), rows=True).tolist()
            result |= {f"{prefix}.{expert}.{name}": value for expert, value in enumerate(values)}
    return result


def policy_dtypes(model: nn.Module) -> dict[str, str]:
    """The dtype in which the engine holds each tensor of the checkpoint, such as "bfloat16", by the names there."""
    dtypes = {}
    for name, parameter in model.named_parameters():
        dtype = str(parameter.dtype).removeprefix("torch.")
        head, dot, tail = name.rpartition(".")
        if ".mlp.experts." in name:
            [ours] = [ours for ours, theirs in _EXPERT_PARAMETERS.items() if theirs == tail]
            dtypes[re.sub(r"(\.mlp\.experts)\..*", r"\1", name) + "." + ours] = dtype
        elif head.endswith(".attn.qkv_proj"):
            block = head.removesuffix(".attn.qkv_proj")
            dtypes |= {f"{block}.self_attn.{letter}_proj.{tail}": dtype for letter in "qkv"}
        else:
            dtypes[name.replace(".attn.", ".self_attn.").replace(".embedding.", ".embed_tokens.")] = dtype
    return dtypes


def trainer_checksums(name: str, tensor: torch.Tensor, dtype: torch.dtype) -> dict[str, int]:
    """The checksums the engine should report for one tensor of the trainer.

    Args:
        name (`str`): name in the checkpoint.
        tensor (`torch.Tensor`): the whole tensor.
        dtype (`torch.dtype`): in which the engine holds it.
    """
    match = _EXPERTS.fullmatch(name)
    if match is None:
        return {name: int(checksum(tensor.to(dtype)))}
    values = [checksum(part.to(dtype)) for part in tensor]
    return {f"{match[1]}.{e}.{match[2]}": v for e, v in enumerate(torch.stack(values).tolist())}


def merge_ranks(parts: list[dict[str, int]]) -> dict[str, set[int]]:
    """Checksums that are acceptable for each name, from the reports of the tensor-parallel ranks of one engine.

    A tensor that is split adds up over the ranks; one that every rank holds is equal on all of them.
    """
    return {
        name: {total(part[name] for part in parts)}
        | ({parts[0][name]} if len({part[name] for part in parts}) == 1 else set())
        for name in parts[0]
    }


def linear_weight(layer: nn.Module) -> torch.Tensor:
    """(out, in) weight of a vLLM linear layer, also where only a packed copy of it is left (CPU).

    The packed copy is read back as the product with one-hot rows, which is exact.
    """
    if layer.weight.numel() > 0:
        return layer.weight.data
    size = layer.input_size_per_partition if "input_size_per_partition" in vars(layer) else layer.input_size
    dtype, device = layer.weight.dtype, layer.weight.device
    rows = []
    for start in range(0, size, _EYE_ROWS):
        count = min(_EYE_ROWS, size - start)
        eye = torch.zeros(count, size, dtype=dtype, device=device)
        eye[torch.arange(count), torch.arange(start, start + count)] = 1
        rows.append(layer.quant_method.apply(layer, eye, None))
    return torch.cat(rows).T


def _attention(attention: nn.Module, prefix: str) -> dict[str, torch.Tensor]:
    sizes = [attention.q_size, attention.kv_size, attention.kv_size]
    sums = {f"{prefix}.sinks": checksum(attention.sinks)}
    weights = linear_weight(attention.qkv_proj).split(sizes)
    biases = attention.qkv_proj.bias.split(sizes)
    for name, weight, bias in zip("qkv", weights, biases, strict=True):
        sums[f"{prefix}.{name}_proj.weight"] = checksum(weight)
        sums[f"{prefix}.{name}_proj.bias"] = checksum(bias)
    sums[f"{prefix}.o_proj.weight"] = checksum(linear_weight(attention.o_proj))
    sums[f"{prefix}.o_proj.bias"] = checksum(attention.o_proj.bias)
    return sums


def _vocabulary(layer: nn.Module) -> torch.Tensor:
    """The rows that stand for tokens; what pads their number is not initialised by every version."""
    indices = layer.shard_indices
    return layer.weight.data[: indices.num_org_elements]


def _routed_experts(model: nn.Module) -> dict[str, nn.Module]:
    """The modules that hold `w13_weight`, by the name of the experts in the checkpoint."""
    found = {}
    for name, module in model.named_modules():
        if "w13_weight" in module._parameters:
            found[re.sub(r"(\.mlp\.experts).*", r"\1", name)] = module
    return found
