"""`torch.library` operators with fake implementations, so that `torch.compile(fullgraph=True)` sees one opaque node.

Operators may not change their inputs, so the compiled backward works on a copy of the saved product: 2 I more values
per assignment than eager mode at the peak.
"""

import torch

from .function import _run_backward, _run_forward
from .params import Activation, ExpertParams, Needs, Saved

_TENSORS = (
    "Tensor x, Tensor index, Tensor weight, Tensor gate_up, Tensor gate_up_bias, Tensor down, Tensor down_bias, "
    "Tensor? lora_up_in, Tensor? lora_up_out, Tensor? lora_down_in, Tensor? lora_down_out"
)
_LIBRARY = torch.library.Library("trl_gptoss", "FRAGMENT")
_LIBRARY.define(
    f"experts({_TENSORS}, float alpha, float limit, int chunk, bool keep) -> (Tensor, Tensor, Tensor, Tensor)"
)
_LIBRARY.define(
    f"experts_backward(Tensor grad, {_TENSORS}, Tensor saved, Tensor order, Tensor offsets, float alpha, float limit, "
    "int chunk, bool[] needs) -> Tensor[]"
)


def _experts(x, index, weight, *rest):
    *tensors, alpha, limit, chunk, keep = rest
    params = ExpertParams(*tensors)
    out, saved = _run_forward(x, index, weight, params, Activation(alpha, limit), chunk, keep)
    return out, *saved


def _experts_fake(x, index, weight, *rest):
    gate_up, chunk, keep = rest[0], rest[-2], rest[-1]
    kept = keep and not chunk
    integer = torch.int32 if x.is_cuda and kept else index.dtype
    saved = x.new_empty((index.numel(), gate_up.shape[2]) if kept else 0)
    order = index.new_empty(index.numel() if kept else 0, dtype=integer)
    offsets = index.new_empty(gate_up.shape[0] + 1 if kept else 0, dtype=integer)
    return torch.empty_like(x), saved, order, offsets


def _experts_backward(grad, x, index, weight, *rest):
    *tensors, saved, order, offsets, alpha, limit, chunk, needs = rest
    params = ExpertParams(*tensors)
    kept = Saved(saved.clone() if x.is_cuda else saved, order, offsets)
    activation = Activation(alpha, limit)
    grads = _run_backward(grad, x, index, weight, params, activation, kept, Needs(*needs), chunk)
    return [g if g is not None else x.new_empty(0) for g in grads]


def _experts_backward_fake(grad, x, index, weight, *rest):
    tensors, needs = rest[:8], rest[-1]
    inputs = (x, weight, *tensors)
    return [torch.empty_like(t) if need else x.new_empty(0) for t, need in zip(inputs, needs, strict=True)]


def _setup(ctx, inputs, output):
    *tensors, ctx.alpha, ctx.limit, ctx.chunk, _ = inputs
    ctx.save_for_backward(*tensors, *output[1:])
    ctx.set_materialize_grads(False)


def _autograd(ctx, grad, *_):
    needs = [ctx.needs_input_grad[0], *ctx.needs_input_grad[2:11]]
    grads = torch.ops.trl_gptoss.experts_backward(grad, *ctx.saved_tensors, ctx.alpha, ctx.limit, ctx.chunk, needs)
    grads = [g if need else None for g, need in zip(grads, needs, strict=True)]
    return grads[0], None, *grads[1:], None, None, None, None


_LIBRARY.impl("experts", _experts, "CompositeExplicitAutograd")
_LIBRARY.impl("experts_backward", _experts_backward, "CompositeExplicitAutograd")
torch.library.register_fake("trl_gptoss::experts", _experts_fake, lib=_LIBRARY)
torch.library.register_fake("trl_gptoss::experts_backward", _experts_backward_fake, lib=_LIBRARY)
torch.library.register_autograd("trl_gptoss::experts", _autograd, setup_context=_setup, lib=_LIBRARY)


def compiled_experts(
    x: torch.Tensor,
    index: torch.Tensor,
    weight: torch.Tensor,
    params: ExpertParams,
    activation: Activation,
    chunk: int,
) -> torch.Tensor:
    """`fused_experts` as an operator."""
    keep = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (x, weight, *params))
    return torch.ops.trl_gptoss.experts(x, index, weight, *params, *activation, chunk, keep)[0]
