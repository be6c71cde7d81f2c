"""Small hooks into the training loop."""

from typing import Any, Protocol

from transformers import ProgressCallback, TrainerCallback, TrainerControl, TrainerState, TrainingArguments


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


class Invalidates(Protocol):
    """What sends the weights again when told that they may have changed without an optimizer step."""

    def invalidate(self) -> None: ...


class SyncAgainCallback(TrainerCallback):
    """A run may begin with other weights than those that were sampled from before (a resumed one does, and one after an interrupted
    one, whose steps had the same numbers), and end with others (`load_best_model_at_end`).

    Args:
        sync ([`Invalidates`]): what brings the weights to the engine.
    """

    def __init__(self, sync: Invalidates) -> None:
        self.sync = sync

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self.sync.invalidate()

    on_train_end = on_train_begin
