"""One GPT-OSS experts layer on one GPU: speed, memory and accuracy of every implementation.

    python layer.py layer  --tokens 2048 8192 32768          # eval, frozen experts, trained experts
    python layer.py decode                                    # 1, 8, 64 tokens, batched_mm as well, and as CUDA graphs
    python layer.py article                                   # 4 x (8192 + 16384) tokens under no_grad
    python layer.py lora                                      # LoRA on the experts: fused, PEFT's own path
    python layer.py all --out h200.csv

Memory is the peak above the weights, the gradients of the weights and the output. Baselines run in the same process.
"""

import argparse
import gc
import re
import statistics
from collections.abc import Callable
from pathlib import Path

import torch
from rows import Rows
from transformers import GptOssConfig
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssMLP
from triton.testing import do_bench, do_bench_cudagraph

import trl_gptoss  # noqa: F401  registers gptoss_fused

GIB = 2**30
IMPLEMENTATIONS = ("gptoss_fused", "grouped_mm", "eager")
WORK = {"eval": 1, "frozen": 2, "trained": 3}  # forward, with the input gradient, with weight gradients


def build(implementation: str, experts: int, dtype: torch.dtype = torch.bfloat16) -> GptOssMLP:
    gc.collect()
    torch.cuda.empty_cache()
    config = GptOssConfig(num_hidden_layers=1, num_local_experts=experts)
    config._experts_implementation = implementation
    with torch.device("cuda"):
        mlp = GptOssMLP(config).to(dtype)
    generator = torch.Generator("cuda").manual_seed(0)
    with torch.no_grad():
        for parameter in mlp.parameters():
            parameter.normal_(0, 0.02, generator=generator)
    return mlp


