"""The raw operators of the library against the definition in float64. `trl_gptoss` tests them through autograd at length.

Run with the library's path in `SINK_FA3_LIBRARY`, or inside a kernels checkout where `sink_fa3` imports.
"""

import os

import pytest
import torch

if os.environ.get("SINK_FA3_LIBRARY"):
    torch.ops.load_library(os.environ["SINK_FA3_LIBRARY"])
    ops = torch.ops.sink_fa3
else:
    ops = pytest.importorskip("sink_fa3", reason="set SINK_FA3_LIBRARY to libsink_fa3.so").ops

hopper = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs an SM90 GPU"
)


def definition(q, k, v, sinks, lengths, window, scale):
    outs = []
    group = q.shape[1] // k.shape[1]
    for q_SHD, k_SKD, v_SKD in zip(*(x.split(lengths) for x in (q, k, v))):
        scores = torch.einsum("qhd,khd->hqk", q_SHD, k_SKD.repeat_interleave(group, 1)) * scale
        own = torch.arange(len(q_SHD))
        distance = own[:, None] - own
        scores = scores.masked_fill((distance < 0) | (distance >= (window or len(q_SHD))), -torch.inf)
        column = sinks[:, None, None].expand(-1, len(q_SHD), 1)
        probs = torch.cat((scores, column), -1).softmax(-1)[..., :-1]
        outs.append(torch.einsum("hqk,khd->qhd", probs, v_SKD.repeat_interleave(group, 1)))
    return torch.cat(outs)


@hopper
@pytest.mark.parametrize("dtype, tolerance", [(torch.bfloat16, 5e-3), (torch.float16, 1e-3)])
@pytest.mark.parametrize("window", [0, 100, 128])
@pytest.mark.parametrize("one_shot", [False, True])
def test_forward_and_backward(dtype, tolerance, window, one_shot):
    if one_shot and not window:
        pytest.skip("the one-shot kernels are for windows")
    torch.manual_seed(0)
    lengths = [300, 1, 129]
    total = sum(lengths)
    q, dout = (torch.randn(total, 16, 64, dtype=dtype, device="cuda") for _ in range(2))
    k, v = (torch.randn(total, 2, 64, dtype=dtype, device="cuda") for _ in range(2))
    sinks = torch.randn(16, device="cuda")
    cu = torch.tensor([0, 300, 301, 430], dtype=torch.int32, device="cuda")
    settings = (cu, cu, 300, 300, True, window, 0.125)
    forward, backward = (ops.window_fwd, ops.window_bwd) if one_shot else (ops.fwd, ops.bwd)
    out, lse = forward(q, k, v, sinks, *settings)
    grads = backward(dout, q, k, v, out, lse, sinks, *settings, True)
    exact = [x.double().cpu().requires_grad_() for x in (q, k, v, sinks)]
    want = definition(*exact, lengths, window, 0.125)
    for a, b in zip((out, *grads), (want, *torch.autograd.grad(want, exact, dout.double().cpu()))):
        assert (a.double().cpu() - b).norm() <= tolerance * b.norm()
    again = backward(dout, q, k, v, out, lse, sinks, *settings, True)
    assert all(torch.equal(a, b) for a, b in zip(grads, again))


@hopper
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name, window", [("", 0), ("window_", 128)])
def test_two_byte_sinks(dtype, name, window):
    """The same bits as from their values in float32, and a gradient rounded to their dtype."""
    torch.manual_seed(0)
    q, dout = (torch.randn(300, 16, 64, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    k, v = (torch.randn(300, 2, 64, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    cu = torch.tensor([0, 100, 300], dtype=torch.int32, device="cuda")
    settings = (cu, cu, 200, 200, True, window, 0.125)
    narrow = torch.randn(16, device="cuda").to(dtype)
    results = []
    for sinks in (narrow, narrow.float()):
        out, lse = getattr(ops, f"{name}fwd")(q, k, v, sinks, *settings)
        results.append((out, lse, *getattr(ops, f"{name}bwd")(dout, q, k, v, out, lse, sinks, *settings, True)))
    assert results[0][-1].dtype == dtype and results[1][-1].dtype == torch.float32 and results[0][-1].any()
    for a, b in zip(*results):
        assert torch.equal(a, b.to(a.dtype))
