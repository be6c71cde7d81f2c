"""RMSNorm and rotary embedding of GPT-OSS through liger-kernel: one kernel where the model runs five to ten.

liger-kernel's own `apply_liger_kernel_to_gpt_oss` rounds the normalised row before it multiplies by the weight, as
Llama does; GPT-OSS multiplies in fp32. `casting_mode="gemma"` with offset 0 is the GPT-OSS order, so we call the same
kernel with that.
"""

import functools
from collections.abc import Callable
from importlib import metadata

import torch
from torch import nn
from transformers.models.gpt_oss import modeling_gpt_oss
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssRMSNorm

_FIRST_LIGER = (0, 8)  # first version with the rotary embedding of GPT-OSS

Rotary = Callable[..., tuple[torch.Tensor, torch.Tensor]]


def _require_liger() -> None:
    try:
        version = metadata.version("liger-kernel")
    except metadata.PackageNotFoundError as error:
        raise ImportError(
            "fused_elementwise needs liger-kernel, which is not installed: pip install 'trl-gptoss[fast]'."
        ) from error
    if tuple(int(part) for part in version.split(".")[:2]) < _FIRST_LIGER:
        raise ImportError(
            f"fused_elementwise needs liger-kernel >= 0.8 and found {version}: pip install -U liger-kernel."
        )


class FusedRMSNorm(GptOssRMSNorm):
    """`GptOssRMSNorm` in one kernel, forward and backward; overrides `forward`. Same parameters and state dict."""

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        from liger_kernel.ops import LigerRMSNormFunction

        # not in place: the gradient may be shared with the residual branch
        return LigerRMSNormFunction.apply(hidden_states, self.weight, self.variance_epsilon, 0.0, "gemma", False, None)


@functools.cache
def _fused_rotary(original: Rotary) -> Rotary:
    from liger_kernel.transformers.rope import liger_rotary_pos_emb_gpt_oss

    def apply_rotary_pos_emb(
        q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, unsqueeze_dim: int = 1
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if q.is_cuda and unsqueeze_dim == 1:
            return liger_rotary_pos_emb_gpt_oss(q, k, cos, sin)
        return original(q, k, cos, sin, unsqueeze_dim)

    return apply_rotary_pos_emb


def fused_elementwise(model: nn.Module, device: torch.device | str | None = None) -> int:
    """Run RMSNorm and the rotary embedding of `model` through liger-kernel.

    The rotary embedding is a function of transformers' GPT-OSS module, not of a model: it is replaced for every GPT-OSS
    model of the process, for CUDA tensors only.

    Args:
        model (`torch.nn.Module`): A GPT-OSS model, with or without PEFT.
        device (`torch.device` or `str`, *optional*): Where the model will compute, if it is not there yet (a model that
            FSDP or DeepSpeed is going to place); by default where it is.

    Returns:
        `int`: Number of norms that now run fused; 0 when it was called before.

    Raises:
        `ImportError`: liger-kernel is missing or too old.
        `ValueError`: The model is not on a CUDA device, or has no GPT-OSS norms.
    """
    norms = [module for module in model.modules() if isinstance(module, GptOssRMSNorm)]
    if not norms:
        raise ValueError(f"{type(model).__name__} has no GPT-OSS norms; fused_elementwise is for GPT-OSS models.")
    kind = torch.device(norms[0].weight.device if device is None else device).type
    if kind != "cuda":
        raise ValueError(
            f"fused_elementwise runs Triton kernels and needs a CUDA device, but the model is on {kind!r}. On CPU leave "
            "it off: the norms are a small part of a step there."
        )
    _require_liger()
    plain = [norm for norm in norms if type(norm) is GptOssRMSNorm]
    for norm in plain:
        norm.__class__ = FusedRMSNorm
    if plain:
        current = modeling_gpt_oss.apply_rotary_pos_emb
        if current.__module__ != __name__:
            modeling_gpt_oss.apply_rotary_pos_emb = _fused_rotary(current)
    return len(plain)
