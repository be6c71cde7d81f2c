"""From rewards to advantages: GAE over policy tokens or turns, group-relative advantages, whitening. Pure tensors.

B completions, T tokens of a completion (tool results included, padded on the right), G completions of one group. A mask
is 1 on tokens that the policy sampled and 0 on tool results and padding; every result is 0 where the mask is 0.

The steps of the decision process are the policy tokens. A tool result is what the environment does between two of
them, so the token after a call follows it directly, however long the result is. With gamma = 0.5, lambda = 1, one
reward of 1 at the end and a critic that knows nothing:

    tokens       {"code":..}  <|call|> | <|start|>functions.python ... | 42     <|return|>
    mask         1            1        | 0  0  0  ...                  | 1      1
    rewards      0            0        | 0  0  0  ...                  | 0      1
    step         0            1        | -  -  -                       | 2      3
    advantages   0.125        0.25     | 0  0  0  ...                  | 0.5    1

Discounting through the result instead would make a long tool output look like a worse call.

`values_BT[:, t]` is the critic's value of the state in which token t is sampled, so its output at the position before:
for the first token of a turn the last token of the tool result, for the first token of all the last one of the prompt.
"""

from collections.abc import Callable
from typing import Literal, NamedTuple

import torch

# Sums a tensor over the data-parallel ranks and gives the sum to each of them, for example
# `lambda x: accelerator.reduce(x, "sum")`. Every rank calls it equally often, with or without tokens.
Reduce = Callable[[torch.Tensor], torch.Tensor]


class Advantages(NamedTuple):
    """What GAE gives. All (B, T), on the device of the values.

    advantages (`torch.Tensor`): float32 (float64 if the values are), in units of the reward; 0 off the mask.
    returns (`torch.Tensor`): targets of the critic, same type and units; 0 where `value_mask` is `False`.
    value_mask (`torch.Tensor`): bool; where the critic is trained.
    """

    advantages: torch.Tensor
    returns: torch.Tensor
    value_mask: torch.Tensor


@torch.no_grad()
def token_rewards(
    rewards_B: torch.Tensor, mask_BT: torch.Tensor, *, kl_BT: torch.Tensor | None = None, kl_coef: float = 0.0
) -> torch.Tensor:
    """One reward per completion, put on its last policy token, minus a KL penalty on every policy token.

        mask       1      1      0    1      1      0
        kl_BT      0.1    0      9    0.2    0      9
        result    -0.01   0      0   -0.02   r      0       kl_coef=0.1

    Args:
        rewards_B (`torch.Tensor`): (B,), floating.
        mask_BT (`torch.Tensor`): (B, T), bool or integer. A completion without policy tokens gets no reward: mask out
            whole rows that could not be scored.
        kl_BT (`torch.Tensor`, *optional*): (B, T), estimates of the KL divergence to the reference in nats; `"k1"` of
            [`~trl_gptoss.losses.kl_estimate`] is the unbiased one.
        kl_coef (`float`, *optional*, defaults to `0.0`): reward per nat, >= 0.

    Returns:
        `torch.Tensor`: (B, T), float32 or float64 as `rewards_B`.

    Raises:
        ValueError: shapes, a mask that is not bool or integer, a negative `kl_coef`, or one of `kl_BT` and a non-zero
            `kl_coef` without the other.
    """
    mask = _bool_mask(mask_BT)
    _expect_shape("rewards_B", rewards_B, mask.shape[:1])
    if kl_coef < 0:
        raise ValueError(f"kl_coef is {kl_coef}; a penalty needs a coefficient >= 0")
    if (kl_BT is None) != (kl_coef == 0):
        given = "no kl_BT" if kl_BT is None else "kl_BT"
        raise ValueError(f"found {given} with kl_coef={kl_coef}; pass both for a penalty in the reward, or neither")
    rewards = _promote(rewards_B)
    # The last policy token is the one after which the mask has no 1 any more.
    remaining = mask.flip(1).cumsum(1).flip(1)
    is_last = mask & (remaining == 1)
    result = torch.where(is_last, rewards.unsqueeze(1), torch.zeros((), dtype=rewards.dtype, device=rewards.device))
    if kl_BT is not None:
        _expect_shape("kl_BT", kl_BT, mask.shape)
        result = result - kl_coef * torch.where(mask, kl_BT.to(result.dtype), torch.zeros_like(result))
    return result


