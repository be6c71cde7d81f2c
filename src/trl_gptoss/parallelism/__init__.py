"""Sequences and parameters spread over ranks, one technique per file.

`mesh` says which ranks work together, `ulysses` exchanges tokens for heads around attention, `sequence` shards tokens and
lends batches, `checks` refuses what would be wrong.
"""

from .checks import check_accelerator, check_sequence_parallel
from .mesh import SequenceGroup, sequence_group, shard_mesh
from .sequence import gather_tokens, shard_tokens, share_batches
from .ulysses import HeadExchange, check_heads

__all__ = [
    "HeadExchange",
    "SequenceGroup",
    "check_accelerator",
    "check_heads",
    "check_sequence_parallel",
    "gather_tokens",
    "sequence_group",
    "shard_mesh",
    "shard_tokens",
    "share_batches",
]
