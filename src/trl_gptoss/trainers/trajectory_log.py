"""Sampled rollouts on disk, one JSON object per line: what the report draws and what a person greps.

The file only ever grows by whole lines, each flushed at once; a torn last line can only be the work of a crash, and
`discard_after` drops it when the run is resumed, together with the steps that will be run again. docs/data_flow.md
describes the fields.
"""

import json
import os
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from ..trajectory import Trajectory

FILE_NAME = "trajectories.jsonl"


def trajectory_record(trajectory: Trajectory, tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    """A trajectory as plain JSON types. `completion_ids` and `loss_mask` are those of the training batch."""

    def text(ids: list[int]) -> str:
        return tokenizer.decode(ids, skip_special_tokens=False)

    return {
        "stop_reason": str(trajectory.stop_reason),
        "final_text": trajectory.final_text,
        "prompt_ids": trajectory.prompt_ids,
        "prompt_text": text(trajectory.prompt_ids),
        "completion_ids": trajectory.completion_ids,
        "loss_mask": trajectory.loss_mask,
        "turns": [
            {
                "policy_ids": turn.policy_ids,
                "policy_text": text(turn.policy_ids),
                "observation_ids": turn.observation_ids,
                "observation_text": text(turn.observation_ids),
                "messages": turn.messages,
                "anomalies": turn.anomalies,
                "tool_results": [
                    {
                        "name": r.name,
                        "arguments": r.arguments,
                        "text": r.text,
                        "failed": r.failed,
                        "timed_out": r.timed_out,
                        "seconds": round(r.seconds, 6),
                    }
                    for r in turn.tool_results
                ],
            }
            for turn in trajectory.turns
        ],
    }


class TrajectoryLog:
    """Appends records to `OUTPUT_DIR/trajectories.jsonl`.

    Args:
        output_dir (`str`): the run's directory.
    """

    def __init__(self, output_dir: str) -> None:
        self.path = Path(output_dir) / FILE_NAME

    def append(self, records: list[dict[str, Any]]) -> None:
        """Write one line per record and flush them."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a", encoding="utf-8") as file:
            # Lone surrogates in a tool's text have no UTF-8 form; ASCII escapes keep every string writable.
            file.writelines(json.dumps(record, ensure_ascii=True, default=str) + "\n" for record in records)
            file.flush()

    def discard_after(self, step: int) -> None:
        """Keep only whole lines of steps up to `step`."""
        if not self.path.exists():
            return
        kept = []
        with self.path.open(encoding="utf-8") as file:
            for line in file:
                try:
                    record = json.loads(line)
                except json.JSONDecodeError:
                    continue
                if record["step"] <= step:
                    kept.append(line)
        replacement = self.path.with_suffix(".jsonl.tmp")
        replacement.write_text("".join(kept), encoding="utf-8")
        os.replace(replacement, self.path)
