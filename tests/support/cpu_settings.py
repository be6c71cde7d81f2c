"""What the configuration of a small run on the CPU says, whatever it tests."""

ON_CPU = {
    "bf16": False,
    "use_cpu": True,
    "report_to": "none",
    "save_strategy": "no",
    "logging_steps": 1,
    "disable_tqdm": True,
    "gradient_checkpointing": False,
}
