"""Cumulative sequence lengths, built once per forward from whatever the caller knows.

Every kernel below this file sees one layout: tokens of all sequences in a row, plus `cu_seqlens`. A padded batch needs no
gathering for that. Its rows already lie one behind the other, so the padding becomes sequences of its own, with queries
but no keys (their output is 0) or keys but no queries (nobody reads them). For 2 rows of 4 queries and 4 keys with the
masks 0 1 1 1 and 1 1 1 0 the sequences are

    queries  | x |   | a b c |   |   | d e f | x |   |        cu_seqlens_q  0 1 1 4 4 4 7 8 8
    keys     |   | x | a b c |   |   | d e f |   | x |        cu_seqlens_k  0 0 1 4 4 4 7 7 8

(empty sequences cost nothing). The shapes depend on the batch's shape only and nothing is read back from the device.
"""

import threading
from collections import OrderedDict
from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple, TypeVar

import torch

T = TypeVar("T")


class Varlen(NamedTuple):
    """Where sequences begin and end in flattened queries and keys.

    Args:
        cu_seqlens_q (`torch.Tensor`): int32 (sequences + 1,), on the device of the queries.
        cu_seqlens_k (`torch.Tensor`): int32 (sequences + 1,).
        max_seqlen_q (`int`): An upper bound of the query lengths.
        max_seqlen_k (`int`): An upper bound of the key lengths.
        trim (`bool`): Whether the tail may consist of empty sequences that are worth cutting off before a kernel runs.
    """

    cu_seqlens_q: torch.Tensor
    cu_seqlens_k: torch.Tensor
    max_seqlen_q: int
    max_seqlen_k: int
    trim: bool = False


class TensorMemo:
    """Remembers what was computed from a tensor's contents.

    The layers of a model hand over the same position_ids, so reading them once per forward is enough. A key holds its
    tensors alive, hence their address cannot be reused, and `_version` notices writes in place.
    """

    def __init__(self, size: int = 32) -> None:
        self.size = size
        self.entries: OrderedDict = OrderedDict()
        self.lock = threading.Lock()  # backward runs in autograd's own threads

    def get(self, tensors: tuple[torch.Tensor, ...], extra: tuple, compute: Callable[[], T]) -> T:
        if any(tensor.is_inference() for tensor in tensors):  # these carry no version
            return compute()
        key = (
            extra,
            *((t.device, t.data_ptr(), t.dtype, tuple(t.shape), t.stride(), t._version) for t in tensors),
        )
        with self.lock:
            if key in self.entries:
                self.entries.move_to_end(key)
                return self.entries[key][1]
        value = compute()
        with self.lock:
            self.entries[key] = (tensors, value)
            while len(self.entries) > self.size:
                self.entries.popitem(last=False)
        return value


_memo = TensorMemo()


def dense(batch: int, q_length: int, kv_length: int, device: torch.device) -> Varlen:
    """`batch` sequences of one shape."""
    build = _dense if torch.compiler.is_compiling() else _dense_cached
    cu_q, cu_k = build(batch, q_length, kv_length, device)
    return Varlen(cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, max_seqlen_q=q_length, max_seqlen_k=kv_length)


