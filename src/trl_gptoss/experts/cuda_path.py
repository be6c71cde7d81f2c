"""Forward and backward of the experts on CUDA, out of the Triton kernels.

Shape legend: T tokens, k = top_k, M = T * k assignments, H hidden, I intermediate, R rank of an adapter.

Memory at the widest point, in rows of M: forward 2I (kept for backward) + I + one block of columns of H; backward
2I + I + one block of columns of H, the gradients of the two products overwriting their inputs. Inputs are gathered
inside the products; only weight gradients, whose contraction runs over the rows, and evaluation with few rows per
expert read a sorted copy.
"""

import torch

from .kernels_gate import gate_backward
from .kernels_gemm import grouped_gemm
from .kernels_route import sort_by_expert
from .kernels_rowwise import combine, gather_rows, router_gradient, sum_tiles
from .kernels_wgrad import grouped_wgrad
from .params import Activation, ExpertParams, Gradients, Needs, Saved
from .tiles import PAD, padded_rows
from .tuning import low_rank_config, low_rank_wgrad_config, tile_config

# Rows of the second product wait in a buffer until the k rows of a token are summed. Wide inputs do it in blocks of
# columns so that the buffer stays below a third of its full size; small ones in one launch.
_COLUMN_BLOCK = 1024
_SMALL_BUFFER = 64 * 2**20


def _column_blocks(rows: int, width: int, like: torch.Tensor) -> list[tuple[int, int]]:
    if rows * width * like.element_size() <= _SMALL_BUFFER:
        return [(0, width)]
    return [(begin, min(begin + _COLUMN_BLOCK, width)) for begin in range(0, width, _COLUMN_BLOCK)]


def _low_rank(rows, factor, order, offsets, top_k, *, gather=False, transpose=False):
    """Rows (M, K) times the thin factor of their expert, (M, R)."""
    rank = factor.shape[1] if transpose else factor.shape[2]
    out = rows.new_empty(order.numel(), rank)
    config = low_rank_config(rank)
    grouped_gemm(
        rows, factor, offsets, config, top_k=top_k, out=out, order=order, gather=gather, transpose_b=transpose
    )
    return out


def first_product(
    x: torch.Tensor,
    index: torch.Tensor,
    params: ExpertParams,
    activation: Activation,
    *,
    keep: bool,
    hidden: torch.Tensor | None,
) -> Saved:
    """Sort, then x @ gate_up + bias for every assignment; kept with `keep`, activated into `hidden` (M, I) if given."""
    experts, _, width = params.gate_up.shape
    order, offsets = sort_by_expert(index, experts)
    M, top_k = order.numel(), index.shape[1]
    low = None
    if params.lora_up_in is not None:
        low = _low_rank(x, params.lora_up_in, order, offsets, top_k, gather=True), params.lora_up_out
    config = tile_config("up" if keep else "up_eval", M, experts, x)
    rows = x
    if config.presort:
        rows = x.new_empty(M, x.shape[1])
        gather_rows(x, order, offsets, top_k, out=rows, padded=False)
    gate_up = x.new_empty(M, width) if keep else None
    grouped_gemm(
        rows,
        params.gate_up,
        offsets,
        config,
        top_k=top_k,
        out=gate_up,
        order=order,
        gather=not config.presort,
        bias=params.gate_up_bias,
        gated=hidden,
        alpha=activation.alpha,
        limit=activation.limit,
        low_rank=low,
    )
    return Saved(x.new_empty(0) if gate_up is None else gate_up, order, offsets)


def forward(
    x: torch.Tensor,
    index: torch.Tensor,
    weight: torch.Tensor,
    params: ExpertParams,
    activation: Activation,
    *,
    keep: bool,
) -> tuple[torch.Tensor, Saved]:
    """Output (T, H) and, with `keep`, what backward needs."""
    top_k, experts = index.shape[1], params.gate_up.shape[0]
    M, width = index.numel(), x.shape[1]
    hidden = x.new_empty(M, params.down.shape[1])
    saved = first_product(x, index, params, activation, keep=keep, hidden=hidden)
    low = None
    if params.lora_down_in is not None:
        low = _low_rank(hidden, params.lora_down_in, saved.order, saved.offsets, top_k), params.lora_down_out
    out = torch.empty_like(x)
    blocks = _column_blocks(M, width, x)
    buffer = x.new_empty(M, blocks[0][1])
    for begin, end in blocks:
        grouped_gemm(
            hidden,
            params.down,
            saved.offsets,
            tile_config("down", M, experts, x),
            top_k=top_k,
            out=buffer,
            order=saved.order,
            scatter=True,
            bias=params.down_bias,
            weight=weight,
            low_rank=low,
            columns=(begin, end),
        )
        combine(buffer, index, out[:, begin:end], experts)
    return out, saved


