"""Some of the rollouts of each logged step, for people: on disk always, on the terminal with `log_completions`."""

import logging
import math
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from transformers import PreTrainedTokenizerBase

from ..harmony import format_conversation
from ..trajectory import Trajectory
from .config import GptOssGRPOConfig
from .trajectory_log import TrajectoryLog, trajectory_record

logger = logging.getLogger(__name__)


@dataclass(kw_only=True, slots=True)
class SampledRollout:
    """A scored rollout.

    prompt (`list[dict]` or `None`): messages of the data set row.
    trajectory ([`Trajectory`] or `None`): `None` where TRL made the completion.
    rewards (`dict[str, float]`): by reward function; NaN where one does not apply or failed.
    advantage (`float`): after normalisation; with a critic the mean over the policy tokens.
    """

    prompt: list[dict[str, Any]] | None
    trajectory: Trajectory | None
    rewards: dict[str, float]
    advantage: float


class SampledLogs:
    """Keeps the rollouts of the last generation batch until they are logged.

    Args:
        args ([`GptOssGRPOConfig`]): `log_trajectories`, `log_completions`, `log_completions_steps`,
            `num_completions_to_print`, `output_dir`.
        tokenizer (`PreTrainedTokenizerBase`): decodes for people.
        enabled (`bool`): whether there are trajectories at all.
    """

    def __init__(self, args: GptOssGRPOConfig, tokenizer: PreTrainedTokenizerBase, enabled: bool) -> None:
        self.args = args
        self.tokenizer = tokenizer
        self.enabled = enabled
        self.file = TrajectoryLog(args.output_dir)
        self.console = Console()
        self.rollouts: list[SampledRollout] = []

    def remember(self, rollouts: list[SampledRollout]) -> None:
        """Replace what is kept by the rollouts of a new generation batch."""
        self.rollouts = [r for r in rollouts if r.trajectory is not None] if self.enabled else []

    def write(self, step: int) -> None:
        """Log what is kept, once, under `step`."""
        rollouts, self.rollouts = self.rollouts, []
        sampled = _spread(rollouts, self.args.log_trajectories)
        if sampled:
            try:
                self.file.append([self._record(step, i, r) for i, r in sampled])
            except OSError as error:  # a full disk costs the log, not the run
                logger.warning(f"No trajectories of step {step} were written to {self.file.path}: {error}")
        if self.args.log_completions and step % self.args.log_completions_steps == 0:
            limit = self.args.num_completions_to_print
            for _, rollout in _spread(rollouts, len(rollouts) if limit is None else limit):
                self._print(step, rollout)

    def _record(self, step: int, index: int, rollout: SampledRollout) -> dict[str, Any]:
        rewards = {name: None if math.isnan(value) else value for name, value in rollout.rewards.items()}
        return {
            "step": step,
            "index": index,
            "reward": self._total(rollout),
            "rewards": rewards,
            "advantage": rollout.advantage,
            "prompt": rollout.prompt,
            **trajectory_record(rollout.trajectory, self.tokenizer),
        }

    def _total(self, rollout: SampledRollout) -> float | None:
        weights = self.args.reward_weights or [1.0] * len(rollout.rewards)
        # An environment's own reward comes after the configured ones, with weight 1.
        weights = [*weights, *[1.0] * (len(rollout.rewards) - len(weights))]
        parts = [w * r for w, r in zip(weights, rollout.rewards.values()) if not math.isnan(r)]
        return sum(parts) if parts else None

    def _print(self, step: int, rollout: SampledRollout) -> None:
        trajectory = rollout.trajectory
        self.console.rule(f"step {step} | reward {self._total(rollout)} | {trajectory.stop_reason}")
        self.console.print(format_conversation(trajectory.prompt_ids + trajectory.completion_ids, self.tokenizer))


def _spread(rollouts: list[SampledRollout], count: int) -> list[tuple[int, SampledRollout]]:
    """At most `count` rollouts with their positions, evenly spread, so that they come from different groups."""
    count = min(count, len(rollouts))
    return [(i, rollouts[i]) for i in (k * len(rollouts) // count for k in range(count))]
