"""Checksums of weights that do not depend on how an engine lays them out.

An engine transposes, fuses, packs, pads and shards what it loads, so its tensors cannot be compared with the trainer's
one by one. What all of that leaves alone is the multiset of values. The checksum of a tensor is the sum, modulo 2^64,
of a hash of every value's bits:

    trainer   q_proj [a b c]   k_proj [d e]              checksums  h(a)+h(b)+h(c)   h(d)+h(e)
    engine    qkv_proj, rows of q and of k, padded       the same, because h(0) = 0

One changed bit changes it. Two values that swap places do not: the log-probs of the probe see those.
"""

from collections.abc import Iterable

import torch

# Large odd constants of splitmix64's finaliser, as signed 64-bit numbers.
_FIRST = 0xBF58476D1CE4E5B9 - (1 << 64)
_SECOND = 0x94D049BB133111EB - (1 << 64)
_CHUNK = 1 << 24  # elements hashed at a time: 128 MiB for each temporary
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def checksum(tensor: torch.Tensor, *, rows: bool = False) -> torch.Tensor:
    """Order-independent checksum of the bits of a tensor.

    Args:
        tensor (`torch.Tensor`): of any shape and dtype. Compare only tensors of one dtype. -0.0 counts as 0.0.
        rows (`bool`, *optional*, defaults to `False`): one checksum for each index of the first dimension.

    Returns:
        `torch.Tensor`: int64 on the tensor's device, () or (rows,).
    """
    if rows:
        if not len(tensor):
            return torch.zeros(0, dtype=torch.int64, device=tensor.device)
        return torch.stack([checksum(row) for row in tensor])
    flat = tensor.detach().reshape(-1)
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for chunk in flat.split(_CHUNK):
        # Adding 0.0 turns -0.0, which some matrix products give back as 0.0, into 0.0.
        bits = (chunk + 0 if chunk.is_floating_point() else chunk).view(_BITS[chunk.element_size()]).long()
        bits = (bits ^ _shift(bits, 30)) * _FIRST
        bits = (bits ^ _shift(bits, 27)) * _SECOND
        total += (bits ^ _shift(bits, 31)).sum()
    return total


def _shift(bits: torch.Tensor, by: int) -> torch.Tensor:
    """Logical right shift of int64."""
    return (bits >> by) & ((1 << (64 - by)) - 1)


def total(checksums: Iterable[int]) -> int:
    """The checksum of parts put together, as the signed number that `checksum` gives."""
    wrapped = sum(checksums) % (1 << 64)
    return wrapped - (1 << 64) if wrapped >= 1 << 63 else wrapped
