"""Train steps of TRL's GRPO trainer and of ours on long rows, everything but the sampling: seconds and peak memory.

    python steps.py --trainer stock --generation 24576 24576 --generation 65536 65536 --out h200.csv
    python steps.py --trainer ours --chunk 4096 --fused-elementwise --generation 24576 24576 --out h200.csv
    python steps.py --trainer ours --rows-per-device 4 --generation 8192 2048 4096 1024 --out h200.csv \
        --then --trainer ours --rows-per-device 4 --padded --generation 8192 2048 4096 1024 --out h200.csv
    python steps.py --trainer ours --rows-per-device 4 --mix 5 8 --out mixed_h200.csv

`trainer.train()` runs as it is: a `rollout_func` returns random ids of the lengths asked for, and what follows (padding or
packing, log-probs with the fused head, loss, backward, clipping, optimizer) is the trainer's own code. Every --generation is
one optimizer step, --mix STEPS ROWS draws the lengths of several; a short warm-up before them is not written. A line of the file is one micro-step: forward and
backward from the moment its inputs are ready, and in `optimizer_s` the seconds of the optimizer's step behind it.
--then begins another case, with a new model in the same process. The model has the width of gpt-oss-20b and random weights;
LoRA on attention, activation checkpointing, bf16.
"""

import argparse
import gc
import math
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from peft import LoraConfig
from tokenizers import Tokenizer, models
from transformers import GptOssConfig, GptOssForCausalLM, PreTrainedTokenizerFast, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from trl_gptoss import GptOssGRPOConfig, GptOssGRPOTrainer

GIB = 2**30
PROMPT = 8  # tokens of a row that are not scored
WARM_UP = 512  # tokens of each row of the first, unwritten step
SHORTEST, LONGEST = 512, 16384  # tokens of a row of --mix: two standard deviations of the logarithm from the median
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
TINY = {
    "hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 16,
    "vocab_size": 512,
}  # fmt: skip
ON_GPU = torch.cuda.is_available()
WORLD = int(os.environ.get("WORLD_SIZE", 1))  # benchmarks/multi_gpu runs these cases with several processes
RANK = int(os.environ.get("RANK", 0))


@dataclass(kw_only=True)
class Case:
    """One model, one trainer, one set of levers; the fields are the options of the command line."""

    generations: list[list[int]]
    trainer: str = "ours"
    attention: str | None = None
    experts: str | None = None
    layers: int = 24
    experts_count: int = 32
    rows_per_device: int = 1
    method: str = "lora"
    rank: int = 16
    chunk: int = 0
    fused_elementwise: bool = False
    offload: bool = False
    checkpointing: bool = True
    padded: bool = False
    warm_up: int = WARM_UP
    tiny: bool = False

    def __post_init__(self) -> None:
        stock = self.trainer == "stock"
        if self.attention is None:
            self.attention = ("flash_attention_4" if ON_GPU else "eager") if stock else "sink_fa3"
        if self.experts is None:
            self.experts = "grouped_mm" if stock else "gptoss_fused"
        sizes = {len(lengths) for lengths in self.generations}
        if len(sizes) != 1 or (rows := sizes.pop()) % (self.rows_per_device * WORLD) or rows < 2:
            raise ValueError(
                "Every --generation needs the same number of rows, at least 2, divisible by the rows per device."
            )


@dataclass(kw_only=True)
class MicroStep:
    tokens: int
    padded_tokens: int
    seconds: float
    peak: int  # bytes
    reserved: int
    optimizer_seconds: float | None = None


class Rollouts:
    """A `rollout_func` that samples nothing: rows of the lengths asked for, one list after another."""

    def __init__(self, generations: list[list[int]], vocabulary: int) -> None:
        self.generations, self.vocabulary, self.calls = generations, vocabulary, 0

    def __call__(self, prompts: list, trainer: GRPOTrainer) -> dict[str, Any]:
        lengths = self.generations[self.calls]
        if len(lengths) != len(prompts) * WORLD:
            raise ValueError(
                f"The trainer asks for {len(prompts)} rows of each process, and --generation has {len(lengths)}."
            )
        self.calls += 1
        generator = torch.Generator().manual_seed(self.calls)
        rows = [torch.randint(10, self.vocabulary, (length,), generator=generator).tolist() for length in lengths]
        first = trainer.accelerator.process_index * len(prompts)
        rows = rows[first : first + len(prompts)]
        return {
            "prompt_ids": [row[:PROMPT] for row in rows],
            "completion_ids": [row[PROMPT:] for row in rows],
            "logprobs": None,
        }


