"""Checksums of weights that do not depend on how an engine lays them out.

An engine transposes, fuses, packs, pads and shards what it loads, so its tensors cannot be compared with the trainer's
one by one. What all of that leaves alone is the multiset of values. The checksum of a tensor is the sum, modulo 2^64,
of a hash of every value's bits:

    trainer   q_proj [a b c]   k_proj [d e]              checksums  h(a)+h(b)+h(c)   h(d)+h(e)
    engine    qkv_proj, rows of q and of k, padded       the same, because h(0) = 0

One changed bit changes it. Two values that swap places do not: the log-probs of the probe see those.
"""

import functools
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
        total += (_looked_up(chunk) if chunk.element_size() == 2 else _hashes(chunk)).sum()
    return total


def _hashes(values_N: torch.Tensor) -> torch.Tensor:
    """int64, of the bits of every value."""
    # Adding 0.0 turns -0.0, which some matrix products give back as 0.0, into 0.0.
    values_N = values_N + 0 if values_N.is_floating_point() else values_N
    bits_N = values_N.view(_BITS[values_N.element_size()]).long()
    bits_N = (bits_N ^ _shift(bits_N, 30)) * _FIRST
    bits_N = (bits_N ^ _shift(bits_N, 27)) * _SECOND
    return bits_N ^ _shift(bits_N, 31)


def _looked_up(values_N: torch.Tensor) -> torch.Tensor:
    """The same of values of two bytes, by which a sixth of the memory is moved."""
    index_N = values_N.view(torch.int16).int().bitwise_and_(0xFFFF)
    return _table(values_N.dtype, values_N.device).index_select(0, index_N)


@functools.cache
def _table(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """int64 (65536,): the hash of every value there is, by its bits."""
    return _hashes(torch.arange(1 << 16, device=device).to(torch.int16).view(dtype))


def _shift(bits: torch.Tensor, by: int) -> torch.Tensor:
    """Logical right shift of int64."""
    return (bits >> by) & ((1 << (64 - by)) - 1)


def total(checksums: Iterable[int]) -> int:
    """The checksum of parts put together, as the signed number that `checksum` gives."""
    wrapped = sum(checksums) % (1 << 64)
    return wrapped - (1 << 64) if wrapped >= 1 << 63 else wrapped
