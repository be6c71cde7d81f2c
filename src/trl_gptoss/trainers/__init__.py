"""Trainers for GPT-OSS on top of TRL's."""

from .config import GptOssGRPOConfig
from .grpo import GptOssGRPOTrainer
from .guards import check_attention, check_experts, check_model

__all__ = ["GptOssGRPOConfig", "GptOssGRPOTrainer", "check_attention", "check_experts", "check_model"]
