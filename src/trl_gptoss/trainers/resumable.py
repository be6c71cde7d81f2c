"""Resuming where a run stopped: the same curves as if it had not."""

from pathlib import Path
from typing import Any

import torch
from accelerate.logging import get_logger
from datasets import IterableDataset
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, TrainOutput
from trl import GRPOTrainer

from .checkpointing import (
    BATCHES,
    REFERENCE,
    LoopState,
    RandomState,
    is_complete,
    last_complete_checkpoint,
    loop_state_path,
    save_whole,
)
from .interruption import Interruption

logger = get_logger(__name__)


class ResumableMixin(GRPOTrainer):
    """The methods of the trainer that checkpoints depend on.

    Overridden, and why:
        `train`: finds complete checkpoints, handles signals, saves the last finished step when something fails.
        `_init_training_state`, `_run_epoch`: where in a streamed data set a resumed run goes on; one that has all its steps
            trains no further one.
        `log`: takes a snapshot of the moment.
        `_save_rng_state`, `_load_rng_state`: what TRL keeps outside of checkpoints goes along with the random states; so does
            a reference model that follows the policy.
    """

    _snapshot: tuple[int, LoopState, RandomState] | None = None
    _optimizer_is_stepping: bool = False
    _saved_steps: set[int] = frozenset()  # of this run

    def train(
        self,
        resume_from_checkpoint: str | bool | None = None,
        trial: Any = None,
        ignore_keys_for_eval: list[str] | None = None,
    ) -> TrainOutput:
        if resume_from_checkpoint is True:
            resume_from_checkpoint = last_complete_checkpoint(self.args.output_dir, self.args.world_size)
        self._interruption = Interruption(single_process=self.args.world_size == 1)
        self._snapshot = None
        self._saved_steps = set()
        self._forget_last_run()
        watch, end_of_step = _StepWatch(self), _EndOfStep(self)
        self.add_callback(watch)
        # Before all others: what one of them raises at the end of a step comes after the step.
        self.callback_handler.callbacks.insert(0, end_of_step)
        try:
            with self._interruption.installed():
                try:
                    output = super().train(resume_from_checkpoint, trial, ignore_keys_for_eval)
                except BaseException as error:
                    self._interruption.deferred = True  # no second signal may cut the saving short
                    self._save_last_step(error)
                    raise
                # A run that a signal has ended must not look finished to the script around it.
                if self._interruption.requested is not None:
                    self._interruption.stop()
            self._end_environments()
            return output
        finally:
            self.remove_callback(watch)
            self.remove_callback(end_of_step)

    def _forget_last_run(self) -> None:
        """What a run that ended, or was broken off in the middle of a step, has left in this process."""
        # TRL goes on with the rest of the last generation batch when `train` is called again, with other weights.
        self._step, self._generated_at, self._buffered_inputs = 0, -1, None
        self._checked_at, self._correction_rows, self._entropy_window_stats = -1, [], None
        self._current_train_step_time = 0.0
        for values in (*self._metrics.values(), self._pending_metrics, self._pending_extra_logs):
            values.clear()

    def _init_training_state(
        self,
        max_steps: int,
        num_update_steps_per_epoch: int,
        num_train_epochs: int,
        resume_from_checkpoint: str | None,
        trial: Any,
    ) -> tuple[int, int]:
        start = super()._init_training_state(
            max_steps, num_update_steps_per_epoch, num_train_epochs, resume_from_checkpoint, trial
        )
        if resume_from_checkpoint is None or not isinstance(self.train_dataset, IterableDataset):
            return start
        if self.args.ignore_data_skip:
            return start
        # transformers takes `max_steps` for the length of a stream: every checkpoint would be one of its first pass.
        saved = TrainerState.load_from_json(str(Path(resume_from_checkpoint) / TRAINER_STATE_NAME))
        passes = int(saved.epoch)
        steps = round((saved.epoch - passes) * saved.max_steps)
        return passes, steps * self.args.gradient_accumulation_steps

    def _run_epoch(self, *args: Any, **kwargs: Any) -> None:
        if self.state.global_step >= self.state.max_steps:  # transformers would train one step more
            self.control.should_training_stop = True
            return
        super()._run_epoch(*args, **kwargs)

    def _start_epoch(self, epoch: int) -> None:
        """Called before the order of an epoch is drawn."""

    def _end_environments(self) -> None:
        """Called when a run has come to its end."""

    def _give_up(self, error: Exception) -> None:
        """End the run by `error`. One of several ranks may not do so at once: the others would wait for it for ever."""
        if not self.is_in_train or self.args.world_size == 1:
            raise error
        self._interruption.fail_after_step(error)

    def _agree_on_signal(self, number: int | None) -> int | None:
        """The signal that any rank got, on all ranks."""
        numbers = self.accelerator.gather(torch.tensor([number or 0], device=self.accelerator.device))
        return int(numbers.max()) or None

    def _loop_state(self) -> LoopState:
        per_generation = self.args.steps_per_generation * self.num_iterations
        batch_in_use = self._step % per_generation != 0
        return LoopState(
            step=self._step,
            generated_at=self._generated_at,
            # The slices themselves are never changed, only given a further key.
            buffered_inputs=[dict(s) for s in self._buffered_inputs] if batch_in_use else None,
            metrics={mode_name: list(values) for mode_name, values in self._metrics["train"].items()},
            running_loss=self._tr_loss.item(),
            last_logged_step=self._globalstep_last_logged,
            tokens_seen=self.state.num_input_tokens_seen,
            world_size=self.args.world_size,
            batches=self._batches(),
        )

    def _batches(self) -> dict[str, int]:
        return {name: getattr(self.args, name) for name in BATCHES}

    def _restore_loop_state(self, state: LoopState) -> None:
        self._step = state.step
        self._generated_at = state.generated_at
        self._buffered_inputs = state.buffered_inputs
        self._metrics["train"].clear()
        for name, values in state.metrics.items():
            self._metrics["train"][name].extend(values)
        self._tr_loss.fill_(state.running_loss)
        self._globalstep_last_logged = state.last_logged_step
        self.state.num_input_tokens_seen = state.tokens_seen

    def _save_rng_state(self, output_dir: str) -> None:
        super()._save_rng_state(output_dir)
        self._loop_state().save(output_dir, self.args.process_index)
        if self._saves_reference and self.accelerator.is_main_process:
            save_whole(self.accelerator.unwrap_model(self.ref_model).state_dict(), Path(output_dir) / REFERENCE)

    @property
    def _saves_reference(self) -> bool:
        """Whether the reference model moves with the policy, and this process has it whole."""
        return self.args.sync_ref_model and not (self.is_deepspeed_enabled or self.is_fsdp_enabled)

    def _load_reference(self, checkpoint: str) -> None:
        file = Path(checkpoint) / REFERENCE
        if self._saves_reference and file.is_file():
            reference = self.accelerator.unwrap_model(self.ref_model)
            reference.load_state_dict(torch.load(file, map_location="cpu", weights_only=True))
        elif self.args.sync_ref_model:
            logger.warning(
                f"{checkpoint} does not hold the reference model of sync_ref_model=True (it is saved where weights are not "
                "sharded): the KL term compares with the model that the run began with until the next synchronisation."
            )

    def _load_rng_state(self, checkpoint: str | None) -> None:
        super()._load_rng_state(checkpoint)
        if checkpoint is None:
            return
        if self.accelerator.is_main_process:
            self.sampled_logs.file.discard_after(self.state.global_step)
        self._load_reference(checkpoint)
        if not loop_state_path(checkpoint, self.args.process_index).is_file():
            logger.warning(
                f"{checkpoint} has no loop state of process {self.args.process_index}: it was written by another trainer "
                "or with another number of processes. Training goes on from its weights, but not on the same curves."
            )
            return
        state = LoopState.load(checkpoint, self.args.process_index, self.args.device)
        here = self._batches()
        written = here if state.batches is None else state.batches
        changed = [f"{name}={written[name]} (now {here[name]})" for name in BATCHES if written[name] != here[name]]
        if state.world_size != self.args.world_size:
            changed.insert(0, f"{state.world_size} process(es) (now {self.args.world_size})")
        if changed:
            logger.warning(
                f"{checkpoint} was written with {', '.join(changed)}: training goes on from its weights and optimizer with a new "
                "generation batch, and not on the same curves."
            )
            self.state.num_input_tokens_seen = state.tokens_seen
            return
        self._restore_loop_state(state)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        if self.is_in_train and self.model.training and not self._optimizer_is_stepping:
            # What is being logged must not be logged again if something fails from here on.
            self._take_snapshot()
            self._snapshot[1].metrics.clear()
        super().log(logs, start_time)

    def _take_snapshot(self) -> None:
        """Remember where the run is, so that a failure in the next step can be undone."""
        self._snapshot = (self.state.global_step, self._loop_state(), RandomState.capture())

    def _save_last_step(self, error: BaseException) -> None:
        """After a failure: a checkpoint of the last finished optimizer step, unless there is one or cannot be one."""
        if self._snapshot is None:
            return
        step, loop_state, random_state = self._snapshot
        name = f"{PREFIX_CHECKPOINT_DIR}-{step}"
        reason = f"{type(error).__name__} after optimizer step {step}"
        if step == 0:
            return
        if self.args.world_size > 1:
            logger.error(
                f"{reason}: with several processes no checkpoint can be saved now. Resume from the last one, with any "
                "number of processes. If this process was waiting for others (a collective, a connection, a timeout), one "
                "of them has died or hangs: the cause is in the log of the rank that stopped first.",
                main_process_only=False,
            )
            return
        if self.state.global_step != step or self._optimizer_is_stepping:
            logger.error(
                f"{reason}, in the middle of the next one: the weights are no checkpoint. Resume from the last."
            )
            return
        # An earlier run may have left a checkpoint of this name in the folder.
        if step in self._saved_steps and is_complete(Path(self.args.output_dir) / name, self.args.world_size):
            logger.error(f"{reason}: {name} is complete, resume from it with resume_from_checkpoint=True.")
            return
        self.model.train()
        self._restore_loop_state(loop_state)
        random_state.restore()
        self._save_checkpoint(self.model_wrapped, trial=None)
        advice = "Resume from it with resume_from_checkpoint=True."
        if self.args.save_only_model:
            advice = "With save_only_model=True it is a model to begin with, and no run to resume."
        logger.error(f"{reason}: saved {name}. {advice}")


