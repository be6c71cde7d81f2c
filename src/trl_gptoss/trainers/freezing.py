"""Parts of the model that are not trained, by name."""

from accelerate.utils import is_peft_model
from torch import nn
from transformers import PreTrainedModel

from .loading import is_gpt_oss

# Which parameters a part has: one of these between the dots of the parameter's name, in any layer.
_MODULES = {
    "attention": ("self_attn",),
    "sinks": ("sinks",),
    "router": ("router",),
    "experts": ("experts",),
}
_GPT_OSS_ONLY = ("sinks", "router", "experts")
FREEZABLE = (*_MODULES, "embeddings")


def check_freeze(names: list[str] | None) -> None:
    """Refuse names that mean nothing.

    Raises:
        ValueError: an unknown name, a name twice, or text instead of a list.
    """
    if names is None:
        return
    if isinstance(names, str) or not isinstance(names, (list, tuple)):
        raise ValueError(f"freeze is {names!r}; expected a list of names, such as ['attention'].")
    unknown = [name for name in names if name not in FREEZABLE]
    if unknown or len(set(names)) < len(names):
        raise ValueError(f"freeze is {names}; expected some of {', '.join(FREEZABLE)}, each once.")


def parameters_of(model: PreTrainedModel, name: str) -> dict[str, nn.Parameter]:
    """The parameters of one part, by their names in the model.

    Args:
        model ([`~transformers.PreTrainedModel`]): without PEFT.
        name (`str`): `"attention"` (projections with their biases, and the sinks), `"sinks"`, `"router"`, `"experts"`, or
            `"embeddings"` (the input embedding and the head).
    """
    if name == "embeddings":
        modules = [m for m in (model.get_input_embeddings(), model.get_output_embeddings()) if m is not None]
        wanted = {id(p) for module in modules for p in module.parameters()}
        return {n: p for n, p in model.named_parameters() if id(p) in wanted}
    return {n: p for n, p in model.named_parameters() if not set(_MODULES[name]).isdisjoint(n.split("."))}


def freeze(model: nn.Module, names: list[str] | None) -> list[str]:
    """Take parts of a model out of the training; before the optimizer is made and the model is sharded.

    Args:
        model (`nn.Module`): the policy.
        names (`list[str]` or `None`): see `parameters_of`.

    Returns:
        `list[str]`: the names of the frozen parameters.

    Raises:
        ValueError: with PEFT, for a part that the model does not have, or if nothing would be left to train.
    """
    if not names:
        return []
    if is_peft_model(model):
        adapted = sorted({n.split(".lora_")[0].split(".")[-1] for n, p in model.named_parameters() if p.requires_grad})
        raise ValueError(
            f"freeze={list(names)} together with PEFT: everything but the adapters is frozen already, and what has an "
            f"adapter ({', '.join(adapted)}) is trained because it was asked for. Remove freeze, and choose with "
            "lora_target_modules (and target_parameters) what is trained."
        )
    if not is_gpt_oss(model.config):
        lacking = [name for name in names if name in _GPT_OSS_ONLY]
        if lacking:
            raise ValueError(
                f"freeze={list(names)}: {', '.join(lacking)} are parts of GPT-OSS, and this is a model of type "
                f"{model.config.get_text_config().model_type!r}. Remove them."
            )
    frozen: dict[str, nn.Parameter] = {}
    for name in names:
        part = parameters_of(model, name)
        if not part:
            raise ValueError(f"freeze={list(names)}: this model has no parameters for {name!r}.")
        frozen |= part
    for parameter in frozen.values():
        parameter.requires_grad_(False)
    if not any(p.requires_grad for p in model.parameters()):
        raise ValueError(f"freeze={list(names)} leaves no parameter to train.")
    return list(frozen)
