"""What a checkpoint needs beyond transformers' own.

TRL keeps three things outside of the checkpoint: its micro-batch counter, the generation batch in use, and metrics that
are waiting for the next log. Without them a run that is resumed in the middle of a generation batch samples anew and
takes another path. They are saved next to the random states, one file per rank, and only whole files get their name.
"""

import copy
import json
import os
import pickle
import random
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate.utils import send_to_device
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

REFERENCE = "reference_model.pt"  # weights of the reference model, if it follows the policy (sync_ref_model)

# Settings that the counter and the slices of a loop state belong to.
BATCHES = ("per_device_train_batch_size", "gradient_accumulation_steps", "steps_per_generation", "num_iterations")


@dataclass(kw_only=True, slots=True)
class LoopState:
    """Where a run is between two optimizer steps.

    step (`int`): micro-batches done.
    generated_at (`int`): optimizer steps done when the batch in use was generated.
    buffered_inputs (`list[dict]` or `None`): slices of the generation batch; `None` if the next micro-batch generates.
    metrics (`dict[str, list[float]]`): values that are waiting for the next log.
    running_loss (`float`): sum of the losses since the last log.
    last_logged_step (`int`): optimizer step of the last log.
    tokens_seen (`int`): tokens generated so far, prompts included.
    world_size (`int`): processes of the run that wrote it.
    batches (`dict[str, int]` or `None`): the settings of `BATCHES` in it; `None` in checkpoints of earlier versions.
    """

    step: int
    generated_at: int
    buffered_inputs: list[dict[str, Any]] | None
    metrics: dict[str, list[float]]
    running_loss: float
    last_logged_step: int
    tokens_seen: int
    world_size: int
    batches: dict[str, int] | None = None

    def save(self, directory: str, rank: int) -> None:
        """Write to `directory` under its final name only once it is complete."""
        save_whole({name: getattr(self, name) for name in self.__slots__}, loop_state_path(directory, rank))

    @classmethod
    def load(cls, directory: str, rank: int, device: torch.device) -> "LoopState":
        """Read what `save` wrote; tensors come to `device`."""
        state = torch.load(loop_state_path(directory, rank), map_location="cpu", weights_only=True)
        return cls(**send_to_device(state, device))


def save_whole(state: dict[str, Any], file: Path) -> None:
    """`torch.save` to a file that gets its name once it is complete."""
    temporary = file.with_suffix(".tmp")
    torch.save(state, temporary)
    os.replace(temporary, file)


def loop_state_path(directory: str | Path, rank: int) -> Path:
    return Path(directory) / f"loop_state_{rank}.pt"


@dataclass(kw_only=True, slots=True)
class RandomState:
    """The random generators of this process: Python, numpy, torch on the CPU and on its GPU."""

    python: Any
    numpy: Any
    cpu: torch.Tensor
    cuda: torch.Tensor | None

    @classmethod
    def capture(cls) -> "RandomState":
        cuda = torch.cuda.get_rng_state() if torch.cuda.is_available() else None
        return cls(
            python=random.getstate(), numpy=copy.deepcopy(np.random.get_state()), cpu=torch.get_rng_state(), cuda=cuda
        )

    def restore(self) -> None:
        random.setstate(self.python)
        np.random.set_state(self.numpy)
        torch.set_rng_state(self.cpu)
        if self.cuda is not None:
            torch.cuda.set_rng_state(self.cuda)


def is_complete(checkpoint: Path, world_size: int) -> bool:
    """Whether everything of a checkpoint was written. transformers writes the trainer state last."""
    if not all(loop_state_path(checkpoint, rank).is_file() for rank in range(world_size)):
        return False
    try:
        json.loads((checkpoint / TRAINER_STATE_NAME).read_text(encoding="utf-8"))
    except (OSError, json.JSONDecodeError):
        return False
    return True


def written_by(checkpoint: Path) -> int | None:
    """Number of processes of the run that wrote a checkpoint; None without a readable loop state."""
    try:
        state = torch.load(loop_state_path(checkpoint, 0), map_location="cpu", weights_only=True, mmap=True)
        return state["world_size"]
    except (OSError, KeyError, RuntimeError, pickle.UnpicklingError, EOFError):
        return None


def last_complete_checkpoint(output_dir: str, world_size: int) -> str:
    """The newest checkpoint that was written to its end, by `world_size` processes if there is such a one, else by any number:
    weights and optimizer go on, the generation batch in use and the order of the prompts do not.

    Raises:
        ValueError: there is none; the message names the incomplete ones.
    """
    found = {
        int(match[1]): path
        for path in Path(output_dir).glob(f"{PREFIX_CHECKPOINT_DIR}-*")
        if (match := re.fullmatch(rf"{PREFIX_CHECKPOINT_DIR}-(\d+)", path.name))
    }
    for step in sorted(found, reverse=True):
        if is_complete(found[step], world_size):
            return str(found[step])
    for step in sorted(found, reverse=True):
        writers = written_by(found[step])
        if writers is not None and is_complete(found[step], writers):
            return str(found[step])
    incomplete = ", ".join(found[step].name for step in sorted(found)) or "none"
    raise ValueError(
        f"No complete checkpoint in {output_dir} for {world_size} process(es) (incomplete or of another trainer: "
        f"{incomplete}). Start without resume_from_checkpoint."
    )
