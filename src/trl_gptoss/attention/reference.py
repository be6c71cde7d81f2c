"""Sink attention in plain PyTorch: the backend of the CPU and of whatever no kernel covers, and everyone's yardstick.

Sequences of similar length are laid side by side, right-aligned, so that one batched matrix product serves them all and
one causal or window pattern fits every row. Queries go through in chunks that bound the scores in memory; backward
computes the scores again. Accumulates in float32, or in float64 for float64 inputs.

Shape suffixes: N sequences of a group, K key/value heads, G query heads per key/value head, Q queries, L keys, D head_dim.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from .varlen import TensorMemo, check_host

NAME = "reference"
SINKS_AS_THEY_ARE = False
# scores held at once: on the CPU they should stay in the caches (2**22 is 1.4x slower than 2**19), on a GPU fill the machine
_SCORES = {"cpu": 2**19, "other": 2**26}
_plans = TensorMemo()


def unusable(device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
    """Why this backend cannot run, or None: it always can."""
    return None


@dataclass(frozen=True, slots=True)
class Group:
    """Sequences computed side by side. Rows are right-aligned: the last query and the last key of each are in the last place.

    Args:
        q_rows (`torch.Tensor` or `None`): int64 (N * Q,), row of the flattened queries behind each place; None if the places
            are the flattened queries in order.
        k_rows (`torch.Tensor` or `None`): int64 (N * L,), the same for keys.
        q_real (`torch.Tensor` or `None`): bool (N, Q), False where a place is filler; None if all are real.
        k_real (`torch.Tensor` or `None`): bool (N, L).
    """

    size: int
    q_len: int
    k_len: int
    q_rows: torch.Tensor | None
    k_rows: torch.Tensor | None
    q_real: torch.Tensor | None
    k_real: torch.Tensor | None


def forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sinks: torch.Tensor | None,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    causal: bool,
    window: int,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `ops.forward`."""
    dtype = _accumulator(q)
    out = q.new_zeros(q.shape)
    lse = _empty_row_lse(q, sinks, dtype)
    for group in _plan(q, k, cu_seqlens_q, cu_seqlens_k):
        q_NKGQD, k_NKLD, v_NKLD = _gather(group, q, k, v, dtype)
        out_NKGQD = torch.empty_like(q_NKGQD)
        lse_NKGQ = q_NKGQD.new_empty(q_NKGQD.shape[:-1])
        sinks_KG1 = None if sinks is None else sinks.to(dtype).view(k.shape[1], -1, 1)
        for rows, keys in _chunks(group, q.shape[1], causal, window, q.device):
            scores = _scores(group, q_NKGQD, k_NKLD, rows, keys, causal, window, scale)
            highest = scores.amax(-1, keepdim=True)
            highest = highest.masked_fill_(highest == -torch.inf, 0)
            total = scores.sub_(highest).exp_().sum(-1)
            lse_keys = highest.squeeze(-1) + total.log()
            lse_rows = lse_keys if sinks is None else torch.logaddexp(lse_keys, sinks_KG1)
            weight = (highest.squeeze(-1) - lse_rows).exp_().masked_fill_(total == 0, 0)
            out_rows = _matmul(scores, v_NKLD[:, :, keys])
            out_NKGQD[:, :, :, rows] = out_rows.mul_(weight.unsqueeze(-1))
            lse_NKGQ[:, :, :, rows] = lse_rows
        _scatter(group, out, out_NKGQD)
        _scatter(group, lse.T.unsqueeze(-1), lse_NKGQ.unsqueeze(-1))
    return out, lse


