"""What a batch of rollouts logs: TRL's completion metrics under TRL's names, and those of the tool loop."""

import torch
from accelerate import Accelerator

from ..trajectory import StopReason, Trajectory

# Columns of the per-rollout statistics that are gathered over the ranks in one go.
_COLUMNS = ("prompt", "policy", "terminated", "turns", "calls", "failed", "timed_out", "malformed", "truncated")
_CUT_OFF = (StopReason.TRUNCATED, StopReason.MAX_TOKENS, StopReason.MAX_SECONDS)


def rollout_statistics(trajectory: Trajectory, stop_ids: list[int]) -> list[float]:
    """One row of statistics, in the order of `_COLUMNS`."""
    completion, results = trajectory.completion_ids, trajectory.tool_results
    return [
        len(trajectory.prompt_ids),
        sum(trajectory.loss_mask),
        completion[-1] in stop_ids,
        len(trajectory.turns),
        len(results),
        sum(r.failed for r in results),
        sum(r.timed_out for r in results),
        bool(trajectory.anomalies),
        trajectory.stop_reason in _CUT_OFF,
    ]


def gather_rollout_metrics(
    trajectories: list[Trajectory], stop_ids: list[int], accelerator: Accelerator
) -> tuple[dict[str, float], int]:
    """Metrics over the rollouts of all ranks, and the number of tokens in them (prompts plus sampled).

    Lengths count sampled tokens only, as TRL's do. `tools/call_frequency` is calls per rollout,
    `tools/failure_frequency` and `tools/timeout_frequency` are per call, `harmony/malformed_frequency` and
    `completions/truncated_frequency` are fractions of the rollouts: with at least one anomaly, and cut off by a token
    budget.
    """
    rows = [[float(x) for x in rollout_statistics(t, stop_ids)] for t in trajectories]
    table_NC = accelerator.gather(torch.tensor(rows, device=accelerator.device))
    column = dict(zip(_COLUMNS, table_NC.unbind(dim=1)))
    lengths, terminated = column["policy"], column["policy"][column["terminated"] > 0]
    if len(terminated) == 0:
        terminated = torch.zeros(1)
    calls = column["calls"].sum().item()
    metrics = {
        "completions/mean_length": lengths.mean().item(),
        "completions/min_length": lengths.min().item(),
        "completions/max_length": lengths.max().item(),
        "completions/clipped_ratio": 1.0 - column["terminated"].mean().item(),
        "completions/mean_terminated_length": terminated.mean().item(),
        "completions/min_terminated_length": terminated.min().item(),
        "completions/max_terminated_length": terminated.max().item(),
        "completions/truncated_frequency": column["truncated"].mean().item(),
        "completions/mean_turns": column["turns"].mean().item(),
        "harmony/malformed_frequency": column["malformed"].mean().item(),
        "tools/call_frequency": calls / len(lengths),
        "tools/failure_frequency": column["failed"].sum().item() / calls if calls else 0.0,
        "tools/timeout_frequency": column["timed_out"].sum().item() / calls if calls else 0.0,
    }
    return metrics, int((column["prompt"] + lengths).sum().item())
