"""From a trained model to a repository that others load: merging, quantising, the card, what may be uploaded, the upload.

mxfp4_files.py  checkpoints in the layout of openai/gpt-oss
adapters.py     sinks trained beside adapters; merging, exactly and for a while
scrub.py        secrets and local paths in text
card.py         the model card
upload.py       one commit of the files that belong to a model
publish.py      merge_and_push: the four of them in a row
export_command.py   `trl-gptoss export`
"""

import importlib
from typing import TYPE_CHECKING, Any

_LAZY = {
    "ModelCardFacts": "card",
    "adapter_sinks": "adapters",
    "merge_adapters_": "adapters",
    "merge_and_push": "publish",
    "merged_weights": "adapters",
    "mxfp4_loading_cost": "mxfp4_files",
    "redact": "scrub",
    "save_pretrained_mxfp4": "mxfp4_files",
    "train_sinks": "adapters",
}

__all__ = sorted(_LAZY)

if TYPE_CHECKING:
    from .adapters import adapter_sinks, merge_adapters_, merged_weights, train_sinks
    from .card import ModelCardFacts
    from .mxfp4_files import mxfp4_loading_cost, save_pretrained_mxfp4
    from .publish import merge_and_push
    from .scrub import redact


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'trl_gptoss.hub' has no attribute {name!r}; it exports {', '.join(__all__)}")
    value = getattr(importlib.import_module(f".{_LAZY[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
