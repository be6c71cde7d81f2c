"""Run by a Python that has vLLM: `python scenarios.py FOLDER NAME`; what was seen goes to FOLDER/NAME_RANK.json.

A process of its own for each scenario: vLLM's engine cannot be taken down in a process that goes on.
"""

import json
import os
import signal
import socket
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

os.environ.update(VLLM_NO_USAGE_STATS="1", VLLM_LOGGING_LEVEL="ERROR", VLLM_CPU_KVCACHE_SPACE="1", HF_HUB_OFFLINE="1")
sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

import torch
from datasets import Dataset
from tiny_policy import byte_tokenizer, tiny_model

from trl_gptoss.rollouts.vllm.engine import WORKER_EXTENSION
from trl_gptoss.trainers import GptOssGRPOConfig, GptOssGRPOTrainer

RANK = int(os.environ.get("RANK", "0"))
# vLLM's CPU kernels want sizes that are multiples of 32.
SIZES = {"hidden_size": 64, "intermediate_size": 64, "head_dim": 32, "initializer_range": 0.15}


def policy(dtype="float32"):
    """Random weights, sinks and biases that matter, and turns that end."""
    model = tiny_model(dtype=getattr(torch, dtype), **SIZES)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(".sinks"):
                parameter.copy_(0.5 + torch.randn(parameter.shape, generator=generator))
            elif name.endswith("bias"):
                parameter.copy_(0.1 * torch.randn(parameter.shape, generator=generator))
    return model


def reward(completion_ids, **kwargs):
    """Something that ids differ in."""
    return [float(sum(ids) % 11) for ids in completion_ids]


def trainer(folder, model=None, callbacks=None, reward_funcs=reward, **settings):
    data = Dataset.from_list([{"prompt": [{"role": "user", "content": f"say {i}"}], "number": i} for i in range(32)])
    settings = {
        "use_vllm": True,
        "vllm_max_model_length": 512,
        "vllm_importance_sampling_correction": False,
        "per_device_train_batch_size": 4,
        "num_generations": 4,
        "max_steps": 6,
        "max_rollout_tokens": 24,
        "learning_rate": 1e-2,
        "bf16": False,
        "use_cpu": True,
        "report_to": "none",
        "save_strategy": "no",
        "logging_steps": 1,
        "disable_tqdm": True,
        "gradient_checkpointing": False,
        **settings,
    }
    return GptOssGRPOTrainer(
        model or policy(),
        reward_funcs,
        GptOssGRPOConfig(str(folder), **settings),
        data,
        processing_class=byte_tokenizer(),
        callbacks=callbacks,
        peft_config=None,
    )


def curves(run):
    return [{k: v for k, v in entry.items() if "probe" in k or "seconds" in k} for entry in run.state.log_history]


def train(folder, **settings):
    run = trainer(folder, **settings)
    before = {name: p.detach().clone() for name, p in run.model.named_parameters()}
    run.train()
    moved = sum(not torch.equal(before[name], p) for name, p in run.model.named_parameters())
    return {"logs": curves(run), "moved": moved, "tensors": len(before), "steps": run.state.global_step}


def colocate_float32(folder):
    return train(folder, vllm_mode="colocate")


def colocate_bfloat16(folder):
    return train(folder, vllm_mode="colocate", model=policy("bfloat16"))


# ---- a server ----


class Server:
    """A vLLM server in a process group of its own."""

    def __init__(self, checkpoint, port, dtype="float32", load_format="auto"):
        self.command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(checkpoint)]
        self.command += ["--port", str(port), "--host", "127.0.0.1", "--dtype", dtype, "--load-format", load_format]
        self.command += ["--enforce-eager", "--max-model-len", "512", "--max-num-seqs", "16"]
        self.command += ["--logprobs-mode", "processed_logprobs", "--max-logprobs", "-1"]
        self.command += ["--worker-extension-cls", WORKER_EXTENSION, "--served-model-name", "policy"]
        self.port = port
        self.process = None

    @property
    def url(self):
        return f"http://127.0.0.1:{self.port}"

    def start(self):
        environment = {**os.environ, "VLLM_SERVER_DEV_MODE": "1"}
        log = open(f"/tmp/vllm_server_{self.port}.log", "a")
        self.process = subprocess.Popen(self.command, env=environment, stdout=log, stderr=log, start_new_session=True)

    def kill(self):
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@contextmanager
def server(folder, dtype="float32"):
    checkpoint = folder / "checkpoint"
    policy(dtype).save_pretrained(checkpoint)
    byte_tokenizer().save_pretrained(checkpoint)
    running = Server(checkpoint, free_port(), dtype)
    running.start()
    try:
        yield running
    finally:
        running.kill()


def by_server(folder, transport, dtype="float32", **settings):
    with server(folder, dtype) as running:
        return train(
            folder / "run",
            model=policy(dtype),
            vllm_mode="server",
            vllm_server_base_url=running.url,
            vllm_sync_transport=transport,
            **settings,
        )


def server_file_float32(folder):
    return by_server(folder, "file")


def server_http_bfloat16(folder):
    return by_server(folder, "http", "bfloat16")


if __name__ == "__main__":
    folder, name = Path(sys.argv[1]), sys.argv[2]
    seen = {f.__name__: f for f in list(globals().values()) if callable(f) and hasattr(f, "__name__")}[name](
        folder / name
    )
    (folder / f"{name}_{RANK}.json").write_text(json.dumps(seen))
    sys.stdout.flush()
    os._exit(0)  # vLLM's threads would keep the process
