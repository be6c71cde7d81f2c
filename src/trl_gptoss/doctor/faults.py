"""What may be different, each as a change to the trainer's model that makes it compute what the other side would.

The doctor asks of every fault: if the trainer had it, too, would the two sides agree? Nothing has to be known about the
engine but its log-probs.
"""

import copy
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from accelerate.utils import is_peft_model
from torch import nn
from transformers import PreTrainedModel
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssRotaryEmbedding

from .scoring import Reading

if TYPE_CHECKING:
    from peft import PeftModel

Change = Callable[[PreTrainedModel], AbstractContextManager[PreTrainedModel]]


@contextmanager
def _unchanged(model: PreTrainedModel) -> Iterator[PreTrainedModel]:
    yield model


def _as_it_is(reading: Reading) -> Reading:
    return reading


@dataclass(kw_only=True, frozen=True)
class Fault:
    """A hypothesis.

    culprit (`str`): short name of what is wrong.
    finding (`str`): what holds if it explains the mismatch.
    fix (`str`): what to do then.
    change (`Callable[[PreTrainedModel], ContextManager[PreTrainedModel]]`): gives the trainer's model the same fault.
    reading (`Callable[[Reading], Reading]`): the same for how log-probs are read.
    """

    culprit: str
    finding: str
    fix: str
    change: Change = _unchanged
    reading: Callable[[Reading], Reading] = _as_it_is


def _parameters(model: nn.Module, ending: str) -> dict[str, nn.Parameter]:
    return {name: p for name, p in model.named_parameters() if name.endswith(ending)}


def _with_values(ending: str, value_of: Callable[[str, torch.Tensor], torch.Tensor | float]) -> Change:
    """Other values in all parameters whose name ends with `ending`."""

    @contextmanager
    def change(model: PreTrainedModel) -> Iterator[PreTrainedModel]:
        kept = {name: p.detach().clone() for name, p in _parameters(model, ending).items()}
        with torch.no_grad():
            for name, p in _parameters(model, ending).items():
                value = value_of(name, kept[name])
                p.copy_(value.to(p.dtype)) if isinstance(value, torch.Tensor) else p.fill_(value)
        try:
            yield model
        finally:
            with torch.no_grad():
                for name, p in _parameters(model, ending).items():
                    p.copy_(kept[name])

    return change


def _with_window(width: int | None) -> Change:
    @contextmanager
    def change(model: PreTrainedModel) -> Iterator[PreTrainedModel]:
        config = model.config.get_text_config()
        attentions = [m for m in model.modules() if type(m).__name__ == "GptOssAttention" and m.sliding_window]
        before = config.sliding_window
        wide = config.max_position_embeddings if width is None else width
        config.sliding_window = wide
        for attention in attentions:
            attention.sliding_window = wide
        try:
            yield model
        finally:
            config.sliding_window = before
            for attention in attentions:
                attention.sliding_window = before

    return change


def _with_rope(**parameters: float | str) -> Change:
    @contextmanager
    def change(model: PreTrainedModel) -> Iterator[PreTrainedModel]:
        owner = next(m for m in model.modules() if type(m).__name__ == "GptOssModel")
        config = copy.deepcopy(owner.config)
        config.rope_parameters = {**config.rope_parameters, **parameters}
        before = owner.rotary_emb
        owner.rotary_emb = GptOssRotaryEmbedding(config).to(before.inv_freq.device)
        try:
            yield model
        finally:
            owner.rotary_emb = before

    return change


def _in_dtype(dtype: torch.dtype) -> Change:
    @contextmanager
    def change(model: PreTrainedModel) -> Iterator[PreTrainedModel]:
        other = copy.deepcopy(model)
        for (
            parameter
        ) in other.parameters():  # not the buffers: loading in a dtype keeps the rope's frequencies in float32
            parameter.data = parameter.data.to(dtype)
        yield other

    return change


@contextmanager
def _without_adapter(model: "PeftModel") -> Iterator["PeftModel"]:
    with model.disable_adapter():
        yield model


