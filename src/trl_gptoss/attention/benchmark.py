"""The two functions that attention benchmarks call: `--own trl_gptoss.attention:bench`."""

import torch

from .ops import sink_attention


def bench(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    s: torch.Tensor,
    cu: torch.Tensor,
    maxlen: int,
    window: int,
    scale: float,
) -> torch.Tensor:
    """Causal sink attention of packed sequences on the active backend, differentiable.

    Args:
        q (`torch.Tensor`): (total, num_heads, head_dim).
        k (`torch.Tensor`): (total, num_kv_heads, head_dim).
        v (`torch.Tensor`): (total, num_kv_heads, head_dim).
        s (`torch.Tensor`): Sinks (num_heads,).
        cu (`torch.Tensor`): int32 (sequences + 1,).
        maxlen (`int`): Longest sequence.
        window (`int`): Number of keys seen, 0 for all.
        scale (`float`): Factor of the scores.

    Returns:
        `torch.Tensor`: (total, num_heads, head_dim).
    """
    return _bench(q, k, v, s, cu, maxlen, window, scale, False)


def bench_deterministic(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    s: torch.Tensor,
    cu: torch.Tensor,
    maxlen: int,
    window: int,
    scale: float,
) -> torch.Tensor:
    """`bench` with bit-identical gradients from run to run."""
    return _bench(q, k, v, s, cu, maxlen, window, scale, True)


def _bench(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    s: torch.Tensor,
    cu: torch.Tensor,
    maxlen: int,
    window: int,
    scale: float,
    deterministic: bool,
) -> torch.Tensor:
    return sink_attention(
        q,
        k,
        v,
        s,
        cu_seqlens_q=cu,
        cu_seqlens_k=cu,
        max_seqlen_q=maxlen,
        max_seqlen_k=maxlen,
        window=window or None,
        scale=scale,
        deterministic=deterministic,
    )
