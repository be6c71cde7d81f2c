"""Measure tile configurations on this GPU: what fills the cache file, and the shipped tables."""

from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from .kernels_gemm import grouped_gemm
from .kernels_route import sort_by_expert
from .kernels_rowwise import gather_rows
from .kernels_wgrad import grouped_wgrad
from .tiles import padded_rows
from .tuning import KERNELS, TileConfig, bucket, candidates, measure, save_configs

Launch = Callable[[TileConfig], None]


def launches(
    experts: int, hidden: int, intermediate: int, top_k: int, tokens: int, device: torch.device
) -> Iterator[tuple[str, Launch]]:
    """The grouped products of one layer on random data, each as a function of its configuration."""
    from .cuda_path import _COPY_BLOCK, _column_blocks, gathered_product

    options = {"dtype": torch.bfloat16, "device": device}
    H, I, M = hidden, intermediate, tokens * top_k  # noqa: E741
    x = torch.randn(tokens, H, **options)
    index = torch.rand(tokens, experts, device=device).topk(top_k).indices
    weight = torch.rand(M, **options)
    gate_up, down = torch.randn(experts, H, 2 * I, **options) * 0.02, torch.randn(experts, I, H, **options) * 0.02
    gate_up_bias, down_bias = torch.randn(experts, 2 * I, **options), torch.randn(experts, H, **options)
    act, both = torch.randn(M, I, **options), torch.randn(M, 2 * I, **options)
    columns = _column_blocks(M, H, x)[0]
    rows = torch.empty(M, H, **options)
    order, offsets = sort_by_expert(index, experts)
    scattered = {"top_k": top_k, "order": order, "scatter": True}
    block = {"out": rows[:, : columns[1]], "columns": columns}
    gate = {"gated": torch.empty_like(act), "alpha": 1.702, "limit": 7.0, "bias": gate_up_bias}
    product = torch.empty_like(both)
    backward = {"top_k": top_k, "out": torch.empty_like(act), "transpose_b": True}
    copy = torch.empty(padded_rows(M, experts), H, **options)
    gather_rows(x, order, offsets, top_k, out=copy)
    d_up, d_down = torch.empty_like(gate_up), torch.empty_like(down)
    begin, end = _column_blocks(M, H, x, _COPY_BLOCK)[0]
    part, d_part = copy[:, begin:end], d_up[:, begin:end]
    yield "up", lambda c: gathered_product(x, gate_up, order, offsets, c, top_k=top_k, **gate, out=product)
    yield "up_eval", lambda c: gathered_product(x, gate_up, order, offsets, c, top_k=top_k, **gate)
    yield "down", lambda c: grouped_gemm(act, down, offsets, c, **scattered, **block, bias=down_bias, weight=weight)
    yield "grad_hidden", lambda c: gathered_product(x, down, order, offsets, c, **backward)
    yield (
        "grad_hidden_sorted",
        lambda c: grouped_gemm(copy, down, offsets, c, order=order, padded_a=True, **backward),
    )
    yield "grad_input", lambda c: grouped_gemm(both, gate_up, offsets, c, **scattered, out=rows, transpose_b=True)
    yield "wgrad_up", lambda c: grouped_wgrad(part, both, d_part, offsets, c, padded_a=True)
    yield "wgrad_down", lambda c: grouped_wgrad(act, copy, d_down, offsets, c, padded_b=True)


def tune_experts(
    tokens: list[int],
    *,
    num_experts: int = 32,
    hidden_size: int = 2880,
    intermediate_size: int = 2880,
    top_k: int = 4,
    kernels: tuple[str, ...] = KERNELS,
    report: Callable[[str], None] = print,
) -> Path:
    """Measure the candidates on the current GPU and write the fastest to the cache file.

    Takes minutes, most of it compilation. Call it once per machine; every process reads the file at its first use.

    Args:
        tokens (`list[int]`): Token counts to tune for; each stands for its mean number of rows per expert.
        num_experts, hidden_size, intermediate_size, top_k (`int`, *optional*): Shape of the layer, by default the 20B.
        kernels (`tuple[str, ...]`, *optional*): Kernels to tune, by default all.
        report (`Callable`, *optional*): Receives one line per measurement.

    Returns:
        `Path` of the cache file.
    """
    if not torch.cuda.is_available():
        raise RuntimeError("tune_experts measures on a CUDA GPU and found none.")
    device = torch.device("cuda", torch.cuda.current_device())
    found: dict[str, dict[int, TileConfig]] = {}
    for count in tokens:
        rows = bucket(count * top_k, num_experts)
        for kernel, launch in launches(num_experts, hidden_size, intermediate_size, top_k, count, device):
            if kernel not in kernels:
                continue
            timed = measure(launch, candidates(kernel, rows))
            for milliseconds, config in timed:
                report(f"{kernel},{num_experts},{count},{rows},{milliseconds:.4f},{config}")
            if timed:
                found.setdefault(kernel, {})[rows] = timed[0][1]
    return save_configs(torch.cuda.get_device_name(device), found)
