"""PPO's gradient, put together from advantages and losses, against REINFORCE and against the gradient of the return."""

import itertools

import numpy as np
import pytest
import torch

from trl_gptoss.advantages import Advantages, gae_advantages, token_rewards, turn_gae_advantages
from trl_gptoss.losses import LossNormalizer, policy_loss

VOCABULARY, WIDTH = 6, 5


def softmax(x: np.ndarray) -> np.ndarray:
    e = np.exp(x - x.max())
    return e / e.sum()


def reinforce_gradient(
    weight: np.ndarray, states: np.ndarray, actions: np.ndarray, mask: np.ndarray, rewards: np.ndarray, gamma: float
) -> np.ndarray:
    """Gradient of -mean over policy tokens of (discounted reward to go) * log pi, written out: (WIDTH, VOCABULARY).

    log pi(a | s) = log softmax(s W)[a], so its gradient is the outer product of s and (onehot(a) - softmax(s W)).
    """
    gradient = np.zeros_like(weight)
    for row in range(len(mask)):
        reward_to_go = 0.0
        for t in reversed(range(mask.shape[1])):
            if not mask[row, t]:
                continue
            reward_to_go = rewards[row, t] + gamma * reward_to_go
            onehot = np.eye(VOCABULARY)[actions[row, t]]
            gradient -= reward_to_go * np.outer(states[row, t], onehot - softmax(states[row, t] @ weight))
    return gradient / mask.sum()


def batch_with_tools(seed: int) -> tuple[torch.Tensor, ...]:
    rng = np.random.default_rng(seed)
    mask = np.array([[1, 1, 1, 0, 0, 1, 1, 0], [1, 0, 0, 0, 1, 0, 1, 1], [1, 1, 0, 0, 0, 0, 0, 0]], dtype=bool)
    states, actions = rng.normal(size=(*mask.shape, WIDTH)), rng.integers(0, VOCABULARY, mask.shape)
    rewards = np.where(mask, rng.normal(size=mask.shape), 0)
    return tuple(map(torch.from_numpy, (rng.normal(size=(WIDTH, VOCABULARY)), states, actions, mask, rewards)))


def log_probs(weight: torch.Tensor, states: torch.Tensor, actions: torch.Tensor) -> torch.Tensor:
    return (states @ weight).log_softmax(-1).gather(-1, actions.unsqueeze(-1)).squeeze(-1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("gamma", [1.0, 0.9])
@pytest.mark.parametrize("old", ["none", "stored"])
@pytest.mark.parametrize("seed", range(3))
def test_on_policy_ppo_without_a_critic_is_reinforce(dtype: torch.dtype, gamma: float, old: str, seed: int) -> None:
    weight, states, actions, mask, rewards = batch_with_tools(seed)
    expected = reinforce_gradient(*(x.numpy() for x in (weight, states, actions, mask, rewards)), gamma=gamma)
    weight, states, rewards = weight.to(dtype).requires_grad_(), states.to(dtype), rewards.to(dtype)

    logps = log_probs(weight, states, actions)
    advantages = gae_advantages(rewards, torch.zeros_like(rewards), mask, gamma=gamma, lam=1.0).advantages
    # The bounds of a real run: on-policy they must not matter.
    policy = policy_loss(
        logps, logps.detach() if old == "stored" else None, advantages, mask,
        epsilon=0.2, epsilon_high=0.28, dual_clip=10.0,
    )  # fmt: skip
    LossNormalizer.from_mask(mask, "token_mean")(policy.loss, mask).backward()
    np.testing.assert_allclose(weight.grad, expected, atol=1e-6 if dtype == torch.float32 else 1e-14)
    # Control: with tool results counted as policy tokens it is another gradient.
    everything = torch.ones_like(mask)
    wrong = gae_advantages(rewards, torch.zeros_like(rewards), everything, gamma=gamma).advantages
    loss = LossNormalizer.from_mask(everything, "token_mean")(
        policy_loss(log_probs(weight, states, actions), None, wrong, everything).loss, everything
    )
    assert np.abs(torch.autograd.grad(loss, weight)[0].numpy() - expected).max() > 1e-2


def test_a_second_step_is_not_reinforce() -> None:
    """Control of the limit: away from the sampling policy the ratio enters the gradient, then the clip."""
    weight, states, actions, mask, rewards = batch_with_tools(0)
    advantages = gae_advantages(rewards, torch.zeros_like(rewards), mask).advantages
    stored = log_probs(weight, states, actions)
    moved = (weight + 0.5 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(0))).requires_grad_()
    policy = policy_loss(log_probs(moved, states, actions), stored, advantages, mask)
    gradient = torch.autograd.grad(LossNormalizer.from_mask(mask, "token_mean")(policy.loss, mask), moved)[0]
    expected = reinforce_gradient(*(x.detach().numpy() for x in (moved, states, actions, mask, rewards)), gamma=1.0)
    assert np.abs(gradient.numpy() - expected).max() > 1e-2
    assert (policy.clipped_low | policy.clipped_high).any()