def backward(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    sinks: torch.Tensor | None,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    causal: bool,
    window: int,
    scale: float,
    deterministic: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """See `ops.backward`. Every sum has a fixed order, so `deterministic` changes nothing."""
    dtype = _accumulator(q)
    dq, dk, dv = (x.new_zeros(x.shape) for x in (q, k, v))  # contiguous, whatever the strides of the inputs
    delta = (dout.to(dtype) * out.to(dtype)).sum(-1).T.contiguous()  # (H, total_q)
    for group in _plan(q, k, cu_seqlens_q, cu_seqlens_k):
        q_NKGQD, k_NKLD, v_NKLD = _gather(group, q, k, v, dtype)
        dout_NKGQD = _gather_queries(group, dout, k.shape[1], dtype)
        lse_NKGQ = _gather_queries(group, lse.T.unsqueeze(-1), k.shape[1], dtype)
        delta_NKGQ = _gather_queries(group, delta.T.unsqueeze(-1), k.shape[1], dtype)
        lse_NKGQ = lse_NKGQ.masked_fill(lse_NKGQ == -torch.inf, 0)  # a row without keys: exp(-inf - 0) = 0, not NaN
        dq_NKGQD = torch.zeros_like(q_NKGQD)
        dk_NKLD, dv_NKLD = torch.zeros_like(k_NKLD), torch.zeros_like(v_NKLD)
        for rows, keys in _chunks(group, q.shape[1], causal, window, q.device):
            probs = _scores(group, q_NKGQD, k_NKLD, rows, keys, causal, window, scale)
            probs = probs.sub_(lse_NKGQ[:, :, :, rows]).exp_()
            dout_rows = dout_NKGQD[:, :, :, rows]
            dv_NKLD[:, :, keys] += _matmul_keys(probs, dout_rows)
            dscores = _matmul(dout_rows, v_NKLD[:, :, keys].transpose(2, 3))
            dscores = dscores.sub_(delta_NKGQ[:, :, :, rows]).mul_(probs).mul_(scale)
            dq_NKGQD[:, :, :, rows] = _matmul(dscores, k_NKLD[:, :, keys])
            dk_NKLD[:, :, keys] += _matmul_keys(dscores, q_NKGQD[:, :, :, rows])
        _scatter(group, dq, dq_NKGQD)
        _scatter_keys(group, dk, dk_NKLD)
        _scatter_keys(group, dv, dv_NKLD)
    return dq, dk, dv, sink_gradient(delta, lse, sinks)


def sink_gradient(delta: torch.Tensor, lse: torch.Tensor, sinks: torch.Tensor | None) -> torch.Tensor:
    """dL/ds_h = -sum_i P_sink[i, h] * delta[i, h] with P_sink = exp(s - lse) and delta = rowsum(dout * out).

    Args:
        delta (`torch.Tensor`): (num_heads, total_q), float32 or float64.
        lse (`torch.Tensor`): (num_heads, total_q), the sink included.
        sinks (`torch.Tensor`, *optional*): (num_heads,).

    Returns:
        `torch.Tensor`: (num_heads,), or (0,) without sinks.
    """
    if sinks is None:
        return delta.new_empty(0)
    sinks = sinks.to(delta.dtype).unsqueeze(1)
    # an infinite sink is a constant: either absent or all there is
    p_sink = (sinks - lse).exp_().masked_fill_(sinks.isinf(), 0)
    return -(p_sink * delta).sum(1)


def _accumulator(q: torch.Tensor) -> torch.dtype:
    return torch.float64 if q.dtype == torch.float64 else torch.float32


def _empty_row_lse(q: torch.Tensor, sinks: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    """(H, total_q): what the LSE is where no key is visible."""
    if sinks is None:
        return q.new_full((q.shape[1], q.shape[0]), -torch.inf, dtype=dtype)
    return sinks.to(dtype).unsqueeze(1).repeat(1, q.shape[0])


def _matmul(a_NKGQX: torch.Tensor, b_NKXY: torch.Tensor) -> torch.Tensor:
    """(N, K, G, Q, X) @ (N, K, X, Y) with G and Q folded: key/value heads are never repeated in memory."""
    return (a_NKGQX.flatten(2, 3) @ b_NKXY).unflatten(2, a_NKGQX.shape[2:4])


def _matmul_keys(a_NKGQL: torch.Tensor, b_NKGQD: torch.Tensor) -> torch.Tensor:
    """(N, K, L, D): sums over the queries and the heads that share a key."""
    return a_NKGQL.flatten(2, 3).transpose(2, 3) @ b_NKGQD.flatten(2, 3)


def _scores(
    group: Group,
    q_NKGQD: torch.Tensor,
    k_NKLD: torch.Tensor,
    rows: slice,
    keys: slice,
    causal: bool,
    window: int,
    scale: float,
) -> torch.Tensor:
    """Scaled scores (N, K, G, rows, keys), -inf where a key is not visible."""
    scores = _matmul(q_NKGQD[:, :, :, rows] * scale, k_NKLD[:, :, keys].transpose(2, 3))
    hidden = None
    if causal:
        # right-aligned, so the distance to the own key is the same for all sequences
        own = torch.arange(rows.start, rows.stop, device=scores.device) + group.k_len - group.q_len
        distance = own[:, None] - torch.arange(keys.start, keys.stop, device=scores.device)
        hidden = (distance < 0) | (distance >= window) if window else distance < 0
    if group.k_real is not None:
        filler = ~group.k_real[:, None, None, None, keys]
        hidden = filler if hidden is None else hidden | filler
    return scores if hidden is None else scores.masked_fill_(hidden, -torch.inf)


def _chunks(
    group: Group, heads: int, causal: bool, window: int, device: torch.device
) -> Iterator[tuple[slice, slice]]:
    """Query rows and the keys that any of them sees."""
    budget = _SCORES["cpu" if device.type == "cpu" else "other"]
    shift = group.k_len - group.q_len
    width = min(group.k_len, 2 * window) if window else group.k_len
    step = min(group.q_len, max(16, budget // (group.size * heads * width)))
    if window:
        step = min(step, max(window, 16))  # longer chunks would compute scores outside every window
    for start in range(0, group.q_len, step):
        stop = min(start + step, group.q_len)
        first = max(0, start + shift - window + 1) if window else 0
        last = min(group.k_len, stop + shift) if causal else group.k_len
        if first < last:
            yield slice(start, stop), slice(first, last)
        else:  # no row of the chunk sees a key: one hidden key keeps the arithmetic uniform
            yield slice(start, stop), slice(0, 1)


def _plan(q: torch.Tensor, k: torch.Tensor, cu_seqlens_q: torch.Tensor, cu_seqlens_k: torch.Tensor) -> list[Group]:
    budget = _SCORES["cpu" if q.device.type == "cpu" else "other"] // (32 * q.shape[1])
    return _plans.get(
        (cu_seqlens_q, cu_seqlens_k),
        (q.shape[0], k.shape[0], budget),
        lambda: _make_plan(cu_seqlens_q, cu_seqlens_k, q.shape[0], k.shape[0], budget, q.device),
    )


def _make_plan(
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    total_q: int,
    total_k: int,
    budget: int,
    device: torch.device,
) -> list[Group]:
    ends_q = check_host(cu_seqlens_q, total_q, "cu_seqlens_q")
    ends_k = check_host(cu_seqlens_k, total_k, "cu_seqlens_k")
    spans = [
        (q0, q1, k0, k1)
        for q0, q1, k0, k1 in zip(ends_q, ends_q[1:], ends_k, ends_k[1:])
        if q1 > q0 and k1 > k0  # the rest has nothing to compute: out = 0, lse = sink
    ]
    lengths = {(q1 - q0, k1 - k0) for q0, q1, k0, k1 in spans}
    if len(lengths) > 1:
        spans.sort(key=lambda span: (span[3] - span[2], span[1] - span[0]))
    groups, members, area, q_len, k_len = [], [], 0, 0, 0
    for span in spans:
        q_own, k_own = span[1] - span[0], span[3] - span[2]
        q_new, k_new, area_new = max(q_len, q_own), max(k_len, k_own), area + q_own * k_own
        count = len(members) + 1
        if members and (count * q_new * k_new > 2 * area_new or count * k_new > budget):
            groups.append(_make_group(members, q_len, k_len, total_q, total_k, device))
            members, q_new, k_new, area_new = [], q_own, k_own, q_own * k_own
        members.append(span)
        area, q_len, k_len = area_new, q_new, k_new
    if members:
        groups.append(_make_group(members, q_len, k_len, total_q, total_k, device))
    return groups


def _make_group(
    spans: list[tuple[int, int, int, int]], q_len: int, k_len: int, total_q: int, total_k: int, device: torch.device
) -> Group:
    q0, q1, k0, k1 = torch.tensor(spans, dtype=torch.int64).T
    q_rows, q_real = _places(q0, q1, q_len, total_q, device)
    k_rows, k_real = _places(k0, k1, k_len, total_k, device)
    return Group(len(spans), q_len, k_len, q_rows, k_rows, q_real, k_real)


def _places(
    begin: torch.Tensor, end: torch.Tensor, length: int, total: int, device: torch.device
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    rows = end[:, None] - length + torch.arange(length)
    real = rows >= begin[:, None]
    rows = rows.masked_fill(~real, 0).flatten()
    all_real = bool(real.all())
    in_order = all_real and rows.numel() == total and bool((rows == torch.arange(total)).all())
    return None if in_order else rows.to(device), None if all_real else real.to(device)


def _gather(
    group: Group, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    keys = (_take(x, group.k_rows, group.k_real, (group.size, group.k_len), dtype) for x in (k, v))
    k_NKLD, v_NKLD = (x.transpose(1, 2).contiguous() for x in keys)
    return _gather_queries(group, q, k.shape[1], dtype), k_NKLD, v_NKLD


def _gather_queries(group: Group, x: torch.Tensor, kv_heads: int, dtype: torch.dtype) -> torch.Tensor:
    """(total_q, H, X) to (N, K, G, Q, X), contiguous."""
    x = _take(x, group.q_rows, group.q_real, (group.size, group.q_len), dtype)
    return x.unflatten(2, (kv_heads, -1)).permute(0, 2, 3, 1, 4).contiguous()


def _take(
    x: torch.Tensor, rows: torch.Tensor | None, real: torch.Tensor | None, shape: tuple[int, int], dtype: torch.dtype
) -> torch.Tensor:
    """(N, length, heads, X); filler is 0, since infinities that happen to lie there would spread as NaN."""
    taken = (x if rows is None else x.index_select(0, rows)).to(dtype).unflatten(0, shape)
    return taken if real is None else taken.masked_fill(~real[:, :, None, None], 0)


def _scatter(group: Group, target: torch.Tensor, x_NKGQX: torch.Tensor) -> None:
    """Write (N, K, G, Q, X) to the rows of target (total_q, H, X)."""
    _put(target, x_NKGQX.permute(0, 3, 1, 2, 4).flatten(2, 3), group.q_rows, group.q_real)


def _scatter_keys(group: Group, target: torch.Tensor, x_NKLD: torch.Tensor) -> None:
    _put(target, x_NKLD.transpose(1, 2), group.k_rows, group.k_real)


def _put(target: torch.Tensor, x_NLHX: torch.Tensor, rows: torch.Tensor | None, real: torch.Tensor | None) -> None:
    x = x_NLHX.flatten(0, 1).to(target.dtype)
    if rows is None:
        target.copy_(x)
    elif real is None:
        target[rows] = x
    else:
        real = real.flatten()
        target[rows[real]] = x[real]
