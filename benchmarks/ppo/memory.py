"""Peak memory of PPO updates with each critic at the width of GPT-OSS-20B, part by part, against the planner.

    python benchmarks/ppo/memory.py --out benchmarks/ppo/memory_h200.csv     # one H200, up to 94 GiB
    python benchmarks/ppo/memory.py --width tiny --tokens 256 --out -        # tries the script out, on a CPU too

The trainer is the real one; random tokens take the place of generation. LoRA runs all 24 layers. What is trained in full does not
fit on one GPU with 24, so it runs with two depths, whose difference is what a layer costs; a third one tells how well they
extrapolate. A case for which the GPU has not enough memory left is passed over. Columns `*_gib`: states in use after a step
(`policy`, `critic`: weights; `gradients` and `optimizer` of both), then the peaks of the four phases of a step (`values`: the
critic's forward over the generation batch; `policy_pass`, `critic_pass`: forward and backward; `step`), and `reserved`: what
PyTorch holds of the GPU at the end.
"""

import argparse
import csv
import datetime
import gc
import math
import random
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1] / "common"))

import peft
import torch
import transformers
import trl
from datasets import Dataset
from peft import LoraConfig
from stamp import commit, driver
from transformers import GptOssConfig, GptOssForCausalLM, PreTrainedTokenizerBase, TrainerCallback

from trl_gptoss import GptOssPPOConfig, GptOssPPOTrainer
from trl_gptoss.attention import active_backend
from trl_gptoss.harmony import HarmonyVocabulary
from trl_gptoss.memory import GIB, ModelShape, TrainSetup, predict_memory
from trl_gptoss.rollouts import Sample, SamplingOptions
from trl_gptoss.tiny.make import load_tokenizer
from trl_gptoss.tiny.model import special_ids

CUDA = torch.cuda.is_available()
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
# critic, method, layers
CASES = (
    ("lora", "lora", 24),
    ("separate", "full", 4),
    ("separate", "full", 2),
    ("shared", "lora", 24),
    ("separate", "lora", 4),
    ("separate", "lora", 2),
    ("shared", "full", 4),
    ("shared", "full", 2),
    ("separate", "full", 6),
)
SPARE = 1.05  # times what the planner asks for has to be free
NARROW = {
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 4096,
}


class RandomTokens:
    """A generation backend: text of as many random tokens as the budget allows."""

    collective = False

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        control = HarmonyVocabulary.of(tokenizer).control_ids
        self.ids = [i for i in range(len(tokenizer)) if i not in control]
        self.rng, self.sampling = random.Random(0), SamplingOptions()

    def generate(self, prompts: list[list[int]], max_new_tokens: list[int], sampling: Any = None) -> list[Sample]:
        return [Sample(ids=self.rng.choices(self.ids, k=n)) for n in max_new_tokens]


class Peaks:
    """The largest number of bytes in use by phase: what was seen since the last reading belongs to the phase named."""

    def __init__(self) -> None:
        self.bytes: dict[str, int] = defaultdict(int)

    def read(self, phase: str) -> None:
        if CUDA:
            self.bytes[phase] = max(self.bytes[phase], torch.cuda.max_memory_allocated())
            torch.cuda.reset_peak_memory_stats()

    @contextmanager
    def of(self, phase: str, before: str) -> Iterator[None]:
        self.read(before)
        yield
        self.read(phase)


class MeasuredTrainer(GptOssPPOTrainer):
    """Reads the peaks between the phases."""

    peaks: Peaks

    def _add_targets(self, output: dict[str, Any]) -> None:
        with self.peaks.of("values", before="other"):
            super()._add_targets(output)

    def _train_critic(self, model: torch.nn.Module, inputs: dict[str, Any], last: bool) -> None:
        with self.peaks.of("critic_pass", before="policy_pass"):
            super()._train_critic(model, inputs, last)


class StepReader(TrainerCallback):
    """The gradients before a step, its peak, and the states behind it."""

    def __init__(self, trainer: MeasuredTrainer) -> None:
        self.trainer = trainer
        self.found: dict[str, float] = {}

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        critic = self.trainer._critic_optimizer
        self.trainer.peaks.read("policy_pass" if self.trainer._critic_kind == "shared" else "critic_pass")
        gradients = [p.grad for p in self.trainer.model.parameters() if p.grad is not None]
        gradients += list(critic._set_aside.values())
        if critic.backbone is not None:
            gradients += [p.grad for p in self.trainer.critic.backbone.parameters() if p.grad is not None]
        self.found["gradients_gib"] = size_of(gradients)

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:  # after the critic's
        self.trainer.peaks.read("step")
        optimizers = [self.trainer.optimizer, *self.trainer._critic_optimizer.optimizers]
        states = [value for o in optimizers for entry in o.state.values() for value in entry.values()]
        self.found["optimizer_gib"] = size_of([value for value in states if torch.is_tensor(value)])


def size_of(tensors: list[torch.Tensor]) -> float:
    return round(sum(t.numel() * t.element_size() for t in tensors) / GIB, 3)


