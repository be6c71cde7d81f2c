"""Time and memory of an optimizer step with rollout correction: this trainer's one forward beside stock TRL's two.

    python one_forward.py --layers 4 --hidden 2880 --rows 4 --tokens 4096 --attention sink_fa3 --experts gptoss_fused

Both trainers get the same model, the same rollouts (random ids with log-probs, from a `rollout_func`: nothing is sampled)
and the same correction: token ratios truncated at 2. TRL corrects with vLLM only; its client is replaced by one that does
nothing. Neither packs rows. Seconds are the median of the steps after the first, the two trainers in turn.
"""

import argparse
import csv
import gc
import platform
import random
import statistics
import sys
import tempfile
import time
from datetime import date
from importlib import metadata
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1] / "common"))

import torch
from datasets import Dataset
from peft import LoraConfig
from stamp import commit
from transformers import GptOssConfig, GptOssForCausalLM, PreTrainedTokenizerFast, TrainerCallback
from trl import GRPOConfig, GRPOTrainer
from trl.trainer import grpo_trainer

from trl_gptoss import GptOssGRPOConfig, GptOssGRPOTrainer
from trl_gptoss.tiny.tokenizer import byte_tokenizer


class NoVllm:
    """TRL's correction is tied to vLLM; nothing is sampled here."""

    def __init__(self, **kwargs: Any) -> None:
        pass

    def sync_weights(self) -> None:
        pass


class StepTimes(TrainerCallback):
    def __init__(self, device: torch.device) -> None:
        self.device, self.seconds = device, []

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
        self._wait()
        self.start = time.perf_counter()

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        self._wait()
        self.seconds.append(time.perf_counter() - self.start)


def model_of(args: argparse.Namespace) -> GptOssForCausalLM:
    torch.manual_seed(0)
    config = GptOssConfig(
        num_hidden_layers=args.layers,
        layer_types=["sliding_attention", "full_attention"] * (args.layers // 2),
        hidden_size=args.hidden,
        intermediate_size=args.hidden,
        num_local_experts=args.experts_count,
        vocab_size=args.vocabulary,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=2,
    )
    dtype = torch.bfloat16 if args.device == "cuda" else torch.float32
    with torch.device(args.device):
        return GptOssForCausalLM._from_config(
            config, dtype=dtype, attn_implementation=args.attention, experts_implementation=args.experts
        )


def rollouts_of(args: argparse.Namespace):
    def rollout_func(prompts: list, trainer: GRPOTrainer) -> dict[str, list]:
        rng = random.Random(0)
        ids = [[rng.randrange(3, 256) for _ in range(args.tokens)] for _ in prompts]
        return {
            "prompt_ids": [[3, 4, 5]] * len(prompts),
            "completion_ids": ids,
            "logprobs": [[-rng.random() * 10 for _ in row] for row in ids],
        }

    return rollout_func


def measure(args: argparse.Namespace, trl: bool, tokenizer: PreTrainedTokenizerFast) -> tuple[list[float], float]:
    """Seconds of each step, and peak memory in GiB (NaN on CPU)."""
    settings = {
        "per_device_train_batch_size": args.micro_batch,
        "gradient_accumulation_steps": args.rows // args.micro_batch,
        "num_generations": args.rows,
        "max_completion_length": args.tokens,
        "max_steps": args.steps,
        "gradient_checkpointing": True,
        "gradient_checkpointing_kwargs": {"use_reentrant": False},
        "use_cpu": args.device == "cpu",
        "bf16": args.device == "cuda",
        "report_to": "none",
        "save_strategy": "no",
        "disable_tqdm": True,
        "router_aux_loss_coef": 0.0,
        "vllm_importance_sampling_mode": "token_truncate",
        "vllm_importance_sampling_clip_max": 2.0,
    }
    data = Dataset.from_list([{"prompt": "x"}] * 64)
    times = StepTimes(torch.device(args.device))
    with tempfile.TemporaryDirectory() as folder:
        if trl:
            config: GRPOConfig = GRPOConfig(folder, use_vllm=True, vllm_mode="colocate", **settings)
        else:
            config = GptOssGRPOConfig(
                folder, padding_free=False, on_policy_check_steps=0, log_trajectories=0, **settings
            )
        trainer = (GRPOTrainer if trl else GptOssGRPOTrainer)(
            model_of(args),
            lambda completion_ids, **kwargs: [float(sum(ids) % 11) for ids in completion_ids],
            config,
            data,
            processing_class=tokenizer,
            callbacks=[times],
            rollout_func=rollouts_of(args),
            peft_config=LoraConfig(r=16, target_modules=["q_proj", "k_proj", "v_proj", "o_proj"]),
        )
        if args.device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        trainer.train()
    peak = torch.cuda.max_memory_allocated() / 2**30 if args.device == "cuda" else float("nan")
    del trainer
    gc.collect()
    if args.device == "cuda":
        torch.cuda.empty_cache()
    return times.seconds, peak


def stamp(args: argparse.Namespace) -> dict[str, str]:
    hardware = torch.cuda.get_device_name() if args.device == "cuda" else f"{platform.machine()} CPU, 1 thread"
    versions = {name: metadata.version(name) for name in ("torch", "transformers", "trl", "peft")}
    return {"hardware": hardware, **versions, "commit": commit(), "date": date.today().isoformat()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--layers", type=int, default=4, help="an even number")
    parser.add_argument("--hidden", type=int, default=2880)
    parser.add_argument("--experts-count", type=int, default=32)
    parser.add_argument("--vocabulary", type=int, default=201088)
    parser.add_argument("--rows", type=int, default=4)
    parser.add_argument("--micro-batch", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--attention", default="sink_fa3")
    parser.add_argument("--experts", default="gptoss_fused")
    parser.add_argument("--out", type=Path, default=Path(__file__).with_name("one_forward.csv"))
    args = parser.parse_args()
    if args.device == "cpu":
        torch.set_num_threads(1)
    grpo_trainer.VLLMGeneration = NoVllm  # in this script only
    tokenizer = byte_tokenizer()
    found: dict[bool, list[float]] = {True: [], False: []}
    peaks = {True: 0.0, False: 0.0}
    for trl in (True, False, True, False):
        seconds, peak = measure(args, trl, tokenizer)
        print("TRL" if trl else "ours", [round(s, 3) for s in seconds], f"{peak:.2f} GiB", flush=True)
        found[trl] += seconds[1:]
        peaks[trl] = max(peaks[trl], peak)
    shape = {
        name: vars(args)[name]
        for name in ("layers", "hidden", "experts_count", "vocabulary", "rows", "micro_batch", "tokens")
    }
    row = {
        **stamp(args),
        **shape,
        "attention": args.attention,
        "experts": args.experts,
        "trl_seconds": round(statistics.median(found[True]), 4),
        "seconds": round(statistics.median(found[False]), 4),
        "trl_peak_gib": round(peaks[True], 2),
        "peak_gib": round(peaks[False], 2),
    }
    print(row)
    new = not args.out.exists()
    with args.out.open("a", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, row.keys())
        if new:
            writer.writeheader()
        writer.writerow(row)


if __name__ == "__main__":
    main()
