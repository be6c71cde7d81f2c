"""`sink_attention` against the definition, in float64, for values and every gradient."""

import math

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from trl_gptoss.attention import reference, sink_attention
from trl_gptoss.attention.ops import sink_attention_backward_op, sink_attention_op

# flash attention's relative errors; where the same formula in the same dtype is worse than half of that, twice its error
TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-6, torch.bfloat16: 6e-3, torch.float16: 1e-3}


def inputs(lengths_q, lengths_k, heads=4, kv_heads=2, head_dim=64, dtype=torch.float64, device="cpu", sink_scale=1.5):
    generator = torch.Generator().manual_seed(sum(lengths_q) + 7 * sum(lengths_k))

    def randn(*shape):
        return torch.randn(*shape, generator=generator).to(device, dtype)

    total_q, total_k = sum(lengths_q), sum(lengths_k)
    q = randn(total_q, heads, head_dim)
    k, v = randn(total_k, kv_heads, head_dim), randn(total_k, kv_heads, head_dim)
    sinks = sink_scale * torch.randn(heads, generator=generator).to(device)
    if dtype == torch.float64:
        sinks = sinks.double()
    return q, k, v, sinks, randn(total_q, heads, head_dim)


def ends(lengths):
    return [0, *torch.tensor(lengths).cumsum(0).tolist()]


def run(fn, tensors, dout):
    leaves = [None if x is None else x.detach().clone().requires_grad_() for x in tensors]
    out = fn(*leaves)
    wanted = [x for x in leaves if x is not None]
    return out.detach(), *torch.autograd.grad(out, wanted, dout.to(out.dtype))


def both(
    formula,
    lengths_q,
    lengths_k=None,
    *,
    device="cpu",
    dtype=torch.float64,
    sinks=True,
    window=None,
    causal=True,
    **kw,
):
    """(ours, oracle, the formula in `dtype`): out, dq, dk, dv, dsinks each."""
    lengths_k = lengths_q if lengths_k is None else lengths_k
    q, k, v, s, dout = inputs(lengths_q, lengths_k, dtype=dtype, device=device, **kw)
    tensors = (q, k, v, s if sinks else None)
    cu_q, cu_k = (torch.tensor(ends(x), dtype=torch.int32, device=device) for x in (lengths_q, lengths_k))
    ours = run(
        lambda *x: sink_attention(
            *x,
            cu_seqlens_q=cu_q,
            cu_seqlens_k=cu_k,
            max_seqlen_q=max(lengths_q),
            max_seqlen_k=max(lengths_k),
            causal=causal,
            window=window,
        ),
        tensors,
        dout,
    )
    oracle, peer = (
        run(
            lambda *x: formula(*x, ends(lengths_q), ends(lengths_k), causal=causal, window=window)[0],
            [None if x is None else x.to("cpu", kind) for x in tensors],
            dout.to("cpu", kind),
        )
        for kind in (torch.float64, dtype)
    )
    return ours, oracle, peer


def assert_close(ours, oracle, compare, tolerance, peer=None):
    for name, a, b, c in zip(("out", "dq", "dk", "dv", "dsinks"), ours, oracle, peer or oracle):
        assert torch.isfinite(a).all(), name
        error = compare.distance(a, b) if b.norm() > 0 else float(a.abs().max())
        allowed = max(tolerance, 2 * compare.distance(c, b)) if b.norm() > 0 else tolerance
        assert error <= allowed, f"{name}: {error:.2e} > {allowed:.1e}"


