"""Checkpoints like openai/gpt-oss, the experts in MXFP4 and everything else as it is: saving them, the cost of loading."""

import copy
import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path

import torch
from huggingface_hub import StateDictSplit, split_torch_state_dict_into_shards
from safetensors.torch import save_file
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import GptOssConfig, GptOssForCausalLM, Mxfp4Config
from transformers.utils import CONFIG_NAME, SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

from ..experts.mxfp4 import BLOCK_SIZE, ScaleRule, quantize_mxfp4

# What openai/gpt-oss's own config.json lists; vLLM and transformers quantise nothing that matches these.
MODULES_TO_NOT_CONVERT = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
_QUANTISED = (".mlp.experts.gate_up_proj", ".mlp.experts.down_proj")


def save_pretrained_mxfp4(
    model: GptOssForCausalLM,
    directory: str | os.PathLike,
    *,
    state_dict: Mapping[str, torch.Tensor] | None = None,
    dtype: torch.dtype | None = None,
    scale_rule: ScaleRule = "best",
    max_shard_size: int | str = "5GB",
) -> Path:
    """Save a GPT-OSS model in the layout of openai/gpt-oss: `*_blocks` and `*_scales` for the experts' matrices.

    Stock transformers, vLLM and others that read openai/gpt-oss read it; none needs this package. The model is left as it
    is. Weights are quantised on the device they are on, one shard at a time: beyond the model this needs host memory for
    one shard and 90 MiB for the quantiser. The directory appears complete or not at all. In a distributed run call it on
    one process, with the full `state_dict`.

    Args:
        model (`GptOssForCausalLM`): unwrapped, adapters merged.
        directory (`str` or `os.PathLike`): must not exist yet, or be empty. Holds config.json, generation_config.json and
            safetensors afterwards; save the tokenizer into it yourself.
        state_dict (`Mapping[str, torch.Tensor]`, *optional*): the full weights, gathered from a sharded model.
        dtype (`torch.dtype`, *optional*, defaults to that of the model): of all that is not quantised, biases of the
            experts included. openai/gpt-oss has bfloat16. The experts are quantised from the weights as they are.
        scale_rule (`str`, *optional*, defaults to `"best"`): see [`~trl_gptoss.experts.mxfp4.quantize_mxfp4`].
        max_shard_size (`int` or `str`, *optional*, defaults to `"5GB"`): of one safetensors file.

    Returns:
        `Path`: the directory.

    Raises:
        `TypeError`: not a `GptOssForCausalLM`, or weights of a dtype that cannot be quantised. `ValueError`: sizes that
        MXFP4 cannot hold, weights that are missing, sharded, on the meta device, NaN or infinite. `FileExistsError`: the
        directory has files in it.
    """
    _check_model(model)
    weights = dict(model.state_dict() if state_dict is None else state_dict)
    _check_weights(weights, model.config)
    if model.config.tie_word_embeddings:
        del weights["lm_head.weight"]
    dtype = model.dtype if dtype is None else dtype
    target = Path(directory).resolve()
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise FileExistsError(f"{target} exists and is not an empty directory; remove it or choose another one")
    # Beside the target, so that the rename stays inside one file system. Not tempfile: its directories are private (0700).
    prefix = f".{target.name}.partial-"
    _remove_abandoned(target.parent, prefix)
    partial = target.parent / f"{prefix}{os.getpid()}"
    partial.mkdir(parents=True)
    try:
        _save_configs(model, dtype, partial)
        _save_weights(weights, dtype, scale_rule, max_shard_size, partial)
        os.replace(partial, target)
    finally:
        shutil.rmtree(partial, ignore_errors=True)  # gone already where all went well
    return target


def _remove_abandoned(parent: Path, prefix: str) -> None:
    """What processes that were killed in the middle of such a save have left: as large as a checkpoint."""
    for path in parent.iterdir() if parent.is_dir() else ():
        if not path.name.startswith(prefix):
            continue
        try:
            os.kill(int(path.name.removeprefix(prefix)), 0)
        except ProcessLookupError:
            shutil.rmtree(path, ignore_errors=True)
        except (ValueError, PermissionError):
            continue  # not one of ours, or of a process that runs for somebody else


def mxfp4_loading_cost(config: GptOssConfig, dtype: torch.dtype = torch.bfloat16) -> str:
    """What it takes to load an MXFP4 checkpoint of this configuration dequantised, as a sentence for a log.

    Args:
        config (`GptOssConfig`): of the checkpoint; nothing is loaded.
        dtype (`torch.dtype`, *optional*, defaults to `torch.bfloat16`): to load in.

    Returns:
        `str`: bytes in the checkpoint, bytes in memory, and the passing need of transformers' conversion on top. That is
        3.3 to 3.8 times the largest matrix of the experts, measured on a CPU (docs/mxfp4.md); 4 is said here.
    """
    with torch.device("meta"):
        weights = GptOssForCausalLM(copy.deepcopy(config)).state_dict()
    if config.tie_word_embeddings:
        del weights["lm_head.weight"]
    total = sum(tensor.numel() for tensor in weights.values())
    packed = _plan_shards(weights, torch.bfloat16, "5GB").metadata["total_size"]
    largest = max(tensor.numel() for name, tensor in weights.items() if name.endswith(_QUANTISED))
    gib = dtype.itemsize / 2**30
    return (
        f"MXFP4 weights are dequantised to be trained: {packed / 2**30:.1f} GiB in the checkpoint become "
        f"{total * gib:.1f} GiB in {str(dtype).removeprefix('torch.')} ({total / 1e9:.1f} B parameters), and loading takes "
        f"up to {4 * largest * gib:.1f} GiB more for a moment. Gradients and optimizer states come on top."
    )


