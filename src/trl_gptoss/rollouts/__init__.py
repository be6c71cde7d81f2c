"""Rollouts: generation backends, tool execution, and the token-in/token-out loop that joins them."""

from .backend import GenerationBackend, Sample, SampleEnd, SamplingOptions
from .loop import Episode, Observation, ParsedSample, RolloutLimits, ToolCall, TurnFormat, run_episodes
from .routed_experts import DamagedRouting, RouterShape
from .stream import SampleRequest, SampleStream, ThreadStream
from .tools import Toolbox, ToolRunner

__all__ = [
    "DamagedRouting",
    "Episode",
    "GenerationBackend",
    "Observation",
    "ParsedSample",
    "RolloutLimits",
    "RouterShape",
    "Sample",
    "SampleEnd",
    "SampleRequest",
    "SampleStream",
    "SamplingOptions",
    "ThreadStream",
    "ToolCall",
    "ToolRunner",
    "Toolbox",
    "TurnFormat",
    "run_episodes",
]
