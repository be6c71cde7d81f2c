"""What `import trl_gptoss` may cost: it registers two names and does nothing else."""

import json
import subprocess
import sys

import pytest

import trl_gptoss

PROBE = """
import json, sys, time
from transformers import AttentionInterface
before = set(sys.modules)
start = time.perf_counter()
import trl_gptoss
seconds = time.perf_counter() - start
import torch
print(json.dumps({
    "seconds": seconds,
    "new": sorted(m for m in set(sys.modules) - before if m.split(".")[0] in {"trl", "datasets", "triton", "kernels", "vllm", "flash_attn"}),
    "cuda": torch.cuda.is_initialized(),
}))
"""


def probe() -> dict:
    env = {"PATH": "/usr/bin:/bin", "HF_HUB_OFFLINE": "1", "PYTHONPATH": ":".join(p for p in sys.path if p)}
    result = subprocess.run([sys.executable, "-c", PROBE], capture_output=True, text=True, env=env, timeout=240)
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout.splitlines()[-1])


def test_import_is_cheap():
    runs = [probe() for _ in range(2)]
    assert runs[0]["new"] == []
    assert not runs[0]["cuda"]
    assert min(run["seconds"] for run in runs) < 0.5


def test_every_export_resolves():
    for name in trl_gptoss.__all__:
        assert getattr(trl_gptoss, name).__module__.startswith("trl_gptoss.")


OPTIONAL = [
    "peft",
    "deepspeed",
    "vllm",
    "kernels",
    "liger_kernel",
    "bitsandbytes",
    "openai_harmony",
    "if_verifiable",
    "nltk",
]
NEEDS_TRITON = "trl_gptoss.experts."
WITHOUT_EXTRAS = """
import importlib, pkgutil, sys
for name in sys.argv[1].split(","):
    sys.modules[name] = None  # as if it were not installed
import trl_gptoss
for module in pkgutil.walk_packages(trl_gptoss.__path__, "trl_gptoss."):
    try:
        importlib.import_module(module.name)
    except ModuleNotFoundError as error:
        print(module.name, error.name)
for name in trl_gptoss.__all__:
    getattr(trl_gptoss, name)
"""


def test_every_module_imports_without_the_extras():
    result = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", WITHOUT_EXTRAS, ",".join(OPTIONAL)],
        capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    missing = [line.split() for line in result.stdout.splitlines() if line.startswith("trl_gptoss.")]
    # Triton comes with CUDA builds of torch; its kernels are imported only where they run
    assert [line for line in missing if line[1] != "triton" or not line[0].startswith(NEEDS_TRITON)] == []


def test_unknown_export_names_what_exists():
    with pytest.raises(AttributeError, match="GptOssGRPOTrainer"):
        _ = trl_gptoss.GptOssTrainer