def timed(trainer_class: type[GRPOTrainer]) -> type[GRPOTrainer]:
    """The trainer with a clock from the moment a micro-step's inputs are ready to the end of its backward."""

    class Timed(trainer_class):
        steps: list[MicroStep]
        _begin = 0.0

        def _prepare_inputs(self, generation_batch: Any) -> dict[str, Any]:
            inputs = super()._prepare_inputs(generation_batch)
            masks = inputs["prompt_mask"], inputs["completion_mask"]
            self._sizes = int(sum(m.sum() for m in masks)), sum(m.numel() for m in masks)
            synchronize()
            if ON_GPU:
                torch.cuda.reset_peak_memory_stats()
            self._begin = time.perf_counter()
            return inputs

        def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
            loss = super().training_step(*args, **kwargs)
            synchronize()
            seconds = time.perf_counter() - self._begin
            if not torch.isfinite(loss):
                raise RuntimeError(f"The loss is {loss.item()}: the step computed nothing of use.")
            peak = (torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()) if ON_GPU else (0, 0)
            real, padded = self._sizes
            self.steps.append(
                MicroStep(tokens=real, padded_tokens=padded, seconds=seconds, peak=peak[0], reserved=peak[1])
            )
            return loss

    return Timed


class OptimizerClock(TrainerCallback):
    """Seconds of the optimizer's step, written into the micro-step before it."""

    def __init__(self, steps: list[MicroStep]) -> None:
        self.steps, self.begin = steps, 0.0

    def on_pre_optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        synchronize()
        self.begin = time.perf_counter()

    def on_optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        synchronize()
        self.steps[-1].optimizer_seconds = time.perf_counter() - self.begin


def synchronize() -> None:
    if ON_GPU:
        torch.cuda.synchronize()


def build_model(case: Case) -> GptOssForCausalLM:
    config = GptOssConfig(
        num_hidden_layers=case.layers, num_local_experts=case.experts_count, **(TINY if case.tiny else {})
    )
    with torch.device("cuda" if ON_GPU else "cpu"):
        return GptOssForCausalLM._from_config(
            config,
            dtype=torch.bfloat16 if ON_GPU else torch.float32,
            attn_implementation=case.attention,
            experts_implementation=case.experts,
        )


def tokenizer() -> PreTrainedTokenizerFast:
    words = {"<pad>": 0, "<end>": 1, "a": 2}
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="a")), pad_token="<pad>", eos_token="<end>"
    )


def build_trainer(
    case: Case, model: GptOssForCausalLM, folder: str, clock: Callable[[type], type] = timed, **more: Any
) -> GRPOTrainer:
    """`clock` makes the trainer's class one with `steps`; `more` are further settings of ours."""
    rows = len(case.generations[0])
    plan = [[case.warm_up] * rows, *case.generations]
    settings = {
        "output_dir": folder, "per_device_train_batch_size": case.rows_per_device, "num_generations": rows,
        "gradient_accumulation_steps": rows // case.rows_per_device // WORLD, "max_steps": len(plan), "bf16": ON_GPU,
        "use_cpu": not ON_GPU, "max_completion_length": max(map(max, plan)), "router_aux_loss_coef": 0.0, "logging_steps": 1,
        "report_to": "none", "save_strategy": "no", "disable_tqdm": True, "activation_checkpointing": case.checkpointing,
    }  # fmt: skip
    if case.trainer == "stock":
        args, base = GRPOConfig(**settings), GRPOTrainer
    else:
        args = GptOssGRPOConfig(
            **settings, log_trajectories=0, experts_token_chunk=case.chunk or None, padding_free=False if case.padded else None,
            fused_elementwise=case.fused_elementwise and ON_GPU, activation_offloading=case.offload, **more,
        )  # fmt: skip
        base = GptOssGRPOTrainer
    targets = EXPERTS if case.method == "lora+experts" else None
    lora = LoraConfig(r=case.rank, lora_alpha=32, target_modules=ATTENTION, target_parameters=targets)
    trainer = clock(base)(
        model,
        # not the same for all rows of a group: without advantages the gradients are zeros, with which products are faster
        lambda completions, **_: [float((RANK * len(completions) + i) % 2) for i in range(len(completions))],
        args,
        Dataset.from_list([{"prompt": "a"}] * 8),
        processing_class=tokenizer(),
        peft_config=None if case.method == "full" else lora,
        rollout_func=Rollouts(plan, model.config.vocab_size),
    )
    trainer.steps = []
    trainer.add_callback(OptimizerClock(trainer.steps))
    return trainer


