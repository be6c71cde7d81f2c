"""What runs inside of vLLM's workers: `--worker-extension-cls trl_gptoss.rollouts.vllm.worker.PolicyWorkerExtension`.

vLLM mixes this class into its worker, so `self` is the worker, and calls its methods by name (`LLM.collective_rpc` in
this process, `POST /collective_rpc` on a server, where arguments and results are JSON). New weights are first put down
and then loaded in one call, so that a trainer that dies while it sends leaves the engine as it was.
"""

import base64
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import safe_open
from torch import nn

from .loading import Weights, load_policy, policy_checksums, policy_dtypes
from .versions import EngineVersion


class _Worker(Protocol):
    """The part of vLLM's worker that is used here."""

    rank: int
    model_runner: Any
    model_config: Any
    parallel_config: Any
    weight_transfer_engine: Any


class _Landing:
    """Stands for the model in vLLM's NCCL transfer: what arrives is loaded one tensor at a time."""

    def __init__(self, worker: _Worker, model: nn.Module) -> None:
        self.worker, self.model = worker, model

    def load_weights(self, weights: Weights) -> None:
        load_policy(self.model, self.worker.model_config, weights, "in_place")


class PolicyWorkerExtension:
    """Weight sync and checksums for GPT-OSS. All names begin with `policy_`: vLLM refuses to hide its own."""

    def policy_describe(self: _Worker) -> dict[str, Any]:
        """What [`EngineInfo`] holds, as JSON."""
        import vllm

        return {
            "version": vllm.__version__,
            "device": _device(self),
            "dtypes": policy_dtypes(self.model_runner.get_model()),
            "dtype": str(self.model_config.dtype).removeprefix("torch."),
            "max_model_len": self.model_config.max_model_len,
            "logprobs_mode": self.model_config.logprobs_mode,
            "policy_version": vars(self).get("policy_version", ""),
            "quantization": self.model_config.quantization,
            "tensor_parallel_size": self.parallel_config.tensor_parallel_size,
            "routed_experts": self.model_config.enable_return_routed_experts,
        }

    def policy_load(self: _Worker, weights: Weights, policy_version: str) -> None:
        """Load weights handed over in this process. For the arguments see [`load_policy`]."""
        import vllm

        way = EngineVersion(version=vllm.__version__, device=_device(self)).loading
        load_policy(self.model_runner.get_model(), self.model_config, weights, way)
        self.policy_version = policy_version

    def policy_load_files(self: _Worker, paths: list[str], policy_version: str) -> None:
        """Load weights from safetensors files that this machine can read.

        Raises:
            FileNotFoundError: it cannot read one of them.
        """
        missing = [path for path in paths if not os.path.isfile(path)]
        if missing:
            raise FileNotFoundError(
                f"The vLLM worker cannot read {missing[0]}: the folder of vllm_sync_dir must be the same on the "
                "trainer's machine and on the server's. Without a shared folder use vllm_sync_transport='http'."
            )
        PolicyWorkerExtension.policy_load(self, _read(paths), policy_version)

    def policy_receive_bytes(self: _Worker, number: int, data: str) -> None:
        """Put down one safetensors file that came over HTTP. Number 0 begins a new set of files."""
        folder = _spool(self)
        if number == 0:
            for path in folder.iterdir():
                path.unlink()
        (folder / f"{number:05}.safetensors").write_bytes(base64.b64decode(data))

    def policy_load_received(self: _Worker, count: int, policy_version: str) -> None:
        """Load the `count` files put down by `policy_receive_bytes`."""
        paths = sorted(_spool(self).iterdir())
        if len(paths) != count:
            raise RuntimeError(f"{len(paths)} files of new weights have arrived, the trainer sent {count}.")
        PolicyWorkerExtension.policy_load(self, _read([str(path) for path in paths]), policy_version)
        for path in paths:
            path.unlink()

    def policy_receive_nccl(self: _Worker, update_info: dict[str, Any], policy_version: str) -> None:
        """Receive weights over vLLM's NCCL weight transfer, and load them the way that is right for GPT-OSS.

        vLLM's own `update_weights` reloads the model under the trainer's names, which leaves experts and sinks stale.
        """
        engine = self.weight_transfer_engine
        landing = _Landing(self, self.model_runner.get_model())
        engine.set_weight_update_target(landing, self.model_config)
        try:
            engine.receive_weights(engine.parse_update_info(update_info))
            torch.cuda.synchronize()
        finally:
            engine.reset_weight_update_target()
        self.policy_version = policy_version

    def policy_checksums(self: _Worker) -> dict[str, int]:
        """See [`policy_checksums`]."""
        return policy_checksums(self.model_runner.get_model())


def _device(worker: _Worker) -> str:
    parameter = next(worker.model_runner.get_model().parameters())
    return parameter.device.type


def _read(paths: list[str]) -> Iterator[tuple[str, torch.Tensor]]:
    for path in paths:
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 - not a dict
                yield name, file.get_tensor(name)


def _spool(worker: _Worker) -> Path:
    """A folder of this worker's own."""
    if "policy_spool" not in vars(worker):
        worker.policy_spool = tempfile.TemporaryDirectory(prefix="trl_gptoss_weights_")
    return Path(worker.policy_spool.name)