# Three policy tokens out of three symbols with a tool result of two tokens after the first. The state of a token is all
# that came before it. Every episode can be enumerated, so expectations have no sampling error.
EPISODES = list(itertools.product(range(3), repeat=3))
MASK = torch.tensor([[1, 0, 0, 1, 1]], dtype=torch.bool).repeat(len(EPISODES), 1)


def episode_logps(table: dict[tuple[int, ...], torch.Tensor]) -> torch.Tensor:
    """(27, 5) log-probs; NaN on the tool result, where the policy has said nothing."""
    rows = []
    for episode in EPISODES:
        taken = [table[episode[:i]].log_softmax(-1)[episode[i]] for i in range(3)]
        rows.append(torch.stack([taken[0], *torch.full((2,), torch.nan).double(), taken[1], taken[2]]))
    return torch.stack(rows)


def episode_advantages(kind: str, rewards: torch.Tensor) -> Advantages:
    per_token = token_rewards(rewards, MASK)
    if kind == "turns":
        return turn_gae_advantages(per_token, torch.zeros_like(per_token), MASK)
    values = torch.zeros_like(per_token)
    if kind == "critic":  # any function of the state is a baseline without bias when lambda = 1
        generator = torch.Generator().manual_seed(1)
        baseline: dict[tuple[int, ...], float] = {}
        for row, episode in enumerate(EPISODES):
            for i, t in enumerate((0, 3, 4)):
                value = baseline.setdefault(episode[:i], torch.randn((), generator=generator).item())
                values[row, t] = value
    return gae_advantages(per_token, values, MASK)


@pytest.mark.parametrize("kind", ["no critic", "critic", "turns"])
def test_the_expected_gradient_is_that_of_the_expected_return(kind: str) -> None:
    generator = torch.Generator().manual_seed(0)
    prefixes = [prefix for length in range(3) for prefix in itertools.product(range(3), repeat=length)]
    table = {prefix: torch.randn(3, generator=generator).double().requires_grad_() for prefix in prefixes}
    rewards = torch.randn(len(EPISODES), generator=generator).double()
    logps = episode_logps(table)
    probabilities = logps.where(MASK, torch.zeros_like(logps)).sum(1).exp()
    assert probabilities.sum().item() == pytest.approx(1)
    parameters = list(table.values())
    expected = torch.autograd.grad((probabilities * rewards).sum(), parameters, retain_graph=True)

    policy = policy_loss(logps, None, episode_advantages(kind, rewards).advantages, MASK)
    gradient = torch.autograd.grad(-(probabilities.detach() * policy.loss.sum(1)).sum(), parameters)
    for found, wanted in zip(gradient, expected):
        torch.testing.assert_close(found, wanted, atol=1e-12, rtol=1e-9)
