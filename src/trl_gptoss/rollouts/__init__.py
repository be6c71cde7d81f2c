"""Rollouts: generation backends, tool execution, and the token-in/token-out loop that joins them."""

from .backend import GenerationBackend, Sample, SampleEnd, SamplingOptions
from .loop import Episode, Observation, ParsedSample, RolloutLimits, ToolCall, TurnFormat, run_episodes
from .tools import Toolbox, ToolRunner

__all__ = [
    "Episode",
    "GenerationBackend",
    "Observation",
    "ParsedSample",
    "RolloutLimits",
    "Sample",
    "SampleEnd",
    "SamplingOptions",
    "ToolCall",
    "ToolRunner",
    "Toolbox",
    "TurnFormat",
    "run_episodes",
]
