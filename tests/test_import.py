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


def test_unknown_export_names_what_exists():
    with pytest.raises(AttributeError, match="GptOssGRPOTrainer"):
        _ = trl_gptoss.GptOssTrainer
