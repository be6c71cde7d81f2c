"""Forward and backward of the experts in plain PyTorch: the CPU path, and the path of dtypes without tensor cores.

The same sorted order and the same memory law as on CUDA: only the biased first product (M, 2 I) lives between forward
and backward. Needs the token counts on the host, so on a GPU it waits for the device once per layer.

Shape legend: T tokens, k = top_k, M = T * k assignments, H hidden, I intermediate.
"""

import torch
from torch.nn import functional

from .params import Activation, ExpertParams, Gradients, Needs, Saved, gradient_buffers


def sort_by_expert(index: torch.Tensor, num_experts: int) -> tuple[torch.Tensor, torch.Tensor]:
    """`order` (M,) int64 and `offsets` (E + 1,) int64 as in `kernels_route`; foreign experts sort to the end."""
    flat = index.reshape(-1)
    flat = torch.where((flat < 0) | (flat >= num_experts), num_experts, flat)
    order = flat.argsort(stable=True)
    offsets = flat.new_zeros(num_experts + 1)
    offsets[1:] = torch.bincount(flat, minlength=num_experts + 1)[:num_experts].cumsum(0)
    return order, offsets


def _segments(offsets: torch.Tensor) -> list[tuple[int, slice]]:
    bounds = offsets.tolist()
    return [(e, slice(a, b)) for e, (a, b) in enumerate(zip(bounds, bounds[1:])) if a < b]


def _activate(gate_up: torch.Tensor, activation: Activation) -> torch.Tensor:
    """Clamped SwiGLU in fp32 (fp64 stays), interleaved (rows, 2 I) to (rows, I)."""
    wide = gate_up.double() if gate_up.dtype == torch.float64 else gate_up.float()
    gate = wide[:, ::2].clamp(max=activation.limit)
    linear = wide[:, 1::2].clamp(-activation.limit, activation.limit)
    glu = functional.silu(gate.mul_(activation.alpha))  # alpha * gate * sigmoid(alpha * gate)
    return linear.add_(1).mul_(glu).mul_(1 / activation.alpha).to(gate_up.dtype)