CASES = {
    # of many heads: dq and dk of so few tokens are what cancellation leaves, and the peer's error is one draw of it
    "one": dict(lengths_q=(1,), heads=64, kv_heads=8),
    "two": dict(lengths_q=(2,), heads=64, kv_heads=8),
    "127_128_129": dict(lengths_q=(127, 128, 129), window=128),
    "1000": dict(lengths_q=(1000,), window=128, heads=2, kv_heads=1),
    "ragged": dict(lengths_q=(33, 1, 70, 2, 25)),
    "window": dict(lengths_q=(33, 1, 70, 2, 25), window=16),
    "window_one": dict(lengths_q=(33, 7), window=1),
    "no_sinks": dict(lengths_q=(33, 20), sinks=False),
    "no_sinks_window": dict(lengths_q=(33, 20), sinks=False, window=8),
    "no_gqa": dict(lengths_q=(19, 30), heads=3, kv_heads=3),
    "mqa": dict(lengths_q=(19, 30), heads=5, kv_heads=1),
    "gqa_8": dict(lengths_q=(150, 31), heads=16, kv_heads=2, window=128),
    "bidirectional": dict(lengths_q=(19, 30), causal=False),
    "cross": dict(lengths_q=(19, 3), lengths_k=(7, 30), causal=False),
    "q_shorter": dict(lengths_q=(1, 5, 16), lengths_k=(40, 64, 17)),
    "q_shorter_window": dict(lengths_q=(1, 5, 16, 40), lengths_k=(40, 64, 17, 200), window=16),
    "decode": dict(lengths_q=(1, 3, 8), lengths_k=(1500, 1100, 2000), heads=16, kv_heads=2),
    "q_longer": dict(lengths_q=(9, 30), lengths_k=(4, 31)),  # the first five queries see nothing
    "q_longer_window": dict(lengths_q=(9, 30), lengths_k=(4, 31), window=3),
    "empty": dict(lengths_q=(0, 9, 0, 0, 5, 0), lengths_k=(3, 9, 0, 4, 0, 0)),
    "head_dim_128": dict(lengths_q=(21, 40), head_dim=128),
}


@pytest.mark.parametrize("case", CASES)
def test_values_and_gradients(place, case, formula, compare):
    device, dtypes = place
    for dtype in dtypes:
        if case == "head_dim_128" and device == "cuda":
            pytest.skip("not every kernel has head_dim 128")
        ours, oracle, peer = both(formula, device=device, dtype=dtype, **CASES[case])
        assert_close(ours, oracle, compare, TOLERANCE[dtype], peer)


@pytest.mark.parametrize("control", ["sinks", "window", "packing", "alignment", "sign"])
def test_the_comparison_notices(control, formula, compare):
    """Each mistake must show as an error far above the tolerances."""
    ours, oracle, _ = both(formula, (40, 33), (41, 50), window=16)
    q, k, v, s, dout = inputs((40, 33), (41, 50))
    cu_q, cu_k, window = [0, 40, 73], [0, 41, 91], 16
    if control == "sinks":
        s = None
    elif control == "window":
        window = 17
    elif control == "packing":
        cu_q, cu_k = [0, 73], [0, 91]
    elif control == "alignment":
        cu_k = [0, 42, 91]
    wrong = run(lambda *x: formula(*x, cu_q, cu_k, window=window)[0], (q, k, v, s), dout)
    if control == "sign":
        wrong = (*oracle[:4], -oracle[4])
    names = ("out", "dq", "dk", "dv", "dsinks")
    errors = {name: compare.distance(a, b) for name, a, b in zip(names, wrong, ours)}
    assert max(errors.values()) > 5 * TOLERANCE[torch.bfloat16], errors
    assert compare.distance(ours[0], oracle[0]) < 1e-12


def test_lse_includes_the_sink(place, formula, compare):
    device, dtypes = place
    q, k, v, s, _ = inputs((9, 30), (4, 31), dtype=dtypes[0], device=device)
    cu_q, cu_k = (torch.tensor(x, dtype=torch.int32, device=device) for x in ([0, 9, 39], [0, 4, 35]))
    lengths = dict(max_seqlen_q=30, max_seqlen_k=31, return_lse=True)
    for sinks in (s, None):
        _, lse = sink_attention(q, k, v, sinks, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, **lengths)
        exact = [None if x is None else x.double().cpu() for x in (q, k, v, sinks)]
        expected = formula(*exact, [0, 9, 39], [0, 4, 35])[1]
        assert lse.shape == (4, 39) and lse.dtype == (torch.float64 if dtypes[0] == torch.float64 else torch.float32)
        hidden = expected == -math.inf
        assert torch.equal(lse.cpu() == -math.inf, hidden) and hidden.any() == (sinks is None)
        assert compare.distance(lse.cpu()[~hidden], expected[~hidden]) < TOLERANCE[dtypes[0]]


