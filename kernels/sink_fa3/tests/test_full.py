"""torch.ops.sink_fa3.fwd and bwd against float64 on a Hopper GPU.

The library is the file named by SINK_FA3_LIBRARY, or build/libsink_fa3.so of this project.
"""

import os
import random
from pathlib import Path

import oracle
import pytest
import torch
from cases import case, cases, make

LIBRARY = Path(os.environ.get("SINK_FA3_LIBRARY", Path(__file__).parents[1] / "build" / "libsink_fa3.so"))
hopper = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
pytestmark = [
    pytest.mark.skipif(not hopper, reason="needs a Hopper GPU"),
    pytest.mark.skipif(not LIBRARY.is_file(), reason=f"no library at {LIBRARY}"),
]


@pytest.fixture(scope="module")
def ops():
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.ops.load_library(str(LIBRARY))
    return torch.ops.sink_fa3


def run(ops, c: dict, seed: int, deterministic: bool = False) -> tuple[dict, dict, dict]:
    """Results of the kernels, of the oracle in float64 and of the same formula with operands rounded to the dtype."""
    q, k, v, s, do, lq, lk = make(c, seed)
    scale = c["d"] ** -0.5
    tail = (
        oracle.cumulative(lq, q.device),
        oracle.cumulative(lk, q.device),
        max(lq) + c["slack"],
        max(lk) + c["slack"],
    )
    tail += (c["causal"], c["window"], scale)
    torch.use_deterministic_algorithms(True)  # fills what the operators allocate with NaN: all of it must be written
    try:
        out, lse = ops.fwd(q, k, v, s, *tail)
        grads = ops.bwd(do, q, k, v, out, lse, s, *tail, deterministic)
    finally:
        torch.use_deterministic_algorithms(False)
    got = dict(zip(("out", "lse", "dq", "dk", "dv", "dsinks"), (out, lse, *grads), strict=True))
    args = (q, k, v, s, lq, lk, c["causal"], c["window"], scale, do)
    ref = oracle.attention(*args)
    low = oracle.attention(*args, dtype=torch.float32, bf16_like=c["dtype"])
    low = {n: x.to(c["dtype"]) if n in ("out", "dq", "dk", "dv") else x for n, x in low.items()}
    return got, ref, low


def check(got: dict, ref: dict, low: dict, with_sinks: bool) -> None:
    for n, x in got.items():
        if n == "dsinks":
            assert x.numel() == 0 if not with_sinks else oracle.sinks_agree(x, ref, got["out"].dtype)[0], n
            continue
        assert not x.isnan().any(), n
        if n == "lse":
            assert torch.equal(x.isinf(), ref[n].isinf())
            finite = ref[n].isfinite()
            assert ((x[finite] - ref[n][finite]).abs() <= 3e-5 * (1 + ref[n][finite].abs())).all()
        else:
            errors = oracle.relative(x, ref[n]), oracle.relative(low[n], ref[n])
            assert oracle.agrees(n, x, ref, low, got["out"].dtype), f"{n}: {errors[0]:.1e}, formula {errors[1]:.1e}"


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("index", range(len(cases())))
def test_against_float64(ops, index, deterministic):
    c = cases()[index]
    check(*run(ops, c, index, deterministic), c["sink"] is not None)


@pytest.mark.parametrize("change", [{"sink": None}, {"window": 99}, {"lens_q": [300]}, {"causal": False, "window": 0}])
def test_the_comparison_notices(ops, change):
    """The oracle of a different problem must not pass: sinks off, window off by one, packing ignored, mask dropped."""
    right = case([200, 100], window=100)
    q, k, v, s, do, _, _ = make(right, 0)
    got, _, _ = run(ops, right, 0)
    wrong = {**right, **change}
    lens = wrong["lens_q"]
    sinks = None if wrong["sink"] is None else s
    args = (q, k, v, sinks, lens, lens, wrong["causal"], wrong["window"], 64**-0.5, do)
    ref = oracle.attention(*args)
    low = oracle.attention(*args, dtype=torch.float32, bf16_like=torch.bfloat16)
    with pytest.raises(AssertionError):
        check(got, ref, low, True)


