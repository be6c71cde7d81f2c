"""How GPT-OSS is loaded from a model id: bf16, attention with sink gradients, fused experts, trainable weights."""

import logging
from typing import Any

import torch
from accelerate import PartialState
from torch import nn
from transformers import AutoConfig, AutoModelForSequenceClassification, Mxfp4Config, PretrainedConfig
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ..hub.mxfp4_files import mxfp4_loading_cost

logger = logging.getLogger(__name__)

ATTENTION = "sink_fa3"
EXPERTS = "gptoss_fused"


def is_gpt_oss(config: PretrainedConfig) -> bool:
    """Whether this is the configuration of a GPT-OSS model."""
    return config.get_text_config().model_type == "gpt_oss"


def model_init_kwargs(model_id: str, given: dict[str, Any] | None, trust_remote_code: bool) -> dict[str, Any] | None:
    """Keyword arguments for `from_pretrained`; what the user gave goes before what is filled in.

    Args:
        model_id (`str`): Hub id or directory.
        given (`dict` or `None`): `model_init_kwargs` of the user.
        trust_remote_code (`bool`): passed on to the configuration's loading.

    Returns:
        `dict` or `None`: for GPT-OSS `dtype=torch.bfloat16`, the attention and experts of this package where they are
        registered, and MXFP4 weights dequantised (they cannot be trained as they are). `given` for other models.
    """
    kwargs = dict(given or {})
    config = AutoConfig.from_pretrained(model_id, revision=kwargs.get("revision"), trust_remote_code=trust_remote_code)
    if not is_gpt_oss(config):
        return given
    kwargs.setdefault("dtype", torch.bfloat16)
    if ATTENTION in ALL_ATTENTION_FUNCTIONS:
        kwargs.setdefault("attn_implementation", ATTENTION)
    if EXPERTS in ALL_EXPERTS_FUNCTIONS:
        kwargs.setdefault("experts_implementation", EXPERTS)
    quantization = config.to_dict().get("quantization_config")
    if quantization is not None and quantization.get("quant_method") == "mxfp4":
        kwargs.setdefault("quantization_config", Mxfp4Config(dequantize=True))
        if PartialState().is_main_process:
            logger.warning(mxfp4_loading_cost(config, _dtype(kwargs["dtype"])))
    return kwargs


def _dtype(given: torch.dtype | str) -> torch.dtype:
    """The dtype that a keyword argument stands for; "auto" is what the checkpoint has beside its experts, bfloat16."""
    if isinstance(given, torch.dtype):
        return given
    return torch.bfloat16 if given == "auto" else getattr(torch, given)


def load_reward_models(reward_funcs: Any, given: dict[str, Any] | None, trust_remote_code: bool) -> list[Any]:
    """Reward functions with model ids replaced by models.

    TRL loads them with the `model_init_kwargs` of the policy, which by then ask for GPT-OSS's attention and experts; a
    reward model of another family must not get those.

    Args:
        reward_funcs (`RewardFunc`, `list[RewardFunc]` or `None`): as given to the trainer.
        given (`dict` or `None`): `model_init_kwargs` of the user.
        trust_remote_code (`bool`): for reward models with code of their own.
    """
    if reward_funcs is None:
        return []
    functions = reward_funcs if isinstance(reward_funcs, list) else [reward_funcs]
    kwargs = {"trust_remote_code": trust_remote_code, **(given or {})}

    def load(model_id: str) -> nn.Module:
        return AutoModelForSequenceClassification.from_pretrained(model_id, num_labels=1, **kwargs)

    return [load(f) if isinstance(f, str) else f for f in functions]
