"""Make the models of the reproduction: pretrained on right conversations, warm-started on an unreliable demonstrator.

    python benchmarks/reproduction/pretrain.py outputs/reproduction/model            # one H200
    python benchmarks/reproduction/pretrain.py outputs/reproduction/dense --dense    # the dense control of the same size
    python benchmarks/reproduction/pretrain.py OUT --size test --steps 2 --warm_start_steps 2 --pool 60     # CPU, seconds

One model learns all three tasks. It has every feature of GPT-OSS (sinks, sliding and full layers, YaRN, experts with top-k,
biases) in at most 25 million parameters; the dense control is a Qwen3 of the same width, depth and number of parameters.
OUT holds model (in bf16), tokenizer and pretrain.json (settings, losses, machine).
"""

import argparse
import json
import multiprocessing
import os
import random
import re
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from itertools import islice, repeat
from pathlib import Path

import torch
from machine import machine_info
from problems import P_RIGHT, TASKS, demonstrations
from transformers import (
    GptOssConfig,
    GptOssForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from trl_gptoss.attention import selftest
from trl_gptoss.harmony import render_prompt
from trl_gptoss.tiny.demonstrations import Demonstration
from trl_gptoss.tiny.model import special_ids, tiny_config, tiny_generation_config
from trl_gptoss.tiny.tokenizer import byte_tokenizer, train_small_tokenizer
from trl_gptoss.tiny.warm_start import collate, weighted_loss

MOST_PARAMETERS = 25_000_000
VOCABULARY, CORPUS = 640, 400  # tokens; conversations of each task that they are learned on
PARTS = 16  # streams of each task that are rendered at the same time

# Of GPT-OSS's shape; the window is shorter than a conversation and YaRN stretches 128 positions to 512.
SIZES = {
    "h200": {
        "hidden_size": 256, "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 8,
        "num_key_value_heads": 2, "head_dim": 64, "num_local_experts": 16, "num_experts_per_tok": 4,
    },
    "test": {
        "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2,
    },
}  # fmt: skip
POSITIONS = 128

# So short a pretraining moves the sinks by a tenth. The scores grow past sinks that start at 2: a trainer without them then
# disagrees with the sampler by 6e-4 nats a token, and nothing is lost (a model of 1.5 million parameters on a CPU). Sinks at 5
# gave 0.13, at 7 0.50.
SINK_START = 6.0


@dataclass(frozen=True, kw_only=True)
class Phase:
    """Supervised steps on one stream.

    steps (`int`), batch_size (`int`): optimizer steps, and demonstrations in each.
    learning_rate (`float`): peak of a cosine with a twentieth of warm-up, which ends at a tenth.
    p_right (`float`): how often a step of the demonstrator is right.
    """

    steps: int
    batch_size: int
    learning_rate: float
    p_right: float


def make_tokenizer() -> PreTrainedTokenizerFast:
    """A small Harmony tokenizer, learned as that of the tiny models, on conversations of all three tasks."""
    raw = byte_tokenizer()
    control = re.compile("|".join(re.escape(token) for token in raw.all_special_tokens) + r"|<\|[a-z]+\|>")
    texts = [
        part for task in TASKS for d in islice(demonstrations(task, raw, 0), CORPUS)
        for part in control.split(raw.decode(d.ids))
    ]  # fmt: skip
    phrases = []
    for tools in (
        [],
        ["python"],
    ):  # the system message is one token; each of its lines too, for other efforts or dates
        parts = control.split(raw.decode(render_prompt([], raw, tools, "medium")))
        system = max(parts, key=len)
        phrases += [system, *(line for line in system.split("\n") if len(line.split()) >= 3)]
    return train_small_tokenizer(texts, phrases, VOCABULARY)


def moe_config(size: str, tokenizer: PreTrainedTokenizerFast) -> GptOssConfig:
    """GPT-OSS in small."""
    base = tiny_config(len(tokenizer), special_ids(tokenizer), POSITIONS).to_dict()
    layers = SIZES[size]["num_hidden_layers"]
    kinds = ["sliding_attention", "full_attention"] * (layers // 2)
    return GptOssConfig.from_dict({**base, **SIZES[size], "layer_types": kinds})


def dense_config(size: str, tokenizer: PreTrainedTokenizerFast) -> Qwen3Config:
    """A Qwen3 of the same width, depth and heads, its MLP as wide as gives the number of parameters of `moe_config`."""
    moe = moe_config(size, tokenizer)

    def config(width: int) -> Qwen3Config:
        same = ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim")
        return Qwen3Config(
            **{name: SIZES[size][name] for name in same},
            **special_ids(tokenizer),
            intermediate_size=width,
            vocab_size=len(tokenizer),
            max_position_embeddings=moe.max_position_embeddings,
            initializer_range=moe.initializer_range,
            tie_word_embeddings=False,
        )

    one, two = (count(Qwen3ForCausalLM, config(width)) for width in (8, 16))
    width = 8 + 8 * (count(GptOssForCausalLM, moe) - one) / (two - one)  # the count is linear in the width
    return config(max(8, 8 * round(width / 8)))


def count(model_class: type[PreTrainedModel], config: GptOssConfig | Qwen3Config) -> int:
    """Parameters, without allocating them."""
    with torch.device("meta"):
        return model_class(config).num_parameters()


def make_model(
    size: str, tokenizer: PreTrainedTokenizerFast, dense: bool, seed: int, sink_start: float = SINK_START
) -> PreTrainedModel:
    """A randomly initialised float32 model on the CPU.

    Args:
        size (`str`): key of `SIZES`.
        tokenizer (`PreTrainedTokenizerFast`): see `make_tokenizer`.
        dense (`bool`): the control.
        seed (`int`): of the initialisation.
        sink_start (`float`, *optional*, defaults to `SINK_START`): added to the sinks, which are drawn around 0.

    Raises:
        `ValueError`: no such size, or too many parameters.
    """
    if size not in SIZES:
        raise ValueError(f"size is {size!r}, expected one of {', '.join(SIZES)}")
    torch.manual_seed(seed)
    if dense:
        model = Qwen3ForCausalLM(dense_config(size, tokenizer))
    else:
        config = moe_config(size, tokenizer)
        model = GptOssForCausalLM._from_config(
            config, dtype=torch.float32, attn_implementation="sink_fa3", experts_implementation="gptoss_fused"
        )
        with torch.no_grad():
            for layer in model.model.layers:
                layer.self_attn.sinks += sink_start
    if model.num_parameters() > MOST_PARAMETERS:
        raise ValueError(f"{size!r} has {model.num_parameters()} parameters, at most {MOST_PARAMETERS} are allowed")
    model.generation_config = tiny_generation_config(tokenizer)
    return model


def _part(tokenizer: PreTrainedTokenizerFast, task: str, seed: int, p_right: float, count: int) -> list[Demonstration]:
    return list(islice(demonstrations(task, tokenizer, seed, p_right), count))


def drawn_pool(
    tokenizer: PreTrainedTokenizerFast, p_right: float, pool: int, seed: int, workers: int = 1
) -> list[Demonstration]:
    """About `pool` demonstrations, the tasks in equal shares; the same ones for every number of processes."""
    each = max(1, pool // (len(TASKS) * PARTS))
    parts = [(tokenizer, task, seed * PARTS + part, p_right, each) for task in TASKS for part in range(PARTS)]
    if workers == 1:
        return [d for part in parts for d in _part(*part)]
    # forked, and before CUDA is used: a new interpreter would take longer to import than to render
    with ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("fork")) as processes:
        return [d for done in processes.map(_part, *zip(*parts)) for d in done]


def batches(
    tokenizer: PreTrainedTokenizerFast, phase: Phase, pool: int, seed: int, workers: int = 1
) -> Iterator[list[Demonstration]]:
    """Endless batches from a pool of `pool` demonstrations (rendering is slower than a GPU), which is rendered at once."""
    drawn = drawn_pool(tokenizer, phase.p_right, pool, seed, workers)
    longest = 4 * POSITIONS
    fitting = [d for d in drawn if len(d.ids) <= longest]
    if not fitting:
        raise ValueError(f"all {len(drawn)} demonstrations are longer than the {longest} positions of the model")
    rng = random.Random(f"batches-{seed}")
    return (rng.choices(fitting, k=phase.batch_size) for _ in repeat(None))


def train(
    model: PreTrainedModel, stream: Iterator[list[Demonstration]], phase: Phase, device: torch.device
) -> list[float]:
    """Train `model` in place, with bf16 autocast on CUDA; returns the loss of every step."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=phase.learning_rate, betas=(0.9, 0.98), weight_decay=0.0)
    warmup = max(1, phase.steps // 20)

    def factor(step: int) -> float:
        done = torch.tensor(step / max(1, phase.steps))
        return min((step + 1) / warmup, 0.1 + 0.45 * (1 + torch.cos(torch.pi * done).item()))

    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
    losses = []
    model.train()
    for step in range(phase.steps):
        ids, weights = collate(next(stream), model.config.pad_token_id)
        ids, weights = ids.to(device), weights.to(device)
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            # Right padding needs no attention mask: attention is causal, and padding is no target.
            logits = model(input_ids=ids, use_cache=False).logits
        loss = weighted_loss(logits, ids, weights, 0)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
        if (step + 1) % 50 == 0:
            print(f"step {step + 1} of {phase.steps}: loss {losses[-1]:.3f}", flush=True)
    model.eval()
    return losses


def pretrain(
    out: Path,
    size: str,
    dense: bool,
    phases: list[Phase],
    pool: int,
    seed: int,
    device: torch.device,
    sink_start: float = SINK_START,
) -> PreTrainedModel:
    """Make a model, train it through `phases` and save it to `out`.

    Raises:
        `ValueError`: `out` holds something already, or a size that does not exist.
    """
    if out.exists() and any(out.iterdir()):
        raise ValueError(f"{out} is not empty: name a new folder, or delete that model first")
    began = time.monotonic()
    tokenizer = make_tokenizer()
    workers = max(1, os.cpu_count() // 2)
    streams = [batches(tokenizer, phase, pool, seed, workers) for phase in phases]
    model = make_model(size, tokenizer, dense, seed, sink_start).to(device)
    if device.type == "cuda" and not dense:
        selftest(device)
    losses = [train(model, stream, phase, device) for stream, phase in zip(streams, phases)]
    model.to(torch.bfloat16).save_pretrained(out)  # half the size; the runs load it in float32
    tokenizer.save_pretrained(out)
    record = {
        **machine_info(),
        "size": size, "dense": dense, "seed": seed, "pool": pool, "sink_start": sink_start, "parameters": model.num_parameters(),
        "phases": [asdict(phase) for phase in phases], "seconds": round(time.monotonic() - began, 1), "losses": losses,
    }  # fmt: skip
    (out / "pretrain.json").write_text(json.dumps(record, indent=2) + "\n")
    return model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("out", type=Path, help="a new folder")
    parser.add_argument("--dense", action="store_true", help="the dense control instead of the GPT-OSS shape")
    parser.add_argument("--size", choices=list(SIZES), default="h200")
    parser.add_argument("--steps", type=int, default=1500, help="on right conversations (default: 1500)")
    parser.add_argument("--warm_start_steps", type=int, default=300, help="on unreliable ones (default: 300)")
    parser.add_argument("--batch_size", type=int, default=128)
    parser.add_argument("--learning_rate", type=float, default=1e-3, help="of the first phase; the second has half")
    parser.add_argument("--pool", type=int, default=24000, help="different conversations in each phase")
    parser.add_argument("--sink_start", type=float, default=SINK_START, help="where the sinks start")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    phases = [
        Phase(steps=args.steps, batch_size=args.batch_size, learning_rate=args.learning_rate, p_right=1.0),
        Phase(
            steps=args.warm_start_steps,
            batch_size=args.batch_size,
            learning_rate=args.learning_rate / 2,
            p_right=P_RIGHT,
        ),
    ]
    device = torch.device(args.device)
    model = pretrain(args.out, args.size, args.dense, phases, args.pool, args.seed, device, args.sink_start)
    print(f"{args.out}: {model.num_parameters() / 1e6:.1f} M parameters")


if __name__ == "__main__":
    main()
