"""Tokens are independent: deviations under a permutation and of tokens computed in a smaller batch, on one GPU.

    python properties.py --out properties.csv

A token's output may depend on the other tokens only through rounding: another number of rows can mean another tile, and
with up to two tokens another kernel. Deviations are absolute maxima; `scale` is the largest output.
"""

import argparse
from pathlib import Path

import torch
from layer import IMPLEMENTATIONS, build
from rows import Rows

TOKENS = 4096


@torch.no_grad()
def deviations(implementation: str, experts: int) -> dict[str, float]:
    layer = build(implementation, experts).requires_grad_(False).experts
    torch.manual_seed(0)
    x = torch.randn(TOKENS, 2880, device="cuda", dtype=torch.bfloat16)
    index = torch.rand(TOKENS, experts, device="cuda").topk(4).indices
    weight = torch.randn(TOKENS, 4, device="cuda").softmax(-1).bfloat16()
    out = layer(x, index, weight).float()
    order = torch.randperm(TOKENS, device="cuda")
    permuted = layer(x[order], index[order], weight[order]).float()
    found = {"scale": out.abs().max(), "permutation": (permuted - out[order]).abs().max()}
    for count in (1, 2, 3, 16, 100, 1000):
        part = layer(x[:count], index[:count], weight[:count]).float()
        found[f"first_{count}"] = (part - out[:count]).abs().max()
    found["repeat"] = (layer(x, index, weight).float() - out).abs().max()
    return {name: round(value.item(), 5) for name, value in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--experts", type=int, nargs="*", default=[32, 128])
    parser.add_argument("--out", type=Path, default=Path("properties.csv"))
    args = parser.parse_args()
    rows = Rows(args.out)
    for experts in args.experts:
        for implementation in IMPLEMENTATIONS:
            rows.add(
                implementation=implementation, experts=experts, tokens=TOKENS, **deviations(implementation, experts)
            )


if __name__ == "__main__":
    main()
