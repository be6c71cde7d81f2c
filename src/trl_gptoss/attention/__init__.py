"""`attn_implementation="sink_fa3"`: attention sinks with exact gradients, wherever transformers calls attention.

`interface` and `mask` face transformers, `varlen` turns what they hear into cumulative lengths, `ops` holds the operators
and `sink_attention`, `backends` picks one of `hopper`, `fa4`, `fa2` and `reference`.
"""

import importlib
from typing import TYPE_CHECKING, Any

NAME = "sink_fa3"

_LAZY = {
    "active_backend": "backends",
    "bench": "benchmark",
    "bench_deterministic": "benchmark",
    "selftest": "checks",
    "sink_attention": "ops",
}

__all__ = ["NAME", "active_backend", "bench", "bench_deterministic", "register", "selftest", "sink_attention"]

if TYPE_CHECKING:
    from .backends import active_backend
    from .benchmark import bench, bench_deterministic
    from .checks import selftest
    from .ops import sink_attention


def register() -> None:
    """Register `sink_fa3` with transformers. Cheap: no kernel is loaded here."""
    from transformers import AttentionInterface, AttentionMaskInterface

    from .interface import sink_attention_forward
    from .mask import sink_mask

    AttentionInterface.register(NAME, sink_attention_forward)
    AttentionMaskInterface.register(NAME, sink_mask)


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(
            f"module 'trl_gptoss.attention' has no attribute {name!r}; it exports {', '.join(__all__)}"
        )
    value = getattr(importlib.import_module(f".{_LAZY[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
