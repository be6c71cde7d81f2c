"""Shapes and values that the full kernels are checked on, small enough for the float64 oracle."""

import itertools

import torch

INF = float("inf")


def case(
    lens_q,
    lens_k=None,
    h=8,
    kv=1,
    d=64,
    causal=True,
    window=0,
    dtype=torch.bfloat16,
    sink="randn",
    gain=1.0,
    ramp=0.0,
    slack=0,
):
    return locals()


def cases() -> list[dict]:
    c = [case([n]) for n in (1, 2, 63, 64, 127, 128, 129, 300, 1000)]
    c += [case([64, 1, 0, 200, 333]), case([512, 512], h=16, kv=2)]
    c += [case([257, 130], h=h, kv=kv) for h, kv in ((1, 1), (4, 4), (6, 2), (10, 2), (7, 1), (64, 8), (16, 1))]
    c += [case([300, 65], window=w) for w in (1, 16, 127, 128, 129, 200, 1000)]
    c += [case([5, 64, 1], [300, 700, 129]), case([300, 64, 10], [50, 0, 10]), case([0, 5], [7, 0])]
    c += [
        case([130, 70], [260, 33], causal=False),
        case([5, 64], [300, 700], window=100),
        case([300, 64], [50, 20], window=30),
    ]
    c += [case([300, 65], dtype=torch.float16), case([300, 65], dtype=torch.float16, gain=30.0)]
    c += [case([700], sink=s) for s in (None, "inf", "-inf", "1e4", "-1e4", "mixed")]
    c += [case([700], gain=g) for g in (0.0, 10.0, 100.0, 3000.0)]
    c += [case([900], ramp=r, dtype=t) for r, t in itertools.product((30.0, 300.0), (torch.bfloat16, torch.float16))]
    c += [case([300, 65], slack=500), case([1100, 30, 500], h=64, kv=8)]
    # one long among many short sequences, and a bound far above all of them
    c += [case([2, 1, 700, 0] + [3] * 300, slack=4000), case([1] * 40, [1, 5000, *[9] * 38], slack=1000)]
    return c + decode_cases()


def decode_cases() -> list[dict]:
    """Few queries, many keys: the kernels that divide the keys among blocks, and those that just about do not."""
    c = [case([n], [5000], h=64, kv=8) for n in (1, 2, 7, 8, 9, 60)]
    c += [case([1, 3, 0, 8, 1], [5000, 129, 77, 2048, 1], h=16, kv=2), case([1] * 3, [1500] * 3, slack=9000)]
    c += [case([4], [3000], h=h, kv=kv) for h, kv in ((1, 1), (6, 2), (7, 1), (16, 1))]
    c += [case([1, 5], [4000, 1100], sink=s) for s in (None, "inf", "-inf", "1e4", "-1e4", "mixed")]
    c += [case([3], [3000], window=w) for w in (1, 128, 1500, 2900)]
    c += [case([2, 50], [3000, 2500], causal=False), case([5], [4000], dtype=torch.float16, gain=30.0)]
    c += [case([1, 2], [3000, 1024], ramp=r) for r in (30.0, 300.0)] + [case([8], [3000], gain=3000.0)]
    return c


def make(c: dict, seed: int):
    g = torch.Generator("cuda").manual_seed(seed)
    rnd = lambda *s: torch.randn(*s, generator=g, device="cuda")  # noqa: E731
    lq, lk = c["lens_q"], c["lens_k"] or c["lens_q"]
    q = (rnd(sum(lq), c["h"], c["d"]) * c["gain"]).to(c["dtype"])
    k, v = rnd(sum(lk), c["kv"], c["d"]), rnd(sum(lk), c["kv"], c["d"]).to(c["dtype"])
    if c["ramp"]:  # earlier keys ever larger: the maximum grows along the kernel's order
        k *= torch.linspace(c["ramp"], 0.1, sum(lk), device="cuda")[:, None, None]
    k = k.to(c["dtype"])
    s = {
        None: None, "randn": rnd(c["h"]) * 1.5, "inf": torch.full((c["h"],), INF, device="cuda"), "-inf": torch.full((c["h"],), -INF, device="cuda"),
        "1e4": torch.full((c["h"],), 1e4, device="cuda"), "-1e4": torch.full((c["h"],), -1e4, device="cuda"),
        "mixed": torch.tensor([INF, -INF, 1e4, -1e4, 0.0, 5.0, -5.0, 50.0] * 16, device="cuda")[: c["h"]],
    }[c["sink"]]  # fmt: skip
    do = rnd(*q.shape).to(c["dtype"])
    return q, k, v, s, do, lq, lk