@pytest.mark.parametrize("sink", [-1e4, 1e4, -math.inf, math.inf])
@pytest.mark.parametrize("score", [1.0, 1e4])
def test_extreme_values(place, sink, score, formula, compare):
    """Scores of +-1e4, sinks of +-1e4 and +-inf, rows that see nothing: right values, no NaN."""
    device, dtypes = place
    dtype = dtypes[0]
    q, k, v, s, dout = inputs((9, 30), (4, 31), dtype=dtype, device=device)
    q = (q * score).to(dtype)
    s[::2] = sink
    cu_q, cu_k = (torch.tensor(x, dtype=torch.int32, device=device) for x in ([0, 9, 39], [0, 4, 35]))
    lengths = dict(cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, max_seqlen_q=30, max_seqlen_k=31)
    ours = run(lambda *x: sink_attention(*x, **lengths), (q, k, v, s), dout)
    exact = [x.double().cpu() for x in (q, k, v, s)]
    want = run(lambda *x: formula(*x, [0, 9, 39], [0, 4, 35])[0], exact, dout.double().cpu())
    want = (*want[:4], want[4].masked_fill(s.double().cpu().isinf(), 0))  # a constant has no gradient
    # with one-hot probabilities dq and dk are differences of equal numbers: measure them by what was subtracted
    floors = dict(dq=float(dout.norm()), dk=float(dout.norm()) * score) if score > 1 else {}
    for name, a, b in zip(("out", "dq", "dk", "dv", "dsinks"), ours, want):
        error = float((a.double().cpu() - b).norm())
        floor = 1e-12 if dtype == torch.float64 else 1e-3
        assert error <= max(TOLERANCE[dtype], 1e-9) * max(float(b.norm()), floors.get(name, 0), floor), name


def test_dense_is_varlen_of_equal_lengths(place):
    device, dtypes = place
    q, k, v, s, _ = inputs((8, 8, 8), (20, 20, 20), dtype=dtypes[0], device=device)
    cu_q, cu_k = (torch.tensor(x, dtype=torch.int32, device=device) for x in ([0, 8, 16, 24], [0, 20, 40, 60]))
    flat = sink_attention(q, k, v, s, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, window=4)
    dense = sink_attention(*(x.unflatten(0, (3, -1)) for x in (q, k, v)), s, window=4)
    assert dense.shape == (3, 8, 4, 64) and torch.equal(dense.flatten(0, 1), flat)


def test_strides_are_free(place, compare):
    """Heads before tokens, as transformers has them, and values with every second head."""
    device, dtypes = place
    q, k, v, s, _ = inputs((50,), (50,), dtype=dtypes[0], device=device)
    cu = torch.tensor([0, 50], dtype=torch.int32, device=device)
    odd_q = q.transpose(0, 1).contiguous().transpose(0, 1)
    odd_v = torch.stack((v, v), 2).flatten(1, 2)[:, ::2]
    want = sink_attention(q, k, v, s, cu_seqlens_q=cu)
    assert torch.equal(sink_attention(odd_q, k, odd_v, s, cu_seqlens_q=cu), want)
    # last dimension strided
    assert torch.equal(sink_attention(q.transpose(1, 2).contiguous().transpose(1, 2), k, v, s, cu_seqlens_q=cu), want)


