"""Losses against Python loops over single tokens, gradients against finite differences and exact expectations."""

import math
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trl_gptoss.losses import (
    AdaptiveKLController,
    FixedKLController,
    LossNormalizer,
    entropy_loss,
    kl_estimate,
    policy_loss,
    policy_metrics,
    value_loss,
)

sys.path.insert(0, str(Path(__file__).parent / "support"))
from thread_ranks import run_ranks  # noqa: E402

SEEDS = st.integers(0, 2**32 - 1)
MODES = ["token_mean", "sequence_mean", "fixed_length"]


def random_batch(seed: int, rows: int | None = None) -> dict[str, torch.Tensor]:
    """Log-probs, values and a mask with holes and empty rows; garbage off the mask."""
    rng = np.random.default_rng(seed)
    shape = (rows or int(rng.integers(1, 5)), int(rng.integers(1, 20)))
    mask = (rng.random(shape) < 0.6) & (rng.random((shape[0], 1)) < 0.8)
    logps = -rng.exponential(1.0, size=shape)
    batch = {
        "logps": logps,
        "old": logps - rng.normal(0, rng.choice([0.1, 1.5]), size=shape),
        "advantages": rng.choice([-2.0, -0.5, 0.0, 1.0], size=shape),
        "values": rng.normal(size=shape),
        "old_values": rng.normal(size=shape),
        "returns": rng.normal(size=shape),
    }
    garbage = rng.choice([np.nan, np.inf, -np.inf, 1e30], size=shape)
    return {n: torch.from_numpy(np.where(mask, x, garbage)) for n, x in batch.items()} | {
        "mask": torch.from_numpy(mask)
    }


def loop_policy_loss(b: dict[str, torch.Tensor], low: float, high: float, dual: float | None) -> np.ndarray:
    loss = np.zeros(b["mask"].shape)
    for i, j in b["mask"].nonzero().tolist():
        ratio = math.exp(b["logps"][i, j].item() - b["old"][i, j].item())
        advantage = b["advantages"][i, j].item()
        objective = min(ratio * advantage, min(max(ratio, 1 - low), 1 + high) * advantage)
        if dual is not None and advantage < 0:
            objective = max(objective, dual * advantage)
        loss[i, j] = -objective
    return loss


@settings(max_examples=150, deadline=None)
@given(
    seed=SEEDS,
    low=st.sampled_from([0.1, 0.2, math.inf]),
    high=st.sampled_from([None, 0.28, math.inf]),
    dual=st.sampled_from([None, 1.5, 10.0]),
)
def test_policy_loss_equals_the_loops(seed: int, low: float, high: float | None, dual: float | None) -> None:
    b = random_batch(seed)
    result = policy_loss(
        b["logps"], b["old"], b["advantages"], b["mask"], epsilon=low, epsilon_high=high, dual_clip=dual
    )
    np.testing.assert_allclose(
        result.loss, loop_policy_loss(b, low, low if high is None else high, dual), rtol=1e-12, atol=1e-12
    )


@settings(max_examples=40, deadline=None)
@given(seed=SEEDS, dual=st.sampled_from([None, 1.5]))
def test_policy_gradient_equals_finite_differences_and_clipped_tokens_have_none(seed: int, dual: float | None) -> None:
    b = random_batch(seed)
    logps = b["logps"].clone().requires_grad_()
    result = policy_loss(logps, b["old"], b["advantages"], b["mask"], epsilon=0.2, epsilon_high=0.28, dual_clip=dual)
    gradient = torch.autograd.grad(result.loss.sum(), logps)[0]
    clipped = result.clipped_low | result.clipped_high | result.clipped_dual
    assert not gradient[clipped | ~b["mask"]].any()
    step = 1e-6
    numeric = (
        loop_policy_loss(b | {"logps": b["logps"] + step}, 0.2, 0.28, dual)
        - loop_policy_loss(b | {"logps": b["logps"] - step}, 0.2, 0.28, dual)
    ) / (2 * step)
    np.testing.assert_allclose(gradient, numeric, atol=1e-6, rtol=1e-6)
    assert (gradient != 0)[b["mask"] & ~clipped & (b["advantages"] != 0)].all()


