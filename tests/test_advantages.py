"""Advantages against Python loops that know nothing of the tensors: one completion at a time, one step at a time."""

import math
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trl_gptoss.advantages import (
    explained_variance,
    gae_advantages,
    group_advantages,
    token_rewards,
    turn_gae_advantages,
    whiten,
)

sys.path.insert(0, str(Path(__file__).parent / "support"))
from thread_ranks import run_ranks  # noqa: E402

SEEDS = st.integers(0, 2**32 - 1)
DISCOUNTS = st.sampled_from([0.0, 0.3, 0.95, 1.0])


def random_mask(rng: np.random.Generator, rows: int, length: int) -> np.ndarray:
    """Turns and tool results of random lengths, padding on the right; some rows without a single policy token."""
    mask = np.zeros((rows, length), dtype=bool)
    for row in mask:
        position, used = 0, rng.integers(0, length + 1)
        while position < used:
            turn = rng.integers(1, 6)
            row[position : min(position + turn, used)] = True
            position += turn + rng.integers(1, 6)
    return mask


def random_batch(seed: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    rows, length = int(rng.integers(1, 5)), int(rng.integers(1, 40))
    # Every fourth mask has no structure at all: single tokens, results at the start.
    mask = rng.random((rows, length)) < 0.5 if seed % 4 == 0 else random_mask(rng, rows, length)
    values = np.where(mask, rng.normal(size=mask.shape), np.nan)
    return {
        "rewards": np.where(mask, rng.normal(size=mask.shape), 0.0),
        "values": values,
        "mask": mask,
        "truncated": rng.random(rows) < 0.5,
        "final": rng.normal(size=rows),
    }


def loop_gae(rewards: list[float], values: list[float], final: float, gamma: float, lam: float) -> list[float]:
    """The definition, a sum of deltas for every step, not the recursion."""
    following = [*values[1:], final]
    deltas = [r + gamma * n - v for r, n, v in zip(rewards, following, values)]
    return [
        sum((gamma * lam) ** (later - step) * deltas[later] for later in range(step, len(deltas)))
        for step in range(len(deltas))
    ]


def loop_token_gae(batch: dict[str, np.ndarray], gamma: float, lam: float) -> tuple[np.ndarray, np.ndarray]:
    advantages, returns = np.zeros(batch["mask"].shape), np.zeros(batch["mask"].shape)
    for row in range(len(advantages)):
        tokens = [t for t in range(advantages.shape[1]) if batch["mask"][row, t]]
        rewards = [batch["rewards"][row, t] for t in tokens]
        values = [batch["values"][row, t] for t in tokens]
        final = batch["final"][row] if batch["truncated"][row] else 0.0
        for t, a, v in zip(tokens, loop_gae(rewards, values, final, gamma, lam), values):
            advantages[row, t], returns[row, t] = a, a + v
    return advantages, returns


def loop_turn_gae(batch: dict[str, np.ndarray], gamma: float, lam: float) -> tuple[np.ndarray, ...]:
    shape = batch["mask"].shape
    advantages, returns, first = np.zeros(shape), np.zeros(shape), np.zeros(shape, dtype=bool)
    for row in range(shape[0]):
        turns: list[list[int]] = []
        for t in range(shape[1]):
            if not batch["mask"][row, t]:
                continue
            if turns and turns[-1][-1] == t - 1:
                turns[-1].append(t)
            else:
                turns.append([t])
        rewards = [sum(batch["rewards"][row, t] for t in turn) for turn in turns]
        values = [batch["values"][row, turn[0]] for turn in turns]
        final = batch["final"][row] if batch["truncated"][row] else 0.0
        for turn, a, v in zip(turns, loop_gae(rewards, values, final, gamma, lam), values):
            advantages[row, turn] = a
            returns[row, turn[0]], first[row, turn[0]] = a + v, True
    return advantages, returns, first


def tensors(batch: dict[str, np.ndarray]) -> dict[str, torch.Tensor]:
    return {name: torch.from_numpy(array) for name, array in batch.items()}


def run_gae(function, batch: dict[str, np.ndarray], gamma: float, lam: float, **kwargs):
    t = tensors(batch)
    kwargs = kwargs or {"truncated_B": t["truncated"], "final_values_B": t["final"]}
    return function(t["rewards"], t["values"], t["mask"], gamma=gamma, lam=lam, **kwargs)


@settings(max_examples=150, deadline=None)
@given(seed=SEEDS, gamma=DISCOUNTS, lam=DISCOUNTS)
def test_token_gae_equals_the_loops(seed: int, gamma: float, lam: float) -> None:
    batch = random_batch(seed)
    result = run_gae(gae_advantages, batch, gamma, lam)
    advantages, returns = loop_token_gae(batch, gamma, lam)
    np.testing.assert_allclose(result.advantages, advantages, atol=1e-12)
    np.testing.assert_allclose(result.returns, returns, atol=1e-12)
    assert (result.value_mask.numpy() == batch["mask"]).all()


@settings(max_examples=150, deadline=None)
@given(seed=SEEDS, gamma=DISCOUNTS, lam=DISCOUNTS)
def test_turn_gae_equals_the_loops(seed: int, gamma: float, lam: float) -> None:
    batch = random_batch(seed)
    result = run_gae(turn_gae_advantages, batch, gamma, lam)
    advantages, returns, first = loop_turn_gae(batch, gamma, lam)
    np.testing.assert_allclose(result.advantages, advantages, atol=1e-12)
    np.testing.assert_allclose(result.returns, returns, atol=1e-12)
    assert (result.value_mask.numpy() == first).all()


def test_the_example_of_the_docstring_and_its_control() -> None:
    mask = torch.tensor([[1, 1, 0, 0, 0, 1, 1]])
    rewards = token_rewards(torch.ones(1), mask)
    zeros = torch.zeros(1, 7)
    result = gae_advantages(rewards, zeros, mask, gamma=0.5)
    assert result.advantages.tolist() == [[0.125, 0.25, 0, 0, 0, 0.5, 1]]
    # Control: with the tool result counted as steps, the call is discounted through it.
    wrong = gae_advantages(rewards, zeros, torch.ones_like(mask), gamma=0.5)
    assert wrong.advantages[0, 0] == 0.5**6

    mask = torch.tensor([[1, 1, 1, 0, 0, 1, 1]])
    result = turn_gae_advantages(token_rewards(torch.ones(1), mask), zeros, mask, gamma=0.5)
    assert result.advantages.tolist() == [[0.5, 0.5, 0.5, 0, 0, 1, 1]]
    assert result.returns.tolist() == [[0.5, 0, 0, 0, 0, 1, 0]]
    assert result.value_mask.tolist() == [[True, False, False, False, False, True, False]]


@settings(max_examples=50, deadline=None)
@given(seed=SEEDS, extra=st.integers(1, 30), gamma=DISCOUNTS, lam=DISCOUNTS)
def test_the_length_of_a_tool_result_changes_nothing(seed: int, extra: int, gamma: float, lam: float) -> None:
    rng = np.random.default_rng(seed)
    sides = [rng.normal(size=(1, 4)) for _ in range(4)]

    def run(gap: int) -> tuple[np.ndarray, np.ndarray]:
        space = np.zeros((1, gap))
        mask = np.concatenate([np.ones((1, 4)), space, np.ones((1, 4))], 1).astype(bool)
        rewards = np.concatenate([sides[0], space, sides[1]], 1)
        values = np.concatenate([sides[2], space + 99, sides[3]], 1)
        result = gae_advantages(*map(torch.from_numpy, (rewards, values, mask)), gamma=gamma, lam=lam)
        return result.advantages.numpy()[mask], result.returns.numpy()[mask]

    for short, long in zip(run(1), run(1 + extra)):
        np.testing.assert_array_equal(short, long)


def test_truncation_bootstraps_and_only_where_it_is_set() -> None:
    mask, rewards, values = torch.ones(2, 3, dtype=torch.bool), torch.zeros(2, 3), torch.full((2, 3), 0.25)
    result = gae_advantages(
        rewards, values, mask, truncated_B=torch.tensor([True, False]), final_values_B=torch.tensor([0.75, torch.nan])
    )
    assert result.returns.tolist() == [[0.75] * 3, [0.0] * 3]
    assert gae_advantages(rewards, values, mask).returns.tolist() == [[0.0] * 3] * 2


def test_long_completions_in_float32() -> None:
    """16k tokens: gamma = lambda = 1 must telescope to reward - value, whatever the values are in between."""
    generator = torch.Generator().manual_seed(0)
    values, mask = torch.randn(2, 16384, generator=generator), torch.rand(2, 16384, generator=generator) < 0.7
    result = gae_advantages(token_rewards(torch.tensor([1.0, 0.0]), mask), values, mask)
    expected = torch.where(mask, torch.tensor([[1.0], [0.0]]) - values, 0)
    assert (result.advantages - expected).abs().max() < 2e-4
    assert result.advantages.dtype == torch.float32


@pytest.mark.parametrize("shape", [(0, 5), (3, 0), (2, 4)])
def test_nothing_to_train_gives_zeros(shape: tuple[int, int]) -> None:
    mask, zeros = torch.zeros(shape, dtype=torch.long), torch.zeros(shape)
    for function in (gae_advantages, turn_gae_advantages):
        result = function(
            zeros, zeros, mask, truncated_B=torch.ones(shape[0]).bool(), final_values_B=torch.ones(shape[0])
        )
        assert all(x.shape == shape and not x.any() for x in result)
    assert not token_rewards(torch.ones(shape[0]), mask).any()


def test_half_precision_is_computed_in_float32_and_nothing_is_differentiated() -> None:
    values = torch.full((1, 300), 1 / 3, dtype=torch.bfloat16, requires_grad=True)
    mask = torch.ones(1, 300, dtype=torch.int)
    result = gae_advantages(torch.full((1, 300), 0.1, dtype=torch.bfloat16), values, mask)
    assert result.advantages.dtype == torch.float32 and not result.advantages.requires_grad
    tenth = float(torch.tensor(0.1, dtype=torch.bfloat16))
    assert result.returns[0, 0].item() == pytest.approx(300 * tenth, rel=1e-5)  # bf16 would have stopped growing


def test_rewards_go_to_the_last_policy_token_minus_kl() -> None:
    mask = torch.tensor([[1, 1, 0, 1, 1, 0], [0, 0, 0, 0, 0, 0]])
    kl = torch.tensor([[0.1, 0.0, 9.0, 0.2, 0.0, torch.nan]]).repeat(2, 1)
    result = token_rewards(torch.tensor([2.0, torch.nan]), mask, kl_BT=kl, kl_coef=0.1)
    torch.testing.assert_close(result, torch.tensor([[-0.01, 0, 0, -0.02, 2, 0], [0] * 6]))


BAD_GAE = [
    ({"mask_BT": torch.ones(2, 3)}, "mask must be"),
    ({"mask_BT": torch.ones(2, 4).bool()}, "rewards_BT must be floating and"),
    ({"values_BT": torch.zeros(2, 2)}, "values_BT must be"),
    ({"values_BT": torch.zeros(2, 3).long()}, "values_BT must be floating"),
    ({"gamma": 1.1}, "gamma is 1.1"),
    ({"lam": -0.1}, "lam is -0.1"),
    ({"rewards_BT": torch.tensor([[0, torch.nan, 0], [0, 0, 0]])}, "row 0, token 1"),
    ({"rewards_BT": torch.tensor([[0.0, 0, 0], [0, 0, 3]])}, "row 1, token 2, which the policy did not sample"),
    ({"values_BT": torch.full((2, 3), torch.inf)}, "5 non-finite"),
    ({"truncated_B": torch.zeros(2).bool()}, "final_values_B is missing"),
    ({"final_values_B": torch.zeros(2)}, "truncated_B is missing"),
    ({"truncated_B": torch.zeros(2).long(), "final_values_B": torch.zeros(2)}, "truncated_B must be bool"),
    ({"truncated_B": torch.zeros(2).bool(), "final_values_B": torch.zeros(3)}, "final_values_B must be"),
    ({"truncated_B": torch.ones(2).bool(), "final_values_B": torch.tensor([0, torch.nan])}, "truncated completion 1"),
]


@pytest.mark.parametrize("function", [gae_advantages, turn_gae_advantages])
@pytest.mark.parametrize(("change", "message"), BAD_GAE)
def test_bad_input_is_named(function, change: dict, message: str) -> None:
    mask = torch.tensor([[1, 1, 1], [1, 1, 0]])
    good = {"rewards_BT": torch.zeros(2, 3), "values_BT": torch.zeros(2, 3), "mask_BT": mask}
    function(**good)
    with pytest.raises(ValueError, match=message):
        function(**good | change)


def test_bad_rewards_are_named() -> None:
    mask = torch.ones(2, 3).bool()
    with pytest.raises(ValueError, match="rewards_B must be floating and"):
        token_rewards(torch.zeros(3), mask)
    with pytest.raises(ValueError, match="pass both"):
        token_rewards(torch.zeros(2), mask, kl_coef=0.1)
    with pytest.raises(ValueError, match="pass both"):
        token_rewards(torch.zeros(2), mask, kl_BT=torch.zeros(2, 3))
    with pytest.raises(ValueError, match="kl_coef is -1"):
        token_rewards(torch.zeros(2), mask, kl_BT=torch.zeros(2, 3), kl_coef=-1)


def loop_group_advantages(rewards: list[float], size: int, scale: str, eps: float) -> list[float]:
    def std(numbers: list[float]) -> float:
        if len(numbers) < 2:
            return 0.0
        mean = sum(numbers) / len(numbers)
        return math.sqrt(sum((x - mean) ** 2 for x in numbers) / (len(numbers) - 1))

    result = []
    for start in range(0, len(rewards), size):
        group = rewards[start : start + size]
        scored = [r for r in group if not math.isnan(r)]
        divisor = 1.0
        if scale == "group":
            divisor = std(scored) + eps
        elif scale == "batch":
            divisor = std([r for r in rewards if not math.isnan(r)]) + eps
        result += [0.0 if math.isnan(r) else (r - sum(scored) / len(scored)) / divisor for r in group]
    return result


@settings(max_examples=100, deadline=None)
@given(
    seed=SEEDS,
    groups=st.integers(1, 5),
    size=st.integers(2, 6),
    scale=st.sampled_from(["none", "group", "batch"]),
    eps=st.sampled_from([1e-4, 0.1]),
)
def test_group_advantages_equal_the_loops(seed: int, groups: int, size: int, scale: str, eps: float) -> None:
    rng = np.random.default_rng(seed)
    rewards = rng.choice([0.0, 1.0, -0.3, np.nan], size=groups * size)
    result = group_advantages(torch.from_numpy(rewards), size, scale=scale, eps=eps)
    np.testing.assert_allclose(result, loop_group_advantages(rewards.tolist(), size, scale, eps), atol=1e-9)


def test_group_of_equal_rewards_has_no_advantage() -> None:
    assert group_advantages(torch.full((6,), 0.1), 3).abs().max() < 1e-3
    assert not group_advantages(torch.full((4,), torch.nan), 2).any()


def test_bad_groups_are_named() -> None:
    for rewards, size, kwargs, message in [
        (torch.zeros(4), 1, {}, "num_generations is 1"),
        (torch.zeros(5), 2, {}, "no whole number of groups"),
        (torch.zeros(2, 2), 2, {}, "rewards_B must be"),
        (torch.zeros(4).long(), 2, {}, "rewards_B must be floating"),
        (torch.full((4,), torch.inf), 2, {}, "infinite"),
        (torch.zeros(4), 2, {"scale": "std"}, "scale is 'std'"),
    ]:
        with pytest.raises(ValueError, match=message):
            group_advantages(rewards, size, **kwargs)


@settings(max_examples=60, deadline=None)
@given(seed=SEEDS, shift_mean=st.booleans(), ranks=st.integers(1, 3))
def test_whitening_over_ranks_equals_whitening_of_all(seed: int, shift_mean: bool, ranks: int) -> None:
    rng = np.random.default_rng(seed)
    batches = []
    for _ in range(ranks):
        mask = random_mask(rng, int(rng.integers(1, 4)), int(rng.integers(1, 12)))
        batches.append((np.where(mask, rng.normal(50, 3, size=mask.shape), np.nan), mask))
    numbers = [x for values, mask in batches for x in values[mask].tolist()]
    results = run_ranks(
        [
            lambda reduce, v=v, m=m: whiten(
                torch.from_numpy(v), torch.from_numpy(m), shift_mean=shift_mean, reduce=reduce
            )
            for v, m in batches
        ]
    )
    mean = sum(numbers) / max(len(numbers), 1)
    std = math.sqrt(sum((x - mean) ** 2 for x in numbers) / max(len(numbers) - 1, 1))
    for (values, mask), result in zip(batches, results):
        expected = np.zeros(mask.shape)
        for index in zip(*mask.nonzero()):
            expected[index] = ((values[index] - mean) / std if std else 0.0) + (0.0 if shift_mean else mean)
        np.testing.assert_allclose(result, expected, atol=1e-8)
    # Control: what each rank would do alone is something else, as soon as there are two with tokens.
    if sum(mask.sum() > 1 for _, mask in batches) > 1:
        alone = [whiten(torch.from_numpy(v), torch.from_numpy(m), shift_mean=shift_mean) for v, m in batches]
        assert any((a - r).abs().max() > 1e-6 for a, r in zip(alone, results))


@pytest.mark.parametrize("value", [0.0, 0.1, 1 / 3, -1e4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_whitening_makes_no_signal_of_rounding(value: float, dtype: torch.dtype) -> None:
    values = torch.full((7, 1001), value, dtype=dtype)
    assert not whiten(values, torch.ones(7, 1001).bool()).any()
    values[0, 0] += max(abs(value), 1) * 1e-2  # control: a real difference, however small, is scaled up
    assert whiten(values, torch.ones(7, 1001).bool())[0, 0] > 10


@settings(max_examples=40, deadline=None)
@given(seed=SEEDS)
def test_explained_variance_equals_numpy_over_ranks(seed: int) -> None:
    rng = np.random.default_rng(seed)
    returns, mask = rng.normal(5, 2, size=(4, 9)), rng.random((4, 9)) < 0.7
    mask[0, :2] = True
    values = np.where(mask, returns + rng.normal(size=returns.shape), np.nan)
    parts = [(values[i : i + 2], returns[i : i + 2], mask[i : i + 2]) for i in (0, 2)]
    results = run_ranks(
        [lambda reduce, p=p: explained_variance(*map(torch.from_numpy, p), reduce=reduce) for p in parts]
    )
    expected = 1 - np.var((returns - values)[mask]) / np.var(returns[mask])
    np.testing.assert_allclose(results, [expected] * 2, rtol=1e-9)


def test_explained_variance_of_known_critics() -> None:
    returns, mask = torch.tensor([[0.0, 1.0, 2.0]]), torch.ones(1, 3).bool()
    assert explained_variance(returns, returns, mask) == 1
    assert explained_variance(torch.ones(1, 3), returns, mask) == 0
    assert explained_variance(-returns, returns, mask) < 0
    assert explained_variance(returns, torch.full((1, 3), 0.1), mask).isnan()


def test_rounding_of_the_values_is_no_variance() -> None:
    """All rewards 0: the returns, advantages plus values, are 0 but for the rounding of the values."""
    mask = torch.ones(8, 16384).bool()
    values = 0.3 * torch.randn(8, 16384, generator=torch.Generator().manual_seed(0))
    flat = gae_advantages(torch.zeros(8, 16384), values, mask, gamma=1.0, lam=1.0).returns
    assert 0 < flat.abs().max() < 1e-5
    assert explained_variance(values, flat, mask).isnan()
    rewards = torch.zeros(8, 16384)
    rewards[0, -1] = 1e-2  # the control: a real difference, however small
    returns = gae_advantages(rewards, values, mask, gamma=1.0, lam=1.0).returns
    assert explained_variance(values, returns, mask) < -1