@pytest.mark.parametrize("window", [None, 128])
def test_sinks_in_the_dtype_of_q(place, window):
    """Same numbers as with float32 sinks, and a gradient rounded to the sinks' dtype."""
    device, dtypes = place
    dtype = dtypes[-1]
    q, k, v, s, dout = inputs((150, 20), (150, 20), dtype=dtype, device=device, heads=16)
    cu = torch.tensor([0, 150, 170], dtype=torch.int32, device=device)
    lengths = dict(cu_seqlens_q=cu, max_seqlen_q=150, max_seqlen_k=150, window=window, deterministic=True)
    runs = [
        run(lambda *x: sink_attention(*x, **lengths), (q, k, v, sinks), dout)
        for sinks in (s.to(dtype), s.to(dtype).float(), torch.stack((s, s), 1).to(dtype)[:, 0])
    ]
    assert [x[-1].dtype for x in runs] == [dtype, torch.float32, dtype] and runs[0][-1].abs().sum() > 0
    for other in runs[1:]:
        assert all(torch.equal(a, b) for a, b in zip(runs[0][:4], other[:4]))
        assert torch.equal(runs[0][-1], other[-1].to(dtype))


def test_deterministic_gradients_repeat(place):
    device, dtypes = place
    q, k, v, s, dout = inputs((300, 70), (300, 70), dtype=dtypes[0], device=device, heads=16)
    cu = torch.tensor([0, 300, 370], dtype=torch.int32, device=device)
    for window in (None, 128):
        runs = [
            run(lambda *x: sink_attention(*x, cu_seqlens_q=cu, window=window, deterministic=True), (q, k, v, s), dout)  # noqa: B023
            for _ in range(5)
        ]
        for other in runs[1:]:
            assert all(torch.equal(a, b) for a, b in zip(runs[0], other))


@pytest.mark.parametrize("sinks, trim", [(True, True), (False, False)])
def test_opcheck(place, sinks, trim):
    device, dtypes = place
    q, k, v, s, dout = inputs((12, 20), (12, 20), dtype=dtypes[0], device=device)
    # heads before tokens, as transformers hands them over: results must be contiguous all the same
    q, k, dout = (x.transpose(0, 1).contiguous().transpose(0, 1) for x in (q, k, dout))
    s = s if sinks else None
    cu = torch.tensor([0, 12, 32, 32, 32], dtype=torch.int32, device=device)
    leaves = [None if x is None else x.requires_grad_() for x in (q, k, v, s)]
    settings = (20, 20, True, 8, 0.125, True, trim)
    torch.library.opcheck(sink_attention_op, (*leaves, cu, cu, *settings))
    out, lse = sink_attention_op(*leaves, cu, cu, *settings)
    detached = [None if x is None else x.detach() for x in leaves]
    args = (dout, *detached[:3], out.detach(), lse.detach(), detached[3], cu, cu, *settings)
    torch.library.opcheck(sink_attention_backward_op, args)


@pytest.mark.parametrize("with_out", [True, False])
def test_lse_gradients(place, with_out, formula, compare):
    device, dtypes = place
    q, k, v, s, dout = inputs((9, 30), (12, 31), dtype=dtypes[0], device=device)
    ends_q, ends_k = [0, 9, 39], [0, 12, 43]
    cu_q, cu_k = (torch.tensor(x, dtype=torch.int32, device=device) for x in (ends_q, ends_k))
    dlse = torch.linspace(-1, 1, 4 * 39, dtype=torch.float64).view(4, 39)

    def gradients(leaves, out, lse):
        loss = (lse.double().cpu() * dlse).sum() + (out.double().cpu() * dout.double().cpu()).sum() * with_out
        return torch.autograd.grad(loss, leaves)

    leaves = [x.detach().requires_grad_() for x in (q, k, v, s)]
    exact = [x.detach().double().cpu().requires_grad_() for x in (q, k, v, s)]
    ours = gradients(
        leaves,
        *sink_attention(
            *leaves, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, max_seqlen_q=30, max_seqlen_k=31, return_lse=True
        ),
    )
    for a, b in zip(ours, gradients(exact, *formula(*exact, ends_q, ends_k))):
        assert compare.distance(a, b) <= 2 * TOLERANCE[dtypes[0]] if b.norm() > 0 else not a.any()


