"""Targets of a batch against loops in numpy: tool spans, truncations, rows without a score or without a token."""

import numpy as np
import pytest
import torch
from ppo_run import settings_of

from trl_gptoss.trainers.ppo_targets import ppo_targets

ROWS, LENGTH = 7, 11


def batch(seed):
    rng = np.random.default_rng(seed)
    mask = rng.random((ROWS, LENGTH)) < 0.6
    mask[2] = False  # nothing sampled
    rewards = rng.normal(size=ROWS)
    rewards[4] = np.nan  # could not be scored
    return {
        "mask": mask,
        "rewards": rewards,
        "values": rng.normal(size=(ROWS, LENGTH + 1)),
        "truncated": rng.random(ROWS) < 0.5,
        "kl": rng.normal(size=(ROWS, LENGTH)),
    }


def in_loops(b, gamma, lam, level, bootstrap, kl_coef):
    """Advantages, returns and where the critic is trained, one row and one step at a time."""
    advantages, returns, trained = np.zeros((ROWS, LENGTH)), np.zeros((ROWS, LENGTH)), np.zeros((ROWS, LENGTH), bool)
    for row in range(ROWS):
        tokens = [t for t in range(LENGTH) if b["mask"][row, t]]
        if not tokens or np.isnan(b["rewards"][row]):
            continue
        paid = {t: -kl_coef * b["kl"][row, t] for t in tokens}
        paid[tokens[-1]] += b["rewards"][row]
        steps = [[t] for t in tokens]
        if level == "turn":
            steps = [[tokens[0]]]
            for before, t in zip(tokens, tokens[1:]):
                steps[-1].append(t) if t == before + 1 else steps.append([t])
        after = b["values"][row, tokens[-1] + 1] if bootstrap and b["truncated"][row] else 0.0
        later = 0.0
        for step in reversed(steps):
            value = b["values"][row, step[0]]
            later = sum(paid[t] for t in step) + gamma * after - value + gamma * lam * later
            after = value
            for t in step:
                advantages[row, t] = later
            returns[row, step[0]], trained[row, step[0]] = later + value, True
    return advantages, returns, trained


@pytest.mark.parametrize("kl_coef", [0.0, 0.3])
@pytest.mark.parametrize("bootstrap", [False, True])
@pytest.mark.parametrize("level", ["token", "turn"])
@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 1.0), (0.9, 0.8), (0.5, 0.0)])
def test_targets_are_those_of_the_loops(tmp_path, gamma, lam, level, bootstrap, kl_coef):
    for seed in range(3):
        b = batch(seed)
        for whitened in (False, True):
            args = settings_of(
                tmp_path, gae_gamma=gamma, gae_lambda=lam, gae_level=level, bootstrap_truncated=bootstrap,
                whiten_advantages=whitened,
            )  # fmt: skip
            targets, metrics = ppo_targets(
                args,
                rewards_B=torch.from_numpy(b["rewards"]),
                values_BT1=torch.from_numpy(b["values"]),
                mask_BT=torch.from_numpy(b["mask"]),
                truncated_B=torch.from_numpy(b["truncated"]),
                kl_BT=torch.from_numpy(b["kl"]) if kl_coef else None,
                kl_coef=kl_coef,
                reduce=lambda x: x,
            )
            advantages, returns, trained = in_loops(b, gamma, lam, level, bootstrap, kl_coef)
            kept = b["mask"] & ~np.isnan(b["rewards"])[:, None]
            if whitened:
                chosen = advantages[kept]
                advantages = np.where(kept, (advantages - chosen.mean()) / chosen.std(ddof=1), 0)
            np.testing.assert_array_equal(targets.policy_mask, kept)
            np.testing.assert_array_equal(targets.value_mask, trained)
            np.testing.assert_allclose(targets.advantages, advantages, atol=1e-12)
            np.testing.assert_allclose(targets.returns, returns, atol=1e-12)
        values = b["values"][:, :-1][trained]
        expected = 1 - (returns[trained] - values).var(ddof=1) / returns[trained].var(ddof=1)
        assert metrics["explained_variance"] == pytest.approx(expected)
        rows = [(row, np.flatnonzero(trained[row])) for row in range(ROWS) if trained[row].any()]
        for name, which in (("first", 0), ("last", -1)):
            r, v = np.array([(returns[row, t[which]], b["values"][row, t[which]]) for row, t in rows]).T
            expected = 1 - (r - v).var(ddof=1) / r.var(ddof=1)
            assert metrics[f"explained_variance/{name}"] == pytest.approx(expected)
        assert metrics["returns/mean"] == pytest.approx(returns[trained].mean())
        assert metrics["values/std"] == pytest.approx(values.std(ddof=1))


def test_a_batch_without_a_token_gives_zeros(tmp_path):
    targets, metrics = ppo_targets(
        settings_of(tmp_path),
        rewards_B=torch.tensor([1.0, torch.nan]),
        values_BT1=torch.ones(2, 4),
        mask_BT=torch.tensor([[0, 0, 0], [1, 1, 1]]),
        truncated_B=torch.zeros(2, dtype=torch.bool),
        kl_BT=None,
        kl_coef=0.0,
        reduce=lambda x: x,
    )
    assert not targets.policy_mask.any() and not targets.advantages.any() and not targets.returns.any()
    assert np.isnan(metrics["returns/mean"]) and all(
        np.isnan(metrics[n]) for n in metrics if n.startswith("explained")
    )
