"""DeepSpeed ZeRO-3 without any sequence parallelism of its own."""

from typing import Any


def zero3_config(*, bf16: bool = True, cpu_offload: bool = False) -> dict[str, Any]:
    """A configuration for `TrainingArguments(deepspeed=...)`; `configs/accelerate/zero3.yaml` says the same to `accelerate
    launch`.

    It names neither `sequence_parallel_size` nor a model-parallel unit: with either DeepSpeed divides gradients by another
    number of ranks. Parameters are sharded over all ranks, whatever the trainer's `sequence_parallel_size`.

    Args:
        bf16 (`bool`, *optional*, defaults to `True`): Compute in bfloat16 with float32 master weights.
        cpu_offload (`bool`, *optional*, defaults to `False`): Keep parameters and optimizer states in host memory.

    Returns:
        `dict`: Sizes are "auto": transformers fills them in.
    """
    offload = {"device": "cpu", "pin_memory": True} if cpu_offload else {"device": "none"}
    return {
        "zero_optimization": {
            "stage": 3,
            "overlap_comm": True,
            "contiguous_gradients": True,
            "offload_param": offload,
            "offload_optimizer": offload,
            "stage3_gather_16bit_weights_on_model_save": True,
        },
        "bf16": {"enabled": bf16},
        "train_micro_batch_size_per_gpu": "auto",
        "train_batch_size": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "zero_allow_untested_optimizer": True,
    }
