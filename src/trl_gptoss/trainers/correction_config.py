"""The settings of rollout correction, and how TRL's options for vLLM map onto them."""

from dataclasses import MISSING, dataclass, field
from typing import Any, Literal

from trl import GRPOConfig

from ..correction import LONG_ROLLOUTS, check_options, from_trl_options

SHORT_ROLLOUTS = {"level": "token", "mode": "truncate", "high": 2.0}
LONG_BUDGET = 1024  # tokens; below, the mean log-ratio of a rollout is too noisy for a band of one percent
_TRL = "vllm_importance_sampling_"
_TRL_FIELDS = ("correction", "mode", "clip_max", "clip_min")
_OWN_FIELDS = ("mode", "low", "high", "veto", "token_cap")


@dataclass
class RolloutCorrectionConfig:
    r"""
    How the difference between the sampler and the trainer is corrected, see docs/rollout_correction.md.

    Parameters:
        rollout_correction_level (`str`, *optional*, defaults to `"auto"`):
            `"token"`, `"turn"`, `"sequence"` or `"geometric"`: the ratio that is looked at. `"off"` for no correction.
            `"auto"`: what TRL's `vllm_importance_sampling_*` say if one of them is set; else geometric rejection with
            truncated token weights if a rollout may have 1024 tokens or more, and truncated token weights if not (and
            with `loss_type="vespo"`). Where the policy itself samples through transformers, `"auto"` only measures.
        rollout_correction_mode (`str`, *optional*):
            `"truncate"`, `"mask"` or `"icepop"`: what is done with ratios outside of `low` and `high`. Needed with a
            level of your own.
        rollout_correction_low (`float`, *optional*):
            Lower limit of the ratio; `None` is open.
        rollout_correction_high (`float`, *optional*):
            Upper limit of the ratio; `None` is open.
        rollout_correction_veto (`float`, *optional*):
            A rollout with a token whose ratio is below this is rejected. `None` for no veto.
        rollout_correction_token_cap (`float`, *optional*):
            With `mask` and `icepop`: tokens that pass are weighted by their own ratio, at most this. `None` weights them
            by the ratio of the level.
        rollout_correction_clamp (`float`, *optional*, defaults to `20.0`):
            Limit of the log-ratio of a token before it is summed, and of the exponent of a weight.
        rollout_correction_min_ess (`float`, *optional*, defaults to `0.5`):
            Warn, with advice, when the effective sample size falls below this fraction. `0` never warns.
    """

    rollout_correction_level: Literal["auto", "off", "token", "turn", "sequence", "geometric"] = field(
        default="auto",
        metadata={
            "help": "Ratio between trainer and sampler that is looked at: 'token', 'turn', 'sequence' or 'geometric'; "
            "'off' for no correction; 'auto' by TRL's options if one is set, else by the rollout budget."
        },
    )
    rollout_correction_mode: Literal["truncate", "mask", "icepop"] | None = field(
        default=None,
        metadata={"help": "What is done with ratios outside of low and high: 'truncate', 'mask' or 'icepop'."},
    )
    rollout_correction_low: float | None = field(default=None, metadata={"help": "Lower limit of the ratio."})
    rollout_correction_high: float | None = field(default=None, metadata={"help": "Upper limit of the ratio."})
    rollout_correction_veto: float | None = field(
        default=None, metadata={"help": "Rollouts with a token whose ratio is below this are rejected."}
    )
    rollout_correction_token_cap: float | None = field(
        default=None,
        metadata={"help": "With 'mask' and 'icepop': weigh tokens that pass by their own ratio, at most this."},
    )
    rollout_correction_clamp: float = field(
        default=20.0, metadata={"help": "Limit of a token's log-ratio before sums, and of the exponent of a weight."}
    )
    rollout_correction_min_ess: float = field(
        default=0.5, metadata={"help": "Warn when the effective sample size is below this fraction; 0 never warns."}
    )


def correction_options(args: GRPOConfig) -> dict[str, Any] | None:
    """Keyword arguments of [`rollout_correction`] that a configuration asks for, `None` for no correction.

    Args:
        args ([`~trl.GRPOConfig`] that is also a [`RolloutCorrectionConfig`]): after its `__post_init__`.

    Raises:
        ValueError: settings that contradict each other, or a limit out of its range.
    """
    level = args.rollout_correction_level
    own = {name: getattr(args, f"rollout_correction_{name}") for name in _OWN_FIELDS}
    chosen = {name: value for name, value in own.items() if value is not None}
    trl = _chosen_in_trl(args)
    if not 0 <= args.rollout_correction_min_ess <= 1:
        raise ValueError(f"rollout_correction_min_ess is {args.rollout_correction_min_ess}, expected 0 to 1.")
    if level in ("auto", "off"):
        if chosen:
            raise ValueError(
                f"rollout_correction_level={level!r} goes without rollout_correction_{next(iter(chosen))}: set "
                "rollout_correction_level to 'token', 'turn', 'sequence' or 'geometric'."
            )
        options = None if level == "off" else _automatic(args, trl)
    else:
        if trl:
            raise ValueError(
                f"rollout_correction_level={level!r} and {_TRL}{next(iter(trl))} are both set. Keep the first; TRL's "
                f"options are the same as {_in_own_words(args)}."
            )
        if args.rollout_correction_mode is None:
            raise ValueError(
                f"rollout_correction_level={level!r} needs a rollout_correction_mode: 'truncate', 'mask' or 'icepop'."
            )
        options = {"level": level, **own}
    if options is None:
        return None
    options["clamp"] = args.rollout_correction_clamp
    check_options(**options)
    if args.loss_type == "vespo" and options["level"] != "token":
        raise ValueError(
            f"loss_type='vespo' makes sequence weights itself and needs token ratios, not level={options['level']!r}. "
            "Set rollout_correction_level='token', rollout_correction_mode='truncate', rollout_correction_high=2.0."
        )
    return options


def _chosen_in_trl(args: GRPOConfig) -> dict[str, Any]:
    """TRL's options that differ from TRL's defaults."""
    defaults = GRPOConfig.__dataclass_fields__
    found = {}
    for name in _TRL_FIELDS:
        default = defaults[_TRL + name].default
        if default is MISSING:  # a new TRL that computes it: the table in the docs has to be looked at again
            raise RuntimeError(f"TRL's {_TRL}{name} has no plain default any more.")
        if getattr(args, _TRL + name) != default:
            found[name] = getattr(args, _TRL + name)
    return found


def _from_trl(args: GRPOConfig) -> dict[str, Any] | None:
    if not args.vllm_importance_sampling_correction:
        return None
    return from_trl_options(
        args.vllm_importance_sampling_mode,
        args.vllm_importance_sampling_clip_max,
        args.vllm_importance_sampling_clip_min,
    )


def _automatic(args: GRPOConfig, trl: dict[str, Any]) -> dict[str, Any] | None:
    if trl:
        return _from_trl(args)
    long = args.max_completion_length is None or args.max_completion_length >= LONG_BUDGET
    return dict(LONG_ROLLOUTS if long and args.loss_type != "vespo" else SHORT_ROLLOUTS)


def _in_own_words(args: GRPOConfig) -> str:
    options = _from_trl(args)
    if options is None:
        return "rollout_correction_level='off'"
    return ", ".join(f"rollout_correction_{name}={value!r}" for name, value in options.items() if value is not None)
