"""The coefficient of the KL term over a run: what a mini-batch measured moves it after that mini-batch's step."""

import torch

from ..advantages import Reduce
from ..losses import AdaptiveKLController, FixedKLController
from .ppo_config import GptOssPPOConfig


class KLTerm:
    """Coefficient and measurement of the KL term, in nats per policy token.

    Args:
        args ([`GptOssPPOConfig`]): `beta`, `kl_controller`, `kl_target`, `kl_horizon`.
        reduce (`Callable`): sums a tensor over ranks.
    """

    def __init__(self, args: GptOssPPOConfig, reduce: Reduce) -> None:
        self.controller = (
            FixedKLController(args.beta)
            if args.kl_controller == "fixed"
            else AdaptiveKLController(args.beta, target=args.kl_target, horizon=args.kl_horizon)
        )
        self._reduce = reduce
        self._sums: list[torch.Tensor] = []

    @property
    def coef(self) -> float:
        return self.controller.coef

    def start_mini_batch(self) -> None:
        """Forget what is left of a mini-batch that came to no step."""
        self._sums = []

    @torch.no_grad()
    def measure(self, kl_BT: torch.Tensor, mask_BT: torch.Tensor) -> None:
        """Take note of one micro-batch.

        Args:
            kl_BT (`torch.Tensor`): (B, T), 0 off the mask.
            mask_BT (`torch.Tensor`): (B, T), bool.
        """
        sequences = mask_BT.any(1).sum()
        self._sums.append(torch.stack([kl_BT.sum().double(), mask_BT.sum().double(), sequences.double()]))

    def step(self) -> dict[str, float]:
        """After an optimizer step: move the coefficient; what to log. All ranks call it."""
        if not self._sums:  # no KL term, or a step of the critic alone
            return {}
        total, tokens, sequences = self._reduce(torch.stack(self._sums).sum(0)).tolist()
        self._sums = []
        logs = {"kl_coef": self.coef}
        if tokens:
            logs["kl"] = total / tokens
            self.controller.update(logs["kl"], int(sequences))
        return logs