@torch.no_grad()
def gae_advantages(
    rewards_BT: torch.Tensor,
    values_BT: torch.Tensor,
    mask_BT: torch.Tensor,
    *,
    gamma: float = 1.0,
    lam: float = 1.0,
    truncated_B: torch.Tensor | None = None,
    final_values_B: torch.Tensor | None = None,
) -> Advantages:
    """Generalised advantage estimation (Schulman et al., 2016) whose steps are the policy tokens.

    For policy tokens 0..n-1 of a completion, with tool results and padding taken out:

        delta_i = r_i + gamma * V_{i+1} - V_i        A_i = delta_i + gamma * lam * A_{i+1}        return_i = A_i + V_i

    V_n is 0 where the episode ended by itself, and `final_values_B` where it was cut off. The head of this file has a
    token-level example.

    Args:
        rewards_BT (`torch.Tensor`): (B, T), floating; reward received for token t. Must be 0 off the mask: what an
            environment pays for a call belongs to the last token of the call.
        values_BT (`torch.Tensor`): (B, T), floating, in units of the reward; value of the state in which token t is
            sampled. Anything, NaN included, off the mask.
        mask_BT (`torch.Tensor`): (B, T), bool or integer, 1 on policy tokens.
        gamma (`float`, *optional*, defaults to `1.0`): discount per policy token, in [0, 1].
        lam (`float`, *optional*, defaults to `1.0`): 0 is TD(0), 1 is return minus value; in [0, 1].
        truncated_B (`torch.Tensor`, *optional*): (B,), bool; completions that a budget ended. Comes with
            `final_values_B`. Without the two every completion counts as ended, which is what makes sense if running
            out of budget is a failure of the policy.
        final_values_B (`torch.Tensor`, *optional*): (B,), floating; value of the state after the last policy token (the
            critic's output at that token). Read where `truncated_B` is set only.

    Returns:
        [`Advantages`]: `value_mask` is the mask.

    Raises:
        ValueError: shapes, types, gamma or lam out of range, one of the last two arguments without the other,
            non-finite numbers on policy tokens, or rewards off the mask.
    """
    mask = _bool_mask(mask_BT)
    rewards, values = _checked_steps(rewards_BT, values_BT, mask, gamma, lam)
    final_values = _final_values(truncated_B, final_values_B, mask, values)

    # Policy tokens to the left, in order: (B, T) -> (B, steps).
    order = torch.argsort(~mask, dim=1, stable=True)
    advantages = _gae_over_steps(
        rewards.gather(1, order), values.gather(1, order), mask.sum(1), final_values, gamma, lam
    )
    advantages = torch.zeros_like(values).scatter(1, order, advantages)
    return Advantages(advantages, torch.where(mask, advantages + values, 0), mask)


@torch.no_grad()
def turn_gae_advantages(
    rewards_BT: torch.Tensor,
    values_BT: torch.Tensor,
    mask_BT: torch.Tensor,
    *,
    gamma: float = 1.0,
    lam: float = 1.0,
    truncated_B: torch.Tensor | None = None,
    final_values_B: torch.Tensor | None = None,
) -> Advantages:
    """GAE whose steps are the turns: one action is all that the policy samples between two tool results.

    The reward of a turn is the sum over its tokens, its value the one at its first token. All tokens of the turn get
    its advantage, and the critic is trained at the first token only. With gamma = 0.5, lam = 1, values of 0:

        mask         1      1      1    | 0  0 |  1     1
        rewards      0      0      0    | 0  0 |  0     1
        turn         0      0      0    | -  - |  1     1
        advantages   0.5    0.5    0.5  | 0  0 |  1     1
        returns      0.5    0      0    | 0  0 |  1     0
        value_mask   1      0      0    | 0  0 |  1     0

    A turn is a run of 1s in the mask. Two turns never touch, since what stands between them (the result, or at least
    the next generation prompt) was not sampled.

    Arguments, result and errors are those of [`gae_advantages`]; gamma discounts per turn. Values are read at first
    tokens only but must be finite on all policy tokens.
    """
    mask = _bool_mask(mask_BT)
    rewards, values = _checked_steps(rewards_BT, values_BT, mask, gamma, lam)
    final_values = _final_values(truncated_B, final_values_B, mask, values)

    starts = mask.clone()
    starts[:, 1:] &= ~mask[:, :-1]
    # Turn of each token; off the mask it is that of the turn before, or 0, where rewards are 0 anyway.
    turn_BT = (starts.cumsum(1) - 1).clamp(min=0)
    # First tokens to the left, in order. There are at most T turns: a (B, T) table needs no wait for the real number.
    order = torch.argsort(~starts, dim=1, stable=True)
    turn_rewards = _sum_to_turn_start(rewards, turn_BT).gather(1, order)
    advantages = _gae_over_steps(turn_rewards, values.gather(1, order), starts.sum(1), final_values, gamma, lam)
    advantages = torch.where(mask, advantages.gather(1, turn_BT), 0)
    return Advantages(advantages, torch.where(starts, advantages + values, 0), starts)


