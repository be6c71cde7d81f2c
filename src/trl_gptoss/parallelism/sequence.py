"""Shards of a token list, and batches that the members of a group lend each other.

"SP over DP": every rank owns its batch. A group processes its members' batches one after the other, each spread over the
whole group; every member computes the loss of that batch from the gathered log-probs, and back-propagates through its own
tokens only. The members' gradients of one batch add up to its gradient, and the average over all ranks that data
parallelism takes is the one without sequence parallelism: no factor anywhere.
"""

import torch
import torch.distributed as dist

from .mesh import SequenceGroup


def shard_tokens(x: torch.Tensor, group: SequenceGroup, dim: int = -1) -> torch.Tensor:
    """The contiguous share of this rank.

    Args:
        x (`torch.Tensor`): Something per token, the same on all members; positions, labels shifted before, routes.
        group (`SequenceGroup`): Whose members share it.
        dim (`int`, *optional*, defaults to -1): The dimension of the tokens, a multiple of the group's size.
    """
    tokens = x.shape[dim]
    if tokens % group.size:
        raise ValueError(f"{tokens} tokens cannot be shared equally by {group.size} ranks; pad them to a multiple.")
    share = tokens // group.size
    return x.narrow(dim, group.rank * share, share)


class _GatherTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_XS: torch.Tensor, group: SequenceGroup) -> torch.Tensor:
        ctx.sequence = group
        gathered_PXS = x_XS.new_empty((group.size, *x_XS.shape))
        dist.all_gather_into_tensor(gathered_PXS, x_XS.contiguous().unsqueeze(0), group=group.group)
        return gathered_PXS.movedim(0, -2).flatten(-2)

    @staticmethod
    def backward(ctx, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return shard_tokens(grad, ctx.sequence), None


def gather_tokens(x: torch.Tensor, group: SequenceGroup) -> torch.Tensor:
    """All tokens (..., P*S) from every member's share (..., S).

    Backward keeps the own share of the gradient and communicates nothing: the members compute one and the same loss from
    what is returned here, so each already has the whole gradient, and a sum over them would be P times too large.
    """
    return _GatherTokens.apply(x, group)


def share_batches(
    batch: dict[str, torch.Tensor | None], note: object, group: SequenceGroup
) -> list[tuple[dict[str, torch.Tensor | None], object]]:
    """Every member's batch, on every member.

    Args:
        batch (`dict[str, torch.Tensor]`): The own one; None values pass as they are.
        note (`object`): Something small and picklable that goes along, by the host alone (row lengths).
        group (`SequenceGroup`): Its members call this together.

    Returns:
        `list[tuple[dict, object]]`: Batch and note of each member, in the order of their ranks; the own batch is `batch`.
    """
    shapes = {name: None if x is None else (tuple(x.shape), x.dtype) for name, x in batch.items()}
    described: list = [None] * group.size
    dist.all_gather_object(described, (shapes, note), group=group.host_group)
    device = next(x.device for x in batch.values() if x is not None)
    batches = []
    for member, (theirs, their_note) in enumerate(described):
        shared: dict[str, torch.Tensor | None] = {}
        for name, described_tensor in theirs.items():
            if described_tensor is None:
                shared[name] = None
                continue
            shape, dtype = described_tensor
            own = member == group.rank
            tensor = batch[name].contiguous() if own else torch.empty(shape, dtype=dtype, device=device)
            if tensor.numel():
                dist.broadcast(tensor, group=group.group, group_src=member)
            shared[name] = tensor
        batches.append((batch if member == group.rank else shared, their_note))
    return batches
