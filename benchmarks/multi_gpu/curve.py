"""Twenty GRPO steps on several GPUs beside the same steps on one; run by `run_all.py`.

    python curve.py FOLDER one --rows 4                      one process, micro-batches of 4 rows
    torchrun --nproc_per_node 2 curve.py FOLDER ddp --size 2     the same rows on two ranks

The trainer of tests/distributed/curves.py on a larger model in bf16 (float32 weights, bf16 computation). What is sampled
depends on the prompt alone, so that every run trains on the same rows: sampling from the policy would turn the first rounding
difference into another completion. A line per step goes to `FOLDER/curve_<name>.csv`.
"""

import argparse
import os
import random
import sys
from collections import Counter
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1] / "experts"))
sys.path.append(str(Path(__file__).resolve().parents[2] / "tests/distributed"))

os.environ["RANK"] = os.environ.get("RANK", "0")  # one process is started without a launcher

import torch
import torch.distributed as dist
from accelerate import PartialState
from ahead import wait
from curves import ON_GPU, RANK, trainer
from fsdp2_without_gpu import fsdp2_without_gpu
from rows import Rows
from scripted_backend import ScriptedBackend
from tiny_policy import tiny_model

WORLD = int(os.environ.get("WORLD_SIZE", 1))
STEPS, GROUP = 20, 4  # completions of a prompt; every rank has one group in a step
SHAPE = {
    "hidden_size": 512, "intermediate_size": 512, "num_hidden_layers": 4, "num_attention_heads": 16,
    "num_key_value_heads": 4, "head_dim": 64, "num_local_experts": 8, "num_experts_per_tok": 2, "sliding_window": 128,
    "initializer_range": 0.02,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
}  # fmt: skip
LOGGED = ("loss", "grad_norm", "entropy")


class ByPrompt:
    """Of a prompt's n-th completion, a script of `ScriptedBackend`: the same tokens wherever and whenever it is asked for."""

    def __init__(self, longest: int) -> None:
        self.longest, self.seen = longest, Counter()

    def __call__(self, prompt: list[int], _: random.Random) -> list[int]:
        self.seen[tuple(prompt)] += 1
        rng = random.Random(f"{prompt} {self.seen[tuple(prompt)]}")
        return [rng.randrange(256) for _ in range(rng.randrange(1, self.longest))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("name")
    parser.add_argument("--rows", type=int, default=4, help="of a micro-batch of one process")
    parser.add_argument("--ranks", type=int, default=2, help="of the runs to compare: groups of a step")
    parser.add_argument("--size", type=int, default=1, help="sequence_parallel_size")
    parser.add_argument("--tiny", action="store_true", help="the tests' tiny model, to try the script without GPUs")
    args = parser.parse_args()
    wait()
    if ON_GPU:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
    elif "ACCELERATE_USE_FSDP" in os.environ:
        fsdp2_without_gpu()
    elif WORLD > 1:
        PartialState(cpu=True)
    longest = 12 if args.tiny else 400
    implementations = {"attn_implementation": "sink_fa3", "experts_implementation": "gptoss_fused"}
    grpo = trainer(
        args.folder / f"curve_{args.name}",
        model=tiny_model(**implementations, **({} if args.tiny else SHAPE)),
        prompts=[f"say {i}" for i in range(64)],
        per_device_train_batch_size=args.rows,
        gradient_accumulation_steps=GROUP * args.ranks // (args.rows * WORLD),
        sequence_parallel_size=args.size,
        padding_free=True,
        max_steps=STEPS,
        num_iterations=2,  # on-policy the loss is the mean advantage, whatever the model does
        max_rollout_tokens=longest,
        learning_rate=3e-4,
        lr_scheduler_type="constant",
        bf16=True,
        ddp_backend=None if WORLD == 1 else "nccl" if ON_GPU else "gloo",
    )
    grpo.use_backend(ScriptedBackend(ByPrompt(longest)))
    grpo.train()
    seen = [entry for entry in grpo.state.log_history if "loss" in entry]
    assert len(seen) == STEPS
    rows = Rows(args.folder / f"curve_{args.name}.csv")
    kind = str(grpo.accelerator.distributed_type).rsplit(".", 1)[-1]
    for step, entry in enumerate(seen) if RANK == 0 else ():
        rows.add(
            run=args.name, gpus=WORLD, distributed_type=kind, sequence_parallel_size=args.size, micro_batch_rows=args.rows,
            step=step, **{name: f"{entry[name]:.8g}" for name in LOGGED},
        )  # fmt: skip
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
