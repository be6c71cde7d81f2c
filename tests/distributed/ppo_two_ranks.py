"""Gradient of a policy and a critic under DDP and gradient accumulation; run by torchrun, or as one process.

The argument is a folder for `gradient_<world size>_<rank>.json`. Eight completions of unequal length in micro-batches of
two: rank 0 has almost all tokens.
"""

import json
import sys
from pathlib import Path

import torch
from accelerate import Accelerator
from torch import nn

from trl_gptoss.advantages import gae_advantages, token_rewards, whiten
from trl_gptoss.losses import LossNormalizer, policy_loss, value_loss

torch.set_num_threads(1)
LENGTHS = torch.tensor([9, 7, 8, 9, 1, 2, 1, 0])


class PolicyAndCritic(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.policy, self.critic = nn.Linear(4, 6), nn.Linear(4, 1)

    def forward(self, states: torch.Tensor, actions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        logps = self.policy(states).log_softmax(-1).gather(-1, actions.unsqueeze(-1)).squeeze(-1)
        return logps, self.critic(states).squeeze(-1)


def gradient(accelerator: Accelerator, mode: str, own_counts: bool) -> list[float]:
    """`own_counts`: the control, each micro-batch and rank by its own counts."""
    torch.manual_seed(0)
    model = PolicyAndCritic().double()
    states, actions = torch.randn(8, 9, 4).double(), torch.randint(0, 6, (8, 9))
    mask = (torch.arange(9) < LENGTHS.unsqueeze(1)) & (torch.rand(8, 9) < 0.8)
    rewards = token_rewards(torch.randn(8).double(), mask)
    mine = torch.arange(8).chunk(accelerator.num_processes)[accelerator.process_index]
    states, actions, mask, rewards = states[mine], actions[mine], mask[mine], rewards[mine]
    model = accelerator.prepare(model)

    def reduce(tensor: torch.Tensor) -> torch.Tensor:
        return accelerator.reduce(tensor, "sum")

    with torch.no_grad():
        old_values = model(states, actions)[1]
    advantages, returns, _ = gae_advantages(rewards, old_values, mask)
    advantages = whiten(advantages, mask, reduce=reduce)
    length = 9 if mode == "fixed_length" else None
    averaged = accelerator.num_processes
    whole = LossNormalizer.from_mask(mask, mode, reduce=reduce, length=length, averaged=averaged)
    micro_batches = torch.arange(len(mine)).split(2)
    for i, micro in enumerate(micro_batches):
        normalize = LossNormalizer.from_mask(mask[micro], mode, length=length) if own_counts else whole
        with accelerator.no_sync(model) if i < len(micro_batches) - 1 else torch.enable_grad():
            logps, values = model(states[micro], actions[micro])
            policy = policy_loss(logps, None, advantages[micro], mask[micro])
            value = value_loss(values, old_values[micro], returns[micro], mask[micro], value_clip=0.2)
            loss = normalize(policy.loss, mask[micro]) + 0.5 * normalize(value.loss, mask[micro])
            accelerator.backward(loss)
    return torch.cat([p.grad.flatten() for p in model.parameters()]).tolist()


if __name__ == "__main__":
    accelerator = Accelerator(cpu=True)
    seen = {
        f"{mode} {own}": gradient(accelerator, mode, own)
        for mode in ("token_mean", "sequence_mean", "fixed_length")
        for own in (False, True)
    }
    name = f"gradient_{accelerator.num_processes}_{accelerator.process_index}.json"
    (Path(sys.argv[1]) / name).write_text(json.dumps(seen))
    accelerator.end_training()
