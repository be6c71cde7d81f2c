"""Small hooks into the training loop."""

from typing import Any

from transformers import ProgressCallback, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from ..rollouts.sglang_backend import DiskWeightSync, SglangBackend


class RolloutProgressCallback(ProgressCallback):
    """transformers' progress bar with the reward and the tool calls per rollout of the last log behind it.

    The numbers of a log, forty a step, are not printed: they go to the trackers and to `trainer_state.json`.
    """

    SHOWN = {"reward": "reward", "tools/call_frequency": "tools", "completions/truncated_frequency": "truncated"}

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        if state.is_world_process_zero and self.training_bar is not None and logs is not None:
            shown = {short: logs[name] for name, short in self.SHOWN.items() if logs.get(name) is not None}
            if shown:
                self.training_bar.set_postfix({short: f"{value:.2f}" for short, value in shown.items()})


class SendAgainCallback(TrainerCallback):
    """A run may begin where one was interrupted, whose steps had the same numbers, and end with other weights than those of its
    last step (`load_best_model_at_end`): SGLang gets them again.

    Args:
        backend ([`SglangBackend`]): what samples.
    """

    def __init__(self, backend: SglangBackend) -> None:
        self.backend = backend

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if isinstance(self.backend.sync_weights, DiskWeightSync):
            self.backend.sync_weights.invalidate()

    on_train_end = on_train_begin
