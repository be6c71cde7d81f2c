"""Triton: sort the (token, slot) assignments by expert, once per layer and without a host synchronisation.

A stable counting sort. Shape legend: M = T * top_k assignments, E experts. An expert id outside [0, E) marks an
assignment that this rank does not compute (expert parallelism); it gets no place in the sorted order.

    index     [[2, 0], [0, 1]]          assignments 0..3 go to experts 2, 0, 0, 1
    order     [1, 2, 3, 0]              assignments in expert order, stable
    offsets   [0, 2, 3, 4]              rows of expert e are order[offsets[e]:offsets[e + 1]]
"""

import torch
import triton
import triton.language as tl

from .tuning import cdiv, next_power_of_2

# One-hot tile of a block, in elements: 64 registers per thread with 8 warps.
_ONE_HOT_ELEMENTS = 16384
_MAX_BLOCK = 1024


@triton.jit
def _count_kernel(index_ptr, counts_ptr, M, E, num_blocks, BLOCK: tl.constexpr, E_POW2: tl.constexpr):
    block = tl.program_id(0)
    position = block * BLOCK + tl.arange(0, BLOCK)
    expert = tl.arange(0, E_POW2)
    ids = tl.load(index_ptr + position, mask=position < M, other=-1).to(tl.int32)
    one_hot = ((ids[:, None] == expert[None, :]) & (expert[None, :] < E)).to(tl.int32)
    tl.store(counts_ptr + expert * num_blocks + block, tl.sum(one_hot, axis=0), mask=expert < E)


@triton.jit
def _scan_kernel(counts_ptr, num_blocks, BLOCK: tl.constexpr):
    """Running sums over the blocks of one expert, in place."""
    row = counts_ptr + tl.program_id(0) * num_blocks
    total = 0
    for start in range(0, num_blocks, BLOCK):
        block = start + tl.arange(0, BLOCK)
        counts = tl.load(row + block, mask=block < num_blocks, other=0)
        tl.store(row + block, total + tl.cumsum(counts, axis=0), mask=block < num_blocks)
        total += tl.sum(counts, axis=0)


@triton.jit
def _place_kernel(
    index_ptr,
    running_ptr,
    order_ptr,
    offsets_ptr,
    M,
    E,
    num_blocks,
    BLOCK: tl.constexpr,
    E_POW2: tl.constexpr,
    SINGLE: tl.constexpr,
):
    block = tl.program_id(0)
    position = block * BLOCK + tl.arange(0, BLOCK)
    expert = tl.arange(0, E_POW2)
    ids = tl.load(index_ptr + position, mask=position < M, other=-1).to(tl.int32)
    valid = (ids >= 0) & (ids < E)
    one_hot = ((ids[:, None] == expert[None, :]) & valid[:, None]).to(tl.int32)
    if SINGLE:
        totals = tl.sum(one_hot, axis=0)
        before = tl.zeros((E_POW2,), tl.int32)
    else:
        row = running_ptr + expert * num_blocks
        totals = tl.load(row + num_blocks - 1, mask=expert < E, other=0)
        before = tl.load(row + block - 1, mask=(expert < E) & (block > 0), other=0)
    ends = tl.cumsum(totals, axis=0)
    rank = tl.cumsum(one_hot, axis=0) - 1 + (ends - totals + before)[None, :]
    destination = tl.sum(rank * one_hot, axis=1)
    tl.store(order_ptr + destination, position, mask=valid)
    if block == 0:
        tl.store(offsets_ptr + 1 + expert, ends, mask=expert < E)
        tl.store(offsets_ptr + expert, expert * 0, mask=expert == 0)


def sort_by_expert(index: torch.Tensor, num_experts: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Sort assignments by expert.

    Args:
        index (`torch.Tensor` of shape `(T, top_k)`, integer, contiguous): Expert of every assignment.
        num_experts (`int`): E.

    Returns:
        `order` (`(M,)`, int32): assignment ids in expert order; entries from `offsets[E]` on are unwritten.
        `offsets` (`(E + 1,)`, int32): first row of every expert.
    """
    M = index.numel()
    power = next_power_of_2(num_experts)
    block = min(_MAX_BLOCK, max(16, _ONE_HOT_ELEMENTS // power), max(16, next_power_of_2(M)))
    num_blocks = cdiv(M, block)
    order = torch.empty(M, dtype=torch.int32, device=index.device)
    offsets = torch.empty(num_experts + 1, dtype=torch.int32, device=index.device)
    warps = 8 if block * power >= 8192 else 4
    running = order
    if num_blocks > 1:
        running = torch.empty(num_experts, num_blocks, dtype=torch.int32, device=index.device)
        _count_kernel[(num_blocks,)](
            index, running, M, num_experts, num_blocks, BLOCK=block, E_POW2=power, num_warps=warps
        )
        _scan_kernel[(num_experts,)](running, num_blocks, BLOCK=1024, num_warps=4)
    _place_kernel[(num_blocks,)](
        index,
        running,
        order,
        offsets,
        M,
        num_experts,
        num_blocks,
        BLOCK=block,
        E_POW2=power,
        SINGLE=num_blocks == 1,
        num_warps=warps,
    )
    return order, offsets