def _dense(batch: int, q_length: int, kv_length: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    rows = torch.arange(batch + 1, dtype=torch.int32, device=device)
    cu_q = rows * q_length
    return cu_q, cu_q if q_length == kv_length else rows * kv_length


@lru_cache(maxsize=128)
def _dense_cached(batch: int, q_length: int, kv_length: int, device: torch.device):
    with torch.inference_mode(False):  # a cached inference tensor could not be saved for a later backward
        return _dense(batch, q_length, kv_length, device)


def from_ranges(ranges: torch.Tensor, q_length: int, kv_length: int, self_attending: bool = False) -> Varlen:
    """A padded batch or a static cache.

    Args:
        ranges (`torch.Tensor`): int32 (batch, 1, 1, 4) as `mask.row_ranges` makes it.
        q_length (`int`): Queries per row, padding included.
        kv_length (`int`): Keys per row, padding and unwritten places included.
        self_attending (`bool`, defaults to `False`): Let padding attend to itself, so that queries and keys share one
            `cu_seqlens`, which one-shot window kernels need. Only where queries and keys are the same tokens. Costs nothing
            with a window, much without.
    """

    def build() -> tuple[torch.Tensor, torch.Tensor]:
        batch = ranges.shape[0]
        row = torch.arange(batch, dtype=torch.int32, device=ranges.device)
        q_begin, q_end, k_begin, k_end = ranges.view(batch, 4).unbind(1)
        q_begin, q_end = q_begin + row * q_length, q_end + row * q_length
        k_begin, k_end = k_begin + row * kv_length, k_end + row * kv_length
        zero = k_end.new_zeros(1)
        before = torch.cat((zero, k_end[:-1]))  # the keys' previous end: the first gap holds queries only
        last_q, last_k = zero + batch * q_length, zero + batch * kv_length
        if self_attending:
            cu = torch.cat((zero, torch.stack((k_begin, k_end), 1).flatten(), last_k))
            return cu, cu
        cu_q = torch.cat((zero, torch.stack((q_begin, q_begin, q_end), 1).flatten(), last_q, last_q))
        cu_k = torch.cat((zero, torch.stack((before, k_begin, k_end), 1).flatten(), k_end[-1:], last_k))
        return cu_q, cu_k

    if torch.compiler.is_compiling():
        cu_q, cu_k = build()
    else:
        cu_q, cu_k = _memo.get((ranges,), ("ranges", q_length, kv_length, self_attending), build)
    return Varlen(cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, max_seqlen_q=q_length, max_seqlen_k=kv_length)


def from_positions(position_ids: torch.Tensor, batch: int) -> Varlen:
    """Packed sequences, told apart by position_ids: 0 1 2 0 1 0 1 2 3 are three sequences of 3, 2 and 4 tokens.

    A sequence begins at each row's first token and wherever a position is not its predecessor plus one. Eager mode reads
    the answer back once per forward. A graph cannot, so there the lengths keep their greatest possible number.
    """
    positions = position_ids.expand(batch, -1)
    total = positions.shape[0] * positions.shape[1]
    if not torch.compiler.is_compiling():
        return _memo.get((position_ids,), ("positions", batch), lambda: _read_positions(positions))
    starts = sequence_starts(positions)
    index = torch.arange(total, dtype=torch.int32, device=positions.device)
    # starts in ascending order, then `total` once per token that starts nothing
    cu = torch.where(starts, index, total).sort().values
    cu = torch.cat((cu, cu.new_full((1,), total))).to(torch.int32)
    return Varlen(
        cu_seqlens_q=cu, cu_seqlens_k=cu, max_seqlen_q=positions.shape[1], max_seqlen_k=positions.shape[1], trim=True
    )


def sequence_starts(positions: torch.Tensor) -> torch.Tensor:
    """Bool (batch * length,): whether a token begins a sequence, from positions (batch, length)."""
    starts = torch.ones_like(positions, dtype=torch.bool)
    starts[:, 1:] = positions[:, 1:] != positions[:, :-1] + 1
    return starts.flatten()


def _read_positions(positions: torch.Tensor) -> Varlen:
    starts = sequence_starts(positions).nonzero().flatten().to(torch.int32)  # the one device sync
    cu = torch.cat((starts, starts.new_full((1,), positions.numel())))
    longest = int(cu.diff().max()) if len(cu) > 2 else positions.shape[1]
    return Varlen(cu_seqlens_q=cu, cu_seqlens_k=cu, max_seqlen_q=longest, max_seqlen_k=longest)


def from_lengths(
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int | torch.Tensor | None,
    max_seqlen_k: int | torch.Tensor | None,
    total_q: int,
    total_k: int,
    device: torch.device,
    same_tokens: bool = False,
) -> Varlen:
    """Lengths that the caller gave. Nothing is read from the device as long as the maxima are ints.

    `same_tokens`: queries and keys are the same tokens, so both must be cut alike and one tensor serves both.
    """

    def build() -> Varlen:
        cu_q, cu_k = (cu.to(device=device, dtype=torch.int32) for cu in (cu_seqlens_q, cu_seqlens_k))
        if cu_q.shape != cu_k.shape or cu_q.ndim != 1 or cu_q.numel() < 1:
            raise ValueError(
                f"cu_seqlens of shape {tuple(cu_q.shape)} for queries and {tuple(cu_k.shape)} for keys; "
                "both must have shape (sequences + 1,)."
            )
        if same_tokens and cu_q is not cu_k:
            torch._assert_async(
                (cu_q == cu_k).all(), "sink_fa3: cu_seqlens differ for queries and keys of the same tokens"
            )
            cu_k = cu_q
        max_q = _maximum(cu_q, max_seqlen_q, total_q)
        max_k = _maximum(cu_k, max_seqlen_k, total_k)
        return Varlen(cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, max_seqlen_q=max_q, max_seqlen_k=max_k)

    if torch.compiler.is_compiling():
        return build()
    if (
        cu_seqlens_q is cu_seqlens_k
        and cu_seqlens_q.dtype == torch.int32
        and cu_seqlens_q.device == device
        and type(max_seqlen_q) is type(max_seqlen_k) is int
    ):
        return Varlen(
            cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k, max_seqlen_q=max_seqlen_q, max_seqlen_k=max_seqlen_k
        )
    given = (
        max_seqlen_q if isinstance(max_seqlen_q, int) else None,
        max_seqlen_k if isinstance(max_seqlen_k, int) else None,
    )
    return _memo.get((cu_seqlens_q, cu_seqlens_k), ("lengths", total_q, total_k, device, same_tokens, *given), build)


def _maximum(cu: torch.Tensor, given: int | torch.Tensor | None, total: int) -> int:
    if isinstance(given, int):
        return given
    if torch.compiler.is_compiling():
        return total  # an upper bound; reading the tensor would break the graph
    if isinstance(given, torch.Tensor):
        return int(given)
    return int(cu.diff().max()) if cu.numel() > 1 else 0


def trimmed(cu_seqlens_q: torch.Tensor, cu_seqlens_k: torch.Tensor) -> Varlen:
    """Cut the empty tail of lengths that were built inside a graph (`Varlen.trim`). Reads the device once per forward."""

    def build() -> Varlen:
        ends = torch.stack((cu_seqlens_q, cu_seqlens_k)).cpu()
        keep = int((ends != ends[:, -1:]).any(0).sum()) + 1
        lengths = ends[:, :keep].diff(dim=1)
        max_q, max_k = (int(row.max()) if row.numel() else 0 for row in lengths)
        return Varlen(
            cu_seqlens_q=cu_seqlens_q[:keep].clone(),
            cu_seqlens_k=cu_seqlens_k[:keep].clone(),
            max_seqlen_q=max_q,
            max_seqlen_k=max_k,
        )

    return _memo.get((cu_seqlens_q, cu_seqlens_k), ("trim",), build)


def rows_without_keys(
    cu_seqlens_q: torch.Tensor, cu_seqlens_k: torch.Tensor, total_q: int, causal: bool
) -> torch.Tensor | None:
    """Bool (total_q,): queries that see no key at all. None when queries and keys share their lengths, so that all see one."""
    if cu_seqlens_q.data_ptr() == cu_seqlens_k.data_ptr():
        return None

    def build() -> torch.Tensor:
        row = torch.arange(total_q, dtype=torch.int32, device=cu_seqlens_q.device)
        sequence = torch.searchsorted(cu_seqlens_q, row, right=True) - 1
        k_len = cu_seqlens_k.diff()[sequence]
        if not causal:
            return k_len == 0
        return row + k_len < cu_seqlens_q[sequence + 1]  # i + k_len - q_len < 0, counted from the sequence's end

    return _memo.get((cu_seqlens_q, cu_seqlens_k), ("rows without keys", total_q, causal), build)


def check_host(cu_seqlens: torch.Tensor, total: int, name: str) -> list[int]:
    """Read lengths back and check them: for the reference, and for tests of callers."""
    ends = cu_seqlens.tolist()
    if ends[0] != 0 or ends[-1] != total or any(a > b for a, b in zip(ends, ends[1:])):
        raise ValueError(
            f"{name} must rise from 0 to the number of tokens, {total}; it is {ends[:8]}{'...' if len(ends) > 8 else ''}"
            f" (last {ends[-1]})."
        )
    return ends