def _activate_backward(
    gate_up: torch.Tensor, grad: torch.Tensor, weight: torch.Tensor, activation: Activation
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradient of `gate_up`, the activation times the router weight, and <activation, grad> per row."""
    dtype = torch.float64 if gate_up.dtype == torch.float64 else torch.float32
    alpha, limit = activation
    wide, grad = gate_up.to(dtype), grad.to(dtype)
    raw_gate, raw_linear = wide[:, ::2], wide[:, 1::2]
    scaled, linear = raw_gate.clamp(max=limit).mul_(alpha), raw_linear.clamp(-limit, limit).add_(1)
    glu = functional.silu(scaled).mul_(1 / alpha)
    hidden = linear * glu
    dot = torch.linalg.vecdot(hidden, grad)
    grad = grad * weight
    d_wide = torch.empty_like(wide)
    d_gate = torch.ops.aten.silu_backward(linear.mul_(grad), scaled)
    torch.mul(d_gate, raw_gate <= limit, out=d_wide[:, ::2])
    torch.mul(glu.mul_(grad), raw_linear.abs() <= limit, out=d_wide[:, 1::2])
    return d_wide, hidden.mul_(weight), dot


def first_product(
    x: torch.Tensor, index: torch.Tensor, params: ExpertParams, activation: Activation, *, keep: bool, hidden=None
) -> Saved:
    """Sort, then x @ gate_up + bias for every assignment."""
    experts, _, width = params.gate_up.shape
    order, offsets = sort_by_expert(index, experts)
    segments = _segments(offsets)
    rows = segments[-1][1].stop if segments else 0
    tokens = order[:rows] // index.shape[1]
    gate_up = x.new_empty(rows, width)
    for e, part in segments:
        inputs = x[tokens[part]]
        torch.addmm(params.gate_up_bias[e], inputs, params.gate_up[e], out=gate_up[part])
        if params.lora_up_in is not None:
            gate_up[part].addmm_(inputs @ params.lora_up_in[e], params.lora_up_out[e])
    return Saved(gate_up, order, offsets)


def forward(
    x: torch.Tensor,
    index: torch.Tensor,
    weight: torch.Tensor,
    params: ExpertParams,
    activation: Activation,
    *,
    keep: bool,
) -> tuple[torch.Tensor, Saved]:
    """Output (T, H) and what backward needs."""
    hidden, saved = to_hidden(x, index, params, activation, keep=keep)
    return from_hidden(hidden, saved, index, weight, params), saved


def to_hidden(
    x: torch.Tensor, index: torch.Tensor, params: ExpertParams, activation: Activation, *, keep: bool
) -> tuple[torch.Tensor, Saved]:
    """First half of `forward`: activated rows (M, I) and what backward needs."""
    saved = first_product(x, index, params, activation, keep=keep)
    hidden = _activate(saved.gate_up, activation)
    return hidden, saved if keep else Saved(x.new_empty(0), saved.order, saved.offsets)


def from_hidden(
    hidden: torch.Tensor, saved: Saved, index: torch.Tensor, weight: torch.Tensor, params: ExpertParams
) -> torch.Tensor:
    """Second half of `forward`: weighted sum of the experts' outputs, (T, H). Reads only the sort of `saved`."""
    tokens, top_k = index.shape
    rows = hidden.shape[0]
    products = hidden.new_empty(rows, params.down.shape[2])
    for e, part in _segments(saved.offsets):
        torch.addmm(params.down_bias[e], hidden[part], params.down[e], out=products[part])
        if params.lora_down_in is not None:
            products[part].addmm_(hidden[part] @ params.lora_down_in[e], params.lora_down_out[e])
    order = saved.order[:rows]
    products.mul_(weight.reshape(-1)[order].unsqueeze(1))
    return _sum_slots(products, order, tokens, top_k)


def _sum_slots(rows: torch.Tensor, order: torch.Tensor, tokens: int, top_k: int) -> torch.Tensor:
    """Sum sorted rows (M, H) over the slots of their token, (T, H)."""
    complete = rows.shape[0] == tokens * top_k
    by_slot = (rows.new_empty if complete else rows.new_zeros)(tokens * top_k, rows.shape[1])
    by_slot[order] = rows
    return by_slot.view(tokens, top_k, -1).sum(1)


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
    """Gradients of one layer; with `into`, parameter gradients are added to those buffers."""
    segments = _segments(saved.offsets)
    rows = saved.gate_up.shape[0]
    tokens, top_k = index.shape
    order = saved.order[:rows]
    source = order // top_k
    weights = weight.reshape(-1)[order].unsqueeze(1)
    out = into if into is not None else gradient_buffers(params, needs, None, zero=True)
    dots = (
        weight.new_zeros(tokens * top_k, dtype=torch.promote_types(x.dtype, torch.float32)) if needs.weight else None
    )
    d_rows = x.new_empty(rows, x.shape[1]) if needs.x else None
    for e, part in segments:
        grads = grad[source[part]]
        d_hidden = grads @ params.down[e].T
        thin = None
        if params.lora_down_in is not None:
            thin = grads @ params.lora_down_out[e].T
            d_hidden.addmm_(thin, params.lora_down_in[e].T)
        d_wide, hidden, dot = _activate_backward(saved.gate_up[part], d_hidden, weights[part], activation)
        if needs.weight:
            dots[order[part]] = dot + grads.to(dot.dtype) @ params.down_bias[e].to(dot.dtype)
        if needs.gate_up_bias:
            out.gate_up_bias[e] += d_wide.sum(0)
        if needs.down_bias:
            out.down_bias[e] += weights[part, 0].to(dot.dtype) @ grads.to(dot.dtype)
        d_gate_up, hidden = d_wide.to(x.dtype), hidden.to(x.dtype)
        if needs.down:
            out.down[e] += hidden.T @ grads
        if needs.lora_down_in:
            out.lora_down_in[e] += hidden.T @ thin
        if needs.lora_down_out:
            out.lora_down_out[e] += (hidden @ params.lora_down_in[e]).T @ grads
        if needs.gate_up or needs.lora_up_in or needs.lora_up_out:
            inputs = x[source[part]]
        if needs.gate_up:
            out.gate_up[e] += inputs.T @ d_gate_up
        if needs.lora_up_out:
            out.lora_up_out[e] += (inputs @ params.lora_up_in[e]).T @ d_gate_up
        if params.lora_up_in is not None:
            thin = d_gate_up @ params.lora_up_out[e].T
            if needs.lora_up_in:
                out.lora_up_in[e] += inputs.T @ thin
        if needs.x:
            torch.mm(d_gate_up, params.gate_up[e].T, out=d_rows[part])
            if params.lora_up_in is not None:
                d_rows[part].addmm_(thin, params.lora_up_in[e].T)
    d_x = _sum_slots(d_rows, order, tokens, top_k) if needs.x else None
    d_weight = dots.view(tokens, top_k).to(weight.dtype) if needs.weight else None
    return Gradients(d_x, d_weight, *out)