def test_dual_clip_is_the_delta_of_trl() -> None:
    """TRL clamps the ratio of the unclipped product; the same for every delta above the upper bound."""
    ratios = torch.linspace(0.1, 20, 400, dtype=torch.float64).unsqueeze(0)
    for advantage in (-1.5, 0.0, 2.0):
        advantages = torch.full_like(ratios, advantage)
        trl = -torch.min(ratios.clamp(max=10) * advantages, ratios.clamp(0.8, 1.28) * advantages)
        ours = policy_loss(
            ratios.log(), torch.zeros_like(ratios), advantages, torch.ones_like(ratios).bool(),
            epsilon=0.2, epsilon_high=0.28, dual_clip=10,
        )  # fmt: skip
        torch.testing.assert_close(ours.loss, trl)


def test_on_policy_is_exactly_one_and_a_second_epoch_is_not() -> None:
    torch.manual_seed(0)
    weight = torch.randn(8, 8, requires_grad=True)
    states, actions = torch.randn(3, 20, 8), torch.randint(0, 8, (3, 20))
    mask, advantages = torch.rand(3, 20) < 0.7, torch.randn(3)

    def log_probs() -> torch.Tensor:
        return (states @ weight).log_softmax(-1).gather(-1, actions.unsqueeze(-1)).squeeze(-1)

    normalize = LossNormalizer.from_mask(mask, "token_mean")
    stored = log_probs().detach()
    for old in (None, stored):
        policy = policy_loss(log_probs(), old, advantages, mask, epsilon=1e-7, dual_clip=1 + 1e-7)
        metrics = policy_metrics(policy, mask)
        assert (policy.ratio == 1).all()
        assert [metrics[f"clip_ratio/{x}_mean"].item() for x in ("low", "high", "dual")] == [0, 0, 0]
        assert metrics["approx_kl"] == 0 and metrics["ratio/mean"] == 1 and metrics["ratio/std"] == 0
        gradient = torch.autograd.grad(normalize(policy.loss, mask), weight)[0]
    with torch.no_grad():
        weight -= 20 * gradient
    # Control: the second epoch on the same batch has moved, and is clipped.
    second = policy_loss(log_probs(), stored, advantages, mask, epsilon=0.2)
    metrics = policy_metrics(second, mask)
    assert (second.ratio[mask] - 1).abs().max() > 0.2
    assert metrics["clip_ratio/low_mean"] + metrics["clip_ratio/high_mean"] > 0
    assert metrics["approx_kl"] > 1e-3 and metrics["ratio/std"] > 1e-2


def test_an_overflowing_ratio_leaves_no_nan_where_it_is_clipped() -> None:
    logps = torch.tensor([[200.0, 200.0, -200.0]], requires_grad=True)
    result = policy_loss(
        logps, torch.zeros(1, 3), torch.tensor([[1.0, -1.0, -1.0]]), torch.ones(1, 3).bool(), dual_clip=10
    )
    torch.testing.assert_close(result.loss.detach(), torch.tensor([[-1.2, 10.0, 0.8]]))
    assert not torch.autograd.grad(result.loss.sum(), logps)[0].any()


@settings(max_examples=80, deadline=None)
@given(seed=SEEDS, clip=st.sampled_from([None, 0.2, 5.0]))
def test_value_loss_and_gradient_equal_the_loops(seed: int, clip: float | None) -> None:
    b = random_batch(seed)

    def loops(shift: float) -> np.ndarray:
        loss = np.zeros(b["mask"].shape)
        for i, j in b["mask"].nonzero().tolist():
            value, old, target = (b[n][i, j].item() for n in ("values", "old_values", "returns"))
            value += shift
            squares = [(value - target) ** 2]
            if clip is not None:
                squares.append((old + min(max(value - old, -clip), clip) - target) ** 2)
            loss[i, j] = max(squares) / 2
        return loss

    values = b["values"].clone().requires_grad_()
    result = value_loss(values, b["old_values"], b["returns"], b["mask"], value_clip=clip)
    np.testing.assert_allclose(result.loss.detach(), loops(0), atol=1e-12)
    gradient = torch.autograd.grad(result.loss.sum(), values)[0]
    np.testing.assert_allclose(gradient, (loops(1e-6) - loops(-1e-6)) / 2e-6, atol=1e-6)
    assert not gradient[result.clipped].any()


def test_value_clip_binds_only_on_values_that_moved() -> None:
    mask, old, returns = torch.ones(1, 3).bool(), torch.zeros(1, 3), torch.tensor([[1.0, 1.0, -1.0]])
    values = torch.tensor([[0.0, 0.9, 0.9]])
    result = value_loss(values, old, returns, mask, value_clip=0.5)
    assert result.clipped.tolist() == [[False, True, False]]  # the third went the wrong way: its gradient stays
    torch.testing.assert_close(result.loss, torch.tensor([[0.5, 0.125, 0.5 * 1.9**2]]))


