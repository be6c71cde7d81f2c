"""Which weights sample: those that are trained, or the model as it would be shipped in MXFP4.

Sampling from the shipped model makes the rewards those of the shipped model. The price is that the policy that is trained is
not quite the policy that sampled. The ratio of the surrogate does not see that: it compares the trained policy with itself,
before and after an optimizer step, and is forced to exactly 1 on-policy as always. The difference between sampler and
trainer is the business of rollout correction, which needs the sampler's log-probs; what it amounts to is measured here.
"""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType
from torch import nn
from transformers import PretrainedConfig

from ..experts.mxfp4 import dequantize_mxfp4, quantize_mxfp4
from ..hub.adapters import merged_weights
from ..hub.publish import check_quantisable

_QUANTISED = (".mlp.experts.gate_up_proj", ".mlp.experts.down_proj")


def check_rollout_weights(rollout_weights: str, config: PretrainedConfig, accelerator: Accelerator) -> None:
    """Refuse quantised rollouts of models that cannot be quantised, and of sharded ones.

    Raises:
        `ValueError`: what was found and what to set.
    """
    if rollout_weights == "trained":
        return
    check_quantisable("rollout_weights='mxfp4'", "rollout_weights='trained'", config)
    sharded = accelerator.distributed_type == DistributedType.FSDP or (
        accelerator.distributed_type == DistributedType.DEEPSPEED
        and accelerator.state.deepspeed_plugin.zero_stage == 3
    )
    if sharded:
        raise ValueError(
            "rollout_weights='mxfp4' needs whole weights on every process, but they are sharded (FSDP or ZeRO-3). "
            "Use rollout_weights='trained', or train without sharding."
        )


@contextmanager
def sampling_weights(model: nn.Module, rollout_weights: str) -> Iterator[None]:
    """Inside, `model` has the weights that sample; afterwards the trained ones, bit for bit.

    Args:
        model (`nn.Module`): the policy, unwrapped, with or without PEFT.
        rollout_weights (`str`): `"trained"` or `"mxfp4"`.
    """
    with nullcontext() if rollout_weights == "trained" else merged_weights(model, quantised):
        yield


def quantised(name: str, weight: torch.Tensor) -> torch.Tensor:
    """What loading a saved MXFP4 checkpoint makes of a weight: experts rounded to the format's grid, the rest as it is.

    Args:
        name (`str`): of the parameter, in the base model.
        weight (`torch.Tensor`): of shape (E, in, out) for the experts' matrices.
    """
    if not name.endswith(_QUANTISED):
        return weight
    packed = quantize_mxfp4(weight.transpose(1, 2))
    return dequantize_mxfp4(*packed, dtype=weight.dtype).transpose(1, 2).contiguous()
