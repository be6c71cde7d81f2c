"""Four PPO steps by one process or by two (torchrun); the arguments are a folder and what to run.

Rollouts depend on their prompt alone, so that one process with eight rows and two with four each train on the same data:
completions of 1 to 12 tokens in micro-batches of two. `<critic>-sp` shares every sequence between two ranks, `-epochs` lets the
critic pass twice over a mini-batch, `-fsdp2` shards policy and critic, `-zero3` wants to be started by `accelerate launch` with
configs/accelerate/zero3.yaml. Weights go to `<what>_<world size>_<rank>.pt`.

Accelerate applies FSDP2 on GPUs only. Here the trainer's models are sharded by `shard_model` before training and Accelerate is
told to leave them as they are; everything else is the trainer's.
"""

import os
import random
import sys
from contextlib import nullcontext
from pathlib import Path
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

import torch
from accelerate import Accelerator
from peft import LoraConfig
from ppo_run import build, critic_weights, logged, policy_weights
from tiny_policy import tiny_model
from torch.distributed.tensor import DTensor

from trl_gptoss.parallelism import assert_sharded, shard_mesh, shard_model
from trl_gptoss.trainers.critic_optimizer import CriticOptimizer

torch.set_num_threads(1)
FOLDER = Path(sys.argv[1])
WORLD, RANK = int(os.environ.get("WORLD_SIZE", 1)), int(os.environ.get("RANK", 0))


def by_prompt(prompt: list[int], _: random.Random) -> list[int]:
    rng = random.Random(str(prompt))
    return [rng.randrange(256) for _ in range(rng.choice((1, 2, 12)))]


def shard(trainer) -> None:
    """FSDP2 for what Accelerate would shard."""
    Accelerator.prepare_model = lambda self, model, *args, **kwargs: model
    models = [trainer.model] + ([trainer.critic.model.backbone] if trainer._critic_kind == "separate" else [])
    for model in models:
        assert_sharded(shard_model(model, shard_mesh("cpu")))


def whole(policy: dict, critic: dict) -> dict[str, torch.Tensor]:
    named = {**policy, **{f"critic {name}": value for name, value in critic.items()}}
    return {name: value.full_tensor() if isinstance(value, DTensor) else value for name, value in named.items()}


def gathered(trainer) -> dict[str, torch.Tensor]:
    """Weights that ZeRO-3 has in parts."""
    wrapped = [trainer.model_wrapped]
    critic = dict(trainer.critic.local_parameters())
    if trainer._critic_kind == "separate":
        wrapped.append(trainer.critic.model.backbone)
    assert all(any(p.ds_tensor.numel() < p.ds_numel for p in model.parameters()) for model in wrapped)
    policy, *backbone = (trainer.accelerator.get_state_dict(model) for model in wrapped)
    return whole(policy, {**critic, **(backbone[0] if backbone else {})}) if RANK == 0 else {}


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
        critic_epochs=2 if how == "epochs" else 1,
        use_cpu=how != "zero3",  # asked for the CPU, Accelerate leaves DeepSpeed out without a word
        ddp_backend="gloo" if WORLD > 1 else None,
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
    if how == "fsdp2":
        shard(trainer)
    # the control: every process keeps the gradient of its own rows
    with patch.object(CriticOptimizer, "_average_local_gradients", lambda self: None) if broken else nullcontext():
        trainer.train()
    curves = {
        name: logged(trainer, name)
        for name in ("value_loss", "policy_loss", "explained_variance", "returns/mean", "advantages/std")
    }
    weights = gathered(trainer) if how == "zero3" else whole(policy_weights(trainer), critic_weights(trainer))
    torch.save({"weights": weights, "curves": curves}, FOLDER / f"{what}_{WORLD}_{RANK}.pt")


for what in sys.argv[2:]:
    run(what)
if WORLD > 1:
    torch.distributed.destroy_process_group()
