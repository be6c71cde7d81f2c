"""One packed batch through a model, alone or shared with the other ranks of a sequence-parallel group."""

from typing import Any

import torch
from torch import nn

from ..parallelism import HeadExchange, SequenceGroup, gather_tokens, shard_tokens
from .packing import PackedBatch


def model_inputs(packed: PackedBatch, group: SequenceGroup | None = None) -> dict[str, Any]:
    """Keyword arguments for a transformers model.

    Args:
        packed (`PackedBatch`): With `group`, filled up to a multiple of its size and the same on all its members.
        group (`SequenceGroup`, *optional*): This rank's share of the tokens, and the exchange for `sink_fa3`.

    Returns:
        `dict`: Hidden states, logits or values of the model are then those of the T tokens, or of the T / P own ones;
        `gather_tokens` makes them whole.
    """
    own = {"input_ids": packed.input_ids, "position_ids": packed.position_ids}
    if group is not None:
        own = {name: shard_tokens(x, group) for name, x in own.items()}
        own["head_exchange"] = HeadExchange(group)
    return {
        **own,
        "attention_mask": None,
        "cu_seq_lens_q": packed.cu_seqlens,
        "cu_seq_lens_k": packed.cu_seqlens,
        "max_length_q": packed.max_length,
        "max_length_k": packed.max_length,
    }


def packed_log_probs(
    model: nn.Module,
    packed: PackedBatch,
    group: SequenceGroup | None = None,
    *,
    compute_entropy: bool = False,
    compute_aux_loss: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """Log-probs and entropies at their padded places, from TRL's fused head.

    Args:
        model (`nn.Module`): With `trl.trainer.utils.add_fused_lm_head`.
        packed (`PackedBatch`): See `model_inputs`.
        group (`SequenceGroup`, *optional*): See `model_inputs`.
        compute_entropy (`bool`, *optional*, defaults to `False`): Whether entropies are wanted.
        compute_aux_loss (`bool`, *optional*, defaults to `False`): Whether the router's loss is. Not with a group: a product
            of means over shares is not the product of the means.

    Returns:
        `tuple`: Log-probs (B, C), entropies (B, C) or None, load-balancing loss or None. All members of a group get the
        same; see `gather_tokens` for what backward does.
    """
    if compute_aux_loss and group is not None:
        raise ValueError("The router's auxiliary loss is not computed on shares of a sequence.")
    labels = packed.shift_labels if group is None else shard_tokens(packed.shift_labels, group)
    more = {"output_router_logits": True} if compute_aux_loss else {}
    outputs = model(**model_inputs(packed, group), **more, shift_labels=labels, fused_lm_head=True)
    values_XS = torch.cat([outputs.log_probs, outputs.entropy] if compute_entropy else [outputs.log_probs])
    values_XT = values_XS if group is None else gather_tokens(values_XS, group)
    logps_BC = packed.unpack(values_XT[0])
    entropies_BC = packed.unpack(values_XT[1]) if compute_entropy else None
    return logps_BC, entropies_BC, outputs.aux_loss if compute_aux_loss else None
