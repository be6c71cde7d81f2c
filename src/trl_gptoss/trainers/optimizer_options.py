"""Optimizers that do not go with the way parameters are held."""

from accelerate import Accelerator
from transformers.trainer_optimizer import _BITSANDBYTES_OPTIMIZERS
from transformers.training_args import OptimizerNames

from .config import GptOssGRPOConfig

# AdamW with states of 8 bits, of bitsandbytes: `ADAMW_8BIT` is another name of `ADAMW_BNB`
EIGHT_BIT_ADAMW = (OptimizerNames.ADAMW_BNB, OptimizerNames.ADAMW_8BIT, OptimizerNames.PAGED_ADAMW_8BIT)


def check_optimizer(args: GptOssGRPOConfig, accelerator: Accelerator) -> None:
    """Refuse an optimizer of bitsandbytes on parameters that FSDP2 shards.

    Args:
        args ([`GptOssGRPOConfig`]): with `optim`.
        accelerator ([`~accelerate.Accelerator`]): the trainer's.

    Raises:
        ValueError: its kernels take the memory of a DTensor for a whole parameter and read beyond it.
    """
    if accelerator.is_fsdp2 and args.optim in _BITSANDBYTES_OPTIMIZERS:
        raise ValueError(
            f"optim={args.optim.value!r} with FSDP2: the kernels of bitsandbytes do not know sharded parameters and access memory that is "
            "not theirs (bitsandbytes issue 1633). Use optim='adamw_torch_8bit' (torchao), or DDP or a single GPU."
        )
