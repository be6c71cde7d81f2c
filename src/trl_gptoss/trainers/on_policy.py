"""The ratio of the surrogate: exactly 1 while the weights are those that generated the batch.

There the log-probs of the update are compared with themselves, detached, and not with those of a second forward, which
dropout, ties in the routing or non-deterministic kernels make another function. Slices of the generation batch that are
still to be visited after an optimizer step get their old log-probs before the last backward of that step: from the weights
that generated them, and in eval mode, because the policy that acted has no dropout. See `schedule` for an example. Behind the
backward would be too late: DeepSpeed's engine steps in it, and FSDP2 keeps gathered what a forward without a backward has
gathered, so that the step would pass over it.

What the ratio hides is measured: every `on_policy_check_steps` optimizer steps one micro-batch is evaluated again, and
the largest difference is logged.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from trl.models.utils import disable_gradient_checkpointing

from .rollout_weights import sampling_weights
from .router_replay import RouterReplayMixin

# What TRL hands to the model beside ids and masks, where a batch has it.
MODEL_INPUTS = (
    "pixel_values",
    "image_grid_thw",
    "num_images",
    "pixel_attention_mask",
    "spatial_shapes",
    "num_tiles",
    "image_sizes",
    "token_type_ids",
    "mm_token_type_ids",
    "image_position_ids",
)


class OnPolicyMixin(RouterReplayMixin):
    """The methods of [`GRPOTrainer`] that the ratio depends on.

    Overridden, and why:
        `compute_loss`: hides stored old log-probs from on-policy micro-batches, so that TRL's own
            `per_token_logps.detach()` takes their place; logs the ratio. Before the first optimizer step of a generation
            batch it gets old log-probs for the rest of the batch.
        `_get_per_token_logps_and_entropies`: keeps the log-probs of the training forward for the metrics.
    """

    _generated_at: int = -1  # optimizer steps done when the batch in use was generated
    _checked_at: int = -1  # optimizer step of the last recomputation

    @contextmanager
    def _without_second_forward(self) -> Iterator[None]:
        """Keep TRL from computing old log-probs for a whole generation batch, needed or not, with dropout.

        TRL decides by `gradient_accumulation_steps % (steps_per_generation * num_iterations)`, and reads the first of
        them for nothing else while it generates.
        """
        if self.args.on_policy == "off":
            yield
            return
        steps = self.args.gradient_accumulation_steps
        self.args.gradient_accumulation_steps = self.args.steps_per_generation * self.num_iterations
        try:
            yield
        finally:
            self.args.gradient_accumulation_steps = steps

    def _get_per_token_logps_and_entropies(self, model: nn.Module, *args: Any, **kwargs: Any) -> tuple:
        result = super()._get_per_token_logps_and_entropies(model, *args, **kwargs)
        if torch.is_grad_enabled():
            self._training_logps = result[0].detach()
        return result

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: torch.Tensor | int | None = None,
    ) -> torch.Tensor:
        if not model.training:
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        forced = self.args.on_policy != "off" and self.state.global_step == self._generated_at
        if forced:
            inputs = {name: value for name, value in inputs.items() if name != "old_per_token_logps"}
            if self.accelerator.sync_gradients:  # an optimizer step follows
                self._store_old_logps()  # for later visits: a copy of this slice is what goes on from here
        elif self.args.on_policy != "off" and "old_per_token_logps" not in inputs:
            raise RuntimeError(
                f"A micro-batch generated at optimizer step {self._generated_at} is used at step "
                f"{self.state.global_step} without log-probs of the weights that generated it. This is a bug in "
                "trl_gptoss (or in a subclass that changes the buffered inputs); please report it."
            )
        self._training_logps = None
        loss = super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        self._log_ratio(inputs, forced)
        return loss

    def _store_old_logps(self) -> None:
        """Old log-probs for every slice that is visited after this micro-step, from the weights as they are now."""
        per_generation = self.args.steps_per_generation * self.num_iterations
        done = (self._step + 1) % per_generation
        if done == 0:  # the generation batch is used up
            return
        for index in {step % self.args.steps_per_generation for step in range(done, per_generation)}:
            slice_ = self._buffered_inputs[index]
            if "old_per_token_logps" not in slice_:
                with self._routes_recorded(slice_):
                    slice_["old_per_token_logps"] = self._eval_logps(slice_)

    def _eval_logps(self, inputs: dict[str, Any]) -> torch.Tensor:
        """(B, C) log-probs of the completions under the current weights, without dropout and without gradients."""
        training = self.model.training
        self.model.eval()
        try:
            with (
                torch.no_grad(),
                self._rows_of(inputs),
                self._routes_replayed(inputs),
                disable_gradient_checkpointing(self.model, self.args.gradient_checkpointing_kwargs),
            ):
                logps_BC, _, _ = self._get_per_token_logps_and_entropies(
                    self.model,
                    torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1),
                    torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1),
                    inputs["completion_ids"].size(1),
                    **{name: inputs[name] for name in MODEL_INPUTS if name in inputs},
                )
        finally:
            self.model.train(training)
        return logps_BC

    def _log_ratio(self, inputs: dict[str, Any], forced: bool) -> None:
        """`on_policy/...`: how often the ratio was forced, how large it was, what a recomputation would have given."""
        metrics = self._metrics["train"]
        metrics["on_policy/forced"].append(float(forced))
        if self._training_logps is None:  # a fused loss (use_liger_kernel) keeps its log-probs to itself
            return
        mask_BC = inputs["completion_mask"] * inputs.get("tool_mask", 1)
        logps_BC = self._training_logps

        def largest(other_BC: torch.Tensor) -> float:
            difference = ((logps_BC - other_BC) * mask_BC).abs().max()
            return self.accelerator.gather(difference).max().item()

        metrics["on_policy/max_log_ratio"].append(largest(inputs.get("old_per_token_logps", logps_BC)))
        every = self.args.on_policy_check_steps
        step = self.state.global_step
        due = every > 0 and step % every == 0 and step != self._checked_at
        if due and step == self._generated_at:
            self._checked_at = step
            trained_BC = self._eval_logps(inputs)
            metrics["on_policy/max_log_ratio_recomputed"].append(largest(trained_BC))
            self._log_rollout_weights(inputs, trained_BC, mask_BC)

    def _log_rollout_weights(self, inputs: dict[str, Any], trained_BC: torch.Tensor, mask_BC: torch.Tensor) -> None:
        """`rollout_weights/...`: how far the weights that sample are from the trained ones, on what was sampled."""
        if self.args.rollout_weights == "trained":
            return
        with sampling_weights(self.accelerator.unwrap_model(self.model), self.args.rollout_weights):
            sampler_BC = self._eval_logps(inputs)
        log_ratio_BC = (trained_BC - sampler_BC).float()
        sums = torch.stack(
            [
                (log_ratio_BC.abs() * mask_BC).sum(),
                (
                    (log_ratio_BC.expm1() - log_ratio_BC) * mask_BC
                ).sum(),  # its mean is KL(sampler || trained), never < 0
                mask_BC.sum().float(),
            ]
        )
        absolute, k3, tokens = self.accelerator.reduce(sums, "sum").tolist()
        metrics = self._metrics["train"]
        metrics["rollout_weights/abs_log_ratio"].append(absolute / max(tokens, 1))
        metrics["rollout_weights/kl"].append(k3 / max(tokens, 1))