def build(critic: str, method: str, layers: int, args: argparse.Namespace, folder: str) -> MeasuredTrainer:
    tokenizer = load_tokenizer("small", None)
    narrow = NARROW if args.width == "tiny" else {}
    config = GptOssConfig(num_hidden_layers=layers, num_local_experts=32, **special_ids(tokenizer), **narrow)
    with torch.device("cuda" if CUDA else "cpu"):
        model = GptOssForCausalLM._from_config(
            config, dtype=torch.bfloat16, attn_implementation="sink_fa3", experts_implementation="gptoss_fused"
        )
    prompts = [{"prompt": [{"role": "user", "content": f"{i}"}]} for i in range(64)]
    settings = GptOssPPOConfig(
        folder,
        critic=critic,
        per_device_train_batch_size=args.rows,
        max_rollout_tokens=args.tokens // args.rows - args.prompt,
        max_steps=args.steps,
        learning_rate=1e-6,
        bf16=True,
        use_cpu=not CUDA,
        activation_checkpointing=True,
        on_policy_check_steps=0,
        log_trajectories=0,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    trainer = MeasuredTrainer(
        model,
        lambda completion_ids, **_: [float(sum(ids) % 11) for ids in completion_ids],
        settings,
        Dataset.from_list(prompts),
        processing_class=tokenizer,
        peft_config=LoraConfig(r=16, lora_alpha=32, target_modules=ATTENTION) if method == "lora" else None,
    )
    trainer.peaks = Peaks()
    trainer.use_backend(RandomTokens(tokenizer))
    return trainer


def planned_bytes(critic: str, method: str, layers: int, args: argparse.Namespace) -> int:
    config = GptOssConfig(num_hidden_layers=layers, num_local_experts=32, **(NARROW if args.width == "tiny" else {}))
    setup = TrainSetup(tokens=args.tokens, method=method, critic=critic, accumulates=False)
    return predict_memory(ModelShape.from_config(config), setup).total


def measure(critic: str, method: str, layers: int, args: argparse.Namespace) -> dict[str, Any]:
    if CUDA and SPARE * planned_bytes(critic, method, layers, args) > (free := torch.cuda.mem_get_info()[0]):
        raise torch.OutOfMemoryError(f"{free / GIB:.1f} GiB are free, too little for this case")
    with tempfile.TemporaryDirectory() as folder:
        trainer = build(critic, method, layers, args, folder)
        reader = StepReader(trainer)
        trainer.add_callback(reader)
        trainer.train()
    named = dict(trainer.model.named_parameters())
    shape = ModelShape.from_config(trainer._base_model.config)
    lengths = trainer._buffered_inputs[0]
    tokens = int(lengths["prompt_mask"].sum() + lengths["completion_mask"].sum())
    backbone = [] if critic != "separate" else list(trainer.critic.backbone.parameters())
    found = {
        "tokens": tokens,
        "policy_gib": size_of([p for name, p in named.items() if ".critic." not in name]),
        "critic_gib": size_of([p for name, p in named.items() if ".critic." in name] + backbone),
        **reader.found,
        **{f"{name}_gib": round(b / GIB, 2) for name, b in trainer.peaks.bytes.items() if name != "other"},
        "reserved_gib": round(torch.cuda.memory_reserved() / GIB, 2) if CUDA else 0,
    }
    setup = TrainSetup(tokens=tokens, method=method, critic=critic, accumulates=False)
    predicted = predict_memory(shape, setup)
    peak = max(found.get(f"{name}_gib", 0) for name in ("policy_pass", "critic_pass", "step"))
    found |= {"peak_gib": peak, "predicted_gib": round(predicted.total / GIB, 2), "worst": predicted.worst}
    return found | {"error": round(predicted.total / GIB / peak - 1, 4) if peak else math.nan}


def versions() -> dict[str, str]:
    return {
        "gpu": torch.cuda.get_device_name() if CUDA else "none",
        "driver": driver() if CUDA else "none",
        "attention": active_backend(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "trl": trl.__version__,
        "peft": peft.__version__,
        "commit": commit(),
        "date": datetime.date.today().isoformat(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", choices=("20b", "tiny"), default="20b")
    parser.add_argument("--tokens", type=int, default=32768, help="of a micro-batch, prompts included")
    parser.add_argument("--rows", type=int, default=4, help="rollouts of a micro-batch")
    parser.add_argument("--prompt", type=int, default=32, help="tokens to leave for a prompt")
    parser.add_argument("--steps", type=int, default=2, help="in the second one the optimizers have their states")
    parser.add_argument("--cases", type=int, nargs="+", choices=range(len(CASES)), default=range(len(CASES)))
    parser.add_argument("--out", default="-", help="CSV file; - for standard output")
    args = parser.parse_args()
    writer = None
    file = sys.stdout if args.out == "-" else open(args.out, "w", newline="")  # noqa: SIM115 - open for the whole run
    for case in args.cases:
        critic, method, layers = CASES[case]
        begin = time.perf_counter()
        row = {"critic": critic, "method": method, "layers": layers, "experts": "gptoss_fused"}
        try:
            row |= measure(critic, method, layers, args)
        except torch.OutOfMemoryError as error:
            print(f"{row}: {str(error).splitlines()[0]}", file=sys.stderr)
        finally:
            gc.collect()
            torch.cuda.empty_cache()
        print(f"{critic} critic, {method}, {layers} layers: {time.perf_counter() - begin:.1f} s", file=sys.stderr)
        if writer is None:
            columns = ["tokens", "policy", "critic", "gradients", "optimizer"]
            columns += ["values", "policy_pass", "critic_pass", "step", "peak", "reserved", "predicted"]
            names = [name if name == "tokens" else f"{name}_gib" for name in columns]
            fields = ["critic", "method", "layers", "experts", *names, "error", "worst", *versions()]
            writer = csv.DictWriter(file, fields, restval="")
            writer.writeheader()
        writer.writerow(row | versions())
        file.flush()


if __name__ == "__main__":
    main()
