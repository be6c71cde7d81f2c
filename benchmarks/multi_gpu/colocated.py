"""GRPO with vLLM on the GPUs that train the 20B: syncs, probes, sleep; one process per GPU, started by `run_all.py`.

    torchrun --nproc_per_node 2 colocated.py FOLDER --case full
    python colocated.py FOLDER --case lora_one

Width and depth of gpt-oss-20b, random weights, FSDP2 over all ranks (one rank: none), the trainer and the weight sync as they are,
short rollouts. Every rank writes a line per optimizer step to `FOLDER/colocated_<case>_<rank>.csv`:

    step_s = rollout_s (wake_weights_s, sync_s with wake_kv_cache_s in it, probe_s, sampling, sleep_s) + train_s + optimizer_s + rest

All syncs but those of the steps PLAIN are followed by a probe, which stops the run if one tensor of the engine is stale; `sync_s` of
the others is that of a run with `vllm_probe_every=0` (the probe's checksums of what is sent are part of the sync). `changed` counts
the tensors, experts one by one, whose checksum is another than at the probe before: a stale one would be among them.
`*_gib` is all memory in use on the rank's GPU while the engine samples, after it went to sleep, and when the optimizer is through.
"""

import argparse
import os
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1] / "experts"))
sys.path.append(str(Path(__file__).resolve().parents[1] / "long_traces"))
sys.path.append(str(Path(__file__).resolve().parents[1] / "vllm"))

import torch
import torch.distributed as dist
import vllm  # noqa: F401 - takes seconds, before `ahead.wait`
from ahead import wait
from datasets import Dataset
from h200 import QUESTIONS, QUIET, policy
from peft import LoraConfig
from rows import Rows
from steps import ATTENTION, GIB, ON_GPU, RANK, WORLD, synchronize
from train_steps import sharded_by_hand
from transformers import TrainerCallback

import trl_gptoss.trainers.vllm_setup  # noqa: F401 - as vllm
from trl_gptoss import GptOssGRPOConfig, GptOssGRPOTrainer
from trl_gptoss.parallelism import assert_sharded, shard_mesh, shard_model
from trl_gptoss.rollouts.vllm.versions import installed_version
from trl_gptoss.tiny.vocabulary import small_tokenizer

STEPS, PLAIN = 13, (4, 8, 12)  # optimizer steps, and those of them without a probe after the sync
ROLLOUTS, GROUP, TOKENS = 8, 4, 64  # rollouts of a rank, of a prompt; tokens after the prompt
LAYERS, VOCABULARY = 24, 201088


@dataclass(frozen=True, kw_only=True)
class Case:
    """A run.

    Args:
        method (`str`): "full" or "lora".
        tensor_parallel_size (`int`): ranks that share an engine.
        learning_rate (`float`): With which bf16 weights change from step to step (most of the 20B's move by 1e-5 only if
            they are small: half a unit in the last place of 0.017 is 3e-5).
        optim (`str`, *optional*, defaults to `"adamw_torch_fused"`): Its states are bf16, too. One GPU has no room for those of
            AdamW in full fine-tuning (39 GiB of weights, as much of gradients, twice as much of states).
    """

    method: str
    tensor_parallel_size: int
    learning_rate: float
    optim: str = "adamw_torch_fused"


CASES = {
    "full": Case(method="full", tensor_parallel_size=1, learning_rate=1e-5),
    "lora_tp": Case(method="lora", tensor_parallel_size=2, learning_rate=5e-4),
    "lora_one": Case(method="lora", tensor_parallel_size=1, learning_rate=5e-4),
    "full_one": Case(method="full", tensor_parallel_size=1, learning_rate=1e-5, optim="adafactor"),
}
SHARDING = "fsdp2" if WORLD > 1 else "none"
BACKEND = None if WORLD == 1 else "nccl" if ON_GPU else "gloo"  # with one, Accelerate expects a process group


