"""Rollout correction: importance weights, rejection and diagnostics for a sampler that differs from the trainer.

The engine that sampled a token and the model that trains on it never give it exactly the same log-probability (kernels,
dtypes, routers, stale weights). With `l = trainer_logps - sampling_logps` per token, this file turns `l` into weights for
the loss and says how far apart the two are. It is separate from the PPO ratio, which compares two states of the trainer.
Pure tensors: any sampler that returns log-probabilities can use it. Nothing here waits for the device except reading
`RolloutCorrection.metrics`.

Shapes: B sequences, T positions of the completion, C channels, K packed statistics, R rows of them (ranks, micro-batches).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import torch

Level = Literal["token", "sequence", "geometric", "turn"]
Mode = Literal["truncate", "mask", "icepop"]

# Statistics are packed in this order into one vector, so that one gather carries them all. Counts and sums add up over
# rows; the two logarithms of sums (of ratios, of squared ratios) combine by logsumexp, because a sequence ratio leaves
# float64 at 64k tokens; maxima by max. Each channel appends the last three.
_SUMS = (
    "tokens", "sequences", "trusted_sequences", "untrusted_tokens", "used_tokens", "used_sequences", "vetoed_sequences",
    "log_ratio", "abs_log_ratio", "k3", "sequence_mean_log_ratio", "weight", "weight_squared",
)  # fmt: skip
_LOG_SUMS = ("token_ratio", "token_ratio_squared", "sequence_ratio", "sequence_ratio_squared")
_MAXIMA = ("token_log_ratio", "sequence_log_ratio")
_PER_CHANNEL = ("tokens", "abs_log_ratio", "k3")
_BASE = len(_SUMS) + len(_LOG_SUMS) + len(_MAXIMA)
_METRIC_BOUND = 300.0  # exp of it, squared, is still a float64: the exponential metrics saturate instead of being inf
_CLAMP_MAX = 80.0  # exp of it is still a float32

LONG_ROLLOUTS = {"level": "geometric", "mode": "mask", "low": 0.99, "high": 1.01, "veto": 1e-4, "token_cap": 2.0}
"""The choice for long agentic rollouts: whole rollouts leave by their mean log-ratio (or by one hopeless token), and the
tokens of the others carry their own ratio, truncated. Sequence ratios are useless at these lengths: docs/rollout_correction.md."""


@dataclass(kw_only=True, slots=True)
class RolloutCorrection:
    """What `rollout_correction` returns. All tensors are detached.

    Args:
        weights (`torch.Tensor` of shape `(B, T)`, float32): factor of each token's loss; 0 outside the mask, on rejected
            and on untrusted tokens.
        keep (`torch.Tensor` of shape `(B, T)`, bool): the loss mask to go on with: `mask` without what was rejected. It
            decides what the loss is averaged over. `mode="icepop"` zeroes weights and leaves `keep` alone.
        stats (`torch.Tensor` of shape `(K,)`, float64): packed statistics; stack or gather the vectors of several ranks or
            micro-batches to `(R, K)` and hand them to `summarize_stats`.
        channel_names (`tuple[str, ...]`): names of the channel ids 0, 1, ...
    """

    weights: torch.Tensor
    keep: torch.Tensor
    stats: torch.Tensor
    channel_names: tuple[str, ...]

    @property
    def metrics(self) -> dict[str, float]:
        """Metrics of this batch alone, as plain floats (waits for the device)."""
        return summarize_stats(self.stats, self.channel_names)


def rollout_correction(
    trainer_logps: torch.Tensor,
    sampling_logps: torch.Tensor,
    mask: torch.Tensor,
    *,
    level: Level,
    mode: Mode,
    low: float | None = None,
    high: float | None = None,
    veto: float | None = None,
    token_cap: float | None = None,
    clamp: float = 20.0,
    channels: torch.Tensor | None = None,
    channel_names: Sequence[str] = (),
) -> RolloutCorrection:
    """Weights and rejections from the log-probabilities of the trainer and of the sampler.

    The ratio of a token, by `level`, for log-ratios `l` and a row with two turns (tool output in between):

        mask        1     1     0     1     1     1
        l          .1   -.3    --    .2    .0    .4
        token   e^ .1   -.3    --    .2    .0    .4      own ratio
        turn    e^-.2   -.2    --    .6    .6    .6      sum over a maximal run of mask == 1
        sequence e^.4    .4    --    .4    .4    .4      sum over the row
        geometric e^.08 .08    --   .08   .08   .08      mean over the row (length-normalised)

    and what is done with it, by `mode`:

        truncate    weight = ratio limited to [low, high]; every token stays               TIS
        mask        weight = ratio inside [low, high]; outside: 0, leaves the loss         MIS, geometric rejection
        icepop      weight = ratio inside [low, high]; outside: 0, stays in the average    IcePop, TRL's `*_mask`

    A position whose log-probabilities say nothing (NaN in either, an infinite sampling log-probability, +inf from the
    trainer) is not trusted: weight 0, `keep` False, and it enters no sum. The rest of its row is judged by its other
    tokens. A trainer log-probability of -inf is a true statement (ratio 0): it counts as the lowest possible ratio.

    Args:
        trainer_logps (`torch.Tensor` of shape `(B, T)`): log-probabilities of the sampled tokens under the training model,
            at the sampling temperature. May require grad; none flows.
        sampling_logps (`torch.Tensor` of shape `(B, T)`): those of the engine that sampled, after its processors.
        mask (`torch.Tensor` of shape `(B, T)`, bool or numbers): nonzero exactly on sampled tokens.
        level (`str`): `"token"`, `"turn"`, `"sequence"` or `"geometric"`.
        mode (`str`): `"truncate"`, `"mask"` or `"icepop"`.
        low (`float`, *optional*): lower limit of the ratio of that level, in (0, 1]. `None` is open.
        high (`float`, *optional*): upper limit, at least 1 and above `low`. `None` is open.
        veto (`float`, *optional*): a row with a token whose own ratio is below this, in (0, 1), is rejected as a whole in
            every mode: such a token was hardly sampled from this policy. 1e-4 is usual.
        token_cap (`float`, *optional*): with `mask` and `icepop`: tokens that pass are weighted by their own ratio, at most
            this (at least 1), instead of by the ratio of `level`.
        clamp (`float`, *optional*, defaults to `20.0`): limit of |l| per token before it is summed or averaged, and of
            the exponent of a weight; at most 80. Limits of what it holds lie within e^-clamp and e^clamp. Vetoes and metrics
            see `l` as it is.
        channels (`torch.Tensor` of shape `(B, T)`, integer, *optional*): channel id of each token, for metrics per channel.
            Ids without a name (-1) belong to none.
        channel_names (`Sequence[str]`, *optional*): names of the ids 0, 1, ...; the same on every rank.

    Returns:
        `RolloutCorrection`

    Raises:
        `ValueError`: shapes or dtypes do not fit, or a limit is out of its range.
    """
    _check_tensors(trainer_logps, sampling_logps, mask, channels, channel_names)
    check_options(level=level, mode=mode, low=low, high=high, veto=veto, token_cap=token_cap, clamp=clamp)
    mask = mask.bool()
    trainer, sampling = trainer_logps.detach().double(), sampling_logps.detach().double()
    trusted = mask & sampling.isfinite() & ~trainer.isnan() & (trainer != math.inf)
    # Zeros by `where`, never by a product: 0 * NaN is NaN. -inf becomes finite, so that sums and metrics stay so.
    raw = torch.where(trusted, trainer - sampling, 0.0).clamp(min=-_METRIC_BOUND, max=_METRIC_BOUND)
    log_ratio = raw.clamp(-clamp, clamp)
    level_log_ratio = _aggregate(log_ratio, trusted, mask, level)

    log_low = -math.inf if low is None else math.log(low)
    log_high = math.inf if high is None else math.log(high)
    if mode == "truncate":
        inside = torch.ones_like(mask)
        weight_log = level_log_ratio.clamp(-clamp, clamp).clamp(log_low, log_high)
    else:
        inside = (level_log_ratio >= log_low) & (level_log_ratio <= log_high)
        weight_log = (
            level_log_ratio.clamp(-clamp, clamp) if token_cap is None else log_ratio.clamp(max=math.log(token_cap))
        )

    vetoed = torch.zeros_like(mask[:, :1])
    if veto is not None:
        vetoed = (raw < math.log(veto)).any(dim=1, keepdim=True)
    keep = trusted & ~vetoed
    used = keep & inside
    weights = torch.where(used, weight_log.exp(), 0.0).float()
    stats = _pack_stats(raw, trusted, mask, used, vetoed, weights, channels, len(channel_names))
    return RolloutCorrection(
        weights=weights, keep=keep if mode == "icepop" else used, stats=stats, channel_names=tuple(channel_names)
    )


def summarize_stats(stats: torch.Tensor, channel_names: Sequence[str] = ()) -> dict[str, float]:
    """Metrics over all rows of packed statistics, exactly those of the concatenated batch.

    On several ranks: `summarize_stats(accelerator.gather(correction.stats[None]), names)`; gradient accumulation adds rows.

    Args:
        stats (`torch.Tensor` of shape `(K,)` or `(R, K)`): from `RolloutCorrection.stats`.
        channel_names (`Sequence[str]`, *optional*): as given to `rollout_correction`.

    Returns:
        `dict[str, float]`: a metric without a token or sequence to speak of is left out. KL is KL(sampler || trainer).

        - `tokens`, `sequences`: how many were sampled (a row without a sampled token is no sequence)
        - `untrusted_fraction`: tokens without usable log-probabilities; all that follows is over the others
        - `kl_k1`, `kl_k3`: mean of -l; mean of e^l - 1 - l, never negative
        - `abs_log_ratio`: mean |l|
        - `log_ppl_diff`: mean over sequences of (log-perplexity of the trainer - that of the sampler)
        - `chi2_token`, `chi2_sequence`: mean squared ratio - 1
        - `ess_token`, `ess_sequence`: (sum r)^2 / (n sum r^2) of the raw ratios, in (0, 1]
        - `ess_weights`: the same of the weights that the loss gets, over all trusted tokens (rejected ones weigh 0)
        - `ratio_max`, `sequence_ratio_max`: largest raw ratios
        - `weight_mean`: mean weight over trusted tokens
        - `kept_fraction`, `kept_sequence_fraction`: tokens, and sequences with a token, of nonzero weight, among all sampled
        - `vetoed_fraction`: sequences that the veto rejected
        - `abs_log_ratio/<channel>`, `kl_k3/<channel>`, `token_fraction/<channel>`

        Ratios enter with an exponent of at most 300, so that no metric is infinite.

    Raises:
        `ValueError`: the number of columns does not belong to this number of channels.
    """
    rows = stats.reshape(-1, stats.shape[-1]).double()
    width = _BASE + len(_PER_CHANNEL) * len(channel_names)
    if rows.shape[1] != width:
        raise ValueError(
            f"`stats` has {rows.shape[1]} columns, {len(channel_names)} channel names need {width}. Pass the channel names "
            "that `rollout_correction` was given."
        )
    at_log, at_max = len(_SUMS), len(_SUMS) + len(_LOG_SUMS)
    combined = torch.cat(
        [
            rows[:, :at_log].sum(0),
            rows[:, at_log:at_max].logsumexp(0),
            rows[:, at_max:_BASE].amax(0),
            rows[:, _BASE:].sum(0),
        ]
    ).tolist()
    total = dict(zip(_SUMS, combined[:at_log]))
    log_total = dict(zip(_LOG_SUMS, combined[at_log:at_max]))
    largest = dict(zip(_MAXIMA, combined[at_max:_BASE]))

    tokens, sequences = total["tokens"], total["sequences"]
    trusted = tokens - total["untrusted_tokens"]
    metrics = {"tokens": tokens, "sequences": sequences}
    if tokens > 0:
        metrics["untrusted_fraction"] = total["untrusted_tokens"] / tokens
        metrics["kept_fraction"] = total["used_tokens"] / tokens
        metrics["kept_sequence_fraction"] = total["used_sequences"] / sequences
        metrics["vetoed_fraction"] = total["vetoed_sequences"] / sequences
    if trusted > 0:
        count = {"token": trusted, "sequence": total["trusted_sequences"]}
        metrics |= {
            "kl_k1": -total["log_ratio"] / trusted,
            "kl_k3": total["k3"] / trusted,
            "abs_log_ratio": total["abs_log_ratio"] / trusted,
            "log_ppl_diff": -total["sequence_mean_log_ratio"] / count["sequence"],
            "weight_mean": total["weight"] / trusted,
            "ratio_max": _exp(largest["token_log_ratio"]),
            "sequence_ratio_max": _exp(largest["sequence_log_ratio"]),
        }
        for kind, n in count.items():
            squared = log_total[f"{kind}_ratio_squared"] - math.log(n)
            metrics[f"chi2_{kind}"] = math.expm1(min(squared, _METRIC_BOUND))
            metrics[f"ess_{kind}"] = math.exp(2 * (log_total[f"{kind}_ratio"] - math.log(n)) - squared)
        # Nothing left to learn from is an effective sample size of nothing, not an undefined one.
        metrics["ess_weights"] = total["weight"] ** 2 / (trusted * total["weight_squared"]) if total["weight"] else 0.0
    for name, (n, abs_log_ratio, k3) in zip(channel_names, _triples(combined[_BASE:])):
        if n > 0:
            metrics[f"token_fraction/{name}"] = n / trusted
            metrics[f"abs_log_ratio/{name}"] = abs_log_ratio / n
            metrics[f"kl_k3/{name}"] = k3 / n
    return metrics


def ess_warning(metrics: dict[str, float], level: Level, threshold: float = 0.5, min_sequences: int = 8) -> str | None:
    """What to tell the user when the weights leave little of the batch, or log-probabilities are missing; `None` when all is
    well.

    Args:
        metrics (`dict[str, float]`): from `summarize_stats`, over all ranks.
        level (`str`): the level in use. `"sequence"` is judged by `ess_sequence`, the others by `ess_weights`.
        threshold (`float`, *optional*, defaults to `0.5`): smallest effective fraction that passes; as many tokens need
            usable log-probabilities.
        min_sequences (`int`, *optional*, defaults to `8`): with fewer the effective size is no estimate, and is not
            reported. Missing log-probabilities are, whatever the number.
    """
    name = "ess_sequence" if level == "sequence" else "ess_weights"
    untrusted = metrics.get("untrusted_fraction", 0.0)
    if untrusted > 1 - threshold:  # counted, not estimated; and the rest may be weighted perfectly
        return (
            f"rollout correction: {untrusted:.0%} of {metrics['tokens']:.0f} sampled tokens have no usable log-probability (NaN "
            "or infinite), and a correction leaves them out of the loss. Let the sampler report one for every token it "
            "samples, or set rollout_correction_level='off'."
        )
    # Equal weights have a perfect sample size even when the clamp holds all of them at e^-20.
    vanishing = metrics.get("weight_mean", 1.0) < 0.1
    if metrics["sequences"] < min_sequences or (metrics.get(name, 1.0) >= threshold and not vanishing):
        return None
    found = (
        f"rollout correction: {name} is {metrics[name]:.2f} over {metrics['sequences']:.0f} rollouts of "
        f"{metrics['tokens'] / metrics['sequences']:.0f} sampled tokens, the mean weight is {metrics['weight_mean']:.2g}: little of the batch is left to learn from. "
    )
    if metrics["abs_log_ratio"] > 0.1:
        return found + (
            f"The mean |log-ratio| of a token is {metrics['abs_log_ratio']:.3f}, more than rounding explains: "
            "look for stale weights, sampling parameters or a template that differ before correcting them."
        )
    if level in ("sequence", "turn"):
        return found + (
            "The tokens agree; their sum over this length does not. Choose level='geometric', mode='mask', low=0.99, "
            "high=1.01, token_cap=2.0, or level='token', mode='truncate', high=2.0."
        )
    if metrics["kept_fraction"] > 0.9:
        return found + "Few tokens are rejected, but some weights are very large: set high=2.0 (or token_cap=2.0)."
    return found + (
        f"{1 - metrics['kept_fraction']:.0%} of the tokens are rejected ({metrics['vetoed_fraction']:.0%} of the rollouts "
        "by the veto). Widen low/high, or lower the veto."
    )


def from_trl_options(
    mode: str, clip_max: float | None = 3.0, clip_min: float | None = None
) -> dict[str, str | float | None]:
    """Keyword arguments of `rollout_correction` that give the weights of TRL 1.16's `vllm_importance_sampling_*` options.

    `*_mask` maps onto `icepop`: TRL zeroes the weight and goes on averaging over the rejected tokens.

    Args:
        mode (`str`): `vllm_importance_sampling_mode`.
        clip_max (`float`, *optional*, defaults to `3.0`): `vllm_importance_sampling_clip_max`.
        clip_min (`float`, *optional*): `vllm_importance_sampling_clip_min`.

    Raises:
        `ValueError`: TRL has no such mode.
    """
    level, _, action = mode.partition("_")
    if level not in ("token", "sequence") or action not in ("truncate", "mask"):
        raise ValueError(
            f"vllm_importance_sampling_mode={mode!r} is none of TRL's: token_truncate, token_mask, sequence_truncate, "
            "sequence_mask."
        )
    ours = "truncate" if action == "truncate" else "icepop"
    return {"level": level, "mode": ours, "low": clip_min, "high": clip_max}


def _exp(exponent: float) -> float:
    return math.exp(min(exponent, _METRIC_BOUND))


def _triples(flat: list[float]) -> list[list[float]]:
    step = len(_PER_CHANNEL)
    return [flat[i : i + step] for i in range(0, len(flat), step)]


def _turn_ids(mask: torch.Tensor) -> torch.Tensor:
    """Number of the turn at each position, unique in the batch: [1 1 0 1] -> [1 1 1 2], the next row goes on with 3 + ..."""
    starts = mask.clone()
    starts[:, 1:] &= ~mask[:, :-1]
    return starts.flatten().cumsum(0).view_as(mask)


def _aggregate(log_ratio: torch.Tensor, trusted: torch.Tensor, mask: torch.Tensor, level: Level) -> torch.Tensor:
    """(B, T) log-ratios of tokens (0 where not trusted) -> log-ratio of the level at every position."""
    if level == "token":
        return log_ratio
    if level == "turn":
        ids = _turn_ids(mask)
        # As many slots as there can be turns: counting them would wait for the device.
        slots = log_ratio.new_zeros(mask.numel() + 1)
        # Positions between turns share the id of the turn before and add 0; index_add has a deterministic version.
        return slots.index_add(0, ids.flatten(), log_ratio.flatten())[ids]
    total = log_ratio.sum(dim=1, keepdim=True)
    if level == "geometric":
        total = total / trusted.sum(dim=1, keepdim=True).clamp(min=1)
    return total.expand_as(log_ratio)


def _log_sums(log_ratio: torch.Tensor, valid: torch.Tensor) -> list[torch.Tensor]:
    """Logarithms of the sum of the ratios and of their squares, and the largest; all -inf without a valid one."""
    flat = torch.where(valid, log_ratio, -math.inf).flatten()
    flat = torch.cat([flat, flat.new_full((1,), -math.inf)])  # an empty batch has a maximum too
    return [flat.logsumexp(0), (2 * flat).logsumexp(0), flat.amax()]


def _pack_stats(
    raw: torch.Tensor,
    trusted: torch.Tensor,
    mask: torch.Tensor,
    used: torch.Tensor,
    vetoed: torch.Tensor,
    weights: torch.Tensor,
    channels: torch.Tensor | None,
    num_channels: int,
) -> torch.Tensor:
    k3 = raw.expm1() - raw
    per_row = trusted.sum(dim=1)
    sequence_log_ratio = raw.sum(dim=1)
    weights = weights.double()
    token_log, token_log_squared, token_max = _log_sums(raw, trusted)
    sequence_log, sequence_log_squared, sequence_max = _log_sums(sequence_log_ratio, per_row > 0)
    packed = [
        mask.sum(), mask.any(dim=1).sum(), (per_row > 0).sum(), (mask & ~trusted).sum(),
        used.sum(), used.any(dim=1).sum(), vetoed.sum(),
        raw.sum(), raw.abs().sum(), k3.sum(), (sequence_log_ratio / per_row.clamp(min=1)).sum(),
        weights.sum(), weights.square().sum(),
        token_log, token_log_squared, sequence_log, sequence_log_squared,
        token_max, sequence_max,
    ]  # fmt: skip
    for channel in range(num_channels):
        inside = trusted & (channels == channel)
        packed += [inside.sum(), torch.where(inside, raw.abs(), 0.0).sum(), torch.where(inside, k3, 0.0).sum()]
    return torch.stack([value.double() for value in packed])


def _check_tensors(
    trainer_logps: torch.Tensor,
    sampling_logps: torch.Tensor,
    mask: torch.Tensor,
    channels: torch.Tensor | None,
    channel_names: Sequence[str],
) -> None:
    named = {"trainer_logps": trainer_logps, "sampling_logps": sampling_logps, "mask": mask}
    if channels is not None:
        named["channels"] = channels
    shapes = {name: tuple(tensor.shape) for name, tensor in named.items()}
    if trainer_logps.dim() != 2 or len(set(shapes.values())) != 1:
        raise ValueError(f"Expected tensors of one shape (B, T), got {shapes}.")
    for name in ("trainer_logps", "sampling_logps"):
        if not named[name].is_floating_point():
            raise ValueError(f"`{name}` must be floating-point log-probabilities, got {named[name].dtype}.")
    if (channels is None) != (len(channel_names) == 0):
        raise ValueError("`channels` and `channel_names` belong together: pass both or neither.")
    if channels is not None and (channels.is_floating_point() or channels.dtype == torch.bool):
        raise ValueError(f"`channels` must hold integer ids, got {channels.dtype}.")


def check_options(
    *,
    level: str,
    mode: str,
    low: float | None = None,
    high: float | None = None,
    veto: float | None = None,
    token_cap: float | None = None,
    clamp: float = 20.0,
) -> None:
    """Raise `ValueError` unless `rollout_correction` takes these keyword arguments."""
    for name, value, allowed in (("level", level, get_args(Level)), ("mode", mode, get_args(Mode))):
        if value not in allowed:
            raise ValueError(f"{name}={value!r} is unknown, choose one of {', '.join(allowed)}.")
    for name, value in (("low", low), ("high", high), ("token_cap", token_cap)):
        if value is not None and not 0 < value < math.inf:
            raise ValueError(f"{name}={value} must be a finite ratio above 0 (None for no limit).")
    if low is not None and high is not None and low >= high:
        raise ValueError(f"low={low} must be below high={high}.")
    if veto is not None and not 0 < veto < 1:
        raise ValueError(f"veto={veto} must be a ratio between 0 and 1 (1e-4 is usual; None for no veto).")
    if not 0 < clamp <= _CLAMP_MAX:
        raise ValueError(f"clamp={clamp} must be above 0 and at most {_CLAMP_MAX:g}: beyond, weights leave float32.")
    if (low is not None and low > 1) or (high is not None and high < 1):
        name, value = ("low", low) if low is not None and low > 1 else ("high", high)
        raise ValueError(
            f"{name}={value} leaves out 1, the ratio where trainer and sampler agree: every token that needs no correction "
            "would be rejected or changed. Set low to at most 1 and high to at least 1."
        )
    if token_cap is not None and token_cap < 1:
        raise ValueError(
            f"token_cap={token_cap} lies below 1, the ratio where trainer and sampler agree: every token that needs no correction "
            "would lose weight. Set it to at least 1 (2.0 is usual; None for the ratio of `level`)."
        )
    ends_at_clamp = mode == "truncate" or level in ("token", "geometric")  # a sum of tokens does not, its weight does
    limits = {"token_cap": token_cap, **({"low": low, "high": high} if ends_at_clamp else {})}
    for name, value in limits.items():
        if value is not None and abs(math.log(value)) > clamp:
            raise ValueError(
                f"{name}={value} lies beyond clamp={clamp:g}, which holds these ratios at "
                f"{math.exp(math.copysign(clamp, math.log(value))):.2g}: the limit would never act. Set {name}=None for no limit, "
                "or a larger clamp."
            )
    if token_cap is not None and mode == "truncate":
        raise ValueError("token_cap goes with mode='mask' or 'icepop'; with mode='truncate' the limit is `high`.")
