"""Sequences and parameters spread over ranks, one technique per file.

`mesh` says which ranks work together, `ulysses` exchanges tokens for heads around attention, `sequence` shards tokens and
lends batches, `checks` refuses what would be wrong, `fsdp2` shards parameters, `checkpoint` saves the shards.
"""

from .checkpoint import full_state_dict, load_full_state_dict, load_sharded, save_sharded
from .checks import check_accelerator, check_sequence_parallel
from .fsdp2 import assert_sharded, fsdp2_plugin, keep_float32_results, shard_model
from .mesh import SequenceGroup, sequence_group, shard_mesh
from .sequence import gather_tokens, shard_tokens, share_batches
from .ulysses import HeadExchange, check_heads

__all__ = [
    "HeadExchange",
    "SequenceGroup",
    "assert_sharded",
    "full_state_dict",
    "fsdp2_plugin",
    "keep_float32_results",
    "load_full_state_dict",
    "load_sharded",
    "save_sharded",
    "shard_model",
    "check_accelerator",
    "check_heads",
    "check_sequence_parallel",
    "gather_tokens",
    "sequence_group",
    "shard_mesh",
    "shard_tokens",
    "share_batches",
]