def build(case: Case, folder: str, tiny: bool) -> GptOssGRPOTrainer:
    """The trainer, its policy sharded if there are several ranks, with its engine."""
    width, layers, vocabulary = ("tiny", 4, 1024) if tiny else ("20b", LAYERS, VOCABULARY)
    engine: dict[str, Any] = {"enforce_eager": True}
    if ON_GPU:
        engine["kv_cache_memory_bytes"] = 4 << 30
    if case.tensor_parallel_size > 1:  # NCCL: NVLink multicast may belong to others, see ENVIRONMENT in run_all.py
        engine["disable_custom_all_reduce"] = True
    tokens = 16 if tiny else TOKENS
    trainer = GptOssGRPOTrainer(
        policy(width, vocabulary, "cuda" if ON_GPU else "cpu", layers),
        lambda completion_ids, **_: [float(sum(ids) % 11) for ids in completion_ids],
        GptOssGRPOConfig(
            folder,
            use_vllm=True,
            vllm_mode="colocate",
            vllm_enable_sleep_mode=ON_GPU,
            vllm_tensor_parallel_size=case.tensor_parallel_size,
            vllm_max_model_length=tokens + 512,
            vllm_probe_tolerance=0.5,  # routers of random weights are nearly tied, see ../vllm/h200.py
            vllm_engine_kwargs=engine,
            per_device_train_batch_size=ROLLOUTS,
            num_generations=GROUP,
            generation_kwargs={"ignore_eos": True},
            max_steps=STEPS,
            max_rollout_tokens=tokens,
            activation_checkpointing=True,
            learning_rate=case.learning_rate,
            optim=case.optim,
            lr_scheduler_type="constant",
            router_aux_loss_coef=0.0,
            bf16=True,
            use_cpu=not ON_GPU,
            ddp_backend=BACKEND,
            **QUIET,
        ),
        Dataset.from_list(QUESTIONS),
        processing_class=small_tokenizer(),
        peft_config=LoraConfig(r=16, lora_alpha=32, target_modules=ATTENTION) if case.method == "lora" else None,
    )
    if SHARDING == "fsdp2":
        assert_sharded(shard_model(trainer.model, shard_mesh("cuda" if ON_GPU else "cpu")))
    return trainer


class Seconds(Counter):
    """Seconds spent in methods, with what they put on the GPU."""

    def watch(
        self, owner: Any, method: str, name: Callable[..., str], after: Callable[[], None] = lambda: None
    ) -> None:
        """Count those of `owner.method`, under the name that `name` makes of its arguments; call `after` behind it."""
        inner = getattr(owner, method)

        def watched(*args: Any, **kwargs: Any) -> Any:
            synchronize()
            begin = time.perf_counter()
            result = inner(*args, **kwargs)
            synchronize()
            self[name(*args, **kwargs)] += time.perf_counter() - begin
            after()
            return result

        setattr(owner, method, watched)


def in_use() -> float:
    """GiB of the GPU, whoever took them."""
    if not ON_GPU:
        return 0.0
    free, total = torch.cuda.mem_get_info()
    return (total - free) / GIB


