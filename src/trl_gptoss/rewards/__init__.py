"""Rewards in TRL's signature. They read what the policy said, never what a tool or a prompt said."""

from .format_reward import format_reward
from .instruction_reward import instruction_reward
from .math_reward import math_reward

__all__ = ["format_reward", "instruction_reward", "math_reward"]