class _StepWatch(TrainerCallback):
    """Takes snapshots between optimizer steps, and knows when one of them goes on."""

    def __init__(self, trainer: ResumableMixin) -> None:
        self.trainer = trainer

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        # An earlier run may have left its rollouts in the folder; what belongs to this run was kept by the resumption.
        if state.is_world_process_zero and state.global_step == 0:
            file = self.trainer.sampled_logs.file
            try:
                file.discard_after(0)
            except OSError as error:  # costs the log, not the run
                logger.warning(f"{file.path} cannot be cleared of an earlier run's rollouts: {error}")

    def on_epoch_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self.trainer._start_epoch(int(state.epoch))

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self.trainer._take_snapshot()

    def on_pre_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self.trainer._interruption.deferred = True
        self.trainer._optimizer_is_stepping = True

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self.trainer._saved_steps.add(state.global_step)


class _EndOfStep(TrainerCallback):
    """Takes the snapshot of a finished step and ends the run there when a signal has asked for it."""

    def __init__(self, trainer: ResumableMixin) -> None:
        self.trainer = trainer

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> TrainerControl:
        trainer = self.trainer
        trainer._optimizer_is_stepping = False
        trainer._take_snapshot()
        if args.world_size > 1:
            trainer._interruption.requested = trainer._agree_on_signal(trainer._interruption.requested)
        if trainer._interruption.requested is not None:
            control.should_save = True  # save_strategy="no" wants no regular ones; what was learned is not lost
            control.should_training_stop = True
        else:
            trainer._interruption.deferred = False
        return control