@torch.no_grad()
def group_advantages(
    rewards_B: torch.Tensor,
    num_generations: int,
    *,
    scale: Literal["none", "group", "batch"] = "group",
    eps: float = 1e-4,
) -> torch.Tensor:
    """Reward minus the mean of its group, as in GRPO; the baseline is the group, so there is no critic.

    Args:
        rewards_B (`torch.Tensor`): (B,), floating; the completions of one prompt are neighbours. `NaN` marks a
            completion that could not be scored: it counts for no mean or deviation and gets advantage 0. With `"batch"`
            these are the rewards of all ranks.
        num_generations (`int`): G, at least 2.
        scale (`str`, *optional*, defaults to `"group"`): divide by the standard deviation (with Bessel's correction)
            of the `"group"`, of the `"batch"`, or not at all (`"none"`, Dr. GRPO).
        eps (`float`, *optional*, defaults to `1e-4`): added to the deviation, in units of the reward (TRL's value).

    Returns:
        `torch.Tensor`: (B,), float32 or float64 as `rewards_B`. Use it as it is or as `(B, 1)`.

    Raises:
        ValueError: shape, type, groups that do not divide B or are smaller than 2, infinite rewards, an unknown scale.
    """
    if rewards_B.ndim != 1 or not rewards_B.is_floating_point():
        raise ValueError(f"rewards_B must be floating and (B,), found {rewards_B.dtype} {tuple(rewards_B.shape)}")
    if num_generations < 2:
        raise ValueError(
            f"num_generations is {num_generations}: a group of one is its own mean, so every advantage would be 0. "
            "Use at least 2, or GAE with a critic"
        )
    if rewards_B.numel() % num_generations:
        raise ValueError(f"{rewards_B.numel()} rewards are no whole number of groups of {num_generations}")
    if scale not in ("none", "group", "batch"):
        raise ValueError(f"scale is {scale!r}; expected 'none', 'group' or 'batch'")
    if rewards_B.isinf().any():
        raise ValueError("rewards_B holds infinite rewards; use NaN for a completion that could not be scored")

    rewards = _promote(rewards_B).view(-1, num_generations)
    scored = ~rewards.isnan()
    filled = torch.where(scored, rewards, 0)
    centred = torch.where(scored, filled - _mean(filled, scored, 1), 0)
    if scale == "group":
        centred = centred / (_deviation(filled, scored, 1) + eps)
    elif scale == "batch":
        centred = centred / (_deviation(filled.view(1, -1), scored.view(1, -1), 1) + eps)
    return centred.view(-1)


@torch.no_grad()
def whiten(
    values_BT: torch.Tensor, mask_BT: torch.Tensor, *, shift_mean: bool = True, reduce: Reduce | None = None
) -> torch.Tensor:
    """Mean 0 and standard deviation 1 (Bessel's correction) over all policy tokens of all ranks.

        values   1    3    99   5          mask   1    1    0    1          result  -1    0    0    1

    Values that differ by no more than the rounding of their mean have no spread: they become 0 (their mean with
    `shift_mean=False`) and not noise of size 1.

    Args:
        values_BT (`torch.Tensor`): (B, T), floating; mostly advantages. Pass the whole batch of an update, not a
            micro-batch of it.
        mask_BT (`torch.Tensor`): (B, T), bool or integer.
        shift_mean (`bool`, *optional*, defaults to `True`): `False` scales about the mean and leaves it where it is,
            which is how rewards are whitened.
        reduce (`Callable`, *optional*): sums a tensor over ranks; called twice. B and T may differ between ranks.

    Returns:
        `torch.Tensor`: (B, T), float32 or float64 as the values; 0 off the mask.

    Raises:
        ValueError: shapes or types.
    """
    mask = _bool_mask(mask_BT)
    _expect_shape("values_BT", values_BT, mask.shape)
    values = torch.where(mask, _promote(values_BT), 0)
    mean, variance = _global_moments(values, mask, reduce)
    std = variance.sqrt()
    is_flat = std <= 16 * torch.finfo(values.dtype).eps * mean.abs()
    scaled = torch.where(is_flat, 0, (values - mean) / torch.where(is_flat, 1, std))
    return torch.where(mask, scaled if shift_mean else scaled + mean, 0)


