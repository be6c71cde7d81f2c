"""`sink_fa3` as transformers calls it.

Shape suffixes: B rows, S queries, L keys, H heads, D head_dim; transformers passes (B, H, S, D).
"""

from typing import Protocol

import torch

from . import varlen
from .mask import row_ranges
from .ops import attend


class HeadExchange(Protocol):
    """Sequence parallelism: trades shares of the tokens for shares of the heads, and back. See `parallelism.ulysses`."""

    def to_heads(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, sinks: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]: ...

    def to_tokens(self, out: torch.Tensor) -> torch.Tensor: ...


def sink_attention_forward(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    s_aux: torch.Tensor | None = None,
    position_ids: torch.Tensor | None = None,
    cu_seq_lens_q: torch.Tensor | None = None,
    cu_seq_lens_k: torch.Tensor | None = None,
    max_length_q: int | torch.Tensor | None = None,
    max_length_k: int | torch.Tensor | None = None,
    is_causal: bool | None = None,
    softcap: float | None = None,
    output_attentions: bool | None = None,
    head_exchange: HeadExchange | None = None,
    **kwargs,
) -> tuple[torch.Tensor, None]:
    """Attention for one layer, in the signature of transformers' attention functions.

    Args:
        module (`torch.nn.Module`): The attention layer; read for `is_causal`.
        query (`torch.Tensor`): (B, H, S, D).
        key (`torch.Tensor`): (B, KV, L, D). With a cache L is the length of its buffer.
        value (`torch.Tensor`): (B, KV, L, D).
        attention_mask (`torch.Tensor`, *optional*): What `mask.sink_mask` made, or a bool mask (B, L).
        dropout (`float`, defaults to 0): Must be 0.
        scaling (`float`, *optional*): Factor of the scores.
        sliding_window (`int`, *optional*): Number of keys seen, the own included.
        s_aux (`torch.Tensor`, *optional*): Sinks (H,); None for models without.
        position_ids (`torch.Tensor`, *optional*): (B, S) or (1, S). Positions that restart mark packed sequences. Ignored
            when a mask or cumulative lengths are given, or when the keys reach beyond the queries.
        cu_seq_lens_q (`torch.Tensor`, *optional*): int32 (sequences + 1,): packed sequences, told explicitly.
        cu_seq_lens_k (`torch.Tensor`, *optional*): The same for keys.
        max_length_q (`int`, *optional*): Longest sequence. A tensor, or None, costs one device read per forward.
        max_length_k (`int`, *optional*): The same for keys.
        is_causal (`bool`, *optional*): Overrides `module.is_causal`.
        softcap (`float`, *optional*): Must be None.
        output_attentions (`bool`, *optional*): Must not be True.
        head_exchange (`HeadExchange`, *optional*): The tokens are a share of a sequence that several ranks hold together;
            the cumulative lengths, which are needed then, are those of the whole.

    Returns:
        `tuple`: Output (B, S, H, D) in the dtype that query, key and value share after autocast, and None.
    """
    _refuse(dropout, softcap, output_attentions, query, value)
    query, key, value = one_dtype(query, key, value)
    if head_exchange is not None:
        if cu_seq_lens_q is None or attention_mask is not None:
            raise ValueError(
                "sink_fa3 got a head_exchange without cu_seq_lens_q or with an attention_mask. Sequence parallelism works on "
                "packed batches with the cumulative lengths of the whole sequence."
            )
        query, key, value, s_aux = head_exchange.to_heads(query, key, value, s_aux)
    batch, _, q_length, _ = query.shape
    lengths = _lengths(
        batch, q_length, key.shape[2], query.device, attention_mask, position_ids,
        (cu_seq_lens_q, cu_seq_lens_k, max_length_q, max_length_k), sliding_window,
    )  # fmt: skip
    query, key, value = (x.transpose(1, 2) for x in (query, key, value))
    out, _ = attend(
        query.reshape(-1, *query.shape[2:]),
        key.reshape(-1, *key.shape[2:]),
        value.reshape(-1, *value.shape[2:]),
        s_aux,
        lengths,
        causal=module.is_causal if is_causal is None else is_causal,
        window=sliding_window,
        scale=scaling,
        deterministic=torch.are_deterministic_algorithms_enabled(),
    )
    out = out.view(batch, q_length, *out.shape[1:])
    return out if head_exchange is None else head_exchange.to_tokens(out), None


