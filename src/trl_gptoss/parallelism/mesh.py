"""Which ranks work together.

A sequence-parallel group is `size` consecutive ranks, so that its all-to-all stays inside a node. Data parallelism spans
all ranks: members of a group own different batches ("SP over DP"), hence parameters are sharded and gradients are averaged
over the whole world, as if there were no sequence parallelism.

    world 8, size 4    groups 0 1 2 3 | 4 5 6 7
"""

from dataclasses import dataclass

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh


@dataclass(frozen=True, kw_only=True, eq=False)
class SequenceGroup:
    """The ranks that share a sequence.

    Args:
        group (`ProcessGroup`): For tensors on the device.
        host_group (`ProcessGroup`): gloo, for what is known on the host: nothing waits for the device.
        size (`int`): Ranks in the group.
        rank (`int`): Of this process in the group.
    """

    group: dist.ProcessGroup
    host_group: dist.ProcessGroup
    size: int
    rank: int


def sequence_group(size: int, device_type: str) -> SequenceGroup:
    """Make the group of this process. Every rank of the world must call it.

    Args:
        size (`int`): `sequence_parallel_size`; the world size is a multiple of it.
        device_type (`str`): "cuda" or "cpu".

    Raises:
        ValueError: a world that cannot be divided into groups of `size`.
    """
    world = dist.get_world_size() if dist.is_initialized() else 1
    if size < 1 or world % size:
        raise ValueError(
            f"sequence_parallel_size={size} divides {world} process(es) into no whole groups. Start a multiple of {size} "
            f"processes, or set sequence_parallel_size to a divisor of {world}."
        )
    mesh = init_device_mesh(device_type, (world // size, size), mesh_dim_names=("group", "sequence"))
    host_group, _ = dist.new_subgroups_by_enumeration(mesh.mesh.tolist(), backend="gloo")
    sequence = mesh["sequence"]
    return SequenceGroup(group=sequence.get_group(), host_group=host_group, size=size, rank=sequence.get_local_rank())


def shard_mesh(device_type: str, replicas: int = 1) -> DeviceMesh:
    """The mesh over which FSDP2 shards parameters.

    Args:
        device_type (`str`): "cuda" or "cpu".
        replicas (`int`, *optional*, defaults to 1): More than one for HSDP: parameters are sharded inside each of
            `replicas` blocks of consecutive ranks (nodes), gradients are averaged between them.

    Raises:
        ValueError: a world that `replicas` does not divide.
    """
    world = dist.get_world_size()
    if replicas < 1 or world % replicas:
        raise ValueError(f"{world} processes cannot be divided into {replicas} replicas of equal size.")
    if replicas == 1:
        return init_device_mesh(device_type, (world,), mesh_dim_names=("shard",))
    return init_device_mesh(device_type, (replicas, world // replicas), mesh_dim_names=("replicate", "shard"))
