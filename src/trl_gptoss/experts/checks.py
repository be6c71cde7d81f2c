"""Do the grouped products compute what they should, on this machine, now? A second before a training run."""

import torch

from . import compiled
from .function import fused_experts
from .params import Activation, ExpertParams

# relative errors (norms); a layer in bfloat16 is off by 2-5e-3, lost rows or a wrong expert by 1e-1 to 1
_TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1.5e-2}
_ACTIVATION = Activation(1.702, 7.0)
_NAMES = ("out", "dx", "dweight", "dgate_up", "dgate_up_bias", "ddown", "ddown_bias")


def selftest(device: torch.device | str | None = None) -> dict[str, float]:
    """Compare the output and all gradients of a small layer with float64, with enough rows for the compiled products.

    Args:
        device (`torch.device` or `str`, *optional*): Defaults to the current CUDA device, else the CPU.

    Returns:
        `dict[str, float]`: Relative error of each.

    Raises:
        `RuntimeError`: An error exceeds its tolerance, or is not a number.
    """
    device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    tokens = 8 if device.type == "cpu" else 1111
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int, scale: float = 1.0) -> torch.Tensor:
        return (torch.randn(shape, generator=generator) * scale).to(device, dtype)

    E, H, I = 2, 208, 272  # noqa: E741
    params = ExpertParams(
        normal(E, H, 2 * I, scale=H**-0.5), normal(E, 2 * I), normal(E, I, H, scale=I**-0.5), normal(E, H)
    )
    index = torch.rand(tokens, E, generator=generator).argsort(1).to(device)
    weight = torch.rand(tokens, E, generator=generator).to(device, dtype)
    x, grad = normal(tokens, H), normal(tokens, H)
    got = _run(
        lambda *t: fused_experts(*t[:1], index, t[1], ExpertParams(*t[2:]), _ACTIVATION), x, weight, params, grad
    )
    want = _run(
        lambda *t: _formula(*t[:1], index.cpu(), t[1], ExpertParams(*t[2:])),
        *(t.double().cpu() for t in (x, weight)),
        ExpertParams(*(t if t is None else t.double().cpu() for t in params)),
        grad.double().cpu(),
    )
    errors = {}
    for name, found, expected in zip(_NAMES, got, want, strict=True):
        errors[name] = float((found.double().cpu() - expected).norm() / expected.norm())
        if not errors[name] <= _TOLERANCE[dtype]:
            raise RuntimeError(
                f"gptoss_fused self-test failed on {device}: relative error of {errors[name]:.1e} in {name} (at most "
                f"{_TOLERANCE[dtype]:.0e} expected; products: {compiled.active_products(device, dtype)}). Try "
                f"{compiled.ENV}=triton, and report this."
            )
    return errors


def _run(layer, x, weight, params, grad) -> list[torch.Tensor]:
    leaves = [t.detach().requires_grad_() for t in (x, weight, *params[:4])]
    with torch.enable_grad():
        out = layer(*leaves)
        return [out.detach(), *torch.autograd.grad(out, leaves, grad)]


def _formula(x, index, weight, params) -> torch.Tensor:
    """Every expert on every token, by autograd."""
    product = torch.einsum("th,ehn->ten", x, params.gate_up) + params.gate_up_bias
    gate, linear = product[..., ::2].clamp(max=_ACTIVATION.limit), product[..., 1::2]
    hidden = (linear.clamp(-_ACTIVATION.limit, _ACTIVATION.limit) + 1) * gate * torch.sigmoid(_ACTIVATION.alpha * gate)
    out = torch.einsum("tei,eih->teh", hidden, params.down) + params.down_bias
    return (out.gather(1, index[..., None].expand(-1, -1, out.shape[2])) * weight[..., None]).sum(1)