def _swapped(layer: int, first: int, second: int) -> Change:
    """Two experts of a layer have changed places."""

    def value(name: str, tensor: torch.Tensor) -> torch.Tensor:
        order = list(range(len(tensor)))
        order[first], order[second] = second, first
        return tensor[order]

    @contextmanager
    def change(model: PreTrainedModel) -> Iterator[PreTrainedModel]:
        with (
            _with_values(f"layers.{layer}.mlp.experts.gate_up_proj", value)(model),
            _with_values(f"layers.{layer}.mlp.experts.gate_up_proj_bias", value)(model),
            _with_values(f"layers.{layer}.mlp.experts.down_proj", value)(model),
            _with_values(f"layers.{layer}.mlp.experts.down_proj_bias", value)(model),
        ):
            yield model

    return change


_PARTS = {
    "sinks": ".self_attn.sinks",
    "router bias": ".mlp.router.bias",
    "router weights": ".mlp.router.weight",
    "LM head": "lm_head.weight",
    "embeddings": "embed_tokens.weight",
    "attention weights": "_proj.weight",
    "norms": "norm.weight",
}


def faults_of(
    model: PreTrainedModel, reference: dict[str, torch.Tensor] | None, temperature: float, top_p: float
) -> list[Fault]:
    """All hypotheses about a pair of which `model` is the trainer's side.

    Args:
        model (`PreTrainedModel`): the trainer's model, with or without PEFT.
        reference (`dict[str, torch.Tensor]`, *optional*): the checkpoint that both sides started from, by the names of the
            base model.
        temperature, top_p (`float`): of the run.
    """
    return [
        *_weights(model, reference),
        *_adapters(model),
        *_attention(model),
        *_numbers(model),
        *_sampling(temperature, top_p),
    ]


def _weights(model: PreTrainedModel, reference: dict[str, torch.Tensor] | None) -> list[Fault]:
    found = [
        Fault(
            culprit="sinks",
            finding="the engine computes attention without sinks",
            fix="Choose an attention backend of the engine that supports sinks.",
            change=_with_values(".self_attn.sinks", lambda name, tensor: -1e4),
        ),
        Fault(
            culprit="sinks",
            finding="the engine's sinks are zero",
            fix="The engine did not load the sinks: sync the weights again, and update the engine.",
            change=_with_values(".self_attn.sinks", lambda name, tensor: 0.0),
        ),
        Fault(
            culprit="router bias",
            finding="the engine's router has no bias",
            fix="The engine dropped mlp.router.bias: sync the weights again, and update the engine.",
            change=_with_values(".mlp.router.bias", lambda name, tensor: 0.0),
        ),
    ]
    for part, ending in _PARTS.items() if reference is not None else ():
        found.append(_stale(model, reference, part, ending))
    return found


def _stale(model: PreTrainedModel, reference: dict[str, torch.Tensor], part: str, ending: str) -> Fault:
    def value(name: str, tensor: torch.Tensor) -> torch.Tensor:
        return reference.get(_base_name(name), tensor)

    own = _parameters(model, ending)
    if own and all(not p.any() for p in own.values()):
        finding = f"the trainer's {part} are all zero; the engine has those of the checkpoint"
        fix = f"The trainer did not load the {part}: load the model with from_pretrained, and look at its warnings."
    else:
        finding = f"the engine still has the {part} of the checkpoint: they are stale"
        fix = f"Sync the weights again; if the {part} stay stale, the engine's loader skips them: update it or restart it."
    return Fault(culprit=part, finding=finding, fix=fix, change=_with_values(ending, value))


def _base_name(name: str) -> str:
    return name.removeprefix("base_model.model.").replace(".base_layer", "")


def _adapters(model: PreTrainedModel) -> list[Fault]:
    if not is_peft_model(model):
        return []
    return [
        Fault(
            culprit="LoRA",
            finding="the engine samples without the adapter",
            fix="The adapter was not merged or loaded at the last sync: sync again, and check that the adapter is active.",
            change=_without_adapter,
        )
    ]


