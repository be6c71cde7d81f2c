"""Tasks with a known optimum, played with tabular policies: PPO with a critic and GRPO have to find it."""

import pytest
import torch

from trl_gptoss.advantages import gae_advantages, group_advantages, token_rewards, whiten
from trl_gptoss.losses import LossNormalizer, policy_loss, value_loss

SYMBOLS, BATCH, GROUP = 4, 64, 8


def play(algorithm: str, steps: int, seed: int, *, informative: bool = True) -> float:
    """Mean reward of the last 5 of 60 batches; the optimum is 1.

    `steps` symbols are sampled, with one token of a tool result after the first; the reward is the fraction that is right.
    The state is the step and the number of right symbols so far, so that the critic has something to explain.
    """
    generator = torch.Generator().manual_seed(seed)
    secret = torch.randint(0, SYMBOLS, (steps,), generator=generator)
    policy = torch.zeros(steps, steps + 1, SYMBOLS, requires_grad=True)
    critic = torch.zeros(steps, steps + 1, requires_grad=True)
    optimizer = torch.optim.Adam([{"params": [policy], "lr": 0.1}, {"params": [critic], "lr": 0.1}])
    # Columns of the completion: the first symbol, a tool result, the other symbols.
    columns = torch.tensor([0, *range(2, steps + 1)])
    mask = torch.zeros(BATCH, steps + 1, dtype=torch.bool)
    mask[:, columns] = True
    history = []
    for _ in range(60):
        right, states, actions = torch.zeros(BATCH, dtype=torch.long), [], []
        for step in range(steps):
            states.append(right.clone())
            probabilities = policy[step, right].softmax(-1).detach()
            actions.append(torch.multinomial(probabilities, 1, generator=generator).squeeze(1))
            right += actions[-1] == secret[step]
        score = right / steps
        history.append(score.mean().item())
        paid = score if informative else score[torch.randperm(BATCH, generator=generator)]

        def forward(states=states, actions=actions) -> tuple[torch.Tensor, torch.Tensor]:
            logps, values = torch.zeros(BATCH, steps + 1), torch.zeros(BATCH, steps + 1)
            for step, column in enumerate(columns):
                taken = policy[step, states[step]].log_softmax(-1).gather(1, actions[step].unsqueeze(1)).squeeze(1)
                index = torch.tensor([int(column)])
                logps = logps.index_copy(1, index, taken.unsqueeze(1))
                values = values.index_copy(1, index, critic[step, states[step]].unsqueeze(1))
            return logps, values

        with torch.no_grad():
            old_logps, old_values = forward()
        if algorithm == "ppo":
            advantages, returns, _ = gae_advantages(token_rewards(paid, mask), old_values, mask, gamma=1.0, lam=0.95)
            advantages = whiten(advantages, mask)
        else:
            advantages = group_advantages(paid, GROUP)
        normalize = LossNormalizer.from_mask(mask, "token_mean")
        for epoch in range(2):
            logps, values = forward()
            surrogate = policy_loss(
                logps, old_logps if epoch else None, advantages, mask, epsilon_high=0.28, dual_clip=10.0
            )
            loss = normalize(surrogate.loss, mask)
            if algorithm == "ppo":
                loss = loss + normalize(value_loss(values, old_values, returns, mask, value_clip=0.5).loss, mask)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return sum(history[-5:]) / 5


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("steps", [1, 5])
@pytest.mark.parametrize("algorithm", ["ppo", "grpo"])
def test_the_optimum_is_found(algorithm: str, steps: int, seed: int) -> None:
    assert play(algorithm, steps, seed) > 0.95  # a random policy has 0.25


@pytest.mark.parametrize("algorithm", ["ppo", "grpo"])
def test_nothing_is_found_without_information(algorithm: str) -> None:
    """Control: the rewards of the batch in random order."""
    assert play(algorithm, 5, 0, informative=False) < 0.6
