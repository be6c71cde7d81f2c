"""What a recipe says besides the trainer's configuration: about data and model; the same for all examples."""

from dataclasses import dataclass, field
from typing import Any, Protocol

from accelerate import PartialState
from datasets import Dataset
from trl import GRPOConfig, ModelConfig

from .tiny import make_tiny_model


class Task(Protocol):
    """A module of `trl_gptoss.tasks`."""

    def load_problems(self, dataset_name: str, **options: Any) -> tuple[Dataset, Dataset]: ...


@dataclass
class TaskArguments:
    """
    Data of a task. Each example gives `dataset_name` its own default.

    Parameters:
        dataset_name (`str`): what to train on: a generator's name, a Hub id, or a local file or folder.
        dataset_config (`str`, *optional*): configuration of a Hub data set.
        dataset_train_split (`str`, *optional*, defaults to `"train"`): split to train on.
        dataset_test_split (`str`, *optional*, defaults to `"test"`): split to hold out; a fifth of the training split at most where
            there is no `test`.
        test_dataset_name (`str`, *optional*): another data set to hold out instead: a Hub id, or a local file or folder.
        test_dataset_config (`str`, *optional*): its configuration.
        train_size (`int`, *optional*, defaults to 2000): the most problems to train on.
        held_out_size (`int`, *optional*, defaults to 200): the most problems to hold out; 0 skips the evaluation.
        answers (`int`, *optional*, defaults to 1): answers sampled to each held-out problem; the accuracy is their mean
            (avg@n).
        instructions (`str`, *optional*): system message put before every problem.
    """

    dataset_name: str = field(metadata={"help": "A generator's name, a Hub id, or a local file or folder."})
    dataset_config: str | None = field(default=None, metadata={"help": "Configuration of a Hub data set."})
    dataset_train_split: str = field(default="train", metadata={"help": "Split to train on."})
    dataset_test_split: str = field(
        default="test", metadata={"help": "Split to hold out; a fifth of the training split where there is no `test`."}
    )
    test_dataset_name: str | None = field(
        default=None, metadata={"help": "Another data set to hold out instead: a Hub id, or a local file or folder."}
    )
    test_dataset_config: str | None = field(default=None, metadata={"help": "Configuration of that data set."})
    train_size: int = field(default=2000, metadata={"help": "The most problems to train on."})
    held_out_size: int = field(default=200, metadata={"help": "The most problems to hold out; 0 skips evaluation."})
    answers: int = field(
        default=1, metadata={"help": "Answers sampled to each held-out problem; the accuracy is their mean (avg@n)."}
    )
    instructions: str | None = field(default=None, metadata={"help": "System message put before every problem."})

    def __post_init__(self) -> None:
        for name, least in (("train_size", 1), ("held_out_size", 0), ("answers", 1)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} is {getattr(self, name)}, it must be at least {least}.")

    def load(self, task: Task, seed: int) -> tuple[Dataset, Dataset]:
        """Training and held-out problems of `task`, see its `load_problems`.

        Raises:
            `ValueError`: nothing is left to train on.
        """
        train, held_out = task.load_problems(
            self.dataset_name,
            dataset_config=self.dataset_config,
            train_split=self.dataset_train_split,
            test_split=self.dataset_test_split,
            test_dataset_name=self.test_dataset_name,
            test_dataset_config=self.test_dataset_config,
            train_size=self.train_size,
            held_out_size=self.held_out_size,
            seed=seed,
            instructions=self.instructions,
        )
        if not len(train):
            raise ValueError(
                f"{self.dataset_name} leaves nothing to train on: its {self.dataset_train_split!r} split is empty, or all of it "
                f"is among the {len(held_out)} problems that are held out. Choose another data set to train on or to hold out."
            )
        return train, held_out


@dataclass
class ModelArguments(ModelConfig):
    """
    [`~trl.ModelConfig`] with bf16 as the default.

    Parameters:
        dtype (`str`, *optional*, defaults to `"bfloat16"`): load the model under this dtype.
        tiny_model_steps (`int`, *optional*):
            Steps of the warm start of the tiny model, which is made if no model is named. `None`: what
            [`~trl_gptoss.tiny.make_tiny_model`] takes.
    """

    dtype: str = field(default="bfloat16", metadata={"help": "Load the model under this dtype."})
    tiny_model_steps: int | None = field(
        default=None, metadata={"help": "Steps of the tiny model's warm start, where no model is named."}
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.tiny_model_steps is not None and self.tiny_model_steps < 0:
            raise ValueError(f"tiny_model_steps is {self.tiny_model_steps}, it must be at least 0.")

    def prepare(self, args: GRPOConfig, task: str) -> str:
        """The model to train; writes how to load it into `args.model_init_kwargs`, where that says nothing else.

        Args:
            args ([`~trl.GRPOConfig`]): of the trainer.
            task (`str`): which tiny model to make if no model was named.
        """
        init: dict[str, Any] = {"revision": self.model_revision, "dtype": self.dtype}
        if self.attn_implementation is not None:
            init["attn_implementation"] = self.attn_implementation
        args.model_init_kwargs = init | (args.model_init_kwargs or {})
        if self.model_name_or_path is not None:
            return self.model_name_or_path
        with PartialState().main_process_first():
            return str(make_tiny_model(task=task, seed=args.seed, steps=self.tiny_model_steps))
