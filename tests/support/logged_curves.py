"""What a run has logged, without its times: equal for a run that was stopped and resumed and for one that was not."""

TIMES = (
    "step_time",
    "train_runtime",
    "train_samples_per_second",
    "train_steps_per_second",
    "total_flos",
    "train_loss",
)


def curves(trainer):
    return [{k: v for k, v in entry.items() if k not in TIMES} for entry in trainer.state.log_history]