@torch.no_grad()
def explained_variance(
    values_BT: torch.Tensor, returns_BT: torch.Tensor, mask_BT: torch.Tensor, *, reduce: Reduce | None = None
) -> torch.Tensor:
    """`1 - Var(returns - values) / Var(returns)` over the masked tokens of all ranks.

    1 for a perfect critic, 0 for one that is no better than a constant, negative for a worse one, NaN if all returns
    are the same but for the rounding of the values.

    Args:
        values_BT, returns_BT (`torch.Tensor`): (B, T), floating; values before the update.
        mask_BT (`torch.Tensor`): (B, T), bool or integer: `value_mask` of [`Advantages`].
        reduce (`Callable`, *optional*): sums a tensor over ranks; called four times.

    Returns:
        `torch.Tensor`: 0-d, float32 or float64 as the returns.

    Raises:
        ValueError: shapes or types.
    """
    mask = _bool_mask(mask_BT)
    _expect_shape("values_BT", values_BT, mask.shape)
    _expect_shape("returns_BT", returns_BT, mask.shape)
    returns = torch.where(mask, _promote(returns_BT), 0)
    errors = torch.where(mask, returns - values_BT.to(returns.dtype), 0)
    mean, variance = _global_moments(returns, mask, reduce)
    mean_error, error_variance = _global_moments(errors, mask, reduce)
    # Returns are advantages plus values: they carry the rounding of the values, also where they are 0 themselves. Sums over 16k
    # tokens leave 40 eps of it.
    scale = mean.abs() + mean_error.abs() + error_variance.sqrt()
    is_flat = variance.sqrt() <= 256 * torch.finfo(returns.dtype).eps * scale
    return torch.where(is_flat, torch.nan, 1 - error_variance / variance)


def _gae_over_steps(
    rewards_BN: torch.Tensor,
    values_BN: torch.Tensor,
    lengths_B: torch.Tensor,
    final_values_B: torch.Tensor,
    gamma: float,
    lam: float,
) -> torch.Tensor:
    """GAE of sequences that are packed to the left: step i of row b is real if i < lengths_B[b]; 0 on the others."""
    steps = torch.arange(values_BN.shape[1], device=values_BN.device)
    is_step = steps < lengths_B.unsqueeze(1)
    is_last = steps == lengths_B.unsqueeze(1) - 1
    next_values = torch.where(is_last, final_values_B.unsqueeze(1), values_BN.roll(-1, dims=1))
    advantages = torch.where(is_step, rewards_BN + gamma * next_values - values_BN, 0)
    # A_i = delta_i + c * A_{i+1} by doubling: after k rounds A_i holds 2^k terms. 14 rounds for 16k tokens instead of
    # 16k launches, and the rounding error of a sum in pairs.
    span, factor = 1, gamma * lam
    while span < advantages.shape[1] and factor:
        later = factor * advantages[:, span:]
        advantages[:, :-span] += later
        span, factor = 2 * span, factor * factor
    return advantages


def _sum_to_turn_start(rewards_BT: torch.Tensor, turn_BT: torch.Tensor) -> torch.Tensor:
    """Sum from each token to the end of its turn, by doubling. (`scatter_add` adds in any order on CUDA, so that two
    runs differ.)"""
    sums, span = rewards_BT.clone(), 1
    while span < sums.shape[1]:
        later = torch.where(turn_BT[:, span:] == turn_BT[:, :-span], sums[:, span:], 0)
        sums[:, :-span] += later
        span *= 2
    return sums