@pytest.mark.parametrize(
    "c",
    [
        case([1500, 700, 64, 1], h=16, kv=2),
        case([1500, 700, 64, 1], h=16, kv=2, window=200),
        case([300, 900], [200, 1400], h=16, kv=2),
        case([1, 8, 3], [5000, 3000, 20], h=64, kv=8),
    ],
)
def test_deterministic_runs_are_bit_equal(ops, c):
    q, k, v, s, do, lq, lk = make(c, 3)
    lengths = (oracle.cumulative(lq, q.device), oracle.cumulative(lk, q.device))
    tail = (*lengths, max(lq), max(lk), True, c["window"], 0.125)
    out, lse = ops.fwd(q, k, v, s, *tail)
    first = ops.bwd(do, q, k, v, out, lse, s, *tail, True)
    for _ in range(50):
        again = ops.fwd(q, k, v, s, *tail)
        assert torch.equal(out, again[0]) and torch.equal(lse, again[1])
        assert all(
            torch.equal(a, b) for a, b in zip(first, ops.bwd(do, q, k, v, out, lse, s, *tail, True), strict=True)
        )


def test_strided_inputs(ops):
    """q, k, v as slices of one fused projection."""
    c = case([130, 77], h=8, kv=2)
    q, k, v, s, _, lq, _ = make(c, 5)
    fused = torch.cat([q, k, v], 1)
    cu = oracle.cumulative(lq, q.device)
    tail = (cu, cu, 130, 130, True, 0, 0.125)
    a = ops.fwd(q, k, v, s, *tail)
    b = ops.fwd(fused[:, :8], fused[:, 8:10], fused[:, 10:], s, *tail)
    assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def describe(c: dict) -> str:
    return ", ".join(f"{n}={x}" for n, x in c.items() if x != case([1])[n])


def random_case(rng: random.Random) -> dict:
    kv = rng.choice([1, 1, 2, 3, 8])
    h = kv * rng.choice([1, 2, 3, 4, 5, 8, 16])
    n = rng.randint(1, 4)
    lens_k = [rng.choice([0, 1, rng.randint(1, 40), rng.randint(1, 300), rng.randint(1, 700)]) for _ in range(n)]
    lens_q = list(lens_k) if rng.random() < 0.6 else [rng.choice([0, 1, rng.randint(1, 300)]) for _ in range(n)]
    if rng.random() < 0.15:  # a cache of many keys
        lens_k = [rng.randint(1, 6000) for _ in range(n)]
        lens_q = [rng.choice([0, 1, 1, rng.randint(1, 9), rng.randint(1, 80)]) for _ in range(n)]
    if sum(lens_q) == 0 or sum(lens_k) == 0:
        lens_q, lens_k = [5], [5]
    causal = rng.random() < 0.85
    return case(
        lens_q, lens_k, h=h, kv=kv, causal=causal, window=rng.choice([0, 0, 1, 17, 128, rng.randint(1, 400)]) if causal else 0,
        dtype=rng.choice([torch.bfloat16, torch.bfloat16, torch.float16]), sink=rng.choice(["randn", "randn", "mixed", None]),
        gain=rng.choice([0.3, 1.0, 1.0, 4.0, 30.0]), slack=rng.choice([0, 0, 100]),
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("part", range(8))  # so that several processes can share the work
def test_fuzz(ops, part):
    """SINK_FA3_FUZZ random shapes (2000 by default)."""
    for seed in range(part, int(os.environ.get("SINK_FA3_FUZZ", "2000")), 8):
        c = random_case(random.Random(seed))
        try:
            check(*run(ops, c, seed, seed % 2 == 1), c["sink"] is not None)
        except AssertionError as e:
            raise AssertionError(f"seed {seed}: {e}: {describe(c)}") from e
