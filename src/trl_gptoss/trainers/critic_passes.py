"""The critic's own forwards: values of a generation batch, and passes over a mini-batch beside or behind the policy's.

critic_epochs=1, critic_mini_batches=1     each micro-batch: policy backward, critic backward; then both step
critic_epochs=2, critic_mini_batches=2     each micro-batch: policy backward; the policy steps; then the critic:
                                           [0 1] step  [2 3] step  [0 1] step  [2 3] step      for 4 micro-batches
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from ..losses import LossNormalizer
from .critic_optimizer import CriticOptimizer
from .critic_rows import CriticRows
from .packing import micro_batches
from .padding_free import ROW_LENGTHS
from .ppo_loss import PPOLossMixin


class CriticPassesMixin(PPOLossMixin):
    """Methods of [`GptOssPPOTrainer`] that run a critic with a forward of its own."""

    _critic_optimizer: CriticOptimizer | None

    def _evaluate_critic(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        """(B, T + 1) values of own rows, within the token budget; ranks run as many forwards as the one with most."""
        count = len(batch["completion_ids"])
        parts, lengths = [list(range(count))], None
        if self._padding_free:
            lengths = batch[ROW_LENGTHS].tolist()
            parts = micro_batches([sum(row) for row in lengths], self.args.max_tokens_per_micro_batch)
        values = torch.zeros(count, batch["completion_ids"].shape[1] + 1, device=self.accelerator.device)
        with self._evaluating(), self.critic.in_use(self.model):
            for number in range(self._most(len(parts))):
                part = parts[min(number, len(parts) - 1)]
                rows = {name: x[part] for name, x in batch.items()}
                packed = None if lengths is None else [lengths[row] for row in part]
                values[part] = self.critic.values(self.model, CriticRows(rows, packed))
        return values

    @contextmanager
    def _evaluating(self) -> Iterator[None]:
        training = self.model.training
        self.model.eval()
        self.critic.train(False)
        try:
            yield
        finally:
            self.model.train(training)
            self.critic.train(training)

    def _mini_batch(self, step: int) -> list[dict[str, Any]]:
        """Micro-batches of the mini-batch whose first is micro-step `step`."""
        first = step % self.args.steps_per_generation
        return self._buffered_inputs[first : first + self.args.gradient_accumulation_steps]

    def _count(self, slices: list[dict[str, Any]], mask_name: str) -> LossNormalizer:
        """Denominators for these micro-batches of all ranks."""
        fixed = self.args.loss_normalization == "fixed_length"
        return LossNormalizer.from_mask(
            torch.cat([s[mask_name] for s in slices]),
            self.args.loss_normalization,
            reduce=self._sum_over_ranks,
            length=self.max_completion_length if fixed else None,
            averaged=self.accelerator.num_processes,
        )

    @property
    def _critic_has_passes(self) -> bool:
        """Whether the critic goes over a mini-batch by itself, behind the policy's step, and not along with the policy."""
        return self.args.critic_epochs > 1 or self.args.critic_mini_batches > 1

    def _critic_passes(self) -> None:
        """`critic_epochs` passes over the mini-batch that the policy has just learned from."""
        slices = self._mini_batch(self._step - self.args.gradient_accumulation_steps)
        size = len(slices) // self.args.critic_mini_batches
        groups = [slices[first : first + size] for first in range(0, len(slices), size)]
        policy_counts = self._normalizers[0]
        for _ in range(self.args.critic_epochs):
            for group in groups:
                self._normalizers = (policy_counts, self._count(group, "value_mask"))
                for number, inputs in enumerate(group, 1):
                    self._train_critic(self.model_wrapped, inputs, last=number == len(group))
                self._critic_step()

    def _critic_step(self) -> None:
        for name, value in self._critic_optimizer.step().items():
            self._metrics["train"][name].append(value)

    def _train_critic(self, model: nn.Module, inputs: dict[str, Any], last: bool) -> None:
        """Forward and backward of the critic, in the same parts as the policy's: all rows, or its turns.

        `last`: an update of the critic follows.
        """
        self.critic.train(True)
        parts = [(inputs, CriticRows(inputs), True, 1.0)]
        if self._padding_free:
            group = self._sequence_group
            parts = [(t.inputs, CriticRows(t.inputs, t.lengths, group), t.own, t.scale) for t in self._turns(inputs)]
        counts = torch.zeros(3, device=self.accelerator.device)
        for number, (batch, rows, own, scale) in enumerate(parts, 1):
            sync = last and number == len(parts)
            with self.critic.in_use(model), self._critic_optimizer.accumulating(sync):
                loss, found = self._value_loss(self.critic.values(model, rows), batch)
                self._critic_optimizer.backward(loss * scale, sync)
            if own:
                counts += found
        counts[0] /= self.args.critic_mini_batches  # its share of a pass
        self._log_values(counts)
