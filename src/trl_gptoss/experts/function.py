"""Autograd: the same two nodes for both paths, tiling over tokens, and custom operators for `torch.compile`.

Without tiling the biased first product is kept for backward. With `chunk` tokens per tile nothing but the inputs is
kept: backward recomputes the first product tile by tile, so the peak of forward and backward is that of one tile.

Everything backward needs is saved before the second product starts, by a node of its own. Non-reentrant checkpointing
ends its recomputation at the last saved tensor, and the experts are the last of a decoder layer to save any: the
second product is computed once, not twice, and with tiles the recomputation skips the experts altogether.
"""

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import ModuleType

import torch
from torch.autograd.function import once_differentiable

from . import torch_path
from .params import Activation, ExpertParams, Gradients, Needs, Saved, gradient_buffers

_TRITON_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def _path(x: torch.Tensor) -> ModuleType:
    if x.is_cuda and x.dtype in _TRITON_DTYPES:
        from . import cuda_path

        return cuda_path
    return torch_path


def _run_forward(x, index, weight, params, activation, chunk, keep) -> tuple[torch.Tensor, Saved]:
    path = _path(x)
    if index.numel() == 0:
        return torch.zeros_like(x), _nothing(x, index)
    with _undisturbed(x):
        if not chunk or chunk >= x.shape[0]:
            out, saved = path.forward(x, index, weight, params, activation, keep=keep and not chunk)
            return out, saved if keep and not chunk else _nothing(x, index)
        out = torch.empty_like(x)
        for tile in _tiles(x.shape[0], chunk):
            out[tile] = path.forward(x[tile], index[tile], weight[tile], params, activation, keep=False)[0]
    return out, _nothing(x, index)


def _first_half(x, index, params, activation, chunk) -> tuple[torch.Tensor, Saved]:
    """Activated rows for `_second_half` and what backward needs; nothing with tiles."""
    if chunk or index.numel() == 0:
        return x.new_empty(0), _nothing(x, index)
    with _undisturbed(x):
        return _path(x).to_hidden(x, index, params, activation, keep=True)


def _second_half(hidden, saved, x, index, weight, params, activation, chunk) -> torch.Tensor:
    if chunk or index.numel() == 0:
        return _run_forward(x, index, weight, params, activation, chunk, keep=False)[0]
    with _undisturbed(x):
        return _path(x).from_hidden(hidden, saved, index, weight, params)


def _nothing(x: torch.Tensor, index: torch.Tensor) -> Saved:
    return Saved(x.new_empty(0), index.new_empty(0), index.new_empty(0))


def _run_backward(grad, x, index, weight, params, activation, saved, needs, chunk) -> Gradients:
    path = _path(x)
    if index.numel() == 0:
        empty = torch.zeros_like(weight) if needs.weight else None
        return Gradients(torch.zeros_like(x) if needs.x else None, empty, *gradient_buffers(params, needs, None, True))
    grad = grad.contiguous()
    with _undisturbed(x):
        if chunk >= x.shape[0]:  # one tile needs no sums
            saved = path.first_product(x, index, params, activation, keep=True, hidden=None)
        if not chunk or chunk >= x.shape[0]:
            return path.backward(grad, x, index, weight, params, activation, saved, needs)
        wide = torch.promote_types(x.dtype, torch.float32)
        sums = gradient_buffers(params, needs, wide, zero=True)
        parts = []
        for tile in _tiles(x.shape[0], chunk):
            inputs = x[tile], index[tile], weight[tile], params, activation
            again = path.first_product(x[tile], index[tile], params, activation, keep=True, hidden=None)
            part = path.backward(grad[tile], *inputs, again, needs, into=sums)
            parts.append((part.x, part.weight))
            del again
        d_x = torch.cat([part for part, _ in parts]) if needs.x else None
        d_weight = torch.cat([part for _, part in parts]) if needs.weight else None
        cast = (s if s is None else s.to(p.dtype) for s, p in zip(sums, params, strict=True))
        return Gradients(d_x, d_weight, *cast)


def _tiles(tokens: int, chunk: int) -> list[slice]:
    return [slice(start, min(start + chunk, tokens)) for start in range(0, tokens, chunk)]


