"""`experts_implementation="gptoss_fused"`: GPT-OSS experts with fused grouped products, and what belongs to them."""

import importlib
from typing import TYPE_CHECKING, Any

import torch
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

NAME = "gptoss_fused"

_LAZY = {
    "active_products": "compiled",
    "selftest": "checks",
    "set_experts_products": "compiled",
    "fused_elementwise": "elementwise",
    "fused_experts": "function",
    "fuse_expert_lora": "lora",
    "set_experts_token_chunk": "forward",
    "tune_experts": "tune",
}

__all__ = [
    "NAME",
    "active_products",
    "fuse_expert_lora",
    "fused_elementwise",
    "fused_experts",
    "register",
    "selftest",
    "set_experts_products",
    "set_experts_token_chunk",
    "tune_experts",
]

if TYPE_CHECKING:
    from .checks import selftest
    from .compiled import active_products, set_experts_products
    from .elementwise import fused_elementwise
    from .forward import set_experts_token_chunk
    from .function import fused_experts
    from .lora import fuse_expert_lora
    from .tune import tune_experts


def _forward(
    self: torch.nn.Module,
    hidden_states: torch.Tensor,
    router_indices: torch.Tensor | None = None,
    routing_weights: torch.Tensor | None = None,
) -> torch.Tensor:
    from .forward import gptoss_fused_experts_forward

    return gptoss_fused_experts_forward(self, hidden_states, router_indices, routing_weights)


def register() -> None:
    """Register `gptoss_fused` with transformers. Cheap: no kernel is loaded here."""
    ALL_EXPERTS_FUNCTIONS.register(NAME, _forward)


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_LAZY[name]}", __name__), name)
