"""Forward and backward of the experts on CUDA, out of the Triton kernels and the grouped products compiled for Hopper.

Shape legend: T tokens, k = top_k, M = T * k assignments, H hidden, I intermediate, R rank of an adapter.

Memory at the widest point, in rows of M: forward 2I (kept for backward) + I + one block of columns of H; backward
2I + I (+ H when `down` is trained), then 2I + H, the gradients of the two products overwriting their inputs. The gradient
of the first weight, the largest of all, comes last, with 2I and one block of columns of H. Inputs are gathered inside the products, or from
sorted copies where that is faster: slices of rows (`presort`), blocks of columns for the gradient of the first weight,
and all of `grad` when `down` is trained, where one copy serves two products.
"""

from typing import Any

import torch

from . import compiled, kernels_decode
from .kernels_gate import gate_backward
from .kernels_gemm import grouped_gemm
from .kernels_route import sort_by_expert
from .kernels_rowwise import combine, gather_rows, router_gradient, sum_tiles
from .kernels_wgrad import grouped_wgrad
from .params import Activation, ExpertParams, Gradients, Needs, Saved
from .tiles import PAD, padded_rows
from .tuning import TileConfig, cdiv, low_rank_config, low_rank_wgrad_config, tile_config

# Rows of the second product wait in a buffer until the k rows of a token are summed. Wide inputs do it in blocks of
# columns so that the buffer stays below a third of its full size; small ones in one launch.
_COLUMN_BLOCK = 1024
_COMPILED_COLUMN_BLOCK = 960  # five tiles of the compiled product
_SMALL_BUFFER = 64 * 2**20
# Columns of one sorted copy for the weight gradient of the first product, which reads the other operand once for every
# copy.
_COPY_BLOCK = 1536
# Bytes of one sorted slice of `presort`: no more than the buffer of the second product at 32768 tokens.
_SLICE = 256 * 2**20


def _column_blocks(rows: int, width: int, like: torch.Tensor, block: int | None = None) -> list[tuple[int, int]]:
    if rows * width * like.element_size() <= _SMALL_BUFFER:
        return [(0, width)]
    block = block or _COLUMN_BLOCK
    return [(begin, min(begin + block, width)) for begin in range(0, width, block)]


def _low_rank(rows, factor, order, offsets, top_k, *, gather=False, transpose=False):
    """Rows (M, K) times the thin factor of their expert, (M, R)."""
    rank = factor.shape[1] if transpose else factor.shape[2]
    out = rows.new_empty(order.numel(), rank)
    config = low_rank_config(rank)
    grouped_gemm(
        rows, factor, offsets, config, top_k=top_k, out=out, order=order, gather=gather, transpose_b=transpose
    )
    return out


def gathered_product(
    source: torch.Tensor,
    b: torch.Tensor,
    order: torch.Tensor,
    offsets: torch.Tensor,
    config: TileConfig,
    *,
    top_k: int,
    out: torch.Tensor | None = None,
    gated: torch.Tensor | None = None,
    low_rank: tuple[torch.Tensor, torch.Tensor] | None = None,
    **options: Any,
) -> None:
    """Rows of `source` (T, K) of every sorted assignment times their expert's matrix.

    With `config.presort` the rows are copied in order first, a slice at a time, and the product reads them by TMA.
    Further `options` are those of `grouped_gemm`.
    """
    M = order.numel()
    if not config.presort:
        options |= {"out": out, "gated": gated, "low_rank": low_rank, "top_k": top_k}
        grouped_gemm(source, b, offsets, config, order=order, gather=True, **options)
        return
    slices = cdiv(M * source.shape[1] * source.element_size(), _SLICE)
    step = M if slices == 1 else cdiv(M, 64 * slices) * 64  # aligned, and a tile never crosses without need
    copy = source.new_empty(step, source.shape[1])
    for begin in range(0, M, step):
        part = slice(begin, min(begin + step, M))
        own = offsets if step == M else offsets.clamp(part.start, part.stop).sub_(begin)
        rows = copy[: part.stop - begin]
        gather_rows(source, order[part], own, top_k, out=rows, padded=False)
        grouped_gemm(
            rows,
            b,
            own,
            config,
            top_k=top_k,
            out=None if out is None else out[part],
            gated=None if gated is None else gated[part],
            low_rank=None if low_rank is None else (low_rank[0][part], low_rank[1]),
            **options,
        )


