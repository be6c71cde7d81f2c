"""The function transformers calls for `experts_implementation="gptoss_fused"`."""

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

from .function import fused_experts
from .lora import low_rank_factors, may_be_adapted, plain_parameter
from .params import Activation, ExpertParams

CHUNK_ATTRIBUTE = "experts_token_chunk"


def gptoss_fused_experts_forward(
    self: nn.Module,
    hidden_states: torch.Tensor,
    router_indices: torch.Tensor | None = None,
    routing_weights: torch.Tensor | None = None,
) -> torch.Tensor:
    """Forward of `GptOssExperts`.

    Args:
        hidden_states (`torch.Tensor` of shape `(tokens, hidden_size)`): Input of the experts.
        router_indices (`torch.Tensor` of shape `(tokens, top_k)`, integer): Chosen experts. Under expert parallelism
            foreign experts carry an index of `num_experts` and are skipped.
        routing_weights (`torch.Tensor` of shape `(tokens, top_k)`): Weights of the chosen experts.

    Returns:
        `torch.Tensor` of shape `(tokens, hidden_size)` in the dtype of `hidden_states`.
    """
    if not isinstance(self, GptOssExperts):
        raise TypeError(
            f"experts_implementation='gptoss_fused' computes the clamped SwiGLU of GPT-OSS and got a "
            f"{type(self).__name__}. Use 'grouped_mm' for this model."
        )
    device = hidden_states.device.type
    names = ("gate_up_proj", "gate_up_proj_bias", "down_proj", "down_proj_bias")
    adapted = may_be_adapted(self)  # asked once: six look-ups would be a tenth of a decoding step
    tensors = [_local(plain_parameter(self, name) if adapted else self._parameters[name]) for name in names]
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else tensors[0].dtype
    params = ExpertParams(*(t.to(dtype).contiguous() for t in tensors))
    if adapted:
        factors = [*low_rank_factors(self, "gate_up_proj", dtype), *low_rank_factors(self, "down_proj", dtype)]
        params = ExpertParams(*params[:4], *factors)
    chunk = vars(self.config).get(CHUNK_ATTRIBUTE) or 0
    activation = Activation(self.alpha, self.limit)
    out = fused_experts(hidden_states.to(dtype), router_indices, routing_weights, params, activation, chunk)
    return out.to(hidden_states.dtype)


def _local(parameter: torch.Tensor) -> torch.Tensor:
    return parameter.full_tensor() if isinstance(parameter, DTensor) else parameter


def set_experts_token_chunk(model: nn.Module, tokens: int | None) -> None:
    """Tile the experts of `model` over the tokens: less memory, one more first product in backward.

    Writes `config.experts_token_chunk`, which `gptoss_fused` reads. With tiles nothing but the layer's input lives
    between forward and backward, and the peak is that of one tile; gradients of trainable experts are summed in fp32
    buffers of the size of the experts.

    Args:
        model (`torch.nn.Module`): A model with GPT-OSS experts.
        tokens (`int` or `None`): Tokens per tile; `None` switches tiling off.
    """
    if tokens is not None and (type(tokens) is not int or tokens < 1):
        raise ValueError(
            f"experts_token_chunk is {tokens!r}; it must be a positive number of tokens, or None for off."
        )
    experts = [module for module in model.modules() if isinstance(module, GptOssExperts)]
    if not experts:
        raise ValueError(f"{type(model).__name__} has no GPT-OSS experts to tile.")
    for module in experts:
        setattr(module.config, CHUNK_ATTRIBUTE, tokens)