def test_entropy_loss_is_minus_the_entropy_on_the_mask() -> None:
    entropies = torch.tensor([[1.0, torch.nan, 3.0]], requires_grad=True)
    loss = entropy_loss(entropies, torch.tensor([[1, 0, 1]]))
    assert loss.tolist() == [[-1, 0, -3]]
    assert torch.autograd.grad(loss.sum(), entropies)[0].tolist() == [[-1, 0, -1]]


def test_kl_estimators_have_the_expectation_and_the_gradient_that_is_documented() -> None:
    """Exact sums over all tokens of a vocabulary: no sampling error."""
    torch.manual_seed(0)
    logits, reference = (
        torch.randn(7, dtype=torch.float64, requires_grad=True),
        torch.randn(7).double().log_softmax(-1),
    )
    logps = logits.log_softmax(-1)
    forward = (logps.exp() * (logps - reference)).sum()
    backward = (reference.exp() * (reference - logps)).sum()
    p = logps.detach().exp()

    def expected(estimator: str) -> tuple[torch.Tensor, torch.Tensor]:
        estimate = kl_estimate(logps.unsqueeze(0), reference.unsqueeze(0), torch.ones(1, 7).bool(), estimator)
        mean = (p * estimate[0]).sum()
        return mean.detach(), torch.autograd.grad(mean, logits, retain_graph=True)[0]

    gradients = {
        x: torch.autograd.grad(kl, logits, retain_graph=True)[0] for x, kl in (("f", forward), ("b", backward))
    }
    torch.testing.assert_close(expected("k1")[0], forward.detach())
    torch.testing.assert_close(expected("k3")[0], forward.detach())
    assert not torch.isclose(expected("k2")[0], forward.detach())
    torch.testing.assert_close(expected("k1")[1], torch.zeros(7).double())
    torch.testing.assert_close(expected("k2")[1], gradients["f"])
    torch.testing.assert_close(expected("k3")[1], gradients["b"])
    assert not torch.allclose(gradients["f"], gradients["b"])


@settings(max_examples=60, deadline=None)
@given(seed=SEEDS, estimator=st.sampled_from(["k1", "k2", "k3"]))
def test_kl_estimates_equal_the_loops(seed: int, estimator: str) -> None:
    b = random_batch(seed)
    logps = b["logps"].requires_grad_()
    result = kl_estimate(logps, b["old"], b["mask"], estimator)
    expected = np.zeros(result.shape)
    for i, j in b["mask"].nonzero().tolist():
        d = (logps[i, j] - b["old"][i, j]).item()
        expected[i, j] = {"k1": d, "k2": d * d / 2, "k3": math.exp(-d) - 1 + d}[estimator]
    np.testing.assert_allclose(result.detach(), expected, atol=1e-12, rtol=1e-9)
    assert torch.autograd.grad(result.sum(), logps)[0].isfinite().all()


def test_k3_keeps_its_digits_near_the_reference() -> None:
    logps = torch.full((1, 50), -1.0)
    reference = logps - torch.linspace(1e-3, 2e-3, 50)
    d = (logps - reference).double()  # exact: neighbours in float32
    expected = torch.special.expm1(-d) + d
    estimate = kl_estimate(logps, reference, torch.ones(1, 50).bool(), "k3").double()
    assert ((estimate - expected) / expected).abs().max() < 1e-3
    naive = ((reference - logps).exp() - 1 + (logps - reference)).double()  # control
    assert ((naive - expected) / expected).abs().max() > 1e-2


def loop_normalize(losses: list[list[float]], mode: str, length: int | None) -> float:
    """`losses`: per completion, the losses of its policy tokens."""
    filled = [row for row in losses if row]
    if not filled:
        return 0.0
    if mode == "token_mean":
        return sum(map(sum, filled)) / sum(map(len, filled))
    if mode == "sequence_mean":
        return sum(sum(row) / len(row) for row in filled) / len(filled)
    return sum(map(sum, filled)) / (len(filled) * length)


