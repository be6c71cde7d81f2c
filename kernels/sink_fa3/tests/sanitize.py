"""Every kernel once on small shapes, for compute-sanitizer:

compute-sanitizer --tool racecheck python sanitize.py libsink_fa3.so
"""

import sys

import torch

SHAPES = (  # lengths of queries, lengths of keys, heads, KV heads, window
    ((70, 1, 0, 200), (70, 1, 0, 200), 16, 2, 0),
    ((70, 200), (70, 200), 8, 1, 50),
    ((5, 130), (300, 40), 6, 2, 0),
    ((3, 1), (1500, 40), 16, 2, 0),
    ((50,), (1100,), 8, 1, 0),
)


def cumulative(lengths: tuple[int, ...]) -> torch.Tensor:
    return torch.tensor((0, *lengths), device="cuda").cumsum(0).int()


def main() -> None:
    torch.ops.load_library(sys.argv[1])
    ops = torch.ops.sink_fa3
    for lens_q, lens_k, heads, kv_heads, window in SHAPES:
        q, dout = (torch.randn(sum(lens_q), heads, 64, device="cuda").bfloat16() for _ in range(2))
        k, v = (torch.randn(sum(lens_k), kv_heads, 64, device="cuda").bfloat16() for _ in range(2))
        sinks = torch.randn(heads, device="cuda")
        cu_q = cumulative(lens_q)
        cu_k = cu_q if lens_k == lens_q else cumulative(lens_k)
        tail = (cu_q, cu_k, max(lens_q), max(lens_k), True, window, 0.125)
        out, lse = ops.fwd(q, k, v, sinks, *tail)
        for deterministic in (False, True):
            ops.bwd(dout, q, k, v, out, lse, sinks, *tail, deterministic)
        if window and heads == 8 * kv_heads:
            out, lse = ops.window_fwd(q, k, v, sinks, *tail)
            ops.window_bwd(dout, q, k, v, out, lse, sinks, *tail, True)
        torch.cuda.synchronize()
        print(lens_q, lens_k, heads, window, float(out.float().norm()), flush=True)


if __name__ == "__main__":
    main()