def _check_model(model: nn.Module) -> None:
    if not isinstance(model, GptOssForCausalLM):
        raise TypeError(
            f"expected a GptOssForCausalLM, found {type(model).__name__}; unwrap the model "
            "(`accelerator.unwrap_model(model)`) and merge adapters (`model.merge_and_unload()`) first"
        )
    for name in ("hidden_size", "intermediate_size"):
        size = model.config.to_dict()[name]
        if size % BLOCK_SIZE:
            raise ValueError(
                f"MXFP4 needs a {name} divisible by {BLOCK_SIZE}, found {size}; save this model unquantised"
            )


def _check_weights(weights: Mapping[str, torch.Tensor], config: GptOssConfig) -> None:
    """Names, shapes and storage of the weights against those of a fresh model of this configuration."""
    with torch.device("meta"):
        expected = GptOssForCausalLM(copy.deepcopy(config)).state_dict()
    missing, unknown = sorted(expected.keys() - weights.keys()), sorted(weights.keys() - expected.keys())
    if missing or unknown:
        raise ValueError(
            f"these are not the weights of a GPT-OSS model: {len(missing)} missing {missing[:3]}, {len(unknown)} unknown "
            f"{unknown[:3]}; merge adapters and load MXFP4 checkpoints with `Mxfp4Config(dequantize=True)` first"
        )
    for name, tensor in weights.items():
        if isinstance(tensor, DTensor) or tensor.shape != expected[name].shape:
            raise ValueError(
                f"expected the whole of {name}, {tuple(expected[name].shape)}, found a {type(tensor).__name__} "
                f"{tuple(tensor.shape)}; gather sharded weights and pass them as "
                "`state_dict=accelerator.get_state_dict(model)`"
            )
        if tensor.is_meta:
            raise ValueError(f"{name} is on the meta device and has no values; load the model's weights first")


def _save_configs(model: GptOssForCausalLM, dtype: torch.dtype, directory: Path) -> None:
    config = copy.deepcopy(model.config)
    config.architectures = ["GptOssForCausalLM"]
    config.dtype = str(dtype).removeprefix("torch.")
    config.quantization_config = Mxfp4Config(modules_to_not_convert=MODULES_TO_NOT_CONVERT)
    config.save_pretrained(directory)
    model.generation_config.save_pretrained(directory)


def _save_weights(
    weights: dict[str, torch.Tensor],
    dtype: torch.dtype,
    scale_rule: ScaleRule,
    max_shard_size: int | str,
    directory: Path,
) -> None:
    split = _plan_shards(weights, dtype, max_shard_size)
    packed: dict[str, torch.Tensor] = {}
    for filename, names in split.filename_to_tensors.items():
        for name in names:
            if name in packed:
                continue
            source = name.removesuffix("_blocks").removesuffix("_scales")
            packed |= _pack(source, weights[source], dtype, scale_rule)
        # The blocks and the scales of one matrix may be in different shards: what is not of this one stays in `packed`.
        file = directory / filename
        save_file({name: packed.pop(name) for name in names}, file, metadata={"format": "pt"})
        # safetensors makes its files private (0600), which others on a shared disk trip over.
        shutil.copymode(directory / CONFIG_NAME, file)
    if split.is_sharded:
        index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
        (directory / SAFE_WEIGHTS_INDEX_NAME).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")


def _plan_shards(weights: Mapping[str, torch.Tensor], dtype: torch.dtype, max_shard_size: int | str) -> StateDictSplit:
    """Which tensor goes into which file, from the shapes alone: nothing is quantised yet."""
    planned: dict[str, torch.Tensor] = {}
    for name, tensor in weights.items():
        if name.endswith(_QUANTISED):
            experts, columns, rows = tensor.shape
            shape = (experts, rows, columns // BLOCK_SIZE)
            planned[f"{name}_blocks"] = torch.empty(*shape, BLOCK_SIZE // 2, dtype=torch.uint8, device="meta")
            planned[f"{name}_scales"] = torch.empty(shape, dtype=torch.uint8, device="meta")
        else:
            planned[name] = torch.empty_like(tensor, dtype=dtype, device="meta")
    pattern = SAFE_WEIGHTS_NAME.replace(".safetensors", "{suffix}.safetensors")
    return split_torch_state_dict_into_shards(planned, filename_pattern=pattern, max_shard_size=max_shard_size)


def _pack(name: str, tensor: torch.Tensor, dtype: torch.dtype, scale_rule: ScaleRule) -> dict[str, torch.Tensor]:
    """The tensors on the CPU that one weight becomes in the checkpoint."""
    if not name.endswith(_QUANTISED):
        return {name: tensor.detach().to("cpu", dtype).contiguous()}
    try:
        # transformers holds `(E, in, out)`; the checkpoint has the rows of the output with blocks along the input.
        blocks, scales = quantize_mxfp4(tensor.transpose(1, 2), scale_rule=scale_rule)
    except (TypeError, ValueError) as error:
        raise type(error)(f"{name}: {error}") from error
    return {f"{name}_blocks": blocks.cpu(), f"{name}_scales": scales.cpu()}
