"""Rows of a micro-batch for a critic's forward: padded, or packed and shared like those of the policy.

A value is the head's output at the position before its token, which is where the packed batch scores the token. The last
value of a row, (T + 1)th or earlier, is the one at its last token:

    packed tokens   a  b  X  c  Y  Z          a b, c: prompts of two rows; X, Y Z: their completions
    scored at          X     Y  Z
    values_BT1      row 0: b X 0      row 1: c Y Z       named by the token whose output they are

A row without a token has no state to value: packed, its values are 0.
"""

from typing import Any

import torch

from ..parallelism import SequenceGroup, gather_tokens
from .packed_forward import model_inputs
from .packing import RowLength, pack
from .value_head import ValueHead, completion_states


class CriticRows:
    """One micro-batch.

    Args:
        inputs (`dict[str, torch.Tensor]`): prompt_ids, prompt_mask (B, P), completion_ids, completion_mask (B, T).
        lengths (`list[tuple[int, int]]`, *optional*): tokens of each row's prompt and completion, to pack them. Unset for
            the padded rows.
        group (`SequenceGroup`, *optional*): ranks that share the packed rows.
    """

    def __init__(
        self,
        inputs: dict[str, torch.Tensor],
        lengths: list[RowLength] | None = None,
        group: SequenceGroup | None = None,
    ) -> None:
        self.width = inputs["completion_ids"].shape[1]
        self.group = group
        self.lengths = lengths
        self.input_ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1)
        self.attention_mask = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1)
        self.packed = None
        if lengths is not None:
            self.packed = pack(self.input_ids, lengths, self.width, multiple_of=1 if group is None else group.size)

    def model_inputs(self) -> dict[str, Any]:
        """Keyword arguments for a model without labels."""
        if self.packed is not None:
            return {**model_inputs(self.packed, self.group), "use_cache": False}
        return {"input_ids": self.input_ids, "attention_mask": self.attention_mask, "use_cache": False}

    def values(self, head: ValueHead, hidden: torch.Tensor) -> torch.Tensor:
        """(B, T + 1) values, float32, from the hidden states that `model_inputs` gave: (B, S, D), or (1, S, D) packed."""
        if self.packed is None:
            return head(completion_states(hidden, self.width))
        values_T = head(hidden)[0]
        if self.group is not None:
            values_T = gather_tokens(values_T, self.group)
        values_BT = self.packed.unpack(values_T)
        filled = [row for row, length in enumerate(self.lengths) if sum(length)]  # `pack` leaves the others out
        ends_F = self.packed.cu_seqlens[1 : len(filled) + 1].long() - 1
        places_2F = torch.tensor([filled, [self.lengths[row][1] for row in filled]], device=values_T.device).long()
        values_BT1 = torch.cat([values_BT, values_T.new_zeros(len(self.lengths), 1)], dim=1)
        return values_BT1.index_put(tuple(places_2F), values_T[ends_F])