@settings(max_examples=100, deadline=None)
@given(seed=SEEDS, mode=st.sampled_from(MODES), ranks=st.integers(1, 3))
def test_micro_batches_and_ranks_add_up_to_the_whole_batch(seed: int, mode: str, ranks: int) -> None:
    """Rows of unequal length over ranks and micro-batches; each rank backward()s its sum, DDP takes the mean."""
    rng = np.random.default_rng(seed)
    rows, length = 2 * ranks + int(rng.integers(0, 3)), 7 if mode == "fixed_length" else None
    mask = torch.from_numpy(rng.random((rows, 9)) < rng.random((rows, 1)))
    loss = torch.from_numpy(np.where(mask, rng.normal(size=mask.shape), np.nan))
    chunks = [part.split(int(rng.integers(1, 3))) for part in torch.arange(rows).tensor_split(ranks)]

    def run(rank: int, reduce) -> float:
        local = torch.cat(chunks[rank])
        normalize = LossNormalizer.from_mask(mask[local], mode, reduce=reduce, length=length, averaged=ranks)
        return sum(normalize(loss[micro], mask[micro]).item() for micro in chunks[rank])

    per_rank = run_ranks([lambda reduce, rank=rank: run(rank, reduce) for rank in range(ranks)])
    expected = loop_normalize([loss[i][mask[i]].tolist() for i in range(rows)], mode, length)
    assert sum(per_rank) / ranks == pytest.approx(expected, abs=1e-12)


def test_own_counts_per_micro_batch_are_wrong() -> None:
    """Control of the test above: what a mean per micro-batch would give."""
    mask, loss = torch.tensor([[1, 1, 1], [1, 0, 0]]), torch.tensor([[1.0, 1, 1], [5, 0, 0]])
    whole = LossNormalizer.from_mask(mask, "token_mean")(loss, mask)
    assert whole == 2
    own = [LossNormalizer.from_mask(m[None], "token_mean")(x[None], m[None]) for m, x in zip(mask, loss)]
    assert sum(own) / 2 == 3
    assert LossNormalizer.from_mask(mask, "sequence_mean")(loss, mask) == 3
    assert LossNormalizer.from_mask(mask, "fixed_length", length=4)(loss, mask) == 1
    assert LossNormalizer(mode="token_mean", num_tokens=8, num_sequences=3, averaged=2)(loss, mask) == 2


@pytest.mark.parametrize("mode", MODES)
def test_a_rank_without_tokens_has_a_zero_gradient(mode: str) -> None:
    logps = torch.full((2, 3), torch.nan, requires_grad=True)
    mask = torch.zeros(2, 3).long()
    length = 5 if mode == "fixed_length" else None
    for count in (0, torch.tensor(0), 6):
        normalize = LossNormalizer(mode=mode, num_tokens=count, num_sequences=count, length=length)
        total = normalize(policy_loss(logps, None, torch.ones(2), mask).loss, mask)
        total = total + normalize(kl_estimate(logps, logps, mask), mask)
        assert total == 0 and not torch.autograd.grad(total, logps)[0].any()


@settings(max_examples=40, deadline=None)
@given(seed=SEEDS)
def test_metrics_equal_the_loops_over_ranks(seed: int) -> None:
    batches = [random_batch(seed, rows=2), random_batch(seed + 1)]
    policies = [
        policy_loss(b["logps"], b["old"], b["advantages"], b["mask"], epsilon=0.2, epsilon_high=0.28, dual_clip=2.0)
        for b in batches
    ]
    results = run_ranks(
        [lambda reduce, p=p, b=b: policy_metrics(p, b["mask"], reduce=reduce) for p, b in zip(policies, batches)]
    )
    tokens = [
        (math.exp(b["logps"][i, j].item() - b["old"][i, j].item()), b["advantages"][i, j].item())
        for b in batches
        for i, j in b["mask"].nonzero().tolist()
    ]
    if not tokens:
        assert results[0]["approx_kl"].isnan()
        return
    expected = {
        "clip_ratio/low_mean": np.mean([r < 0.8 and a < 0 for r, a in tokens]),
        "clip_ratio/high_mean": np.mean([r > 1.28 and a > 0 for r, a in tokens]),
        "clip_ratio/dual_mean": np.mean([r > 2 and a < 0 for r, a in tokens]),
        "approx_kl": np.mean([r - 1 - math.log(r) for r, _ in tokens]),
        "ratio/mean": np.mean([r for r, _ in tokens]),
        "ratio/std": np.std([r for r, _ in tokens]),
    }
    for result in results:
        assert result.keys() == expected.keys()
        for name, value in expected.items():
            assert result[name].item() == pytest.approx(value, abs=1e-6, rel=1e-9), name


def test_bf16_log_probs_are_compared_in_float32() -> None:
    logps = torch.tensor([[-1.0]], dtype=torch.bfloat16)
    policy = policy_loss(logps, torch.tensor([[-1.001]]), torch.ones(1), torch.ones(1, 1).bool())
    assert policy.loss.dtype == torch.float32
    assert policy.ratio.item() == pytest.approx(math.exp(0.001), rel=1e-6)


