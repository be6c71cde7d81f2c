"""Trainers for GPT-OSS on top of TRL's."""

from .config import GptOssGRPOConfig
from .grpo import GptOssGRPOTrainer
from .guards import check_attention, check_experts, check_model
from .ppo import GptOssPPOTrainer
from .ppo_config import GptOssPPOConfig

__all__ = [
    "GptOssGRPOConfig",
    "GptOssGRPOTrainer",
    "GptOssPPOConfig",
    "GptOssPPOTrainer",
    "check_attention",
    "check_experts",
    "check_model",
]