def test_fake_tensors_take_the_operators():
    """Shapes, dtypes and strides without computing: what memory estimates and exporters do."""
    with FakeTensorMode():
        q = torch.empty(20, 4, 64, dtype=torch.bfloat16, requires_grad=True)
        k, v = (torch.empty(20, 2, 64, dtype=torch.bfloat16, requires_grad=True) for _ in range(2))
        sinks = torch.empty(4, dtype=torch.bfloat16, requires_grad=True)
        cu = torch.empty(3, dtype=torch.int32)
        out, lse = sink_attention(q, k, v, sinks, cu_seqlens_q=cu, max_seqlen_q=20, max_seqlen_k=20, return_lse=True)
        assert type(out) is FakeTensor and out.is_contiguous() and lse.shape == (4, 20)
        out.float().sum().backward()
        assert (q.grad.shape, k.grad.dtype, sinks.grad.dtype) == (q.shape, torch.bfloat16, torch.bfloat16)


def test_autocast_does_not_reach_inside():
    q, k, v, s, _ = inputs((20,), (20,), dtype=torch.float32)
    cu = torch.tensor([0, 20])
    want = sink_attention(q, k, v, s, cu_seqlens_q=cu)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(sink_attention(q, k, v, s, cu_seqlens_q=cu), want)


def test_reference_memory_is_linear(monkeypatch):
    """No chunk holds more scores than the budget allows, or 16 rows of them."""
    seen = []
    scores = reference._scores

    def spy(*args):
        result = scores(*args)
        seen.append(result.numel())
        return result

    monkeypatch.setattr(reference, "_scores", spy)
    q, k, v, s, _ = inputs((3000, 5, 800), (3000, 5, 800), dtype=torch.float32, head_dim=16)
    sink_attention(q, k, v, s, cu_seqlens_q=torch.tensor([0, 3000, 3005, 3805]))
    assert max(seen) <= max(reference._SCORES["cpu"], 16 * 4 * 3000)
    seen.clear()
    sink_attention(q, k, v, s, cu_seqlens_q=torch.tensor([0, 3000, 3005, 3805]), window=32)
    assert sum(seen) < 4 * 3805 * 32 * 4  # work linear in the window


WRONG = {
    "lengths": (lambda x: dict(cu_seqlens_q=torch.tensor([0, 19])), "must rise from 0"),
    "falling": (lambda x: dict(cu_seqlens_q=torch.tensor([0, 30, 20])), "must rise from 0"),
    "shapes of cu": (
        lambda x: dict(cu_seqlens_q=torch.tensor([0, 20]), cu_seqlens_k=torch.tensor([0, 5, 20])),
        "both must have shape",
    ),
    "no cu": (lambda x: dict(), "without"),
    "k alone": (lambda x: dict(cu_seqlens_k=torch.tensor([0, 20])), "without cu_seqlens_q"),
    "window without causal": (
        lambda x: dict(cu_seqlens_q=torch.tensor([0, 20]), window=4, causal=False),
        "causal=True",
    ),
    "window 0": (lambda x: dict(cu_seqlens_q=torch.tensor([0, 20]), window=0), "at least 1"),
}


@pytest.mark.parametrize("what", WRONG)
def test_bad_arguments(what):
    make, message = WRONG[what]
    q, k, v, s, _ = inputs((20,), (20,))
    with pytest.raises(ValueError, match=message):
        sink_attention(q, k, v, s, **make(None))


def test_bad_tensors():
    q, k, v, s, _ = inputs((20,), (20,))
    cu = dict(cu_seqlens_q=torch.tensor([0, 20]))
    with pytest.raises(ValueError, match="divides"):
        sink_attention(q[:, :3], k, v, s[:3], **cu)
    with pytest.raises(ValueError, match="one floating dtype"):
        sink_attention(q, k.float(), v, s, **cu)
    with pytest.raises(ValueError, match="one per query"):
        sink_attention(q, k, v, s[:2], **cu)
