"""Ulysses: between two all-to-alls every rank has all tokens of some heads instead of all heads of some tokens.

    4 tokens, 2 heads, 2 ranks       before: rank 0 has tokens 0 1 of heads a b     inside: rank 0 has tokens 0 1 2 3 of head a

Attention in between is the ordinary one on the global `cu_seqlens`: windows and documents need no special case. Rank r uses
the sinks of its own heads; the gradient of the others is zero there, and the sum over ranks that data parallelism takes
anyway is the whole gradient.

Shape suffixes: P ranks, S tokens of one rank, H heads, K heads of keys and values, D head_dim.
"""

import torch
import torch.distributed as dist

from .mesh import SequenceGroup


class _AllToAll(torch.autograd.Function):
    """Row p of the input goes to rank p; row p of the output came from rank p. Its own transpose."""

    @staticmethod
    def forward(ctx, sent: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        received = torch.empty_like(sent, memory_format=torch.contiguous_format)
        dist.all_to_all_single(received, sent.contiguous(), group=group)
        return received

    @staticmethod
    def backward(ctx, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _AllToAll.apply(grad, ctx.group), None


def check_heads(heads: int, kv_heads: int, size: int) -> None:
    """Raise unless `size` ranks can share the heads.

    Raises:
        ValueError: says which sizes are possible.
    """

    def possible(p: int) -> bool:
        return heads % p == 0 and (kv_heads % p == 0 or p % kv_heads == 0)

    if not possible(size):
        sizes = [p for p in range(1, heads + 1) if possible(p)]
        raise ValueError(
            f"sequence_parallel_size={size} cannot share {heads} query heads and {kv_heads} key/value heads: every rank "
            f"needs as many query heads as the others, and whole key/value heads of its own or one of them. Possible: {sizes}."
        )


class HeadExchange:
    """What `sink_fa3` calls before and after attention, passed down to it as the keyword argument `head_exchange`.

    A keyword argument and no global state, so that gradient checkpointing recomputes with the same one.
    """

    def __init__(self, group: SequenceGroup) -> None:
        self.group = group

    def to_heads(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, sinks: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Own tokens of all heads to all tokens of own heads, in one all-to-all.

        Args:
            query (`torch.Tensor`): (1, H, S, D).
            key (`torch.Tensor`): (1, K, S, D).
            value (`torch.Tensor`): (1, K, S, D), all of one dtype.
            sinks (`torch.Tensor`, *optional*): (H,).

        Returns:
            `tuple`: (1, H/P, P*S, D), twice (1, max(K/P, 1), P*S, D), and (H/P,) or None.
        """
        size = self.group.size
        if query.shape[0] != 1:
            raise ValueError(f"Sequence parallelism takes one packed row and got {query.shape[0]} rows.")
        check_heads(query.shape[1], key.shape[1], size)
        parts_SPXD = [self._by_rank(x) for x in (query, key, value)]
        heads = [part.shape[2] for part in parts_SPXD]
        received = _AllToAll.apply(torch.cat(parts_SPXD, 2).transpose(0, 1), self.group.group)
        query, key, value = (x.transpose(0, 1).unsqueeze(0) for x in received.flatten(0, 1).split(heads, 1))
        return query, key, value, self._own_sinks(sinks, heads[0])

    def to_tokens(self, out: torch.Tensor) -> torch.Tensor:
        """All tokens of own heads (1, P*S, H/P, D) to own tokens of all heads (1, S, H, D)."""
        sent_PSXD = out[0].unflatten(0, (self.group.size, -1))
        received_PSXD = _AllToAll.apply(sent_PSXD, self.group.group)
        return received_PSXD.transpose(0, 1).flatten(1, 2).unsqueeze(0)

    def _by_rank(self, x_1HSD: torch.Tensor) -> torch.Tensor:
        """(S, P, X, D): the heads that each rank gets. With fewer key/value heads than ranks neighbours share one."""
        x_SHD = x_1HSD[0].transpose(0, 1)
        size = self.group.size
        if x_SHD.shape[1] < size:
            x_SHD = x_SHD.repeat_interleave(size // x_SHD.shape[1], 1)
        return x_SHD.unflatten(1, (size, -1))

    def _own_sinks(self, sinks: torch.Tensor | None, heads: int) -> torch.Tensor | None:
        return None if sinks is None else sinks[self.group.rank * heads : (self.group.rank + 1) * heads]
