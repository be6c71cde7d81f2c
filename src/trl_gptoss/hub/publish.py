"""A trained adapter as a model of its own: merged, saved as wanted, with a card, uploaded."""

import json
import logging
import os
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import torch
from huggingface_hub import CommitInfo, HfApi
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    Mxfp4Config,
    PretrainedConfig,
    PreTrainedTokenizerBase,
    ProcessorMixin,
)
from transformers.utils import find_adapter_config_file

from .adapters import base_state_dict, merge_adapters_, merged_weights
from .card import ModelCardFacts, hardware, write_card
from .mxfp4_files import mxfp4_loading_cost, save_pretrained_mxfp4
from .upload import MXFP4_FOLDER, clean_name, model_files, upload

if TYPE_CHECKING:
    from peft import PeftModel

logger = logging.getLogger(__name__)

SaveFormat = Literal["bf16", "mxfp4", "both"]
SAVE_FORMATS = ("bf16", "mxfp4", "both")
_ADAPTER_WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin")


def merge_and_push(
    model: "PeftModel | str | os.PathLike",
    repo_id: str,
    *,
    processing_class: PreTrainedTokenizerBase | ProcessorMixin | None = None,
    save_format: SaveFormat = "bf16",
    facts: ModelCardFacts | None = None,
    token: str | None = None,
    private: bool | None = None,
    revision: str | None = None,
    commit_message: str = "Upload merged model",
) -> CommitInfo:
    """Merge adapters into their base model and upload the result with a model card.

    Args:
        model (`PeftModel`, `str` or `os.PathLike`): with LoRA adapters, or the id or folder of a saved adapter. A model
            that is given is left as it is, bit for bit.
        repo_id (`str`): made if missing.
        processing_class (*optional*): tokenizer to upload; read from beside the adapter or its base model if not given.
        save_format (`str`, *optional*, defaults to `"bf16"`): `"bf16"` for the dtype of the base model, `"mxfp4"` for the
            layout of openai/gpt-oss, `"both"` for MXFP4 in a subfolder beside it.
        facts ([`ModelCardFacts`], *optional*): for the card; little is known without them.
        token (`str`, *optional*), private (`bool`, *optional*), revision (`str`, *optional*): as everywhere in the Hub.
        commit_message (`str`, *optional*, defaults to `"Upload merged model"`): of the commit.

    Returns:
        `CommitInfo`: of the upload.

    Raises:
        `ValueError`: no adapter, weights that are sharded, an adapter that is not LoRA, or a model that MXFP4 cannot hold.
    """
    check_save_format(save_format)
    if isinstance(model, str | os.PathLike):
        if not is_adapter(str(model)):
            raise ValueError(f"{model} has no adapter_config.json; a whole model is uploaded by trl-gptoss export")
    elif not _is_peft(model):
        raise ValueError(
            f"merge_and_push needs a PeftModel, found {type(model).__name__}, which has no adapters to merge"
        )
    repo_id = HfApi(token=token).create_repo(repo_id, private=private, exist_ok=True).repo_id
    if isinstance(model, str | os.PathLike):
        source = str(model)
        model = load_adapter(source)
        processing_class = load_tokenizer(source, model) if processing_class is None else processing_class
    if facts is None:
        base = model.get_base_model().config._name_or_path
        facts = ModelCardFacts(name=clean_name(repo_id), base_model=base or None, hardware=hardware())
    facts.repo_id, facts.kind = repo_id, "mxfp4" if save_format == "mxfp4" else "full"
    facts.has_mxfp4, facts.trained_sinks = save_format == "both", False
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "model"
        with merged_weights(model):
            save_model(model, folder, save_format)
        save_tokenizer(processing_class, folder)
        write_card(facts, folder, [token] if token else [])
        return upload(
            repo_id, model_files(folder), commit_message=commit_message, token=token, revision=revision, replace=True
        )


def save_model(model: nn.Module, folder: Path, save_format: SaveFormat) -> None:
    """Save the weights as they are now under the names of the base model.

    Args:
        model (`nn.Module`): with or without PEFT; adapters must be merged, see [`merged_weights`].
        folder (`Path`): must not exist yet, or be empty.
        save_format (`str`): see [`merge_and_push`].
    """
    base = model.get_base_model() if _is_peft(model) else model
    weights = base_state_dict(model)
    if save_format == "mxfp4":
        save_pretrained_mxfp4(base, folder, state_dict=weights)
        return
    base.save_pretrained(folder, state_dict=dict(weights))  # it empties the dict that it is given
    if save_format == "both":
        save_pretrained_mxfp4(base, folder / MXFP4_FOLDER, state_dict=weights)


def save_tokenizer(tokenizer: PreTrainedTokenizerBase | ProcessorMixin | None, folder: Path) -> None:
    """Save a tokenizer beside a model, and beside the quantised one in its subfolder."""
    if tokenizer is None:
        return
    tokenizer.save_pretrained(folder)
    if (folder / MXFP4_FOLDER).is_dir():
        tokenizer.save_pretrained(folder / MXFP4_FOLDER)


