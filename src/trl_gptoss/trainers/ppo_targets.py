"""From a generated and scored batch to what PPO's loss needs of it: policy mask, advantages, returns. Pure tensors."""

from dataclasses import dataclass

import torch

from ..advantages import Reduce, explained_variance, gae_advantages, token_rewards, turn_gae_advantages, whiten
from .ppo_config import GptOssPPOConfig
from .value_head import split_values


@dataclass(kw_only=True, slots=True)
class Targets:
    """Per token of a batch; all (B, T).

    policy_mask (`torch.Tensor`): bool, sampled tokens of completions that could be scored.
    value_mask (`torch.Tensor`): bool, where the critic is trained.
    advantages (`torch.Tensor`): float32, whitened if asked for.
    returns (`torch.Tensor`): float32, in units of the reward.
    old_values (`torch.Tensor`): float32, the values that GAE used.
    """

    policy_mask: torch.Tensor
    value_mask: torch.Tensor
    advantages: torch.Tensor
    returns: torch.Tensor
    old_values: torch.Tensor


def ppo_targets(
    args: GptOssPPOConfig,
    *,
    rewards_B: torch.Tensor,
    values_BT1: torch.Tensor,
    mask_BT: torch.Tensor,
    truncated_B: torch.Tensor,
    kl_BT: torch.Tensor | None,
    kl_coef: float,
    reduce: Reduce,
) -> tuple[Targets, dict[str, float]]:
    """Rewards to tokens, GAE, whitening.

    Args:
        args ([`GptOssPPOConfig`]): the fields of GAE, `bootstrap_truncated`, `whiten_advantages`.
        rewards_B (`torch.Tensor`): (B,), floating; NaN for a completion that could not be scored, which is left out.
        values_BT1 (`torch.Tensor`): (B, T + 1), a critic's output before the update.
        mask_BT (`torch.Tensor`): (B, T), bool or integer, 1 on sampled tokens.
        truncated_B (`torch.Tensor`): (B,), bool; completions that a budget ended.
        kl_BT (`torch.Tensor`, *optional*): (B, T), estimates in nats, for a penalty in the reward.
        kl_coef (`float`): reward per nat; 0 without `kl_BT`.
        reduce (`Callable`): sums a tensor over ranks.

    Returns:
        `tuple[Targets, dict[str, float]]`: the targets, and metrics over all ranks.
    """
    scored_B = ~rewards_B.isnan()
    policy_mask = mask_BT.bool() & scored_B.unsqueeze(1)
    per_token = token_rewards(torch.where(scored_B, rewards_B, 0), policy_mask, kl_BT=kl_BT, kl_coef=kl_coef)
    values, final_values = split_values(values_BT1, policy_mask)
    estimate = gae_advantages if args.gae_level == "token" else turn_gae_advantages
    result = estimate(
        per_token,
        values,
        policy_mask,
        gamma=args.gae_gamma,
        lam=args.gae_lambda,
        truncated_B=truncated_B if args.bootstrap_truncated else None,
        final_values_B=final_values if args.bootstrap_truncated else None,
    )
    explained = {
        "explained_variance": result.value_mask,
        "explained_variance/first": result.value_mask & (result.value_mask.cumsum(1) == 1),
        "explained_variance/last": result.value_mask & (result.value_mask.flip(1).cumsum(1).flip(1) == 1),
    }
    metrics = {
        **{n: explained_variance(values, result.returns, mask, reduce=reduce).item() for n, mask in explained.items()},
        **_moments("returns", result.returns, result.value_mask, reduce),
        **_moments("values", values, result.value_mask, reduce),
        **_moments("advantages", result.advantages, policy_mask, reduce),
    }
    advantages = result.advantages
    if args.whiten_advantages:
        advantages = whiten(advantages, policy_mask, reduce=reduce)
    targets = Targets(
        policy_mask=policy_mask,
        value_mask=result.value_mask,
        advantages=advantages,
        returns=result.returns,
        old_values=torch.where(policy_mask, values, 0),
    )
    return targets, metrics


def _moments(name: str, values_BT: torch.Tensor, mask_BT: torch.Tensor, reduce: Reduce) -> dict[str, float]:
    """Mean and deviation over the mask of all ranks; NaN, which logs leave out, without a token."""
    values = torch.where(mask_BT, values_BT, 0)
    total, count = reduce(torch.stack([values.sum(), mask_BT.sum().to(values.dtype)])).tolist()
    if not count:
        return {f"{name}/mean": float("nan"), f"{name}/std": float("nan")}
    mean = total / count
    squares = reduce(torch.where(mask_BT, (values_BT - mean).square(), 0).sum()).item()
    return {f"{name}/mean": mean, f"{name}/std": (squares / max(count - 1, 1)) ** 0.5}