def peak(step: Callable[[], torch.Tensor], kept: Callable[[], int]) -> float:
    """GiB above what was there, what stays (`kept`) and the output."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    out = step()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before - kept() - out.nbytes) / GIB


def measure_layer(
    rows: Rows, implementations: list[str], experts: list[int], tokens: list[int], modes: list[str], rounds: int
) -> None:
    """The implementations take turns, so that a hot GPU slows all of them alike; milliseconds are the median round."""
    for count in experts:
        layers = {implementation: build(implementation, count) for implementation in implementations}
        for T in tokens:
            x = torch.randn(1, T, 2880, device="cuda", dtype=torch.bfloat16)
            grad = torch.randn_like(x)
            for mode in modes:
                inputs = x.clone().requires_grad_(mode != "eval")

                def step(mlp: GptOssMLP, inputs=inputs, grad=grad, mode=mode) -> torch.Tensor:
                    mlp.zero_grad(set_to_none=True)
                    inputs.grad = None
                    with torch.set_grad_enabled(mode != "eval"):
                        out = mlp(inputs)[0]
                    if mode != "eval":
                        out.backward(grad)
                    return out

                def kept(mlp: GptOssMLP) -> int:
                    return sum(p.grad.nbytes for p in mlp.parameters() if p.grad is not None)

                used, taken = {}, {implementation: [] for implementation in layers}
                for implementation, mlp in layers.items():
                    mlp.requires_grad_(mode == "trained").zero_grad(set_to_none=True)  # or `peak` would count them
                    inputs.grad = None
                    used[implementation] = peak(lambda mlp=mlp: step(mlp), lambda mlp=mlp: kept(mlp))
                    mlp.zero_grad(set_to_none=True)
                for _ in range(rounds):
                    for implementation, mlp in layers.items():
                        taken[implementation].append(do_bench(lambda mlp=mlp: step(mlp), return_mode="median"))
                        mlp.zero_grad(set_to_none=True)
                for implementation in layers:
                    ms = statistics.median(taken[implementation])
                    tflops = WORK[mode] * T * 4 * 6 * 2880**2 / ms / 1e9
                    rows.add(
                        case="layer", implementation=implementation, experts=count, tokens=T, mode=mode,
                        ms=round(ms, 3), tflops=round(tflops), peak_gib=round(used[implementation], 3),
                    )  # fmt: skip
        del layers


def measure_decode(rows: Rows, implementations: list[str], experts: list[int], rounds: int) -> None:
    """Launches decide here, and the host is slower after a capture or a compilation: the implementations take turns."""
    timers = {"decode": do_bench, "decode_cuda_graph": do_bench_cudagraph}
    for count in experts:
        names = [*implementations, "batched_mm"]
        layers = {name: build(name, count).requires_grad_(False) for name in names}
        for T in (1, 8, 64):
            x = torch.randn(1, T, 2880, device="cuda", dtype=torch.bfloat16)
            for case, timer in timers.items():
                # eager waits for the host, which a graph cannot hold
                taken = {name: [] for name in layers if case == "decode" or name != "eager"}
                for _ in range(rounds):
                    for name, found in taken.items():
                        with torch.no_grad():
                            found.append(timer(lambda mlp=layers[name], x=x: mlp(x), return_mode="median"))
                for name, found in taken.items():
                    rows.add(
                        case=case, implementation=name, experts=count, tokens=T, mode="eval",
                        ms=round(statistics.median(found), 4), tflops="", peak_gib="",
                    )  # fmt: skip
        del layers


def measure_article(rows: Rows, implementations: list[str]) -> None:
    tokens = 4 * (8192 + 16384)
    for implementation in [*implementations, "batched_mm"]:
        mlp = build(implementation, 32).requires_grad_(False)
        x = torch.randn(4, tokens // 4, 2880, device="cuda", dtype=torch.bfloat16)
        try:
            with torch.no_grad():
                used = peak(lambda mlp=mlp, x=x: mlp(x)[0], lambda: 0)
                ms = do_bench(lambda mlp=mlp, x=x: mlp(x), return_mode="median")
        except torch.OutOfMemoryError as error:  # the row says how much it asked for
            found = re.search(r"Tried to allocate ([\d.]+ \w+)", str(error))
            rows.add(
                case="article", implementation=implementation, experts=32, tokens=tokens, mode="eval", ms="",
                tflops="", peak_gib=f"out of memory, asked for {found.group(1) if found else error}",
            )  # fmt: skip
            continue
        rows.add(
            case="article", implementation=implementation, experts=32, tokens=tokens, mode="eval",
            ms=round(ms, 2), tflops=round(tokens * 4 * 6 * 2880**2 / ms / 1e9), peak_gib=round(used, 3),
        )  # fmt: skip
        del mlp, x


class _Model(torch.nn.Module):
    """PEFT wants a model with a config and the parameter path `mlp.experts`."""

    def __init__(self, mlp: GptOssMLP) -> None:
        super().__init__()
        self.mlp = mlp
        self.config = mlp.experts.config

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return self.mlp(hidden_states)[0]


def measure_lora(rows: Rows, tokens: list[int], rank: int = 16) -> None:
    import peft

    targets = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    for implementation, fuse in (("gptoss_fused", True), ("gptoss_fused", False), ("grouped_mm", False)):
        config = peft.LoraConfig(r=rank, target_modules=[], target_parameters=targets)
        model = peft.get_peft_model(_Model(build(implementation, 32)), config)
        if fuse:
            trl_gptoss.experts.fuse_expert_lora(model)
        for T in tokens:
            x = torch.randn(1, T, 2880, device="cuda", dtype=torch.bfloat16, requires_grad=True)
            grad = torch.randn_like(x)

            def step(model=model, x=x, grad=grad) -> torch.Tensor:
                model.zero_grad(set_to_none=True)
                x.grad = None
                out = model(x)
                out.backward(grad)
                return out

            used = peak(step, lambda: 0)
            ms = do_bench(step, return_mode="median")
            rows.add(
                case=f"lora_r{rank}", implementation=implementation + ("" if fuse else "+peft"), experts=32, tokens=T,
                mode="adapters", ms=round(ms, 3), tflops="", peak_gib=round(used, 3),
            )  # fmt: skip
        del model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("case", choices=("layer", "decode", "article", "lora", "all"))
    parser.add_argument("--implementations", nargs="*", default=list(IMPLEMENTATIONS))
    parser.add_argument("--experts", type=int, nargs="*", default=[32, 128])
    parser.add_argument("--tokens", type=int, nargs="*", default=[2048, 8192, 32768])
    parser.add_argument("--modes", nargs="*", choices=WORK, default=list(WORK), help="of `layer`")
    parser.add_argument("--rounds", type=int, default=3, help="of `layer` and `decode`")
    parser.add_argument("--out", type=Path, default=Path("experts.csv"))
    args = parser.parse_args()
    rows = Rows(args.out)
    if args.case in ("layer", "all"):
        measure_layer(rows, args.implementations, args.experts, args.tokens, args.modes, args.rounds)
    if args.case in ("decode", "all"):
        measure_decode(rows, args.implementations, args.experts, args.rounds)
    if args.case in ("article", "all"):
        measure_article(rows, args.implementations)
    if args.case in ("lora", "all"):
        measure_lora(rows, args.tokens)


if __name__ == "__main__":
    main()
