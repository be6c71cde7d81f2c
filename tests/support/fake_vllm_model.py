"""vLLM's module tree for GPT-OSS in plain torch, filled from a transformers model: fused, transposed, packed, padded."""

import torch
from torch import nn


class _Linear(nn.Module):
    """As on CPU: after packing only `quant_method` knows the weight."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor, packed: bool) -> None:
        super().__init__()
        self.input_size = weight.shape[1]
        self.weight = nn.Parameter(torch.empty(0, dtype=weight.dtype) if packed else weight.clone())
        self.bias = nn.Parameter(bias.clone())
        self.kept = [weight.clone()]
        self.quant_method = self

    def apply(self, layer, x=None, bias=None):  # vLLM's quant_method.apply, not nn.Module's
        assert bias is None
        return x @ self.kept[0].T


class _Embedding(nn.Module):
    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        padding = torch.full((64, weight.shape[1]), torch.nan, dtype=weight.dtype)  # not initialised
        self.weight = nn.Parameter(torch.cat([weight, padding]))
        self.shard_indices = type("Indices", (), {"num_org_elements": len(weight)})


def fake_vllm_model(model: nn.Module, packed: bool) -> nn.Module:
    """The tensors of a transformers GPT-OSS in vLLM's layout."""
    root = nn.Module()
    root.model = nn.Module()
    root.model.embedding = _Embedding(model.model.embed_tokens.weight.data)
    root.model.norm = nn.Module()
    root.model.norm.weight = nn.Parameter(model.model.norm.weight.data.clone())
    root.lm_head = _Embedding(model.lm_head.weight.data)
    root.model.layers = nn.ModuleList(_layer(layer, packed) for layer in model.model.layers)
    return root


def _layer(layer: nn.Module, packed: bool) -> nn.Module:
    block, attention = nn.Module(), layer.self_attn
    block.attn = nn.Module()
    block.attn.sinks = nn.Parameter(attention.sinks.data.clone())
    projections = (attention.q_proj, attention.k_proj, attention.v_proj)
    block.attn.q_size, block.attn.kv_size = (p.out_features for p in projections[:2])
    block.attn.qkv_proj = _Linear(
        torch.cat([p.weight.data for p in projections]), torch.cat([p.bias.data for p in projections]), packed
    )
    block.attn.o_proj = _Linear(attention.o_proj.weight.data, attention.o_proj.bias.data, packed)
    block.mlp = nn.Module()
    block.mlp.router = _Linear(layer.mlp.router.weight.data, layer.mlp.router.bias.data, packed)
    experts = layer.mlp.experts
    block.mlp.experts = nn.Module()
    block.mlp.experts.routed_experts = held = nn.Module()
    # (experts, in, out) becomes (experts, out, in), padded with zeros.
    held.w13_weight = nn.Parameter(nn.functional.pad(experts.gate_up_proj.data.transpose(1, 2), (0, 5)))
    held.w2_weight = nn.Parameter(nn.functional.pad(experts.down_proj.data.transpose(1, 2), (0, 0, 0, 3)))
    held.w13_bias = nn.Parameter(experts.gate_up_proj_bias.data.clone())
    held.w2_bias = nn.Parameter(experts.down_proj_bias.data.clone())
    for name in ("input_layernorm", "post_attention_layernorm"):
        norm = nn.Module()
        norm.weight = nn.Parameter(getattr(layer, name).weight.data.clone())
        setattr(block, name, norm)
    return block
