"""torch.ops.sink_fa3.window_fwd and window_bwd, the one-shot kernels, against float64 on a Hopper GPU.

The library is found as in test_full. The oracle, the error bound (twice the error of the same formula in the kernel's dtype)
and the values are those of the full kernels.
"""

import oracle
import pytest
import torch
from cases import case, make
from test_full import check, ops, pytestmark  # noqa: F401  (a fixture, and the reasons to skip)

FP16 = torch.float16


def cases() -> list[dict]:
    # Tiles are 16 tokens, chunks of tiles at least 128 tokens: every length around those.
    c = [case([n], window=128) for n in (1, 2, 15, 16, 17, 127, 128, 129, 255, 257, 1000, 4099)]
    c += [case([2500], h=64, kv=8, window=128), case([333], h=24, kv=3, window=128, dtype=FP16)]
    c += [case([1, 2, 0, 17, 130, 0, 0, 550, 1, 799, 0], h=16, kv=2, window=128)]
    c += [case([7] * 57 + [1], window=128), case([512] * 4, h=16, kv=2, window=128), case([0, 40], window=128)]
    c += [case([77, 523], window=w) for w in (1, 2, 16, 100, 127)]
    c += [case([700], window=128, sink=s) for s in (None, "inf", "-inf", "1e4", "-1e4", "mixed")]
    c += [case([700], window=128, gain=g) for g in (0.0, 10.0, 100.0)]
    c += [case([700], window=128, dtype=FP16), case([700], window=128, dtype=FP16, gain=30.0)]
    return c


def call(ops, q, k, v, sinks, lens, window, do) -> dict[str, torch.Tensor]:  # noqa: F811
    cu = oracle.cumulative(lens, q.device)
    tail = (cu, cu, max(lens), max(lens), True, window, q.shape[2] ** -0.5)
    torch.use_deterministic_algorithms(True)  # fills what the operators allocate with NaN: all of it must be written
    try:
        out, lse = ops.window_fwd(q, k, v, sinks, *tail)
        grads = ops.window_bwd(do, q, k, v, out, lse, sinks, *tail, False)
    finally:
        torch.use_deterministic_algorithms(False)
    return dict(zip(("out", "lse", "dq", "dk", "dv", "dsinks"), (out, lse, *grads), strict=True))


def expected(q, k, v, sinks, lens, window, do) -> tuple[dict, dict]:
    """The oracle in float64, and with operands rounded to the dtype."""
    args = (q, k, v, sinks, lens, lens, True, window, q.shape[2] ** -0.5, do)
    low = oracle.attention(*args, dtype=torch.float32, bf16_like=q.dtype)
    low = {n: x.to(q.dtype) if n in ("out", "dq", "dk", "dv") else x for n, x in low.items()}
    return oracle.attention(*args), low


@pytest.mark.parametrize("index", range(len(cases())))
def test_against_float64(ops, index):  # noqa: F811
    c = cases()[index]
    q, k, v, sinks, do, lens, _ = make(c, index)
    problem = (q, k, v, sinks, lens, c["window"], do)
    check(call(ops, *problem), *expected(*problem), sinks is not None)


def test_scores_of_ten_thousand(ops):  # noqa: F811
    """P is rebuilt from an lse in float32, whose last bit is 1e-3 there, and rows are one-hot: delta must not inherit that."""
    q, k, v, sinks, do, lens, _ = make(case([700], window=128, gain=3000.0), 5)
    got = call(ops, q, k, v, sinks, lens, 128, do)
    ref, _ = expected(q, k, v, sinks, lens, 128, do)
    assert ref["lse"].max() > 1e3
    for n, bound in {"out": 4e-3, "dv": 4e-3, "dq": 5e-3, "dk": 5e-3}.items():
        assert oracle.relative(got[n], ref[n]) <= bound, n


@pytest.mark.parametrize("with_sinks", [False, True])
def test_tokens_behind_the_last_sequence_see_nothing(ops, with_sinks):  # noqa: F811
    q, k, v, sinks, do, _, _ = make(case([337], window=128, sink="randn" if with_sinks else None), 1)
    lens = [100, 160, 40]  # 37 tokens too few
    got = call(ops, q, k, v, sinks, lens, 128, do)
    ref, low = expected(q, k, v, sinks, lens, 128, do)
    if with_sinks:
        ref["lse"][:, 300:] = low["lse"][:, 300:] = sinks[:, None]
    check(got, ref, low, with_sinks)
    assert not any(got[n][300:].any() for n in ("out", "dq", "dk", "dv"))


def test_slices_of_one_projection(ops):  # noqa: F811
    """Strides that are not the shape's give the same bits as contiguous tensors."""
    q, k, v, sinks, do, lens, _ = make(case([300, 477], h=16, kv=2, window=128), 2)
    views = torch.cat((q, k, v), 1).split([16, 2, 2], 1)
    a, b = call(ops, q, k, v, sinks, lens, 128, do), call(ops, *views, sinks, lens, 128, do)
    assert all(torch.equal(a[n], b[n]) for n in a)


@pytest.mark.parametrize("change", ["sinks off", "window off by one", "packing ignored"])
def test_a_different_problem_does_not_pass(ops, change):  # noqa: F811
    q, k, v, sinks, do, lens, _ = make(case([200, 100], window=128), 3)
    wrong = {
        "sinks off": (q, k, v, None, lens, 128, do),
        "window off by one": (q, k, v, sinks, lens, 127, do),
        "packing ignored": (q, k, v, sinks, [300], 128, do),
    }[change]
    got = call(ops, q, k, v, sinks, lens, 128, do)
    with pytest.raises(AssertionError):
        check(got, *expected(*wrong), wrong[3] is not None)


def test_runs_are_bit_equal(ops):  # noqa: F811
    """The backward has no atomics: without `deterministic` too, chunk borders and dsinks are summed in a fixed order."""
    q, k, v, sinks, do, lens, _ = make(case([900, 2100], h=64, kv=8, window=128), 4)
    first = call(ops, q, k, v, sinks, lens, 128, do)
    for _ in range(50):
        again = call(ops, q, k, v, sinks, lens, 128, do)
        assert all(torch.equal(first[n], again[n]) for n in first)
