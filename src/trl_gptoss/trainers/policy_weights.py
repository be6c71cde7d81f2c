"""The policy as an inference engine wants it: every tensor of the checkpoint, whole, LoRA merged, one at a time.

    trainer                                                       engine
    model.layers.0.self_attn.q_proj.base_layer.weight   W  ]
    ...q_proj.lora_A.default.weight, ...lora_B...       A,B]  ->  model.layers.0.self_attn.q_proj.weight   W + s B A
    model.layers.0.mlp.experts...gate_up_proj, sharded         ->  model.layers.0.mlp.experts.gate_up_proj

Adapters are merged into a copy, in float32, and the base weights are never touched: PEFT's merge and unmerge round bf16
base weights a little further at each sync. Sharded tensors (FSDP2, ZeRO-3) are gathered and given up one by one.
"""

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from accelerate.utils import is_peft_model
from torch import nn
from torch.distributed.tensor import DTensor
from trl.distributed import DistributedBackend

if TYPE_CHECKING:
    from peft.tuners.lora import LoraLayer

_WRAPPERS = ("_checkpoint_wrapped_module.", "_orig_mod.", "base_layer.")


@dataclass(kw_only=True, slots=True)
class _Tensor:
    """One tensor of the checkpoint: its parameter, and the adapters on top of it as (layer, adapter name)."""

    name: str
    parameter: nn.Parameter
    adapters: "list[tuple[LoraLayer, str]]" = field(default_factory=list)


class PolicyWeights:
    """Iterable over (name, tensor) of the policy as it is now.

    Iterating is a collective: gathering a sharded tensor needs every rank. A tensor may be memory that is given up when
    the next one is asked for.

    Args:
        model (`torch.nn.Module`): the policy, without DDP's wrapper; a PEFT model, sharded by FSDP2 or ZeRO-3, or plain.
        sharding ([`~trl.distributed.DistributedBackend`]): how it is sharded.
    """

    def __init__(self, model: nn.Module, sharding: DistributedBackend) -> None:
        if sharding.fsdp_version == 1:
            raise NotImplementedError(
                "FSDP version 1 cannot be kept in sync with vLLM. Set fsdp_version: 2 (configs/accelerate/fsdp2.yaml)."
            )
        self.model = model
        self.sharding = sharding

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        for entry in self._entries():
            parts = [entry.parameter] + [p for layer, name in entry.adapters for p in _factors(layer, name)]
            with ExitStack() as stack, torch.no_grad():
                stack.enter_context(self.sharding.gather_params(parts))
                whole = [_whole(part) for part in parts]
                tensor = whole[0]
                if entry.adapters:
                    tensor = _merged(tensor, entry.adapters, whole[1:])
                yield entry.name, tensor

    def _entries(self) -> list[_Tensor]:
        model = self.model.get_base_model() if is_peft_model(self.model) else self.model
        adapters = _active_adapters(model) if is_peft_model(self.model) else {}
        entries = []
        for name, parameter in model.named_parameters():
            if ".lora_" in name or ".original_module." in name:
                continue
            entries.append(
                _Tensor(name=_checkpoint_name(name), parameter=parameter, adapters=adapters.get(id(parameter), []))
            )
        return entries


def _checkpoint_name(name: str) -> str:
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    head, found, tail = name.partition("modules_to_save.")
    return head + tail.partition(".")[2] if found else name  # "lm_head.modules_to_save.default.weight"


def _active_adapters(model: nn.Module) -> "dict[int, list[tuple[LoraLayer, str]]]":
    """The adapters on each parameter, by the parameter's id.

    Raises:
        NotImplementedError: an adapter of a kind that cannot be merged here.
    """
    from peft.tuners.lora import LoraLayer, ParamWrapper
    from peft.tuners.tuners_utils import BaseTunerLayer

    found: dict[int, list[tuple[LoraLayer, str]]] = {}
    for path, module in model.named_modules():
        if not isinstance(module, BaseTunerLayer) or module.disable_adapters or module.merged:
            continue
        base = module.get_base_layer()
        if (
            not isinstance(module, LoraLayer)
            or not isinstance(module, ParamWrapper)
            and not isinstance(base, nn.Linear)
        ):
            raise NotImplementedError(
                f"{path} is adapted by {type(module).__name__} on {type(base).__name__}; only LoRA on linear layers and "
                "on expert parameters can be merged for vLLM."
            )
        parameter = module.get_param() if isinstance(module, ParamWrapper) else base.weight
        for name in module.active_adapters:
            if name not in module.lora_A:
                continue
            if name in module.lora_variant or module.lora_bias[name]:
                raise NotImplementedError(
                    f"The adapter {name!r} of {path} uses DoRA, a bias or another variant of LoRA, which cannot be "
                    "merged for vLLM. Use plain LoRA (or rslora)."
                )
            found.setdefault(id(parameter), []).append((module, name))
    return found


def _factors(layer: "LoraLayer", name: str) -> list[nn.Parameter]:
    return [layer.lora_A[name].weight, layer.lora_B[name].weight]


def _whole(parameter: torch.Tensor) -> torch.Tensor:
    data = parameter.detach()
    return data.full_tensor() if isinstance(data, DTensor) else data


def _merged(base: torch.Tensor, adapters: "list[tuple[LoraLayer, str]]", factors: list[torch.Tensor]) -> torch.Tensor:
    """`base` with all adapters added, computed in float32 and rounded once."""
    total = base.float() if base.dtype != torch.float64 else base.clone()
    if total.data_ptr() == base.data_ptr():
        total = total.clone()
    for (layer, name), down, up in zip(adapters, factors[::2], factors[1::2], strict=True):
        total += _delta(layer, down.to(total.dtype), up.to(total.dtype), layer.scaling[name], base.ndim)
    return total.to(base.dtype)


def _delta(layer: "LoraLayer", down: torch.Tensor, up: torch.Tensor, scaling: float, ndim: int) -> torch.Tensor:
    """What the adapter adds: (out, in) for a linear layer, the shape of the parameter for experts.

    Args:
        down (`torch.Tensor`): (rank, in), or (experts * rank, in), experts outermost.
        up (`torch.Tensor`): (out, rank), or (out, rank * experts), experts innermost.
    """
    if ndim == 2:
        delta = up @ down * scaling
        return delta.T if layer.fan_in_fan_out else delta
    down_ERI = down.reshape(layer.num_experts, -1, down.shape[-1])
    up_EOR = up.reshape(up.shape[0], -1, layer.num_experts).permute(2, 0, 1)
    delta_EOI = up_EOR @ down_ERI * scaling
    # GPT-OSS stores (experts, in, out).
    return delta_EOI if layer._did_swap_in_out_features else delta_EOI.transpose(1, 2)