def replace_mxfp4(model: nn.Module, folder: Path, state_dict: dict[str, torch.Tensor] | None) -> None:
    """Write `folder` anew, complete or not at all; one from an earlier save is replaced."""
    fresh = folder.with_name(f"_{folder.name}_new")
    shutil.rmtree(fresh, ignore_errors=True)
    save_pretrained_mxfp4(model, fresh, state_dict=state_dict)
    shutil.rmtree(folder, ignore_errors=True)
    os.replace(fresh, folder)


def check_save_format(save_format: str, config: PretrainedConfig | None = None) -> None:
    """Raise `ValueError` for a format that does not exist, or that the model of `config` does not have."""
    if save_format not in SAVE_FORMATS:
        raise ValueError(f"save_format is {save_format!r}, expected one of {', '.join(map(repr, SAVE_FORMATS))}.")
    if save_format != "bf16" and config is not None:
        check_quantisable(f"save_format={save_format!r}", "save_format='bf16'", config)


def check_quantisable(setting: str, instead: str, config: PretrainedConfig) -> None:
    """Raise `ValueError`, which names `setting` and says to use `instead`, if MXFP4 cannot hold the model of `config`."""
    if config.get_text_config().model_type != "gpt_oss":
        raise ValueError(
            f"{setting} is the layout of openai/gpt-oss, but this is a model of type "
            f"{config.get_text_config().model_type!r}. Use {instead}."
        )
    for name, size in (("hidden_size", config.hidden_size), ("intermediate_size", config.intermediate_size)):
        if size % 32:
            raise ValueError(f"{setting} needs a {name} divisible by 32, found {size}. Use {instead}.")


def load_full(source: str, device: torch.device | str = "cpu") -> nn.Module:
    """A causal language model from the Hub or a folder, MXFP4 weights dequantised (with a line about what that costs)."""
    config = AutoConfig.from_pretrained(source)
    quantization = config.to_dict().get("quantization_config") or {}
    kwargs = {}
    if quantization.get("quant_method") == "mxfp4":
        logger.warning(mxfp4_loading_cost(config))
        kwargs["quantization_config"] = Mxfp4Config(dequantize=True)
    return AutoModelForCausalLM.from_pretrained(source, dtype="auto", device_map={"": torch.device(device)}, **kwargs)


def load_adapter(source: str, base: str | None = None, device: torch.device | str = "cpu") -> "PeftModel":
    """An adapter with its base model.

    Args:
        source (`str`): id or folder of the adapter.
        base (`str`, *optional*): id or folder of the base model; the one the adapter names if not given.
        device (`torch.device` or `str`, *optional*, defaults to `"cpu"`): Where both are loaded.

    Raises:
        `ValueError`: the adapter names no base model that exists, or does not fit it. `FileNotFoundError`: its folder holds no
        weights.
    """
    from peft import PeftConfig, PeftModel

    if os.path.isdir(source) and not any(os.path.isfile(os.path.join(source, name)) for name in _ADAPTER_WEIGHTS):
        raise FileNotFoundError(f"{source} holds an adapter_config.json, but no {_ADAPTER_WEIGHTS[0]}: save it again")
    try:
        config = PeftConfig.from_pretrained(source)
    except json.JSONDecodeError as error:
        raise ValueError(f"the adapter_config.json of {source} is no JSON ({error}): save it again") from None
    named = base or config.base_model_name_or_path
    if not named or (named.startswith(("/", ".", "~")) and not os.path.isdir(named)):
        raise ValueError(
            f"the adapter {source} was trained on {named!r}, which is not here; say where its base model is"
        )
    model = load_full(named, device)
    try:
        return PeftModel.from_pretrained(model, source, torch_device=str(device))
    except RuntimeError as error:  # torch's list of every weight that does not fit
        raise ValueError(f"the adapter {source} does not fit its base model {named}: {error}") from None


def load_tokenizer(source: str, model: nn.Module) -> PreTrainedTokenizerBase | None:
    """The tokenizer beside a model or an adapter, or that of the base model; `None` if neither has one."""
    for place in (source, model.config._name_or_path):
        try:
            return AutoTokenizer.from_pretrained(place)
        except (OSError, ValueError, KeyError):
            continue
    return None


def merge_to_full(
    source: str, base: str | None = None, device: torch.device | str = "cpu"
) -> tuple[nn.Module, PreTrainedTokenizerBase | None]:
    """An adapter merged into its base model for good, and the tokenizer."""
    model = load_adapter(source, base, device)
    tokenizer = load_tokenizer(source, model)
    return merge_adapters_(model), tokenizer


def is_adapter(source: str) -> bool:
    """Whether a folder or a repository, which may be in the cache only, holds an adapter."""
    return find_adapter_config_file(source) is not None


def _is_peft(model: nn.Module) -> bool:
    from accelerate.utils import is_peft_model

    return is_peft_model(model)
