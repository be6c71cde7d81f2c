"""Layers of `gptoss_fused` with Triton's products, with the compiled ones, and `grouped_mm`, in turns.

    python compiled.py --out compiled_h200.csv                          # every size and mode; some minutes
    python compiled.py --experts 128 --tokens 32768 --rounds 5          # the case that the products were made for
    python compiled.py --only up down --experts 128 --tokens 32768      # these compiled, all others by Triton
    python compiled.py --anywhere                                       # compiled products below their threshold, too

The order turns round every time, so that no variant always follows the hottest one. Needs an SM90 GPU and the library
(`trl-gptoss build-kernels`).
"""

import argparse
import statistics
from pathlib import Path

import torch
from layer import WORK, build
from rows import Rows
from triton.testing import do_bench

from trl_gptoss.experts import active_products, selftest, set_experts_products
from trl_gptoss.experts.tables import COMPILED_FROM


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--experts", type=int, nargs="*", default=[128, 32])
    parser.add_argument("--tokens", type=int, nargs="*", default=[32768, 8192, 2048])
    parser.add_argument("--modes", nargs="*", choices=list(WORK), default=list(WORK))
    parser.add_argument("--only", nargs="*", choices=list(COMPILED_FROM), help="compiled products; default: all")
    parser.add_argument("--anywhere", action="store_true", help="whatever the number of rows")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path("compiled_h200.csv"))
    args = parser.parse_args()
    set_experts_products("compiled")
    print(active_products(), selftest(), flush=True)
    if "triton" in active_products().values():
        raise SystemExit("no compiled products here")
    for kernel in COMPILED_FROM:
        if args.only and kernel not in args.only:
            COMPILED_FROM[kernel] = 2**30
        elif args.anywhere:
            COMPILED_FROM[kernel] = 1
    rows = Rows(args.out)
    for count in args.experts:
        fused, baseline = build("gptoss_fused", count), build("grouped_mm", count)
        variants = {"grouped_mm": (baseline, "triton"), "triton": (fused, "triton"), "compiled": (fused, "compiled")}
        for tokens in args.tokens:
            for mode in args.modes:
                x = torch.randn(1, tokens, 2880, device="cuda", dtype=torch.bfloat16)
                grad = torch.randn_like(x)
                x.requires_grad_(mode != "eval")

                def step(name: str, x=x, grad=grad, mode=mode, variants=variants) -> torch.Tensor:
                    mlp, choice = variants[name]
                    set_experts_products(choice)
                    mlp.zero_grad(set_to_none=True)
                    x.grad = None
                    with torch.set_grad_enabled(mode != "eval"):
                        out = mlp(x)[0]
                    if mode != "eval":
                        out.backward(grad)
                    return out.detach()

                for mlp in (fused, baseline):
                    mlp.requires_grad_(mode == "trained").zero_grad(set_to_none=True)
                ours, theirs = step("compiled").float(), step("triton").float()
                error = float((ours - theirs).norm() / theirs.norm())
                del ours, theirs
                taken = {name: [] for name in variants}
                for turn in range(args.rounds):
                    for name in list(variants)[:: 1 if turn % 2 else -1]:
                        taken[name].append(do_bench(lambda name=name: step(name), 100, 400, return_mode="median"))
                        variants[name][0].zero_grad(set_to_none=True)
                baseline_ms = statistics.median(taken["grouped_mm"])
                for name, ms in taken.items():
                    rows.add(
                        variant=name, experts=count, tokens=tokens, mode=mode, only=" ".join(args.only or ()),
                        anywhere=args.anywhere, ms=round(statistics.median(ms), 3), ms_min=round(min(ms), 3),
                        ms_max=round(max(ms), 3), speedup=round(baseline_ms / statistics.median(ms), 3),
                        error_to_triton=f"{error:.1e}" if name == "compiled" else "",
                    )  # fmt: skip
        del fused, baseline, variants


if __name__ == "__main__":
    main()
