"""Six PPO steps with a checkpoint after the third, or the last three of them resumed; started by `accelerate launch`.

Arguments: a folder, a critic, and `straight`, `resumed` or `forgetful` (the control: resumed without the critic). What is
resumed is expected as `checkpoint-3` in the folder's `resumed` or `forgetful`. Step 3 lies inside of the second epoch of the
first generation batch, one step behind the warm-up. Curves and weights go to `<what>_<rank>.pt`.

Without a sharding in the launcher's configuration the processes run DDP.
"""

import os
import random
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

import torch
from fsdp2_without_gpu import fsdp2_without_gpu
from logged_curves import curves
from ppo_run import build
from tiny_policy import tiny_model
from torch.distributed.tensor import DTensor

from trl_gptoss.parallelism import assert_sharded

torch.set_num_threads(1)
FOLDER, CRITIC, WHAT = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
RANK = int(os.environ["RANK"])
ZERO3, FSDP2 = "ACCELERATE_USE_DEEPSPEED" in os.environ, "ACCELERATE_USE_FSDP" in os.environ


def by_prompt(prompt: list[int], _: random.Random) -> list[int]:
    rng = random.Random(str(prompt))
    return [rng.randrange(256) for _ in range(rng.choice((1, 2, 12)))]


def weights(trainer) -> dict[str, torch.Tensor]:
    """This rank's part of every weight of policy and critic; all of what is not sharded."""
    models = [trainer.model_wrapped] + ([trainer.critic.model.backbone] if CRITIC == "separate" else [])
    found = {f"critic {name}": value for name, value in trainer.critic.local_parameters().items()}
    for number, model in enumerate(models):
        if ZERO3:
            assert any(p.ds_tensor.numel() < p.ds_numel for p in model.parameters())
        if FSDP2:
            assert_sharded(model)
        found |= {f"{number} {name}": p.ds_tensor if ZERO3 else p for name, p in model.named_parameters()}
    parts = {name: p.to_local() if isinstance(p, DTensor) else p for name, p in found.items()}
    return {name: p.detach().clone() for name, p in parts.items()}


if FSDP2:
    fsdp2_without_gpu()
if WHAT == "forgetful":
    from trl_gptoss.trainers import ppo

    ppo.load_critic = lambda *args: None
model = tiny_model()
model.set_attn_implementation("sink_fa3")
trainer = build(
    FOLDER / WHAT,
    script=by_prompt,
    critic=CRITIC,
    model=model,
    use_cpu=not ZERO3,  # asked for the CPU, Accelerate leaves DeepSpeed out without a word
    ddp_backend="gloo",
    per_device_train_batch_size=2,
    max_rollout_tokens=12,
    save_strategy="steps",
    save_steps=3,
    steps_per_generation=2,
    ppo_epochs=2,
    critic_warmup_steps=2,
    critic_learning_rate=2e-2,
    lr_scheduler_type="linear",
)
if WHAT != "straight":
    torch.manual_seed(12345)
trainer.train(resume_from_checkpoint=WHAT != "straight")
torch.save({"curves": curves(trainer), "weights": weights(trainer)}, FOLDER / f"{WHAT}_{RANK}.pt")
torch.distributed.destroy_process_group()