def test_adaptive_controller_follows_the_formula_and_resumes() -> None:
    controller = AdaptiveKLController(0.2, target=6.0, horizon=100)
    expected = 0.2
    for kl, n in ((6.0, 10), (6.6, 10), (60.0, 50), (0.0, 20)):
        expected *= 1 + min(max((kl - 6) / 6, -0.2), 0.2) * n / 100
        controller.update(kl, n)
        assert controller.coef == pytest.approx(expected, rel=1e-12)
    other = AdaptiveKLController(1.0, target=6.0, horizon=100)
    other.load_state_dict(controller.state_dict())
    assert other.coef == controller.coef != 1.0
    fixed = FixedKLController(0.2)
    fixed.update(60.0, 50)
    assert fixed.coef == 0.2


def test_adaptive_controller_steers_to_its_target() -> None:
    """A policy whose divergence is 1 / coefficient: the coefficient has to find 1 / target."""
    controller = AdaptiveKLController(10.0, target=0.5, horizon=1000)
    for _ in range(600):
        controller.update(1 / controller.coef, 64)
    assert controller.coef == pytest.approx(2.0, rel=0.01)


def test_bad_input_is_named() -> None:
    mask, x = torch.ones(2, 3).bool(), torch.zeros(2, 3)
    for call, message in [
        (lambda: policy_loss(x, x, x, mask.float()), "mask must be"),
        (lambda: policy_loss(x, x, x, mask[0]), "mask must be"),
        (lambda: policy_loss(x[:1], x, x, mask), "logps_BT must be"),
        (lambda: policy_loss(x, x[:, :2], x, mask), "old_logps_BT must be"),
        (lambda: policy_loss(x, x, x[:, :1], mask), "advantages must be"),
        (lambda: policy_loss(x, x, torch.zeros(3), mask), "advantages must be"),
        (lambda: policy_loss(x, x, mask, mask), "advantages must be floating"),
        (lambda: policy_loss(x, x, x, mask, epsilon=0), "epsilon is 0"),
        (lambda: policy_loss(x, x, x, mask, epsilon_high=-1), "epsilon_high is -1"),
        (lambda: policy_loss(x, x, x, mask, epsilon=math.nan), "epsilon is nan"),
        (lambda: policy_loss(x, x, x, mask, dual_clip=1.0), "dual_clip is 1.0"),
        (lambda: value_loss(x, None, x, mask, value_clip=0.2), "value_clip needs old_values_BT"),
        (lambda: value_loss(x, x, x, mask, value_clip=0), "value_clip is 0"),
        (lambda: value_loss(x, x, x[:1], mask), "returns_BT must be"),
        (lambda: entropy_loss(x[:1], mask), "entropies_BT must be"),
        (lambda: kl_estimate(x, x[:1], mask), "ref_logps_BT must be"),
        (lambda: kl_estimate(x, x, mask, "k4"), "estimator is 'k4'"),
        (lambda: LossNormalizer.from_mask(mask, "mean"), "mode is 'mean'"),
        (lambda: LossNormalizer.from_mask(mask, "fixed_length"), "'fixed_length' needs it"),
        (lambda: LossNormalizer.from_mask(mask, "token_mean", length=3), "'fixed_length' needs it"),
        (lambda: LossNormalizer.from_mask(mask, "fixed_length", length=0), "length is 0"),
        (lambda: LossNormalizer.from_mask(mask, "token_mean", averaged=0), "averaged is 0"),
        (lambda: LossNormalizer.from_mask(mask, "token_mean")(x[:1], mask), "loss_BT must be"),
        (lambda: policy_metrics(policy_loss(x, x, x, mask), mask[:1]), "policy.ratio must be"),
        (lambda: FixedKLController(-1), "coef is -1"),
        (lambda: AdaptiveKLController(0, target=1, horizon=1), "coef is 0"),
        (lambda: AdaptiveKLController(1, target=0, horizon=1), "target is 0"),
        (lambda: AdaptiveKLController(1, target=1, horizon=0), "horizon is 0"),
        (lambda: AdaptiveKLController(1, target=1, horizon=1).update(math.nan, 1), "kl is nan"),
        (lambda: AdaptiveKLController(1, target=1, horizon=1).update(1, 5), "num_sequences is 5"),
    ]:
        with pytest.raises(ValueError, match=message):
            call()
