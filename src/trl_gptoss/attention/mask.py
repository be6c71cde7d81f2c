"""The mask that `sink_fa3` asks transformers for: four numbers per row instead of a matrix.

transformers calls `sink_mask` once per forward and attention type. It answers None where no padding exists, else an int32
tensor (batch, 1, 1, 4) of half-open ranges

    [q_begin, q_end, k_begin, k_end]    of the rows' real queries and of the real keys in the key buffer

For a left-padded row 0 0 1 1 1 at prefill that is [2, 5, 2, 5]. One decoding step later, in a static cache of 8 places of
which 6 are written, it is [0, 1, 2, 6]. Queries align with the end of the keys. The tensor is 4-D because transformers
passes a 4-D mask on as it is, and its shape never changes during generation, so graphs are captured once.
"""

from collections.abc import Callable

import torch
from transformers import PretrainedConfig
from transformers.masking_utils import causal_mask_function


def sink_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | torch.Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable = causal_mask_function,
    attention_mask: torch.Tensor | None = None,
    use_vmap: bool = False,
    device: torch.device | str = "cpu",
    local_size: int | None = None,
    config: PretrainedConfig | None = None,
    **kwargs,
) -> torch.Tensor | None:
    """The row ranges for `sink_fa3`, in the signature of transformers' mask functions.

    Args:
        batch_size (`int`): Rows.
        q_length (`int`): Queries per row.
        kv_length (`int`): Places in the key buffer of this attention type.
        q_offset (`int` or `torch.Tensor`): Tokens before the first query; a tensor for static caches.
        kv_offset (`int`): Position of the buffer's first key.
        mask_function (`Callable`): Unused: causality and window reach the attention function as arguments.
        attention_mask (`torch.Tensor`, *optional*): Bool (batch, tokens seen including the queries).
        use_vmap (`bool`): True when the model adds its own mask pattern, which is refused.
        device (`torch.device`): Where to put the answer.
        local_size (`int`, *optional*): Keys of a window, or of a chunk, which is refused.
        config ([`~transformers.PretrainedConfig`], *optional*): The model's; tells the one from the other.

    Returns:
        `torch.Tensor` or `None`: int32 (batch, 1, 1, 4), or None when every key of the buffer is real.
    """
    if use_vmap:
        raise ValueError(
            "attn_implementation='sink_fa3' computes causal and sliding-window attention; this model combines them with "
            "a mask function of its own (and_mask_function / or_mask_function). Use 'eager' or 'sdpa' for it."
        )
    if local_size is not None and config is not None and vars(config).get("attention_chunk_size") == local_size:
        raise ValueError(
            f"attn_implementation='sink_fa3' computes causal and sliding-window attention; layers of this {config.model_type!r} "
            f"model attend in chunks of {local_size} tokens. Use 'eager' or 'sdpa' for it."
        )
    written = q_offset + q_length - kv_offset
    readable = isinstance(written, int) and not torch.compiler.is_compiling()
    if attention_mask is None:
        if isinstance(written, int) and written == kv_length:
            return None
    else:
        attention_mask = attention_mask[:, -kv_length:]
        if isinstance(written, int) and attention_mask.shape[1] < written:
            raise ValueError(
                f"attention_mask covers {attention_mask.shape[1]} tokens but {written} are attended to (cached ones "
                "included). Pass a mask over all tokens seen so far."
            )
        holes = _has_hole(attention_mask)
        if readable:
            hole, ones = torch.stack((holes.any(), attention_mask.all())).tolist()
            if hole:
                raise ValueError(
                    f"attention_mask row {int(holes.int().argmax())} masks tokens between real ones. "
                    "attn_implementation='sink_fa3' takes padding on the left and on the right only; move the padding "
                    "to one side, or pack the sequences."
                )
            if ones and written == kv_length == attention_mask.shape[1]:
                return None
        else:
            torch._assert_async(~holes.any(), "sink_fa3: an attention_mask row masks tokens between real ones")
    return row_ranges(attention_mask, batch_size, q_length, written, torch.device(device))


def row_ranges(
    attention_mask: torch.Tensor | None,
    batch_size: int,
    q_length: int,
    written: int | torch.Tensor,
    device: torch.device,
) -> torch.Tensor:
    """Ranges [q_begin, q_end, k_begin, k_end] per row, int32 (batch, 1, 1, 4).

    Args:
        attention_mask (`torch.Tensor`, *optional*): Bool (batch, >= written), one run of ones per row. None: all ones.
        batch_size (`int`): Rows.
        q_length (`int`): Queries per row; they are the last `q_length` of the written keys.
        written (`int` or `torch.Tensor`): Keys written to the buffer so far.
        device (`torch.device`): Where to put the answer.
    """
    if attention_mask is None:
        begin = torch.zeros(batch_size, dtype=torch.int64, device=device)
        end = begin + written
    else:
        begin = attention_mask.to(torch.int32).argmax(1)
        end = begin + attention_mask.sum(1)
        end = torch.minimum(end, torch.zeros_like(end) + written)
        begin = torch.minimum(begin, end)
    first_query = written - q_length
    q_begin, q_end = ((edge - first_query).clamp(0, q_length) for edge in (begin, end))
    return torch.stack((q_begin, q_end, begin, end), 1).to(torch.int32)[:, None, None]


def _has_hole(mask: torch.Tensor) -> torch.Tensor:
    """Bool (batch,): more than one run of ones."""
    runs = (mask[:, 1:] & ~mask[:, :-1]).sum(1) + mask[:, 0]
    return runs > 1