class Writer(TrainerCallback):
    """Watches a trainer and writes a line when an optimizer step is over."""

    def __init__(self, name: str, trainer: GptOssGRPOTrainer, rows: Rows, tiny: bool) -> None:
        self.name, self.case, self.trainer, self.rows, self.tiny = name, CASES[name], trainer, rows, tiny
        self.sync = trainer.weight_sync
        self.seconds, self.gib = Seconds(), {"rollout": 0.0, "asleep": 0.0}
        self.found: dict[str, float] = {}
        self.sent: dict[str, int] = {}
        self.changed = 0
        llm = self.sync.engine.llm
        self.seconds.watch(trainer, "training_step", lambda *_, **__: "forward_backward")
        self.seconds.watch(trainer, "_generate", lambda *_: "rollout")
        self.seconds.watch(self.sync, "sync", lambda _: "sync", after=self._keep_metrics)
        self.seconds.watch(llm, "wake_up", lambda tags: f"wake_{tags[0]}")
        self._watch_memory(llm)
        self.seconds.watch(llm, "sleep", lambda level: "sleep")
        self._watch_checksums()

    def _keep_metrics(self) -> None:
        self.found = dict(self.sync.metrics)

    def _watch_memory(self, llm: Any) -> None:
        inner = llm.sleep

        def sleep(level: int) -> None:
            self.gib["rollout"] = in_use()
            inner(level=level)
            self.gib["asleep"] = in_use()

        llm.sleep = sleep

    def _watch_checksums(self) -> None:
        inner = self.sync._probe

        def probe(sent: dict[str, int]) -> Any:
            self.changed = sum(self.sent.get(name) != value for name, value in sent.items())
            self.sent = dict(sent)
            return inner(sent)

        self.sync._probe = probe

    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
        synchronize()
        self.seconds.clear()
        self.begin = time.perf_counter()

    def on_pre_optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        synchronize()
        self.optimizer_begin = time.perf_counter()

    def on_optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        synchronize()
        self.seconds["optimizer"] += time.perf_counter() - self.optimizer_begin

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        synchronize()
        spent, step_s = self.seconds, time.perf_counter() - self.begin
        sync_s, probe_s = self.found["vllm/sync_seconds"], self.found.get("vllm/probe_seconds", 0.0)
        around = {"wake_weights": spent["wake_weights"], "sleep": spent["sleep"]}
        sampling = spent["rollout"] - sync_s - probe_s - sum(around.values())
        probed = "vllm/probe_mean" in self.found
        seconds = {
            "step": step_s, "sync": sync_s, "probe": probe_s, "wake_kv_cache": spent["wake_kv_cache"], **around, "sampling": sampling,
            "rollout": spent["rollout"], "train": spent["forward_backward"] - spent["rollout"], "optimizer": spent["optimizer"],
        }  # fmt: skip
        self.rows.add(
            case=self.name, gpus=WORLD, rank=RANK, method=self.case.method, sharding=SHARDING, optim=self.case.optim,
            tensor_parallel_size=self.case.tensor_parallel_size, layers=self.trainer._base_model.config.num_hidden_layers,
            learning_rate=self.case.learning_rate, rollouts=ROLLOUTS, tokens=args.max_rollout_tokens, step=state.global_step,
            **{f"{name}_s": round(value, 4) for name, value in seconds.items()},
            sync_share=round(sync_s / step_s, 4), probed=probed,
            probe_mean=f"{self.found['vllm/probe_mean']:.4g}" if probed else "",
            probe_max=f"{self.found['vllm/probe_max']:.4g}" if probed else "",
            tensors=len(self.sent) if probed else "", changed=self.changed if probed else "",
            weights_gib=round(self._weights() / GIB, 3), rollout_gib=round(self.gib["rollout"], 2),
            asleep_gib=round(self.gib["asleep"], 2), train_gib=round(in_use(), 2), tiny=self.tiny, vllm=installed_version(),
        )  # fmt: skip
        self.sync.probe_every = int(state.global_step + 1 not in PLAIN)

    def _weights(self) -> int:
        """Bytes of what is sent."""
        return 2 * sum(p.numel() for n, p in self.trainer.model.named_parameters() if ".lora_" not in n)


def run(name: str, folder: Path, tiny: bool) -> None:
    torch.manual_seed(0)  # shards of one model on all ranks
    began = time.perf_counter()
    with sharded_by_hand(SHARDING):
        trainer = build(CASES[name], str(folder / f"colocated_{name}"), tiny)
        print(
            f"# rank {RANK}: engine and policy after {time.perf_counter() - began:.1f} s, {in_use():.1f} GiB",
            flush=True,
        )
        trainer.add_callback(Writer(name, trainer, Rows(folder / f"colocated_{name}_{RANK}.csv"), tiny))
        trainer.train()
    if dist.is_initialized():
        dist.barrier()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--case", choices=CASES, required=True, help="one: vLLM's engine cannot be taken down")
    parser.add_argument("--tiny", action="store_true", help="tiny width, to try the script without GPUs")
    args = parser.parse_args()
    wait()
    if ON_GPU:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
    code = 0
    try:
        run(args.case, args.folder, args.tiny)
    except Exception:  # vLLM's threads would keep the process, and the other ranks waiting
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    main()
