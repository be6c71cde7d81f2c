"""Four PPO steps by one process or by two (torchrun); the arguments are a folder and what to run.

Rollouts depend on their prompt alone, so that one process with eight rows and two with four each train on the same data:
completions of 1 to 12 tokens in micro-batches of two. `<critic>-sp` shares every sequence between two ranks, `<critic>-zero3` shards policy and critic with DeepSpeed. Weights go to `<what>_<world size>_<rank>.pt`.
"""

import os
import random
import sys
from contextlib import nullcontext
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

import torch
from peft import LoraConfig
from ppo_run import build, critic_weights, logged, policy_weights
from tiny_policy import tiny_model

from trl_gptoss.parallelism import zero3_config

torch.set_num_threads(1)
FOLDER = Path(sys.argv[1])
WORLD, RANK = int(os.environ.get("WORLD_SIZE", 1)), int(os.environ.get("RANK", 0))


def by_prompt(prompt: list[int], _: random.Random) -> list[int]:
    rng = random.Random(str(prompt))
    return [rng.randrange(256) for _ in range(rng.choice((1, 2, 12)))]


def run(what: str) -> None:
    critic, _, broken = what.partition("_")
    critic, _, how = critic.partition("-")
    model = tiny_model()
    model.set_attn_implementation("sink_fa3")
    trainer = build(
        FOLDER / f"{what}_{WORLD}",
        script=by_prompt,
        critic=critic,
        model=model,
        padding_free=how == "sp",
        sequence_parallel_size=2 if how == "sp" else 1,
        **({"deepspeed": zero3_config(bf16=False), "use_cpu": False} if how == "zero3" else {}),
        lora=LoraConfig(r=4, target_modules=["q_proj", "v_proj"]) if critic == "lora" else None,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=4 // WORLD,
        max_steps=4,
        critic_warmup_steps=1,
        max_rollout_tokens=12,
        optim="sgd",  # linear in the gradient, where Adam would hide a factor
        learning_rate=0.5,
        critic_learning_rate=0.2,
        lr_scheduler_type="constant",
        bootstrap_truncated=True,
    )
    with torch.no_grad():  # the policy's second adapter factor starts at 0, which would hide most of its gradient
        generator = torch.Generator().manual_seed(0)
        for name, parameter in sorted(trainer.model.named_parameters()):
            if "lora_B" in name:
                parameter.normal_(std=0.1, generator=generator)
    if broken:  # the control: every process keeps the gradient of its own rows
        from trl_gptoss.trainers.critic_optimizer import CriticOptimizer

        CriticOptimizer._average_local_gradients = lambda self: None
    trainer.train()
    curves = {
        name: logged(trainer, name)
        for name in ("value_loss", "policy_loss", "explained_variance", "returns/mean", "advantages/std")
    }
    if how == "zero3":
        assert all(p.ds_tensor.numel() < p.ds_numel or p.ds_numel < WORLD for p in trainer.model.parameters())
        assert all(
            p.ds_tensor.numel() < p.ds_numel or p.ds_numel < WORLD for p in trainer.critic.backbone.parameters()
        )
    with gathered(trainer) if how == "zero3" else nullcontext():
        weights = {**policy_weights(trainer), **{f"critic {n}": p for n, p in critic_weights(trainer).items()}}
    torch.save({"weights": weights, "curves": curves}, FOLDER / f"{what}_{WORLD}_{RANK}.pt")


def gathered(trainer):
    import deepspeed

    critic = trainer.critic.backbone.parameters() if trainer._critic_kind == "separate" else []
    return deepspeed.zero.GatheredParameters([*trainer.model.parameters(), *critic])


for what in sys.argv[2:]:
    run(what)
if WORLD > 1:
    torch.distributed.destroy_process_group()
