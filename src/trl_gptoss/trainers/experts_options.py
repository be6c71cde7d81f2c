"""What a trainer's configuration says about the experts and the norms of GPT-OSS, applied to a model.

All of it changes how a model computes and none of it its parameters, so it goes before the optimizer and before any
sharding. The reference model of a KL term gets the same, or the term would measure the difference in arithmetic.
"""

import torch
from accelerate.utils import is_peft_model
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from ..experts import fuse_expert_lora, fused_elementwise, set_experts_token_chunk
from ..routing import set_router_options
from .config import GptOssGRPOConfig
from .loading import EXPERTS, is_gpt_oss


def check_experts_options(args: GptOssGRPOConfig, config: PretrainedConfig, implementation: str | None) -> None:
    """Refuse options that would have no effect on this model.

    Args:
        args ([`GptOssGRPOConfig`]): with `router_dtype`, `router_deterministic_top_k`, `experts_token_chunk` and
            `fused_elementwise`.
        config ([`~transformers.PretrainedConfig`]): the model's.
        implementation (`str` or `None`): the model's `experts_implementation`.

    Raises:
        ValueError: a model that is not GPT-OSS, or `experts_token_chunk` with other experts than `gptoss_fused`.
    """
    values = {
        name: getattr(args, name)
        for name in ("router_dtype", "router_deterministic_top_k", "experts_token_chunk", "fused_elementwise")
    }
    chosen = {name: value for name, value in values.items() if value}
    if chosen and not is_gpt_oss(config):
        found = ", ".join(f"{name}={value!r}" for name, value in chosen.items())
        raise ValueError(
            f"{found} changes how GPT-OSS computes and would have no effect on this model of type "
            f"{config.get_text_config().model_type!r}. Remove it from the configuration."
        )
    if args.experts_token_chunk is not None and implementation != EXPERTS:
        raise ValueError(
            f"experts_token_chunk={args.experts_token_chunk} tiles experts_implementation={EXPERTS!r} and would have no "
            f"effect on {implementation!r}. Load the model with experts_implementation={EXPERTS!r}, or remove it."
        )


def apply_experts_options(args: GptOssGRPOConfig, model: nn.Module, device: torch.device) -> None:
    """Set the options on one model; what is not set is left as the model has it.

    Args:
        args ([`GptOssGRPOConfig`]): checked by [`check_experts_options`].
        model (`nn.Module`): a GPT-OSS model, with or without PEFT.
        device (`torch.device`): where it will compute; under FSDP and ZeRO it is not there yet.
    """
    if args.router_dtype is not None or args.router_deterministic_top_k:
        set_router_options(model, router_dtype=args.router_dtype, deterministic_top_k=args.router_deterministic_top_k)
    if args.experts_token_chunk is not None:
        set_experts_token_chunk(model, args.experts_token_chunk)
    if args.fused_elementwise:
        fused_elementwise(model, device)


def prepare_experts(
    args: GptOssGRPOConfig, policy: nn.Module, reference: PreTrainedModel | None, device: torch.device
) -> None:
    """The options on policy and reference, and the adapters of the policy's experts beside the grouped product.

    Args:
        args ([`GptOssGRPOConfig`]): the trainer's.
        policy (`nn.Module`): the model that is trained, with or without PEFT. Other models than GPT-OSS pass if no
            option is set.
        reference ([`~transformers.PreTrainedModel`] or `None`): the model of the KL term, unwrapped.
        device (`torch.device`): where both will compute.
    """
    base = policy.get_base_model() if is_peft_model(policy) else policy
    if not is_gpt_oss(base.config):
        return
    implementation = base.config.get_text_config()._experts_implementation
    check_experts_options(args, base.config, implementation)
    apply_experts_options(args, policy, device)
    if implementation == EXPERTS and is_peft_model(policy):
        fuse_expert_lora(policy)
    if reference is not None:
        # TRL loads it with the policy's attention, but with the default experts if the policy was handed over
        reference.set_experts_implementation(implementation)
        apply_experts_options(args, reference, device)
