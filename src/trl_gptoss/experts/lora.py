"""LoRA on expert parameters, computed beside the grouped product instead of inside the weight.

PEFT adapts `mlp.experts.gate_up_proj` and `mlp.experts.down_proj` with `lora.ParamWrapper`, which parametrises the
parameter as W + scaling * A @ B for the duration of a forward: the sum of all experts is materialised (and once more
by the check inside `register_parametrization`). `fuse_expert_lora` replaces that by handing the two factors to
`gptoss_fused`. Adapter weights, names, saved files, merging and switching stay PEFT's.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn
from torch.nn.utils import parametrize

Factors = tuple[torch.Tensor, torch.Tensor, float]

_MIN_RANK = 16  # smallest contraction of the matrix units


class _Active(threading.local):
    """Factors of the adapters whose forward is running, by (module id, parameter name)."""

    def __init__(self) -> None:
        self.factors: dict[tuple[int, str], list[Factors]] = {}


_ACTIVE = _Active()


def may_be_adapted(module: nn.Module) -> bool:
    """Whether an adapter of some module is active or a parameter of this one is parametrised."""
    return bool(_ACTIVE.factors) or parametrize.is_parametrized(module)


def plain_parameter(module: nn.Module, name: str) -> torch.Tensor:
    """The parameter without its low-rank update."""
    if parametrize.is_parametrized(module, name):
        return module.parametrizations[name].original
    return module._parameters[name]


def low_rank_factors(
    module: nn.Module, name: str, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor] | tuple[None, None]:
    """Factors (E, in, R) and (E, R, out) of all active adapters of one parameter, scaling in the second.

    Several adapters are stacked along the rank; R is padded with zeros to a power of two of at least 16.
    """
    active = [*_ACTIVE.factors.get((id(module), name), ())]
    if parametrize.is_parametrized(module, name):
        active += [_proxy_factors(module, name, proxy) for proxy in module.parametrizations[name]]
    if not active:
        return None, None
    left = torch.cat([lhs.to(dtype) for lhs, _, _ in active], dim=2)
    right = torch.cat([rhs.to(dtype) * scaling for _, rhs, scaling in active], dim=1)
    rank = left.shape[2]
    padding = max(_MIN_RANK, 1 << (rank - 1).bit_length()) - rank
    if padding:
        left = nn.functional.pad(left, (0, padding))
        right = nn.functional.pad(right, (0, 0, 0, padding))
    return left.contiguous(), right.contiguous()


def _proxy_factors(module: nn.Module, name: str, proxy: nn.Module) -> Factors:
    from peft.tuners.lora.layer import _LoraFactorsProxy

    if not isinstance(proxy, _LoraFactorsProxy):
        raise TypeError(
            f"gptoss_fused: parameter {name!r} of {type(module).__name__} is parametrised by {type(proxy).__name__}, "
            "which is not a low-rank update. Call `trl_gptoss.experts.fuse_expert_lora(model)` for several PEFT "
            "adapters at once, or use experts_implementation='grouped_mm'."
        )
    return proxy.lhs, proxy.rhs, proxy.scaling


@contextmanager
def _active(module: nn.Module, name: str, factors: list[Factors]) -> Iterator[None]:
    key = (id(module), name)
    _ACTIVE.factors[key] = factors
    try:
        yield
    finally:
        del _ACTIVE.factors[key]


def _fused_wrapper() -> type[nn.Module]:
    """Subclass of PEFT's wrapper, made on first use because PEFT is an optional dependency."""
    from peft.tuners.lora import ParamWrapper

    class FusedParamWrapper(ParamWrapper):
        """Hands `(A, B, scaling)` to `gptoss_fused`. Overrides `_activate_lora`, which parametrises the weight."""

        @contextmanager
        def _activate_lora(self, active_adapters: list[str]) -> Iterator[None]:
            module = self.get_base_layer()
            adapters = [name for name in active_adapters if name in self.lora_A]
            if module.config._experts_implementation != "gptoss_fused":
                with super()._activate_lora(active_adapters):
                    yield
            elif adapters:
                with _active(module, self.parameter_name, [self.get_delta_factors(name) for name in adapters]):
                    yield
            else:
                yield

    # PEFT recognises nested wrappers by this class name when a further adapter is added.
    FusedParamWrapper.__name__ = ParamWrapper.__name__
    return FusedParamWrapper


def fuse_expert_lora(model: nn.Module) -> int:
    """Compute the LoRA of expert parameters beside the grouped product.

    Call it after `get_peft_model` or `PeftModel.from_pretrained` with
    `target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]`. The state dict does not change. Without
    the call `gptoss_fused` still reads PEFT's factors, but PEFT materialises the adapted weight once per forward.

    Args:
        model (`torch.nn.Module`): A PEFT model.

    Returns:
        `int`: Number of adapted parameters that now run fused.
    """
    from peft.tuners.lora import ParamWrapper
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

    fused = _fused_wrapper()
    wrappers = [
        module
        for module in model.modules()
        if type(module) is ParamWrapper and isinstance(module.get_base_layer(), GptOssExperts)
    ]
    for wrapper in wrappers:
        wrapper.__class__ = fused
    return len(wrappers)