def run(
    case: Case,
    done: Callable[[GRPOTrainer, list[MicroStep], int], None],
    build: Callable[[Case, GptOssForCausalLM, str], GRPOTrainer] = build_trainer,
) -> None:
    """Train, and hand trainer, micro-steps without the warm-up, and the bytes of the weights to `done`."""
    gc.collect()
    if ON_GPU:
        torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated() if ON_GPU else 0  # what libraries keep: part of no peak
    start = time.perf_counter()
    model = build_model(case)
    synchronize()
    weights = torch.cuda.memory_allocated() - before if ON_GPU else 0
    built = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        trainer = build(case, model, folder)
        ready = time.perf_counter()
        try:
            trainer.train()
        finally:
            rows = len(case.generations[0])
            warm_up = rows // case.rows_per_device // WORLD
            print(
                f"# model {built - start:.1f} s, trainer {ready - built:.1f} s, training {time.perf_counter() - ready:.1f} s",
                flush=True,
            )
            for step in trainer.steps:
                step.peak -= before
            done(trainer, trainer.steps[warm_up:], weights)


def case_columns(case: Case) -> dict[str, Any]:
    return {
        "trainer": case.trainer, "attention": case.attention, "experts": case.experts, "layers": case.layers,
        "method": case.method, "experts_token_chunk": case.chunk, "fused_elementwise": case.fused_elementwise,
        "activation_offloading": case.offload, "packed": case.trainer == "ours" and not case.padded,
    }  # fmt: skip


def write_steps(rows: Any, case: Case) -> Callable[[GRPOTrainer, list[MicroStep], int], None]:
    def write(trainer: GRPOTrainer, steps: list[MicroStep], weights: int) -> None:
        per_generation = len(case.generations[0]) // case.rows_per_device
        for number, step in enumerate(steps):
            rows.add(
                **case_columns(case),
                generation=number // per_generation,
                micro_step=number % per_generation,
                tokens=step.tokens,
                padded_tokens=step.padded_tokens,
                seconds=round(step.seconds, 4),
                optimizer_s="" if step.optimizer_seconds is None else round(step.optimizer_seconds, 4),
                tokens_per_s=round(step.tokens / step.seconds),
                weights_gib=round(weights / GIB, 3),
                peak_gib=round(step.peak / GIB, 3),
                above_weights_gib=round((step.peak - weights) / GIB, 3),
                reserved_gib=round(step.reserved / GIB, 3),
                trl=metadata.version("trl"),
            )

    return write


class Mix(argparse.Action):
    """STEPS lists of ROWS log-normal lengths, the same in every run."""

    def __call__(self, parser: Any, namespace: argparse.Namespace, values: Any, option: str | None = None) -> None:
        steps, rows = values
        median, spread = math.sqrt(SHORTEST * LONGEST), math.log(LONGEST / SHORTEST) / 4
        drawn = torch.randn(steps, rows, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        lengths = (median * (spread * drawn).exp()).round().clamp(SHORTEST, LONGEST).long().tolist()
        namespace.generations = (namespace.generations or []) + lengths


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trainer", choices=["stock", "ours"], default="ours")
    parser.add_argument("--attention", help="default: flash_attention_4 (stock), sink_fa3 (ours)")
    parser.add_argument("--experts", help="default: grouped_mm (stock), gptoss_fused (ours)")
    parser.add_argument(
        "--generation", dest="generations", type=int, nargs="+", action="append", metavar="TOKENS",
        help="lengths of the rows of one optimizer step; repeat for more steps",
    )  # fmt: skip
    parser.add_argument("--mix", dest="generations", action=Mix, type=int, nargs=2, metavar=("STEPS", "ROWS"))
    parser.add_argument("--rows-per-device", type=int, default=1, help="rows of a micro-step")
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--method", choices=["lora", "lora+experts", "full"], default="lora")
    parser.add_argument("--chunk", type=int, default=0, help="experts_token_chunk")
    parser.add_argument("--fused-elementwise", action="store_true")
    parser.add_argument("--offload", action="store_true", help="activation_offloading")
    parser.add_argument("--padded", action="store_true", help="ours without packing")
    parser.add_argument("--warm-up", type=int, default=WARM_UP, help="tokens of the rows of the first step")
    parser.add_argument("--tiny", action="store_true", help="a tiny width, to try the script without a GPU")
    parser.add_argument("--out", type=Path, default=Path("steps.csv"))
    return parser


def split_cases(words: list[str]) -> list[list[str]]:
    cases: list[list[str]] = [[]]
    for word in words:
        if word == "--then":
            cases.append([])
        else:
            cases[-1].append(word)
    return cases


def main() -> int:
    from rows import Rows

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # what has been measured is written
    failed = 0
    for words in split_cases(sys.argv[1:]):
        values = vars(parser().parse_args(words))
        if not values["generations"]:
            raise SystemExit("One --generation or --mix is needed.")
        rows = Rows(values.pop("out"))
        case = Case(**values)
        try:
            run(case, write_steps(rows, case))
        except (RuntimeError, ValueError):  # out of memory, for one: the next case may still run
            traceback.print_exc()
            failed += 1
    return failed


if __name__ == "__main__":
    sys.path.append(str(Path(__file__).resolve().parents[1] / "experts"))
    sys.exit(main())
