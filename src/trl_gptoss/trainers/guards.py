"""Refuse to train GPT-OSS with an implementation that computes another function or another gradient.

GPT-OSS adds a learned logit per head (the sink) to the denominator of its attention softmax, and its experts use a
clamped SwiGLU with alpha = 1.702. An implementation that does not know either still runs, and trains another model
without a word. docs/trainers.md says how each of these was checked.
"""

from accelerate.utils import is_peft_model
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from .loading import ATTENTION, EXPERTS, is_gpt_oss

_NO_SINK = (
    "it has no attention sinks: the sink logits are left out of the softmax, so the model computes another function"
)
_FROZEN_SINK = "it applies the sinks but returns no gradient for them, so they silently stay at their initial values"
_NO_PACKING = (
    "GPT-OSS gives no position_ids to the mask of this implementation, so the packed sequences attend to each other"
)

# Names are compared without an "@revision" or ":kernel" suffix.
_REFUSED_ATTENTION = {
    "sdpa": _NO_SINK,
    "flash_attention_2": "transformers drops the sinks when the flash kernel has no argument for them",
    "flash_attention_3": "transformers drops the sinks when the flash kernel has no argument for them",
    "kernels-community/flash-attn": _NO_SINK,
    "kernels-community/flash-attn2": _NO_SINK,
    "kernels-community/flash-attn3": _NO_SINK,
    "kernels-community/vllm-flash-attn3": _FROZEN_SINK,
    "paged|eager": "it is made for generation from a paged cache, not for training batches",
}
_TRUSTED_ATTENTION = {ATTENTION, "eager", "flex_attention", "flash_attention_4"}
_PADDED_ONLY = {"eager", "flex_attention"}

_REFUSED_EXPERTS = {
    "sonicmoe": "it computes a plain SwiGLU instead of GPT-OSS's clamped one (alpha 1.702, limit 7, up + 1)",
    "deepgemm": "it writes its products into plain buffers, so no gradient reaches the experts or what is below them",
    "batched_mm": "it gathers a copy of the expert weights for every token (133 MB per token and layer of the 120B), "
    "which no training batch fits into memory",
}


def check_attention(config: PretrainedConfig, *, packed: bool = False) -> None:
    """Refuse an attention that drops the sinks of GPT-OSS or their gradient. Other models pass.

    Args:
        config ([`~transformers.PretrainedConfig`]): the model's, after its attention was set.
        packed (`bool`, *optional*, defaults to `False`): whether several sequences share a row (packing,
            padding-free batches).

    Raises:
        ValueError: what was found, why it is wrong, and what to set.
    """
    if not is_gpt_oss(config):
        return
    found = config.get_text_config()._attn_implementation
    name = found.split("@")[0].split(":")[0]
    if name in _REFUSED_ATTENTION:
        reason = _REFUSED_ATTENTION[name]
    elif "/" in name:
        reason = "kernels from the Hub are not known to return the gradient of the sinks"
    elif packed and name in _PADDED_ONLY:
        reason = _NO_PACKING
    elif name not in _TRUSTED_ATTENTION:
        reason = "it is not known to apply the sinks and to return their gradient"
    else:
        return
    trusted = sorted(_TRUSTED_ATTENTION - _PADDED_ONLY if packed else _TRUSTED_ATTENTION)
    raise ValueError(
        f"attn_implementation={found!r} cannot train GPT-OSS{' on packed sequences' if packed else ''}: {reason}. "
        f"Load the model with attn_implementation={ATTENTION!r} (possible: {', '.join(trusted)})."
    )


def check_experts(model: PreTrainedModel) -> None:
    """Refuse an experts implementation that GPT-OSS cannot be trained with. Other models pass.

    Raises:
        ValueError: what was found, why it is wrong, and what to set.
    """
    if not is_gpt_oss(model.config):
        return
    found = model.config.get_text_config()._experts_implementation
    if found in _REFUSED_EXPERTS:
        raise ValueError(
            f"experts_implementation={found!r} cannot train GPT-OSS: {_REFUSED_EXPERTS[found]}. Load the model with "
            f"experts_implementation={EXPERTS!r} (or 'grouped_mm', 'eager')."
        )
    if model.use_kernels:
        raise ValueError(
            "use_kernels=True cannot train GPT-OSS here: it replaces the whole mixture of experts by a kernel from the "
            "Hub, so that experts_implementation has no effect, and nothing is known about that kernel's gradients. Load "
            f"the model without it; experts_implementation={EXPERTS!r} is the fast way to train the experts."
        )


def check_adapters(model: nn.Module) -> None:
    """Refuse adapters with which PEFT samples from another policy than it trains.

    Args:
        model (`nn.Module`): a policy, with or without PEFT.

    Raises:
        ValueError: prompt learning. With PEFT 0.21 and transformers 5.24 the logits of `generate` are not those of the forward, for
            GPT-OSS and for others (log-probs of a tiny model are 0.37 nats apart).
    """
    if not is_peft_model(model):
        return
    found = sorted({str(c.peft_type.value) for c in model.peft_config.values() if c.is_prompt_learning})
    if found:
        raise ValueError(
            f"{', '.join(found)} adds virtual tokens, which PEFT's generate() treats otherwise than its forward: rollouts would come "
            "from another policy than the one that is trained. Use LoRA or another adapter without virtual tokens."
        )


def check_model(model: PreTrainedModel, *, packed: bool = False) -> None:
    """[`check_attention`] and [`check_experts`] of one model."""
    check_attention(model.config, packed=packed)
    check_experts(model)