def _undisturbed(x: torch.Tensor) -> AbstractContextManager:
    """Autocast off and the device of `x` current; nothing at all where that already holds (decoding)."""
    if torch.is_autocast_enabled(x.device.type):
        return _without_autocast(x)
    if x.is_cuda and torch.cuda.current_device() != x.device.index:
        return torch.cuda.device(x.device)
    return nullcontext()


@contextmanager
def _without_autocast(x: torch.Tensor) -> Iterator[None]:
    with torch.autocast(x.device.type, enabled=False), torch.cuda.device_of(x):
        yield


class _Experts(torch.autograd.Function):
    """First half of forward, and the whole of backward.

    Inputs: x (T, H), index (T, k), weight (T, k), the eight tensors of `ExpertParams`, activation, tile size. Outputs:
    a (T, H) stand-in of one stored element, through which the gradient arrives, and what the second half needs.
    """

    @staticmethod
    def forward(ctx, x, index, weight, *rest):
        *tensors, activation, chunk = rest
        hidden, saved = _first_half(x, index, ExpertParams(*tensors), activation, chunk)
        ctx.save_for_backward(x, index, weight, *tensors, *saved)
        ctx.activation, ctx.chunk, ctx.consumed = activation, chunk, False
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(hidden, saved.order, saved.offsets)
        return x.new_empty_strided(x.shape, (0, 0)), hidden, saved.order, saved.offsets

    @staticmethod
    @once_differentiable
    def backward(ctx, grad, *_):
        x, index, weight, *tensors, gate_up, order, offsets = ctx.saved_tensors
        if ctx.consumed:
            raise RuntimeError(
                "gptoss_fused: backward ran a second time through the same forward. The first backward overwrites the "
                "saved product to save memory. Run the forward again, or set a tile size with "
                "`set_experts_token_chunk(model, n)`: tiles are recomputed and can be differentiated repeatedly."
            )
        ctx.consumed = not ctx.chunk and x.is_cuda
        needs = Needs(ctx.needs_input_grad[0], *ctx.needs_input_grad[2:11])
        saved = Saved(gate_up, order, offsets)
        params = ExpertParams(*tensors)
        grads = _run_backward(grad, x, index, weight, params, ctx.activation, saved, needs, ctx.chunk)
        return grads.x, None, *grads[1:], None, None


class _Output(torch.autograd.Function):
    """Second half of forward; saves nothing and hands the gradient of its output to `_Experts`."""

    @staticmethod
    def forward(ctx, stand_in: torch.Tensor, compute: Callable[[], torch.Tensor]) -> torch.Tensor:
        return compute()

    @staticmethod
    def backward(ctx, grad):
        return grad, None


def fused_experts(
    x: torch.Tensor,
    index: torch.Tensor,
    weight: torch.Tensor,
    params: ExpertParams,
    activation: Activation,
    chunk: int = 0,
) -> torch.Tensor:
    """Weighted sum of the chosen experts' outputs.

    Args:
        x (`(T, H)`): Tokens, in the dtype of the parameters.
        index (`(T, k)`, integer): Chosen experts. Values outside `[0, E)` are skipped: they add nothing and get a zero
            router gradient.
        weight (`(T, k)`, floating): Router weights, any floating dtype.
        params (`ExpertParams`): Parameters in one dtype.
        activation (`Activation`): Slope and clamp.
        chunk (`int`, *optional*, defaults to 0): Tokens per tile; 0 for no tiling.

    Returns:
        `torch.Tensor`: `(T, H)` in the dtype of `x`.
    """
    index, weight = index.contiguous(), weight.contiguous()
    x = x.contiguous()
    if torch.compiler.is_compiling():
        from .operators import compiled_experts

        return compiled_experts(x, index, weight, params, activation, chunk)
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (x, weight, *params)):
        stand_in, hidden, *sort = _Experts.apply(x, index, weight, *params, activation, chunk)
        saved = Saved(x.new_empty(0), *sort)
        half = functools.partial(_second_half, hidden, saved, x, index, weight, params, activation, chunk)
        return _Output.apply(stand_in, half)
    if not chunk and index.numel():  # without the empty tensors of `_run_forward`: decoding waits for the host
        with _undisturbed(x):
            return _path(x).forward(x, index, weight, params, activation, keep=False)[0]
    return _run_forward(x, index, weight, params, activation, chunk, keep=False)[0]