def _product(
    kernel: str, a: torch.Tensor, b: torch.Tensor, offsets: torch.Tensor, order: torch.Tensor, **options: Any
) -> None:
    """One grouped product, compiled or by Triton. Further `options` are those of `grouped_gemm`."""
    M, experts = order.numel(), b.shape[0]
    low_rank = options.pop("low_rank", None)
    results = [options.get(name) for name in ("out", "gated", "bias")]
    if low_rank is None and compiled.takes(kernel, M, a, b, *results, weight=options.get("weight")):
        compiled.product(kernel, a, b, offsets, order=order, **options)
        return
    config = tile_config(kernel, M, experts, a)
    kind = compiled.KINDS[kernel]
    options |= {"transpose_b": kind["transpose_b"], "low_rank": low_rank}
    if kind["gather"]:
        gathered_product(a, b, order, offsets, config, **options)
    else:
        grouped_gemm(a, b, offsets, config, order=order, scatter=kind["scatter"], **options)


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
    gate_up = x.new_empty(M, width) if keep else None
    _product(
        "up" if keep else "up_eval",
        x,
        params.gate_up,
        offsets,
        order,
        top_k=top_k,
        out=gate_up,
        gated=hidden,
        low_rank=low,
        bias=params.gate_up_bias,
        alpha=activation.alpha,
        limit=activation.limit,
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
    adapted = params.lora_up_in is not None or params.lora_down_in is not None
    if index.numel() <= kernels_decode.MAX_ASSIGNMENTS and not keep and not adapted:
        nothing = x.new_empty(0)
        return kernels_decode.decode(x, index, weight, *params[:4], *activation), Saved(nothing, nothing, nothing)
    hidden, saved = to_hidden(x, index, params, activation, keep=keep)
    return from_hidden(hidden, saved, index, weight, params), saved


def to_hidden(
    x: torch.Tensor, index: torch.Tensor, params: ExpertParams, activation: Activation, *, keep: bool
) -> tuple[torch.Tensor, Saved]:
    """First half of `forward`: activated rows (M, I) and, with `keep`, what backward needs."""
    hidden = x.new_empty(index.numel(), params.down.shape[1])
    return hidden, first_product(x, index, params, activation, keep=keep, hidden=hidden)


def from_hidden(
    hidden: torch.Tensor, saved: Saved, index: torch.Tensor, weight: torch.Tensor, params: ExpertParams
) -> torch.Tensor:
    """Second half of `forward`: weighted sum of the experts' outputs, (T, H). Reads only the sort of `saved`."""
    tokens, top_k = index.shape
    experts, _, width = params.down.shape
    M = index.numel()
    low = None
    if params.lora_down_in is not None:
        low = _low_rank(hidden, params.lora_down_in, saved.order, saved.offsets, top_k), params.lora_down_out
    out = hidden.new_empty(tokens, width)
    takes = low is None and compiled.takes("down", M, hidden, params.down, params.down_bias, weight=weight)
    blocks = _column_blocks(M, width, hidden, _COMPILED_COLUMN_BLOCK if takes else None)
    buffer = hidden.new_empty(M, blocks[0][1])
    for begin, end in blocks:
        _product(
            "down",
            hidden,
            params.down,
            saved.offsets,
            saved.order,
            top_k=top_k,
            out=buffer[:, : end - begin],
            bias=params.down_bias,
            weight=weight,
            low_rank=low,
            columns=(begin, end),
        )
        combine(buffer, index, out[:, begin:end], experts)
    return out


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
        elif into is None and compiled.takes(kernel, M, a, b, out):
            compiled.wgrad(a, b, out, offsets, **padded)
            return
        else:
            config = tile_config(kernel, M, experts, x)
        grouped_wgrad(a, b, out, offsets, config, accumulate=into is not None, **padded)

    thin = None
    if params.lora_down_in is not None:
        thin = _low_rank(grad, params.lora_down_out, order, offsets, top_k, gather=True, transpose=True)
    d_hidden = x.new_empty(M, intermediate)
    product: dict[str, Any] = {"top_k": top_k, "out": d_hidden}
    if thin is not None:
        product["low_rank"] = thin, params.lora_down_in.transpose(1, 2).contiguous()
    partial = copy = None
    if needs.down_bias:
        partial = grad.new_empty(padded_rows(M, experts) // PAD, grad.shape[1], dtype=torch.float32)
    if needs.down:  # one sorted copy for this product and the weight gradient
        copy = grad.new_empty(padded_rows(M, experts), grad.shape[1])
        gather_rows(grad, order, offsets, top_k, out=copy, weight=weight, partial=partial)
        _product("grad_hidden_sorted", copy, params.down, offsets, order, padded_a=True, **product)
    else:
        _product("grad_hidden", grad, params.down, offsets, order, **product)
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
    d_lora = target("lora_down_out") if needs.lora_down_out else None
    if needs.down:
        wgrad("wgrad_down", weighted_hidden, copy, target("down"), padded_b=True)
        if needs.lora_down_out:
            wgrad("low", low, copy, d_lora, padded_b=True)
    elif needs.down_bias or needs.lora_down_out:
        blocks = _column_blocks(M, grad.shape[1], grad)
        if needs.lora_down_out:
            copy = grad.new_empty(padded_rows(M, experts), blocks[0][1])
        for begin, end in blocks:
            rows = None if copy is None else copy[:, : end - begin]
            part = None if partial is None else partial[:, begin:end]
            gather_rows(grad[:, begin:end], order, offsets, top_k, out=rows, weight=weight, partial=part)
            if needs.lora_down_out:
                wgrad("low", low, rows, d_lora[:, :, begin:end], padded_b=True)
            del rows, part  # views keep their buffer
    if needs.down_bias:
        sum_tiles(partial, offsets, target("down_bias"), into is not None)
    del copy, partial, product
    del weighted_hidden, d_hidden, dots, low

    thin = None
    if params.lora_up_in is not None:
        thin = _low_rank(d_gate_up, params.lora_up_out, order, offsets, top_k, transpose=True)
    low_rank = None if thin is None else (thin, params.lora_up_in.transpose(1, 2).contiguous())
    d_x = None
    if needs.x:
        rows = x.new_empty(M, x.shape[1])
        _product("grad_input", d_gate_up, params.gate_up, offsets, order, top_k=top_k, out=rows, low_rank=low_rank)
        d_x = torch.empty_like(x)
        combine(rows, index, d_x, experts)
        del rows
    if needs.gate_up or needs.lora_up_in:
        blocks = _column_blocks(M, x.shape[1], x, _COPY_BLOCK)
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
    if needs.lora_up_out:
        low = _low_rank(x, params.lora_up_in, order, offsets, top_k, gather=True)
        wgrad("low", low, d_gate_up, target("lora_up_out"))
    if into is not None:
        return Gradients(d_x, d_weight, *into)
    return Gradients(d_x, d_weight, *(found.get(name) for name in ExpertParams._fields))
