"""Attention with sinks in float64, one sequence at a time, straight from the formulas. No autograd, no fused op."""

import torch


def cumulative(lengths: list[int], device: torch.device) -> torch.Tensor:
    return torch.tensor(
        [0, *torch.tensor(lengths, dtype=torch.int64).cumsum(0).tolist()], dtype=torch.int32, device=device
    )


def visible(len_q: int, len_k: int, causal: bool, window: int, device: torch.device) -> torch.Tensor:
    """Bool (len_q, len_k): bottom-right aligned. len_q=2, len_k=3, causal, window=2 gives [[1,1,0],[0,1,1]]."""
    i = torch.arange(len_q, device=device)[:, None] + len_k - len_q
    j = torch.arange(len_k, device=device)[None]
    mask = torch.ones(len_q, len_k, dtype=torch.bool, device=device)
    if causal:
        mask &= j <= i
    if window:
        mask &= j > i - window
    return mask


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sinks: torch.Tensor | None,
    lens_q: list[int],
    lens_k: list[int],
    causal: bool,
    window: int,
    scale: float,
    dout: torch.Tensor | None = None,
    dtype: torch.dtype = torch.float64,
    bf16_like: torch.dtype | None = None,
) -> dict[str, torch.Tensor]:
    """q (total_q, H, D), k/v (total_k, KV, D) -> out, lse (H, total_q) and, with dout, dq, dk, dv, dsinks, all in `dtype`.

    "dsinks_scale" is the root sum of squares of P_sink |dO_i| |O_i|: dsinks itself is a sum of terms of either sign whose
    rounding errors are relative to these, so that an error relative to dsinks says little (0.1 % or 100 % by chance). "dq_scale"
    and "dk_scale" are the same for their norms, from P (|dP| + |dO_i| |O_i|): with few rows, or rows that are almost one-hot, dq
    and dk are what cancellation leaves.

    `bf16_like` rounds P and dS to that dtype before the products, as a fused kernel must: the same-dtype PyTorch formula
    whose error a kernel's error is compared with.
    """
    heads, group = q.shape[1], q.shape[1] // k.shape[1]

    def low(x: torch.Tensor) -> torch.Tensor:
        return x if bf16_like is None else x.to(bf16_like).to(dtype)

    res = {
        "out": torch.zeros(q.shape, dtype=dtype, device=q.device),
        "lse": torch.full((heads, q.shape[0]), -torch.inf, dtype=dtype, device=q.device),
    }
    if dout is not None:
        res |= {n: torch.zeros(x.shape, dtype=dtype, device=q.device) for n, x in (("dq", q), ("dk", k), ("dv", v))}
        res["dsinks"] = torch.zeros(heads, dtype=dtype, device=q.device)
        res["dsinks_scale"] = torch.zeros(heads, dtype=dtype, device=q.device)
        res["dq_scale"] = res["dk_scale"] = torch.zeros((), dtype=dtype, device=q.device)
    s = torch.full((heads,), -torch.inf, dtype=dtype, device=q.device) if sinks is None else sinks.to(dtype)
    a = b = 0
    for lq, lk in zip(lens_q, lens_k, strict=True):
        rq, rk = slice(a, a + lq), slice(b, b + lk)
        a, b = a + lq, b + lk
        if lq == 0:
            continue
        mask = visible(lq, lk, causal, window, q.device)
        for h in range(heads):
            qq, kk, vv = q[rq, h].to(dtype), k[rk, h // group].to(dtype), v[rk, h // group].to(dtype)
            scores = (qq @ kk.T * scale).masked_fill(~mask, -torch.inf)
            lse = torch.logsumexp(torch.cat([scores, s[h].expand(lq, 1)], 1), 1)
            res["lse"][h, rq] = lse
            p = torch.where(
                lse[:, None].isfinite(), (scores - torch.where(lse.isfinite(), lse, 0.0)[:, None]).exp(), 0.0
            )
            res["out"][rq, h] = low(p) @ vv
            if dout is None:
                continue
            do = dout[rq, h].to(dtype)
            delta = (do * low(res["out"][rq, h])).sum(1)
            ds = low(p * (do @ vv.T - delta[:, None]))
            res["dq"][rq, h] = ds @ kk * scale
            res["dk"][rk, h // group] += ds.T @ qq * scale
            res["dv"][rk, h // group] += low(p).T @ do
            sink_p = torch.where(lse.isfinite(), (s[h] - torch.where(lse.isfinite(), lse, 0.0)).exp(), 0.0)
            res["dsinks"][h] -= (sink_p * delta).sum()
            smallest = 8 * torch.finfo(q.dtype).smallest_normal  # of a row of 64: fp16 rounds smaller ones absolutely
            terms = (p * ((do @ vv.T).abs() + (do.norm(dim=1) * res["out"][rq, h].norm(dim=1))[:, None])) ** 2
            res["dq_scale"] = res["dq_scale"] + (terms @ kk**2).sum() * scale**2
            res["dk_scale"] = res["dk_scale"] + (terms.T @ qq**2).sum() * scale**2
            size = sink_p * do.norm(dim=1) * res["out"][rq, h].norm(dim=1).clamp_min(smallest)
            res["dsinks_scale"][h] += (size**2).sum()
    if dout is not None:
        res |= {n: res[n].sqrt() for n in ("dsinks_scale", "dq_scale", "dk_scale")}
    return res


def relative(x: torch.Tensor, ref: torch.Tensor) -> float:
    """|x - ref| / |ref|; nan if x has a nan, and the plain norm if ref is all zero."""
    return (
        ((x.double() - ref.double()).norm() / ref.double().norm().clamp_min(1e-30)).item()
        if ref.norm()
        else x.double().norm().item()
    )


def agrees(name: str, x: torch.Tensor, ref: dict, low: dict, dtype: torch.dtype) -> bool:
    """Whether out, dq, dk or dv has at most twice the error of the formula in `dtype`, or a quarter of a unit of rounding of its terms."""
    if x.isnan().any():
        return False
    if relative(x, ref[name]) <= 2 * relative(low[name], ref[name]) + 1e-4:
        return True
    unit = torch.finfo(dtype).eps / 2
    return (
        f"{name}_scale" in ref and (x.double() - ref[name]).norm().item() <= 0.25 * unit * ref[f"{name}_scale"].item()
    )


def sinks_agree(x: torch.Tensor, ref: dict[str, torch.Tensor], dtype: torch.dtype) -> tuple[bool, float]:
    """Whether dsinks is right to 0.4 units of rounding of `dtype` of its scale, and the largest error in those units.

    0.05 to 0.18 is typical of a kernel that rounds P and O to `dtype`.
    """
    unit = torch.finfo(dtype).eps / 2
    floor = torch.finfo(torch.float32).eps * ref["dsinks"].abs() + 1e-30
    error = ((x.double() - ref["dsinks"]).abs() / (unit * ref["dsinks_scale"] + floor)).max().item()
    return error <= 0.4, error
