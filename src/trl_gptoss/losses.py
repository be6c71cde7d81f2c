"""Losses of PPO and GRPO per token, and the one place where tokens become a scalar. Pure tensors.

B completions, T tokens of a completion (tool results included, padded on the right). Each loss is a (B, T) tensor that
is 0 off the mask; [`LossNormalizer`] sums it, with counts of the whole optimizer step:

    normalize = LossNormalizer.from_mask(mask_of_all_micro_batches, "token_mean", reduce=sum_over_ranks, averaged=ranks)
    for each micro-batch:
        policy = policy_loss(logps, old_logps, advantages, mask, epsilon=0.2, epsilon_high=0.28, dual_clip=10.0)
        value = value_loss(values, old_values, returns, value_mask, value_clip=0.2)
        (normalize(policy.loss, mask) + value_coef * normalize(value.loss, value_mask)).backward()

Log-probs are those of the sampled tokens, in nats. Everything is computed in float32 (float64 if the log-probs are):
in bf16 a log-prob of -1 has steps of 0.4 %, and so would the ratio.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch

# Sums a tensor over the data-parallel ranks and gives the sum to each of them, for example
# `lambda x: accelerator.reduce(x, "sum")`.
Reduce = Callable[[torch.Tensor], torch.Tensor]


class PolicyLoss(NamedTuple):
    """Result of [`policy_loss`]; all (B, T). Only `loss` carries a gradient; on the other fields every token off the
    mask looks on-policy (`ratio` 1, not clipped).

    loss (`torch.Tensor`): float32 or float64; 0 off the mask.
    ratio (`torch.Tensor`): same type, `pi / pi_old`.
    clipped_low (`torch.Tensor`): bool, negative advantage and ratio < 1 - epsilon: no gradient.
    clipped_high (`torch.Tensor`): bool, positive advantage and ratio > 1 + epsilon_high: no gradient.
    clipped_dual (`torch.Tensor`): bool, negative advantage and ratio > dual_clip: no gradient.
    """

    loss: torch.Tensor
    ratio: torch.Tensor
    clipped_low: torch.Tensor
    clipped_high: torch.Tensor
    clipped_dual: torch.Tensor


class ValueLoss(NamedTuple):
    """Result of [`value_loss`]; both (B, T).

    loss (`torch.Tensor`): float32 or float64, in squared units of the reward; 0 off the mask.
    clipped (`torch.Tensor`): bool, the clipped error is the larger one and the token has no gradient.
    """

    loss: torch.Tensor
    clipped: torch.Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class LossNormalizer:
    """Sums a per-token loss so that micro-batches and ranks of any size add up to one loss over the whole step.

    With 3 tokens in one completion and 1 in the other, each token's loss being l:

        token_mean      (l1 + l2 + l3 + l4) / 4                every token counts the same
        sequence_mean   ((l1 + l2 + l3) / 3 + l4 / 1) / 2      every completion counts the same
        fixed_length    (l1 + l2 + l3 + l4) / (2 * length)     as token_mean, but a step with longer completions is a
                                                               larger step (Dr. GRPO); length is a constant

    Dividing each micro-batch by its own count instead weighs a token by what it happens to be batched with.

    Args:
        mode (`str`): `"token_mean"`, `"sequence_mean"` or `"fixed_length"`.
        num_tokens (`int` or 0-d `torch.Tensor`): policy tokens in all micro-batches of the optimizer step, on all ranks.
        num_sequences (`int` or 0-d `torch.Tensor`): completions with at least one policy token, counted likewise.
        length (`int`, *optional*): tokens that a completion counts as; with `"fixed_length"` only, mostly the budget of
            a rollout.
        averaged (`int`, *optional*, defaults to `1`): number of backward passes over which something else takes the
            mean of the gradient; the loss is multiplied by it. DDP and FSDP average over the data-parallel ranks. If
            `accelerator.backward` divides by its accumulation steps too, multiply the two.

    Raises:
        ValueError: an unknown mode, a `length` that is missing, not positive or given with another mode, or
            `averaged` < 1.
    """

    mode: Literal["token_mean", "sequence_mean", "fixed_length"]
    num_tokens: int | torch.Tensor
    num_sequences: int | torch.Tensor
    length: int | None = None
    averaged: int = 1

    def __post_init__(self) -> None:
        if self.mode not in ("token_mean", "sequence_mean", "fixed_length"):
            raise ValueError(f"mode is {self.mode!r}; expected 'token_mean', 'sequence_mean' or 'fixed_length'")
        if (self.mode == "fixed_length") != (self.length is not None):
            raise ValueError(
                f"found mode={self.mode!r} with length={self.length}; 'fixed_length' needs it, no other uses it"
            )
        if self.length is not None and self.length < 1:
            raise ValueError(f"length is {self.length}; expected a positive number of tokens")
        if self.averaged < 1:
            raise ValueError(f"averaged is {self.averaged}; expected a count of at least 1")

    @classmethod
    def from_mask(
        cls,
        mask_BT: torch.Tensor,
        mode: Literal["token_mean", "sequence_mean", "fixed_length"],
        *,
        reduce: Reduce | None = None,
        length: int | None = None,
        averaged: int = 1,
    ) -> "LossNormalizer":
        """Count on the mask of all micro-batches of this rank; `reduce` sums the counts over ranks (called once).

        Args:
            mask_BT (`torch.Tensor`): (B, T), bool or integer.
            mode, length, averaged: see the class.
            reduce (`Callable`, *optional*): sums a tensor over ranks.

        Raises:
            ValueError: as the class, or a mask that is not (B, T), bool or integer.
        """
        mask = _bool_mask(mask_BT)
        counts = torch.stack([mask.sum(), mask.any(1).sum()])
        num_tokens, num_sequences = counts if reduce is None else reduce(counts)
        return cls(mode=mode, num_tokens=num_tokens, num_sequences=num_sequences, length=length, averaged=averaged)

    def __call__(self, loss_BT: torch.Tensor, mask_BT: torch.Tensor) -> torch.Tensor:
        """0-d loss of one micro-batch, `averaged` times its share of the step. An empty micro-batch gives 0 and a
        gradient of 0, so that ranks without tokens still take part in collectives.

        Args:
            loss_BT (`torch.Tensor`): (B, T), floating.
            mask_BT (`torch.Tensor`): (B, T), bool or integer.

        Raises:
            ValueError: shapes or types.
        """
        mask = _bool_mask(mask_BT)
        _expect_shape("loss_BT", loss_BT, mask.shape)
        sums_B = torch.where(mask, loss_BT, 0).sum(1)
        if self.mode == "token_mean":
            return self.averaged * sums_B.sum() / _at_least_one(self.num_tokens)
        if self.mode == "sequence_mean":
            return self.averaged * (sums_B / mask.sum(1).clamp(min=1)).sum() / _at_least_one(self.num_sequences)
        return self.averaged * sums_B.sum() / (_at_least_one(self.num_sequences) * self.length)


def policy_loss(
    logps_BT: torch.Tensor,
    old_logps_BT: torch.Tensor | None,
    advantages: torch.Tensor,
    mask_BT: torch.Tensor,
    *,
    epsilon: float = 0.2,
    epsilon_high: float | None = None,
    dual_clip: float | None = None,
) -> PolicyLoss:
    """Clipped surrogate of PPO, with its own upper bound (clip-higher) and a bound for negative advantages (dual clip).

        r = exp(logps - old_logps)
        loss = -min(r * A, clip(r, 1 - epsilon, 1 + epsilon_high) * A)
        where A < 0 and dual_clip is set: loss = min(loss, -dual_clip * A)

    Without the last line a sampled token that the policy now finds far more likely, and that was bad, has an unbounded
    loss. For dual_clip > 1 + epsilon_high this is what TRL's `delta` does.

    Args:
        logps_BT (`torch.Tensor`): (B, T), floating, with gradient; may be anything off the mask.
        old_logps_BT (`torch.Tensor`, *optional*): (B, T), from the policy that sampled. `None` says that the weights
            are still those: the ratio is then 1 exactly and nothing is clipped, whatever noise a second forward has.
        advantages (`torch.Tensor`): (B, T), or (B,) for one per completion; floating. Not differentiated.
        mask_BT (`torch.Tensor`): (B, T), bool or integer, 1 on policy tokens.
        epsilon (`float`, *optional*, defaults to `0.2`): lower bound is `1 - epsilon`; > 0. `math.inf` for no clipping.
        epsilon_high (`float`, *optional*): upper bound is `1 + epsilon_high`; > 0. Defaults to `epsilon`.
        dual_clip (`float`, *optional*): > 1; unset for no bound.

    Returns:
        [`PolicyLoss`]: per token, to be summed by a [`LossNormalizer`].

    Raises:
        ValueError: shapes, types or bounds.
    """
    mask = _bool_mask(mask_BT)
    _expect_shape("logps_BT", logps_BT, mask.shape)
    _expect_shape("advantages", advantages, mask.shape if advantages.ndim == 2 else mask.shape[:1])
    epsilon_high = epsilon if epsilon_high is None else epsilon_high
    for name, bound in (("epsilon", epsilon), ("epsilon_high", epsilon_high)):
        if not bound > 0:
            raise ValueError(f"{name} is {bound}; expected a number > 0")
    if dual_clip is not None and not dual_clip > 1:
        raise ValueError(f"dual_clip is {dual_clip}; expected > 1, or an on-policy token would be clipped")

    old_logps_BT = logps_BT if old_logps_BT is None else old_logps_BT
    _expect_shape("old_logps_BT", old_logps_BT, mask.shape)
    log_ratio = _masked_difference(logps_BT, old_logps_BT.detach(), mask)
    ratio = log_ratio.detach().exp()
    advantages = advantages.detach().to(ratio.dtype)
    advantages = torch.where(mask, advantages if advantages.ndim == 2 else advantages.unsqueeze(1), 0)

    # The minimum takes the clipped product exactly on these tokens.
    clipped_low = (advantages < 0) & (ratio < 1 - epsilon)
    clipped_high = (advantages > 0) & (ratio > 1 + epsilon_high)
    clipped_dual = torch.zeros_like(mask) if dual_clip is None else (advantages < 0) & (ratio > dual_clip)
    # They leave the graph before the exponential: where it overflows, a gradient of 0 times inf would be NaN.
    clipped = clipped_low | clipped_high | clipped_dual
    surrogate_ratio = torch.where(clipped, 0, log_ratio).exp()
    surrogate_ratio = torch.where(clipped_low, 1 - epsilon, surrogate_ratio)
    surrogate_ratio = torch.where(clipped_high, 1 + epsilon_high, surrogate_ratio)
    if dual_clip is not None:
        surrogate_ratio = torch.where(clipped_dual, dual_clip, surrogate_ratio)
    return PolicyLoss(-surrogate_ratio * advantages, ratio, clipped_low, clipped_high, clipped_dual)


def value_loss(
    values_BT: torch.Tensor,
    old_values_BT: torch.Tensor | None,
    returns_BT: torch.Tensor,
    mask_BT: torch.Tensor,
    *,
    value_clip: float | None = None,
) -> ValueLoss:
    """Half the squared error of the critic, with an optional bound on how far one update moves a value.

        clipped = old_values + clip(values - old_values, -value_clip, value_clip)
        loss = max((values - returns)^2, (clipped - returns)^2) / 2

    Args:
        values_BT (`torch.Tensor`): (B, T), floating, with gradient, in units of the reward.
        old_values_BT (`torch.Tensor`, *optional*): (B, T), the values that GAE used. Comes with `value_clip`.
        returns_BT (`torch.Tensor`): (B, T), floating. Not differentiated.
        mask_BT (`torch.Tensor`): (B, T), bool or integer; `value_mask` of [`~trl_gptoss.advantages.Advantages`].
        value_clip (`float`, *optional*): > 0, in units of the reward; unset for the plain squared error.

    Returns:
        [`ValueLoss`]: per token, to be summed by a [`LossNormalizer`].

    Raises:
        ValueError: shapes, types, a bound that is not positive, or a bound without old values.
    """
    mask = _bool_mask(mask_BT)
    _expect_shape("values_BT", values_BT, mask.shape)
    _expect_shape("returns_BT", returns_BT, mask.shape)
    error = _masked_difference(values_BT, returns_BT.detach(), mask)
    if value_clip is None:
        return ValueLoss(0.5 * error.square(), torch.zeros_like(mask))
    if not value_clip > 0:
        raise ValueError(f"value_clip is {value_clip}; expected a number > 0, or None for no clipping")
    if old_values_BT is None:
        raise ValueError("value_clip needs old_values_BT, the values the advantages were computed with; found None")
    _expect_shape("old_values_BT", old_values_BT, mask.shape)
    change = _masked_difference(values_BT, old_values_BT.detach(), mask)
    # Written as a change of the error, so that a value that did not move has exactly the unclipped error.
    clipped_error = error + (change.clamp(-value_clip, value_clip) - change)
    clipped = clipped_error.square() > error.square()
    return ValueLoss(0.5 * torch.where(clipped, clipped_error, error).square(), clipped)


def entropy_loss(entropies_BT: torch.Tensor, mask_BT: torch.Tensor) -> torch.Tensor:
    """Minus the entropy of each policy token: add `entropy_coef` times its normalised sum for an entropy bonus.

    Args:
        entropies_BT (`torch.Tensor`): (B, T), floating, with gradient, in nats; may be anything off the mask.
        mask_BT (`torch.Tensor`): (B, T), bool or integer.

    Returns:
        `torch.Tensor`: (B, T), float32 or float64; 0 off the mask.

    Raises:
        ValueError: shapes or types.
    """
    mask = _bool_mask(mask_BT)
    _expect_shape("entropies_BT", entropies_BT, mask.shape)
    return torch.where(mask, -_promote(entropies_BT), 0)


def kl_estimate(
    logps_BT: torch.Tensor,
    ref_logps_BT: torch.Tensor,
    mask_BT: torch.Tensor,
    estimator: Literal["k1", "k2", "k3"] = "k3",
) -> torch.Tensor:
    """Estimates of KL(policy || reference) from the sampled token, per token, in nats. With d = logps - ref_logps:

        k1 = d                  unbiased; its gradient averages to 0, so it penalises nothing as a loss
        k2 = d^2 / 2            biased, small variance; its gradient averages to that of KL(policy || reference)
        k3 = exp(-d) - 1 + d    unbiased, >= 0; its gradient averages to that of KL(reference || policy)

    (on-policy, for full support of both). So: k1 in the reward (see [`~trl_gptoss.advantages.token_rewards`]), k2 or
    k3 in the loss. TRL's `beta` uses k3.

    Args:
        logps_BT (`torch.Tensor`): (B, T), floating; with gradient for a loss.
        ref_logps_BT (`torch.Tensor`): (B, T), floating. Not differentiated.
        mask_BT (`torch.Tensor`): (B, T), bool or integer.
        estimator (`str`, *optional*, defaults to `"k3"`): `"k1"`, `"k2"` or `"k3"`.

    Returns:
        `torch.Tensor`: (B, T), float32 or float64; 0 off the mask.

    Raises:
        ValueError: shapes, types or an unknown estimator.
    """
    mask = _bool_mask(mask_BT)
    _expect_shape("logps_BT", logps_BT, mask.shape)
    _expect_shape("ref_logps_BT", ref_logps_BT, mask.shape)
    difference = _masked_difference(logps_BT, ref_logps_BT.detach(), mask)
    if estimator == "k1":
        return difference
    if estimator == "k2":
        return 0.5 * difference.square()
    if estimator == "k3":
        # expm1: near the reference k3 is d^2 / 2, which exp(-d) - 1 + d loses to rounding.
        return torch.expm1(-difference) + difference
    raise ValueError(f"estimator is {estimator!r}; expected 'k1', 'k2' or 'k3'")


class FixedKLController:
    """A KL coefficient that stays what it is.

    Args:
        coef (`float`): reward or loss per nat, >= 0.
    """

    def __init__(self, coef: float) -> None:
        if not 0 <= coef < math.inf:
            raise ValueError(f"coef is {coef}; expected a finite number >= 0")
        self.coef = coef

    def update(self, kl: float, num_sequences: int) -> None:
        """Nothing; there so that both controllers are called alike."""

    def state_dict(self) -> dict[str, float]:
        return {"coef": self.coef}

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.coef = state["coef"]


class AdaptiveKLController(FixedKLController):
    """A coefficient that steers the KL divergence to a target (Ziegler et al., 2019, section 2.2).

    After each batch of n completions: `coef *= 1 + clip(kl / target - 1, -0.2, 0.2) * n / horizon`.

    Args:
        coef (`float`): the first coefficient, > 0 (a coefficient of 0 could never grow).
        target (`float`): KL divergence to hold, in the unit `update` is given: nats per token or per completion; > 0.
        horizon (`int`): completions over which the coefficient may change by about a factor e^0.2; > 0. A batch must
            be smaller than 5 horizons, or the coefficient could become negative.
    """

    def __init__(self, coef: float, *, target: float, horizon: int) -> None:
        super().__init__(coef)
        for name, number in (("coef", coef), ("target", target), ("horizon", horizon)):
            if not number > 0:
                raise ValueError(f"{name} is {number}; an adaptive controller needs a number > 0")
        self.target = target
        self.horizon = horizon

    def update(self, kl: float, num_sequences: int) -> None:
        """Move the coefficient after a batch.

        Args:
            kl (`float`): mean KL divergence of the batch over all ranks, finite, so that ranks stay equal.
            num_sequences (`int`): completions of the batch on all ranks.

        Raises:
            ValueError: a KL that is not finite, or a batch that is not smaller than 5 horizons.
        """
        if not math.isfinite(kl):
            raise ValueError(f"kl is {kl}; expected a finite number of nats")
        if not 0 < num_sequences < 5 * self.horizon:
            raise ValueError(f"num_sequences is {num_sequences}; expected 1 to {5 * self.horizon - 1} (5 horizons)")
        error = min(max(kl / self.target - 1, -0.2), 0.2)
        self.coef *= 1 + error * num_sequences / self.horizon


@torch.no_grad()
def policy_metrics(
    policy: PolicyLoss, mask_BT: torch.Tensor, *, reduce: Reduce | None = None
) -> dict[str, torch.Tensor]:
    """Means over the policy tokens of all ranks, under TRL's names where it has them.

        clip_ratio/low_mean, clip_ratio/high_mean, clip_ratio/dual_mean    fractions of tokens
        approx_kl      mean of r - 1 - log r, in nats: k3 of KL(old policy || policy)
        ratio/mean, ratio/std

    Args:
        policy ([`PolicyLoss`]): of one micro-batch.
        mask_BT (`torch.Tensor`): (B, T), bool or integer.
        reduce (`Callable`, *optional*): sums a tensor over ranks; called once.

    Returns:
        `dict[str, torch.Tensor]`: 0-d tensors; NaN if there is no token anywhere.

    Raises:
        ValueError: a mask of another shape or type.
    """
    mask = _bool_mask(mask_BT)
    _expect_shape("policy.ratio", policy.ratio, mask.shape)
    # Sums of ratio - 1: the variance of a ratio near 1 would otherwise be lost to rounding.
    excess = torch.where(mask, policy.ratio - 1, 0)
    per_token = [policy.clipped_low, policy.clipped_high, policy.clipped_dual, excess - torch.log1p(excess), excess]
    sums = [torch.where(mask, x.to(excess.dtype), 0).sum() for x in (*per_token, excess.square())]
    totals = torch.stack([*sums, mask.sum().to(excess.dtype)])
    totals = totals if reduce is None else reduce(totals)
    low, high, dual, approx_kl, mean_excess, mean_square = totals[:-1] / totals[-1]
    return {
        "clip_ratio/low_mean": low,
        "clip_ratio/high_mean": high,
        "clip_ratio/dual_mean": dual,
        "approx_kl": approx_kl,
        "ratio/mean": 1 + mean_excess,
        "ratio/std": (mean_square - mean_excess.square()).clamp(min=0).sqrt(),
    }


def _masked_difference(first: torch.Tensor, second: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """`first - second` in float32 or float64, 0 off the mask before anything non-linear: a NaN or an overflow in the
    padding would otherwise come back as a NaN gradient."""
    first = torch.where(mask, _promote(first), 0)
    return first - torch.where(mask, second.to(first.dtype), 0)


def _at_least_one(count: int | torch.Tensor) -> int | torch.Tensor:
    return count.clamp(min=1) if isinstance(count, torch.Tensor) else max(count, 1)


def _promote(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.dtype == torch.float64 else tensor.float()


def _bool_mask(mask_BT: torch.Tensor) -> torch.Tensor:
    if mask_BT.ndim != 2 or mask_BT.is_floating_point() or mask_BT.is_complex():
        raise ValueError(f"the mask must be (B, T), bool or integer, found {mask_BT.dtype} {tuple(mask_BT.shape)}")
    return mask_BT.bool()


def _expect_shape(name: str, tensor: torch.Tensor, shape: torch.Size) -> None:
    if tensor.shape != shape or not tensor.is_floating_point():
        raise ValueError(f"{name} must be floating and {tuple(shape)}, found {tensor.dtype} {tuple(tensor.shape)}")