def _attention(model: PreTrainedModel) -> list[Fault]:
    config = model.config.get_text_config()
    width, rope = config.sliding_window, config.rope_parameters
    windows = {width - 1: "one less", width + 1: "one more", None: "no window at all"}
    found = [
        Fault(
            culprit="window",
            finding=f"the engine's sliding window is {'unlimited' if w is None else w} ({what}; the trainer's is {width})",
            fix="One side counts the token itself and the other does not: update the engine, or report it to us.",
            change=_with_window(w),
        )
        for w, what in windows.items()
    ]
    for theta in (10_000.0, 150_000.0, 500_000.0, 1_000_000.0):
        if theta != rope["rope_theta"]:
            found.append(
                Fault(
                    culprit="rope",
                    finding=f"the engine's rope base is {theta:g} (the trainer's is {rope['rope_theta']:g})",
                    fix="One side reads another rope_theta out of config.json: compare the two configurations.",
                    change=_with_rope(rope_theta=theta),
                )
            )
    if rope["rope_type"] != "default":
        found.append(
            Fault(
                culprit="rope",
                finding=f"the engine does not apply the {rope['rope_type']} scaling of the rope",
                fix="The engine ignores rope_parameters (older: rope_scaling) of config.json: update it.",
                change=_with_rope(rope_type="default"),
            )
        )
    return found


def _numbers(model: PreTrainedModel) -> list[Fault]:
    own = model.dtype
    found = []
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        name = str(dtype).removeprefix("torch.")
        if dtype != own:
            found.append(
                Fault(
                    culprit="dtype",
                    finding=f"the engine computes in {name} (the trainer in {str(own).removeprefix('torch.')})",
                    fix="Give the engine the trainer's dtype, or expect rounding of this size and correct for it.",
                    change=_in_dtype(dtype),
                )
            )
            found.append(
                Fault(
                    culprit="LM head dtype",
                    finding=f"the engine's LM head computes in {name}",
                    fix="Set the dtype of the LM head on both sides to the same (GRPOConfig.cast_lm_head_to_fp32).",
                    reading=lambda reading, dtype=dtype: replace(reading, head_dtype=dtype),
                )
            )
    return found


def _sampling(temperature: float, top_p: float) -> list[Fault]:
    temperatures = {t: None for t in (1.0, temperature, 0.5, 0.6, 0.7, 0.8, 0.9, 1.1, 1.2, 1.5)}
    found = [
        Fault(
            culprit="temperature",
            finding=f"the engine's log-probs are those of temperature {t:g} (the trainer's of {temperature:g})",
            fix="Start the engine with --logprobs-mode processed_logprobs, with the temperature of the trainer.",
            reading=lambda reading, t=t: replace(reading, temperature=t),
        )
        for t in temperatures
        if t != temperature
    ]
    nuclei = {p: None for p in (1.0, top_p, 0.7, 0.8, 0.9, 0.95, 0.99)}
    return found + [
        Fault(
            culprit="top-p",
            finding=f"the engine's log-probs are renormalised over the nucleus of {p:g} (the trainer's: {top_p:g})",
            fix="The trainer's log-probs are of all tokens: sample with top_p=1.0, top_k=0, min_p=0.",
            reading=lambda reading, p=p: replace(reading, top_p=p),
        )
        for p in nuclei
        if p != top_p
    ]


def swapped_experts(own: dict[str, str], theirs: dict[str, str]) -> list[Fault]:
    """Hypotheses from fingerprints: an expert of one side is another one of the other side."""
    found = []
    for name, mark in theirs.items():
        if not name.endswith("]") or ".gate_up_proj[" not in name or own.get(name) == mark:
            continue
        tensor, _, rest = name.partition("[")
        expert = int(rest[:-1])
        for other in range(expert + 1, sum(n.startswith(f"{tensor}[") for n in own)):
            if own.get(f"{tensor}[{other}]") == mark and theirs.get(f"{tensor}[{other}]") == own.get(name):
                layer = int(tensor.split("layers.")[1].split(".")[0])
                found.append(
                    Fault(
                        culprit="experts",
                        finding=f"experts {expert} and {other} of layer {layer} have changed places in the engine",
                        fix="The engine's expert map is wrong (expert parallelism?): restart it, and report it to its project.",
                        change=_swapped(layer, expert, other),
                    )
                )
    return found
