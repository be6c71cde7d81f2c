"""The settings of what is saved, published and handed to the sampler."""

from dataclasses import dataclass, field
from typing import Literal

from ..hub.publish import check_save_format


@dataclass
class SavingConfig:
    r"""
    What `save_model`, checkpoints and `push_to_hub` write, and which weights sample.

    Parameters:
        save_format (`str`, *optional*, defaults to `"bf16"`):
            `"bf16"`: the weights as they are trained. `"mxfp4"`: the layout of openai/gpt-oss, quantised; `"both"`: the
            first, and the second in the subfolder `mxfp4`. Checkpoints always hold what resuming needs, and with
            `"mxfp4"` and `"both"` the quantised model in a subfolder besides. With adapters the adapter is saved, and the
            merged, quantised model in the subfolder. GPT-OSS only.
        rollout_weights (`str`, *optional*, defaults to `"trained"`):
            `"trained"`: the policy samples. `"mxfp4"`: the policy as it would be shipped samples: adapters merged, experts
            quantised and dequantised. The trained weights stay as they are, and `rollout_weights/...` says how far the two
            are apart. Needs whole weights on every process, and memory for the experts once more. GPT-OSS only.
        train_sinks (`bool`, *optional*, defaults to `False`):
            Train the attention sinks along with adapters, in float32; they are saved in the adapter's file. Without
            adapters all weights are trained anyway. GPT-OSS only.
    """

    save_format: Literal["bf16", "mxfp4", "both"] = field(
        default="bf16",
        metadata={
            "help": "What save_model, checkpoints and push_to_hub write: 'bf16' (as trained), 'mxfp4' (the layout of "
            "openai/gpt-oss) or 'both'."
        },
    )
    rollout_weights: Literal["trained", "mxfp4"] = field(
        default="trained",
        metadata={"help": "Which weights sample: 'trained', or 'mxfp4' for the policy as it would be shipped."},
    )
    train_sinks: bool = field(
        default=False,
        metadata={"help": "Train the attention sinks along with adapters and save them in the adapter's file."},
    )


def check_saving_config(args: SavingConfig) -> None:
    """Raise `ValueError` for values that do not exist."""
    check_save_format(args.save_format)
    if args.rollout_weights not in ("trained", "mxfp4"):
        raise ValueError(f"rollout_weights is {args.rollout_weights!r}, expected 'trained' or 'mxfp4'.")
