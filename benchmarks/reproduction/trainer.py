"""The package's trainer, made wrong on purpose: how each cause goes around what protects against it."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from causes import Cause
from faults import RIGHT, attention, register_fault
from transformers import PreTrainedModel

from trl_gptoss import GptOssGRPOTrainer

SECOND_FORWARD_SHARE = 8  # it takes an eighth of a micro-batch at a time


class ReproductionTrainer(GptOssGRPOTrainer):
    """[`GptOssGRPOTrainer`] with one [`Cause`]. Everything else is the package's own code.

    Overridden, and why:
        `__init__`: the guard looks at the model while the trainer is made, and refuses a faulty attention. So the model is
            made with `sink_fa3`, passes, and gets its fault afterwards, as does the reference model.
        `_open_model`: the sampler gets the right attention back for as long as it samples, with the same weights.
        `_without_second_forward`: with `two_forwards` TRL takes its second forward on every generation batch, in
            smaller micro-batches than the update.
        `_setup_correction`: "measured" computes metrics and no weights with every sampler.

    Args:
        cause ([`Cause`]): what is wrong, or different.
        strength (`float`, *optional*, defaults to 1.0): of the fault, see `faults.register_fault`.
        args, kwargs: of [`GptOssGRPOTrainer`].
    """

    def __init__(self, *args: Any, cause: Cause, strength: float = 1.0, **kwargs: Any) -> None:
        self._cause = cause
        super().__init__(*args, **kwargs)
        if cause.two_forwards and self.args.steps_per_generation * self.num_iterations < 2:
            raise ValueError(
                "two_forwards needs at least two micro-batches per generation (steps_per_generation), or TRL takes none"
            )
        if cause.fault is not None:
            name = register_fault(cause.fault, strength)
            self._base_model.config._attn_implementation = name
            if self.ref_model is not None:
                self.accelerator.unwrap_model(self.ref_model).config._attn_implementation = name

    @contextmanager
    def _open_model(self) -> Iterator[PreTrainedModel]:
        with super()._open_model() as model:
            with attention(model, model.config._attn_implementation if self._cause.fault is None else RIGHT):
                yield model

    @contextmanager
    def _without_second_forward(self) -> Iterator[None]:
        if not self._cause.two_forwards:
            with super()._without_second_forward():
                yield
            return
        # TRL computes old log-probs if this is no multiple of the micro-batches of a generation, and reads it for nothing
        # else while it generates. The weights do not change before the last of these micro-batches: the ratio would be 1.
        args = self.args
        steps, rows = args.gradient_accumulation_steps, args.per_device_train_batch_size
        args.gradient_accumulation_steps = args.steps_per_generation * self.num_iterations + 1
        # Frameworks with a forward of its own for log-probs have a micro-batch size of its own for it, too.
        args.per_device_train_batch_size = max(1, rows // SECOND_FORWARD_SHARE)
        try:
            yield
        finally:
            args.gradient_accumulation_steps, args.per_device_train_batch_size = steps, rows

    def _setup_correction(self, own_policy_samples: bool) -> None:
        super()._setup_correction(own_policy_samples or self._cause.correction == "measured")
