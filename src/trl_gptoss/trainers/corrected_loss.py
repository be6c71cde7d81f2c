"""Rollout correction in TRL's loss, without a second forward.

The ratio between trainer and sampler needs the trainer's log-probs under the weights that generated. While these weights
are in use they are the detached log-probs of the training forward itself: it runs first, the weights come from it, and
TRL's loss then gets the result of this one forward instead of running its own. Slices that are visited after an optimizer
step bring their `old_per_token_logps` along.

TRL's loss takes the weights as advantages per token, (B, T), which it supports for subclasses: every loss type but VESPO is
linear in a factor of the advantage that is not negative, clipping and minimum included. Rejected tokens leave `tool_mask`.
"""

from contextlib import contextmanager
from typing import Any

import torch
from accelerate.logging import get_logger
from torch import nn
from trl import GRPOTrainer

from ..correction import RolloutCorrection, ess_warning, rollout_correction, summarize_stats
from ..harmony.channel_ids import CHANNEL_NAMES, channel_ids
from .correction_config import correction_options
from .on_policy import MODEL_INPUTS

logger = get_logger(__name__)

_WARN_EVERY = 50  # optimizer steps between two warnings


class CorrectionMixin(GRPOTrainer):
    """The methods of [`GRPOTrainer`] that rollout correction depends on.

    Overridden, and why:
        `_generate_and_score_completions`: every rank has sampling log-probs or none has; channels of the tokens.
        `_compute_loss`: weights and mask of the correction, in training only.
        `_get_per_token_logps_and_entropies`: hands the forward that has been run already to TRL's loss.
    """

    speaks_harmony: bool
    _in_turn: bool
    _correction: dict[str, Any] | None = None
    _only_measures: bool = False
    _forward: tuple | None = None
    _correction_rows: list[torch.Tensor]
    _warned_at: int | None = None
    _told_of_second_forward: bool = False

    def _setup_correction(self, own_policy_samples: bool) -> None:
        """Called once TRL's constructor is through: this correction takes the place of TRL's.

        Args:
            own_policy_samples (`bool`): the sampler is the trainer's own model. There is no other program to correct for
                unless the configuration says so; the metrics are logged all the same.
        """
        self._correction = correction_options(self.args)
        self._only_measures = own_policy_samples and self.args.rollout_correction_level == "auto"
        self._correction_rows = []
        self.vllm_importance_sampling_correction = False

    @property
    def _corrects(self) -> bool:
        return self._correction is not None and not self._only_measures

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        output = super()._generate_and_score_completions(inputs)
        if self._correction is None or not self.model.training or not self._share_sampling_logps(output):
            return output
        if self.speaks_harmony:
            mask_BT = _loss_mask(output).tolist()
            rows = zip(output["completion_ids"].tolist(), mask_BT)
            channels = [channel_ids(ids, mask, self._tokenizer) for ids, mask in rows]
            output["channel_ids"] = torch.tensor(channels, dtype=torch.int8, device=self.accelerator.device)
        return output

    def _share_sampling_logps(self, output: dict[str, Any]) -> bool:
        """Whether any rank's sampler reported log-probs. Then all ranks have them, NaN where nothing was reported."""
        here = "sampling_per_token_logps" in output
        counts = self.accelerator.gather(torch.tensor([int(here)], device=self.accelerator.device))
        anywhere = bool(counts.any())
        if not anywhere and self.args.rollout_correction_level != "auto":
            raise ValueError(
                f"rollout_correction_level={self.args.rollout_correction_level!r}, but the sampler reports no log-probs. "
                "Let `rollout_func` return them as `logprobs`, or set rollout_correction_level='off'."
            )
        if anywhere and not here:
            ids_BT = output["completion_ids"]
            output["sampling_per_token_logps"] = torch.full(ids_BT.shape, torch.nan, device=ids_BT.device)
        return anywhere

    def _get_per_token_logps_and_entropies(self, model: nn.Module, *args: Any, **kwargs: Any) -> tuple:
        if self._forward is not None:
            forward, self._forward = self._forward, None
            return forward
        return super()._get_per_token_logps_and_entropies(model, *args, **kwargs)

    def _compute_loss(self, model: nn.Module, inputs: dict[str, Any]) -> torch.Tensor:
        if self._correction is None or not self.model.training or "sampling_per_token_logps" not in inputs:
            return super()._compute_loss(model, inputs)
        generating_logps_BT = inputs.get("old_per_token_logps")
        forward = None
        if generating_logps_BT is None:
            forward = self._run_forward(model, inputs)
            generating_logps_BT = forward[0].detach()
        correction = self._correct(generating_logps_BT, inputs)
        if not self._in_turn:  # the rows of all turns are logged together, after the last one
            self._log_correction(correction)
        if not self._only_measures:
            inputs = self._corrected(inputs, correction)
        with self._forward_is(forward):
            return super()._compute_loss(model, inputs)

    @contextmanager
    def _forward_is(self, forward: tuple | None):
        """TRL's loss finds this forward where it would run its own."""
        self._forward = forward
        try:
            yield
            if self._forward is not None:
                self._training_logps = None  # those of the loss are not known
            if self._forward is not None and not self._told_of_second_forward:
                self._told_of_second_forward = True
                logger.warning(
                    "The loss ran a forward of its own, beside the one that rollout correction takes its weights from. The "
                    "weights apply all the same; rollout_correction_level='off' saves the second forward."
                )
        finally:
            self._forward = None

    def _run_forward(self, model: nn.Module, inputs: dict[str, Any]) -> tuple:
        """(B, T) log-probs with gradient, entropies and the auxiliary loss, as TRL's loss asks for them."""
        return self._get_per_token_logps_and_entropies(
            model,
            torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1),
            torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1),
            inputs["completion_ids"].size(1),
            compute_entropy=True,
            compute_aux_loss=self.aux_loss_enabled,
            **{name: inputs[name] for name in MODEL_INPUTS if name in inputs},
        )

    def _correct(self, generating_logps_BT: torch.Tensor, inputs: dict[str, Any]) -> RolloutCorrection:
        channels = inputs.get("channel_ids")
        return rollout_correction(
            generating_logps_BT,
            inputs["sampling_per_token_logps"],
            _loss_mask(inputs),
            channels=channels,
            channel_names=() if channels is None else CHANNEL_NAMES,
            **self._correction,
        )

    def _corrected(self, inputs: dict[str, Any], correction: RolloutCorrection) -> dict[str, Any]:
        """The micro-batch with weights on its advantages and without its rejected tokens."""
        keep_BT = correction.keep.to(inputs["completion_mask"].dtype)
        if self.loss_type == "vespo":  # its weight is no factor of the advantage; outside of the mask TRL wants ones
            weights_BT = torch.where(correction.keep, correction.weights, 1.0)
            return {**inputs, "tool_mask": keep_BT, "importance_sampling_ratio": weights_BT}
        advantages = inputs["advantages"]
        advantages = advantages if advantages.dim() == 2 else advantages.unsqueeze(1)
        return {**inputs, "tool_mask": keep_BT, "advantages": advantages * correction.weights}

    def _log_correction(self, correction: RolloutCorrection) -> None:
        """`rollout_correction/...` once per optimizer step, over its micro-batches and all ranks."""
        if self._in_turn:  # a part of a micro-batch; the whole comes afterwards, see `padding_free`
            return
        self._correction_rows.append(self.accelerator.gather(correction.stats[None]))
        if not self.accelerator.sync_gradients:
            return
        metrics = summarize_stats(torch.cat(self._correction_rows), correction.channel_names)
        self._correction_rows = []
        for name, value in metrics.items():
            self._metrics["train"][f"rollout_correction/{name}"].append(value)
        self._warn_of_few_samples(metrics)

    def _warn_of_few_samples(self, metrics: dict[str, float]) -> None:
        threshold, step = self.args.rollout_correction_min_ess, self.state.global_step
        if threshold == 0 or (self._warned_at is not None and step - self._warned_at < _WARN_EVERY):
            return
        message = ess_warning(metrics, self._correction["level"], threshold)
        if message is not None:
            self._warned_at = step
            logger.warning(message)


def _loss_mask(inputs: dict[str, Any]) -> torch.Tensor:
    """(B, T), 1 on the tokens that TRL averages over: sampled, and no padding."""
    return inputs["completion_mask"] * inputs.get("tool_mask", 1)
