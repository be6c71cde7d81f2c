"""`trl-gptoss plan`: what a run will need per GPU, what to switch on, and the settings to paste."""

import argparse
import json
import math
from dataclasses import replace
from pathlib import Path

from .memory import GIB, MemoryPrediction, ModelShape, TrainSetup, predict_memory
from .parallelism.ulysses import check_heads
from .step_time import predict_step_time

MODELS = {
    "openai/gpt-oss-20b": {"num_layers": 24, "num_experts": 32},
    "openai/gpt-oss-120b": {"num_layers": 36, "num_experts": 128},
}
_PUBLISHED = {  # config.json of both
    "hidden_size": 2880, "num_heads": 64, "num_kv_heads": 8, "head_dim": 64, "intermediate_size": 2880, "top_k": 4,
    "vocab_size": 201088,
}  # fmt: skip
RESERVE = 0.06  # of the GPU, for the CUDA context, cuBLAS and fragmentation

# in the order in which they are tried: cheap first
LEVERS = {
    "fused_head": {"fused_head": True},
    "fused_elementwise": {"fused_elementwise": True},
    "activation_checkpointing": {"activation_checkpointing": True},
    "experts_token_chunk": {"experts_token_chunk": 8192},
    "activation_offloading": {"activation_offloading": True},
    "adamw_8bit": {"optimizer": "adamw_8bit"},
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--model",
        default="openai/gpt-oss-20b",
        help="openai/gpt-oss-20b (default), -120b, or a folder with config.json",
    )
    parser.add_argument(
        "--tokens", type=int, default=32768, help="tokens of a micro-batch per data-parallel rank (default: 32768)"
    )
    parser.add_argument("--lengths", type=int, nargs="+", help="lengths of its packed sequences (default: one)")
    parser.add_argument("--method", choices=["lora", "full"], default="lora", help="what is trained (default: lora)")
    parser.add_argument("--lora-rank", type=int, default=16, help="rank of the adapters (default: 16)")
    parser.add_argument("--lora-experts", action="store_true", help="adapters on the experts too")
    parser.add_argument("--gpus", type=int, default=1, help="number of GPUs (default: 1)")
    parser.add_argument(
        "--gpu-memory", type=float, default=139.0, metavar="GIB", help="memory of a GPU in GiB (default: 139, an H200)"
    )
    parser.add_argument(
        "--sequence-parallel-size", type=int, default=1, help="GPUs that share a sequence (default: 1)"
    )
    parser.add_argument("--sharding", choices=["none", "fsdp2", "zero3"], help="default: fsdp2 with more than one GPU")
    parser.add_argument(
        "--engine-memory",
        type=float,
        default=0.0,
        metavar="GIB",
        help="GiB for a rollout engine on the same GPU (default: 0)",
    )
    parser.add_argument(
        "--critic",
        choices=["none", "separate", "shared", "lora"],
        default="none",
        help="PPO: the critic beside the policy (default: none, for GRPO)",
    )
    parser.add_argument(
        "--extra-models", type=int, default=0, help="further copies of the weights, such as a reference (default: 0)"
    )
    parser.add_argument(
        "--no-levers", action="store_true", help="predict transformers' own settings and change nothing"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of the table")


def load_shape(model: str) -> ModelShape:
    """Shape of a published model by name, or of a folder with a config.json.

    Raises:
        `FileNotFoundError`: Neither.
        `ValueError`: Not a GPT-OSS.
    """
    if model in MODELS:
        return ModelShape(**_PUBLISHED, **MODELS[model])
    path = Path(model) / "config.json"
    if not path.is_file():
        raise FileNotFoundError(
            f"--model {model!r} is not one of {', '.join(MODELS)} and {path} does not exist; give a folder with a config.json."
        )
    try:
        config = json.loads(path.read_text())
    except ValueError as e:
        raise ValueError(f"{path} is no JSON ({e}); give a folder with the config.json of a GPT-OSS.") from None
    return ModelShape.from_config(config)


def choose(shape: ModelShape, setup: TrainSetup, room: float) -> tuple[TrainSetup, list[str]]:
    """Switch levers on, cheapest first, until the prediction fits into `room` bytes. Returns setup and levers used."""
    used = []
    for name, change in LEVERS.items():
        if predict_memory(shape, setup).total <= room:
            break
        if all(getattr(setup, key) == value for key, value in change.items()):
            continue
        if name == "adamw_8bit" and (setup.method == "lora" or setup.sharding == "fsdp2"):
            continue  # nothing to gain; bitsandbytes does not know sharded tensors
        setup = replace(setup, **change)
        used.append(name)
    return setup, used


def _check_numbers(args: argparse.Namespace) -> None:
    if not 0 < args.gpu_memory < math.inf:
        raise ValueError(f"--gpu-memory is {args.gpu_memory} GiB, expected a positive number (H200: 139).")
    if not 0 <= args.engine_memory < math.inf:
        raise ValueError(
            f"--engine-memory is {args.engine_memory} GiB, expected 0 or more (0: no engine on this GPU)."
        )
    if args.extra_models < 0:
        raise ValueError(f"--extra-models is {args.extra_models}, expected 0 or more.")
    if args.lora_experts and args.method != "lora":
        raise ValueError(f"--lora-experts with --method {args.method}, expected --method lora: there are no adapters.")
    if args.lengths is not None and (min(args.lengths) < 1 or sum(args.lengths) != args.tokens):
        raise ValueError(
            f"--lengths sum to {sum(args.lengths)} with a shortest of {min(args.lengths)}, expected positive lengths that sum "
            f"to --tokens {args.tokens}."
        )


def run(args: argparse.Namespace) -> int:
    _check_numbers(args)
    shape = load_shape(args.model)
    sharding = args.sharding or ("fsdp2" if args.gpus > 1 else "none")
    setup = TrainSetup(
        tokens=args.tokens, method=args.method, lora_rank=args.lora_rank, lora_experts=args.lora_experts,
        num_gpus=args.gpus, sequence_parallel_size=args.sequence_parallel_size, sharding=sharding,
        critic=args.critic, extra_models=args.extra_models, engine_gib=args.engine_memory, fused_head=False, activation_checkpointing=False,
    )  # fmt: skip
    check_heads(shape.num_heads, shape.num_kv_heads, args.sequence_parallel_size)
    room = args.gpu_memory * GIB * (1 - RESERVE)
    before = predict_memory(shape, setup)
    used: list[str] = []
    if args.no_levers:
        setup = replace(setup, experts_implementation="grouped_mm")  # transformers' default
    else:
        # GRPO always uses the fused head; checkpointing is on in every recipe
        setup = replace(setup, fused_head=True, activation_checkpointing=True)
        setup, used = choose(shape, setup, room)
    prediction = predict_memory(shape, setup)
    seconds = predict_step_time(shape, setup, args.lengths)
    fits = prediction.total <= room
    if args.json:
        print(json.dumps(_as_dict(prediction, seconds.total, setup, used, fits)))
    else:
        _print(args, shape, setup, before, prediction, seconds, used, room)
    return 0 if fits else 1


def _as_dict(prediction: MemoryPrediction, seconds: float, setup: TrainSetup, used: list[str], fits: bool) -> dict:
    return {
        "peak_gib": round(prediction.total / GIB, 2),
        "parts_gib": {name: round(size / GIB, 3) for name, size in prediction.parts.items()},
        "worst_moment": prediction.worst,
        "step_seconds": round(seconds, 3),
        "tokens_per_second_per_gpu": round(setup.local_tokens / seconds),
        "levers": used,
        "settings": _settings(setup),
        "fits": fits,
    }


def _settings(setup: TrainSetup) -> dict[str, object]:
    settings: dict[str, object] = {
        "activation_checkpointing": setup.activation_checkpointing,
        "fused_elementwise": setup.fused_elementwise,
    }
    if setup.optimizer == "adamw_8bit":
        settings["optim"] = "adamw_8bit"
    if setup.activation_offloading:
        settings["activation_offloading"] = True
    if setup.experts_token_chunk:
        settings["experts_token_chunk"] = setup.experts_token_chunk
    if setup.sequence_parallel_size > 1:
        settings["sequence_parallel_size"] = setup.sequence_parallel_size
    if setup.method == "lora":
        attention = ["q_proj", "k_proj", "v_proj", "o_proj"]
        settings |= {"use_peft": True, "lora_r": setup.lora_rank, "lora_target_modules": attention}
        if setup.lora_experts:
            settings["lora_target_parameters"] = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    if setup.critic != "none":
        settings["critic"] = setup.critic
    return settings


def _print(args, shape, setup, before, prediction, seconds, used, room) -> None:
    print(
        f"{args.model}: {shape.parameters / 1e9:.1f} B parameters, {setup.method}, {setup.num_gpus} GPU(s), {setup.sharding}"
    )
    print(f"{setup.tokens} tokens per micro-batch, {setup.local_tokens} on each GPU\n")
    for name, size in sorted(prediction.parts.items(), key=lambda item: -item[1]):
        print(f"  {name:18s} {size / GIB:8.2f} GiB")
    print(f"  {'peak':18s} {prediction.total / GIB:8.2f} GiB of {room / GIB:.1f} usable ({prediction.worst})")
    print(f"  without checkpointing and fused head: {before.total / GIB:.1f} GiB\n")
    print(f"train step about {seconds.total:.2f} s, {setup.local_tokens / seconds.total:.0f} tokens/s and GPU (H200)")
    parts = ("attention", "experts", "dense", "elementwise", "head", "exchange")
    print("  " + ", ".join(f"{name} {getattr(seconds, name):.2f}" for name in parts) + "\n")
    print("switched on to fit: " + (", ".join(used) or "nothing more than the recipes' settings"))
    if prediction.total > room:
        print(
            f"DOES NOT FIT by {(prediction.total - room) / GIB:.1f} GiB. Next: fewer tokens, more GPUs (--gpus), or "
            "--sequence-parallel-size."
        )
        return
    print("settings:")
    for name, value in _settings(setup).items():
        print(f"  {name}: {json.dumps(value)}")
