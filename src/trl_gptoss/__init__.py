"""Agentic RL for GPT-OSS on top of TRL, transformers and Accelerate.

Importing the package registers `attn_implementation="sink_fa3"` and `experts_implementation="gptoss_fused"` with
transformers. It downloads nothing and touches no GPU; everything heavy is imported on first use.
"""

import importlib
import importlib.metadata
from typing import TYPE_CHECKING, Any

from . import attention as _attention
from . import experts as _experts

try:
    __version__ = importlib.metadata.version("trl-gptoss")
except importlib.metadata.PackageNotFoundError:  # run from a checkout that is not installed
    __version__ = "0+unknown"

_attention.register()
_experts.register()

_LAZY = {
    "GptOssGRPOConfig": "trainers",
    "GptOssGRPOTrainer": "trainers",
    "GptOssPPOConfig": "trainers",
    "GptOssPPOTrainer": "trainers",
    "Trajectory": "trajectory",
    "Turn": "trajectory",
    "StopReason": "trajectory",
    "Environment": "environments",
    "OpenEnvEnvironment": "environments",
    "PythonTool": "environments",
    "ToolOutput": "environments",
    "math_reward": "rewards",
    "format_reward": "rewards",
    "rollout_correction": "correction",
    "RolloutCorrection": "correction",
    "sink_attention": "attention",
    "fused_elementwise": "experts",
    "merge_and_push": "hub",
    "save_pretrained_mxfp4": "hub",
}

__all__ = sorted(_LAZY)

if TYPE_CHECKING:
    from .attention import sink_attention
    from .correction import RolloutCorrection, rollout_correction
    from .environments import Environment, OpenEnvEnvironment, PythonTool, ToolOutput
    from .experts import fused_elementwise
    from .hub import merge_and_push, save_pretrained_mxfp4
    from .rewards import format_reward, math_reward
    from .trainers import GptOssGRPOConfig, GptOssGRPOTrainer, GptOssPPOConfig, GptOssPPOTrainer
    from .trajectory import StopReason, Trajectory, Turn


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'trl_gptoss' has no attribute {name!r}; it exports {', '.join(__all__)}")
    value = getattr(importlib.import_module(f".{_LAZY[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