def one_dtype(*tensors: torch.Tensor) -> list[torch.Tensor]:
    """Bring query, key and value to one dtype.

    Rotary embeddings and norms in float32 leave queries and keys wider than values under autocast and PEFT. Autocast's
    dtype wins if autocast is on, else the narrowest of the three.
    """
    device = tensors[0].device.type
    dtypes = {x.dtype for x in tensors}
    if torch.is_autocast_enabled(device):
        target = torch.get_autocast_dtype(device)
        if dtypes == {torch.float64}:  # autocast leaves double precision alone
            return list(tensors)
    elif len(dtypes) == 1:
        return list(tensors)
    else:
        target = min(dtypes, key=lambda dtype: (dtype.itemsize, str(dtype)))
    return [x.to(target) for x in tensors]


def _lengths(
    batch: int,
    q_length: int,
    kv_length: int,
    device: torch.device,
    attention_mask: torch.Tensor | None,
    position_ids: torch.Tensor | None,
    packed: tuple,
    window: int | None,
) -> varlen.Varlen:
    cu_q, cu_k, max_q, max_k = packed
    if cu_q is not None or cu_k is not None:
        if cu_q is None or cu_k is None:
            raise ValueError("sink_fa3 got only one of cu_seq_lens_q and cu_seq_lens_k; packed batches need both.")
        if attention_mask is not None:
            raise ValueError(
                "sink_fa3 got cu_seq_lens_q and an attention_mask with padding. Cumulative lengths already say where "
                "sequences end; pass attention_mask=None."
            )
        return varlen.from_lengths(
            cu_q, cu_k, max_q, max_k, batch * q_length, batch * kv_length, device, q_length == kv_length
        )
    if attention_mask is not None:
        ranges = _ranges(attention_mask, batch, q_length, kv_length)
        # on the CPU padding that attends to itself is time lost; on a GPU it makes the one-shot window kernels applicable
        self_attending = window is not None and q_length == kv_length and device.type == "cuda"
        return varlen.from_ranges(ranges, q_length, kv_length, self_attending)
    if position_ids is not None and q_length == kv_length and q_length > 1:
        if position_ids.ndim != 2 or position_ids.shape[1] != q_length or position_ids.shape[0] not in (1, batch):
            raise ValueError(
                f"sink_fa3 got position_ids of shape {tuple(position_ids.shape)} for {batch} rows of {q_length} tokens; "
                "expected (1 or batch, length)."
            )
        return varlen.from_positions(position_ids, batch)
    return varlen.dense(batch, q_length, kv_length, device)


def _ranges(mask: torch.Tensor, batch: int, q_length: int, kv_length: int) -> torch.Tensor:
    if mask.dtype == torch.int32 and mask.shape == (batch, 1, 1, 4):
        return mask
    if (
        mask.dtype == torch.bool
        and mask.ndim == 2
        and mask.shape[0] == batch
        and q_length <= mask.shape[1] <= kv_length
    ):
        return row_ranges(mask, batch, q_length, mask.shape[1], mask.device)
    raise ValueError(
        f"sink_fa3 got an attention_mask of shape {tuple(mask.shape)}, {mask.dtype}; it takes the mask that transformers asks it "
        f"for, or a bool mask of shape ({batch}, {kv_length}). A 4-D mask of the user's own needs 'eager' or 'sdpa'."
    )


def _refuse(
    dropout: float, softcap: float | None, output_attentions: bool | None, query: torch.Tensor, value: torch.Tensor
) -> None:
    if dropout:
        raise ValueError(
            f"sink_fa3 got attention dropout {dropout}; it has none. Set config.attention_dropout = 0, or use 'eager'."
        )
    if softcap is not None:
        raise ValueError(f"sink_fa3 got softcap={softcap}; it does not cap scores. Use 'eager' for this model.")
    if output_attentions:
        raise ValueError("sink_fa3 never holds the attention weights, so output_attentions=True needs 'eager'.")
    if query.shape[-1] != value.shape[-1]:
        raise ValueError(
            f"sink_fa3 got queries with head_dim {query.shape[-1]} and values with {value.shape[-1]}; they must be equal."
        )