def backward(
    grad: torch.Tensor,
    x: torch.Tensor,
    index: torch.Tensor,
    weight: torch.Tensor,
    params: ExpertParams,
    activation: Activation,
    saved: Saved,
    needs: Needs,
    into: ExpertParams | None = None,
) -> Gradients:
    """Gradients of one layer. Consumes `saved.gate_up`.

    Args:
        grad (`(T, H)`): Gradient of the output.
        into (`ExpertParams`, *optional*): fp32 buffers to which the parameter gradients are added.
    """
    top_k, experts = index.shape[1], params.gate_up.shape[0]
    order, offsets = saved.order, saved.offsets
    M, intermediate = order.numel(), params.down.shape[1]
    found: dict[str, torch.Tensor] = {}

    def target(name: str) -> torch.Tensor:
        """Buffer of one parameter gradient, made when it is needed: early buffers would add to the peak."""
        if into is not None:
            return getattr(into, name)
        found[name] = torch.empty_like(getattr(params, name), memory_format=torch.contiguous_format)
        return found[name]

    def wgrad(kernel: str, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, **padded: bool) -> None:
        if kernel == "low":
            config = low_rank_wgrad_config(out.shape[1], out.shape[2])
        else:
            config = tile_config(kernel, M, experts, x)
        grouped_wgrad(a, b, out, offsets, config, accumulate=into is not None, **padded)

    thin = None
    if params.lora_down_in is not None:
        thin = _low_rank(grad, params.lora_down_out, order, offsets, top_k, gather=True, transpose=True)
    d_hidden = x.new_empty(M, intermediate)
    grouped_gemm(
        grad,
        params.down,
        offsets,
        tile_config("grad_hidden", M, experts, x),
        top_k=top_k,
        out=d_hidden,
        order=order,
        gather=True,
        transpose_b=True,
        low_rank=None if thin is None else (thin, params.lora_down_in.transpose(1, 2).contiguous()),
    )
    need_hidden = needs.down or needs.lora_down_in or needs.lora_down_out
    dots, bias_partial = gate_backward(
        saved.gate_up,
        d_hidden,
        order,
        offsets,
        weight,
        activation.alpha,
        activation.limit,
        need_bias=needs.gate_up_bias,
        need_hidden=need_hidden,
    )
    d_gate_up, weighted_hidden = saved.gate_up, d_hidden
    d_weight = router_gradient(dots, grad, params.down_bias, index, weight.dtype) if needs.weight else None
    if needs.gate_up_bias:
        sum_tiles(bias_partial, offsets, target("gate_up_bias"), into is not None)
        del bias_partial
    low = None
    if needs.lora_down_out:
        low = _low_rank(weighted_hidden, params.lora_down_in, order, offsets, top_k)
    if needs.lora_down_in:
        wgrad("low", weighted_hidden, thin, target("lora_down_in"))
    if needs.down or needs.down_bias or needs.lora_down_out:
        rows = padded_rows(M, experts)
        blocks = _column_blocks(M, grad.shape[1], grad)
        partial = grad.new_empty(rows // PAD, grad.shape[1], dtype=torch.float32) if needs.down_bias else None
        copy = grad.new_empty(rows, blocks[0][1]) if needs.down or needs.lora_down_out else None
        d_down = target("down") if needs.down else None
        d_lora = target("lora_down_out") if needs.lora_down_out else None
        for begin, end in blocks:
            sorted_grad = None if copy is None else copy[:, : end - begin]
            part = None if partial is None else partial[:, begin:end]
            gather_rows(grad[:, begin:end], order, offsets, top_k, out=sorted_grad, weight=weight, partial=part)
            if needs.down:
                wgrad("wgrad_down", weighted_hidden, sorted_grad, d_down[:, :, begin:end], padded_b=True)
            if needs.lora_down_out:
                wgrad("low", low, sorted_grad, d_lora[:, :, begin:end], padded_b=True)
        if needs.down_bias:
            sum_tiles(partial, offsets, target("down_bias"), into is not None)
        del copy, partial, sorted_grad, part  # views keep their buffer
    del weighted_hidden, d_hidden, dots, low

    thin = None
    if params.lora_up_in is not None:
        thin = _low_rank(d_gate_up, params.lora_up_out, order, offsets, top_k, transpose=True)
    if needs.gate_up or needs.lora_up_in:
        blocks = _column_blocks(M, x.shape[1], x)
        copy = x.new_empty(padded_rows(M, experts), blocks[0][1])
        d_up = target("gate_up") if needs.gate_up else None
        d_lora = target("lora_up_in") if needs.lora_up_in else None
        for begin, end in blocks:
            sorted_x = copy[:, : end - begin]
            gather_rows(x[:, begin:end], order, offsets, top_k, out=sorted_x)
            if needs.gate_up:
                wgrad("wgrad_up", sorted_x, d_gate_up, d_up[:, begin:end], padded_a=True)
            if needs.lora_up_in:
                wgrad("low", sorted_x, thin, d_lora[:, begin:end], padded_a=True)
        del copy, sorted_x
    if needs.lora_up_out:
        low = _low_rank(x, params.lora_up_in, order, offsets, top_k, gather=True)
        wgrad("low", low, d_gate_up, target("lora_up_out"))
    low_rank = None if thin is None else (thin, params.lora_up_in.transpose(1, 2).contiguous())
    d_x = None
    if needs.x:
        d_x = torch.empty_like(x)
        blocks = _column_blocks(M, x.shape[1], x)
        buffer = x.new_empty(M, blocks[0][1])
        for begin, end in blocks:
            grouped_gemm(
                d_gate_up,
                params.gate_up,
                offsets,
                tile_config("grad_input", M, experts, x),
                top_k=top_k,
                out=buffer,
                order=order,
                scatter=True,
                transpose_b=True,
                low_rank=low_rank,
                columns=(begin, end),
            )
            combine(buffer, index, d_x[:, begin:end], experts)
    if into is not None:
        return Gradients(d_x, d_weight, *into)
    return Gradients(d_x, d_weight, *(found.get(name) for name in ExpertParams._fields))
