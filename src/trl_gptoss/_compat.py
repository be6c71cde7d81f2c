"""What the pinned versions need until they are fixed: each entry names the cause and when it can go."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from accelerate import Accelerator
from torch import nn


def silence_renamed_attributes() -> None:
    """TRL 1.16 reads `model.is_gradient_checkpointing` around every generation (trl/models/utils.py), a name that
    transformers 5.24 deprecates with a warning each time. Users can do nothing about it. Goes with TRL 1.17's pin, once
    TRL reads `is_activation_checkpointing`.
    """
    warnings.filterwarnings("ignore", message="`is_gradient_checkpointing` is deprecated", category=FutureWarning)


def leave_head_to_root(accelerator: Accelerator) -> None:
    """Leave embeddings and head to the root unit of FSDP2, as `parallelism.shard_model` does.

    Accelerate 1.15 makes one unit of final norm and head, of tied embeddings too. FSDP2 takes the forward of a unit for finished
    when all its modules have run, and TRL 1.16's fused head reads `lm_head.weight` without ever running the module: what comes
    behind a unit's forward does not happen, which torch before 2.13 warns of as error-prone. Goes once TRL's fused head runs
    through the module under FSDP2.

    Args:
        accelerator ([`~accelerate.Accelerator`]): With FSDP2, before it prepares anything.
    """
    prepare = accelerator.prepare

    def with_embeddings_hidden(*objects: Any, **kwargs: Any) -> Any:
        with _without_embeddings([model for model in objects if isinstance(model, nn.Module)]):
            return prepare(*objects, **kwargs)

    accelerator.prepare = with_embeddings_hidden


@contextmanager
def _without_embeddings(models: list[nn.Module]) -> Iterator[None]:
    """Accelerate finds the modules by these two methods, and leaves to the root what it does not find."""
    names = ("get_input_embeddings", "get_output_embeddings")
    for model in models:
        for name in names:
            setattr(model, name, lambda: None)
    try:
        yield
    finally:
        for model in models:
            for name in names:
                delattr(model, name)
