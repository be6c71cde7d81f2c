"""PPO's loss of one micro-batch, where TRL's would be: below rollout correction, packing and the on-policy ratio."""

from typing import Any

import torch
from torch import nn
from trl import GRPOTrainer

from ..losses import (
    LossNormalizer,
    PolicyLoss,
    entropy_loss,
    kl_estimate,
    policy_loss,
    policy_metrics,
    value_loss,
)
from .critic_rows import CriticRows
from .critics import Critic, StatesCritic
from .kl_term import KLTerm
from .ppo_config import GptOssPPOConfig
from .value_head import RecordedStates, split_values


class PPOLossMixin(GRPOTrainer):
    """Takes the place of TRL's `_compute_loss` in training. What calls it may have put weights on the advantages and taken
    tokens out of `tool_mask` (rollout correction), or may ask for a part of the rows (packing)."""

    args: GptOssPPOConfig
    critic: Critic
    kl_term: KLTerm
    _normalizers: tuple[LossNormalizer, LossNormalizer] | None = None  # of policy and critic, for the mini-batch
    _states: RecordedStates | None = None  # of the policy's forward, for a shared critic
    _in_turn: bool
    _padding_free: bool

    def _sum_over_ranks(self, tensor: torch.Tensor) -> torch.Tensor:
        return self.accelerator.reduce(tensor, "sum")

    def _kl_in(self, place: str) -> bool:
        return self.beta != 0.0 and self.args.kl_placement == place

    def _compute_loss(self, model: nn.Module, inputs: dict[str, Any]) -> torch.Tensor:
        if not self.model.training:
            return super()._compute_loss(model, inputs)
        args = self.args
        mask = inputs["policy_mask"]
        if "tool_mask" in inputs:
            mask = mask & inputs["tool_mask"].bool()
        logps, entropies, aux_loss = self._get_per_token_logps_and_entropies(
            model,
            torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1),
            torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1),
            inputs["completion_ids"].shape[1],
            compute_entropy=True,
            compute_aux_loss=self.aux_loss_enabled,
        )
        policy = policy_loss(
            logps,
            inputs.get("old_per_token_logps"),
            inputs["advantages"],
            mask,
            epsilon=args.epsilon,
            epsilon_high=args.epsilon_high,
            dual_clip=args.dual_clip,
        )
        normalize, _ = self._normalizers
        loss = normalize(policy.loss, mask)
        self._log_share("policy_loss", loss)
        loss = loss + self._kl_loss(logps, inputs, mask)
        if args.entropy_coef:
            loss = loss + args.entropy_coef * normalize(entropy_loss(entropies, mask), mask)
        if isinstance(self.critic, StatesCritic):
            values = self.critic.values_of(self._states, self._critic_rows(inputs))
            value, counts = self._value_loss(values, inputs)
            self._log_values(counts)
            loss = loss + (value if args.critic_detach else args.value_coef * value)
        if self.aux_loss_enabled:
            loss = loss + self.router_aux_loss_coef * aux_loss / self.current_gradient_accumulation_steps
            self._metrics["train"]["aux_loss"].append(self.accelerator.gather(aux_loss.detach()).mean().item())
        self._log_policy(policy, entropies, mask)
        return loss

    def _critic_rows(self, inputs: dict[str, Any]) -> CriticRows:
        """All rows of a micro-batch as the policy's forward has them."""
        if not self._padding_free:
            return CriticRows(inputs)
        lengths = torch.stack([inputs["prompt_mask"].sum(1), inputs["completion_mask"].sum(1)], 1).tolist()
        return CriticRows(inputs, lengths)

    def _kl_loss(self, logps: torch.Tensor, inputs: dict[str, Any], mask: torch.Tensor) -> torch.Tensor | float:
        """The KL term in the loss; what was measured, in either place, goes to the coefficient's controller once."""
        if self._kl_in("loss"):
            kl = kl_estimate(logps, inputs["ref_per_token_logps"], mask, self.args.kl_estimator)
        elif self._kl_in("reward"):
            kl = torch.where(mask, inputs["reward_kl"], 0)
        else:
            return 0.0
        if not self._in_turn:
            self.kl_term.measure(kl, mask)
        normalize, _ = self._normalizers
        return self.kl_term.coef * normalize(kl, mask) if self._kl_in("loss") else 0.0

    def _value_loss(self, values_BT1: torch.Tensor, inputs: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
        """The critic's share of the step's loss, and (3,) numbers for [`_log_values`]."""
        values, _ = split_values(values_BT1, inputs["policy_mask"])
        mask = inputs["value_mask"]
        result = value_loss(values, inputs["old_values"], inputs["returns"], mask, value_clip=self.args.value_clip)
        _, normalize = self._normalizers
        loss = normalize(result.loss, mask)
        counts = torch.stack([loss.detach(), result.clipped.sum().to(loss.dtype), mask.sum().to(loss.dtype)])
        return loss, counts

    # ---- logs ----

    def _log_share(self, name: str, loss: torch.Tensor) -> None:
        """A share of the step's loss, so that the mean over its micro-batches and ranks is the step's loss."""
        share = loss.detach() * self.args.gradient_accumulation_steps
        self._metrics["train"][name].append(self.accelerator.gather(share).mean().item())

    def _log_values(self, counts: torch.Tensor) -> None:
        self._log_share("value_loss", counts[0])
        clipped, tokens = self._sum_over_ranks(counts[1:]).tolist()
        self._metrics["train"]["clip_ratio/value_mean"].append(clipped / tokens if tokens else float("nan"))

    def _log_policy(self, policy: PolicyLoss, entropies_BT: torch.Tensor, mask_BT: torch.Tensor) -> None:
        for name, value in policy_metrics(policy, mask_BT, reduce=self._sum_over_ranks).items():
            self._metrics["train"][name].append(value.item())
        entropy = torch.where(mask_BT, entropies_BT.detach().float(), 0).sum()
        total, tokens = self._sum_over_ranks(torch.stack([entropy, mask_BT.sum().float()])).tolist()
        self._metrics["train"]["entropy"].append(total / tokens if tokens else float("nan"))
