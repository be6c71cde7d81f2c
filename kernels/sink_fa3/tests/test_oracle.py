"""The oracle against autograd in float64, on the CPU; no kernel."""

import oracle
import pytest
import torch


@pytest.mark.parametrize(
    ("lens_q", "lens_k", "causal", "window"),
    [([30], [40], True, 9), ([7, 0, 12], [7, 3, 20], True, 0), ([5, 9], [11, 2], False, 0), ([17], [4], True, 3)],
)
@pytest.mark.parametrize("with_sinks", [True, False])
def test_oracle_is_the_gradient_of_a_softmax(lens_q, lens_k, causal, window, with_sinks):
    torch.manual_seed(0)
    draw = lambda *s: torch.randn(*s, dtype=torch.float64, requires_grad=True)  # noqa: E731
    q, k, v, s = draw(sum(lens_q), 4, 8), draw(sum(lens_k), 2, 8), draw(sum(lens_k), 2, 8), draw(4)
    dout = torch.randn(q.shape, dtype=torch.float64)
    outs, a, b = [], 0, 0
    for n, m in zip(lens_q, lens_k, strict=True):
        qs, ks, vs = q[a : a + n], k[b : b + m].repeat_interleave(2, 1), v[b : b + m].repeat_interleave(2, 1)
        a, b = a + n, b + m
        scores = torch.einsum("qhd,khd->hqk", qs, ks) * 0.3
        # finite, and weighed out below: a softmax over nothing would be nan
        scores = scores.masked_fill(~oracle.visible(n, m, causal, window, q.device), -1e30)
        columns = [scores, (s if with_sinks else s.detach() - 1e9)[:, None, None].expand(-1, n, 1)]
        outs.append(torch.einsum("hqk,khd->qhd", torch.softmax(torch.cat(columns, -1), -1)[..., :-1], vs))
    out = torch.cat(outs)
    grads = torch.autograd.grad(out, (q, k, v, s), dout, allow_unused=True)
    got = oracle.attention(
        q.detach(),
        k.detach(),
        v.detach(),
        s.detach() if with_sinks else None,
        lens_q,
        lens_k,
        causal,
        window,
        0.3,
        dout,
    )
    for name, want in zip(("out", "dq", "dk", "dv", "dsinks"), (out.detach(), *grads), strict=True):
        if name != "dsinks" or with_sinks:
            assert oracle.relative(got[name], want) < 1e-13, name


def test_sinks_agree_notices_a_wrong_sign():
    torch.manual_seed(0)
    q, k, v, do = (torch.randn(60, h, 16).double() for h in (2, 1, 1, 2))
    s = torch.tensor([0.5, 2.0]).double()
    ref = oracle.attention(q, k, v, s, [60], [60], True, 0, 0.25, do)
    assert oracle.sinks_agree(ref["dsinks"], ref, torch.bfloat16)[0]
    assert not oracle.sinks_agree(-ref["dsinks"], ref, torch.bfloat16)[0]
    assert not oracle.sinks_agree(torch.zeros(2), ref, torch.bfloat16)[0]