def _checked_steps(
    rewards_BT: torch.Tensor, values_BT: torch.Tensor, mask: torch.Tensor, gamma: float, lam: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rewards and values in a type to compute in, 0 off the mask; or an error."""
    _expect_shape("rewards_BT", rewards_BT, mask.shape)
    _expect_shape("values_BT", values_BT, mask.shape)
    for name, number in (("gamma", gamma), ("lam", lam)):
        if not 0 <= number <= 1:
            raise ValueError(f"{name} is {number}; expected a number in [0, 1]")
    for name, tensor in (("rewards_BT", rewards_BT), ("values_BT", values_BT)):
        bad = mask & ~tensor.isfinite()
        if bad.any():
            row, column = bad.nonzero()[0].tolist()
            raise ValueError(
                f"{name} has {int(bad.sum())} non-finite numbers on policy tokens, the first at row {row}, token "
                f"{column}. Mask out completions that could not be scored"
            )
    stray = ~mask & (rewards_BT != 0)
    if stray.any():
        row, column = stray.nonzero()[0].tolist()
        raise ValueError(
            f"rewards_BT is {rewards_BT[row, column].item()} at row {row}, token {column}, which the policy did not "
            "sample. Put a reward on the last policy token before it"
        )
    values = torch.where(mask, _promote(values_BT), 0)
    return rewards_BT.to(values.dtype), values


def _final_values(
    truncated_B: torch.Tensor | None, final_values_B: torch.Tensor | None, mask: torch.Tensor, values: torch.Tensor
) -> torch.Tensor:
    """Value of the state after the last step: (B,), 0 where the episode ended by itself."""
    if truncated_B is None and final_values_B is None:
        return values.new_zeros(mask.shape[0])
    if truncated_B is None or final_values_B is None:
        missing = "truncated_B" if truncated_B is None else "final_values_B"
        raise ValueError(
            f"{missing} is missing; bootstrapping needs truncated_B and final_values_B, no bootstrapping neither"
        )
    _expect_shape("final_values_B", final_values_B, mask.shape[:1])
    if truncated_B.dtype != torch.bool or truncated_B.shape != mask.shape[:1]:
        raise ValueError(
            f"truncated_B must be bool and {tuple(mask.shape[:1])}, found {truncated_B.dtype} {tuple(truncated_B.shape)}"
        )
    bad = truncated_B & ~final_values_B.isfinite()
    if bad.any():
        raise ValueError(f"final_values_B is not finite for truncated completion {int(bad.nonzero()[0])}")
    return torch.where(truncated_B, final_values_B.to(values.dtype), 0)


def _global_moments(
    values: torch.Tensor, mask: torch.Tensor, reduce: Reduce | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean and variance (Bessel) over the mask and all ranks; `values` is 0 off the mask. Two passes: E[x^2] - E[x]^2
    loses all digits when the mean is large."""
    reduce = reduce or (lambda tensor: tensor)
    total, count = reduce(torch.stack([values.sum(), mask.sum().to(values.dtype)]))
    mean = total / count.clamp(min=1)
    squares = reduce(torch.where(mask, (values - mean).square(), 0).sum())
    return mean, squares / (count - 1).clamp(min=1)


def _mean(filled: torch.Tensor, mask: torch.Tensor, dim: int) -> torch.Tensor:
    return filled.sum(dim, keepdim=True) / mask.sum(dim, keepdim=True).clamp(min=1)


def _deviation(filled: torch.Tensor, mask: torch.Tensor, dim: int) -> torch.Tensor:
    """Standard deviation with Bessel's correction over the mask; 0 for fewer than two entries."""
    squares = torch.where(mask, (filled - _mean(filled, mask, dim)).square(), 0).sum(dim, keepdim=True)
    return (squares / (mask.sum(dim, keepdim=True) - 1).clamp(min=1)).sqrt()


def _promote(tensor: torch.Tensor) -> torch.Tensor:
    """float64 as it is, everything shorter as float32: sums over 16k tokens have no digits in bf16."""
    return tensor if tensor.dtype == torch.float64 else tensor.float()


def _bool_mask(mask_BT: torch.Tensor) -> torch.Tensor:
    if mask_BT.ndim != 2 or mask_BT.is_floating_point() or mask_BT.is_complex():
        raise ValueError(f"the mask must be (B, T), bool or integer, found {mask_BT.dtype} {tuple(mask_BT.shape)}")
    return mask_BT.bool()


def _expect_shape(name: str, tensor: torch.Tensor, shape: torch.Size) -> None:
    if tensor.shape != shape or not tensor.is_floating_point():
        raise ValueError(f"{name} must be floating and {tuple(shape)}, found {tensor.dtype} {tuple(tensor.shape)}")
