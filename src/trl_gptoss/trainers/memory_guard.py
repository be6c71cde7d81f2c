"""GPU memory of a train step: measured against the planner, explained when it runs out, tried again in smaller parts.

Running out of memory in a step never loses the run: `ResumableMixin` saves the last finished optimizer step. Here the error
says what was asked for and which setting to change next, and with `oom_retries` the micro-batch is divided further and
tried again, from the gradients that were there before it.
"""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from accelerate.logging import get_logger
from accelerate.utils import DistributedType, is_peft_model
from torch import nn
from trl import GRPOTrainer

from ..memory import GIB, ModelShape, TrainSetup, predict_memory
from .checkpointing import RandomState
from .config import GptOssGRPOConfig
from .loading import is_gpt_oss
from .optimizer_options import EIGHT_BIT_ADAMW
from .padding_free import ROW_LENGTHS

if TYPE_CHECKING:
    from peft import LoraConfig

logger = get_logger(__name__)

TOLERANCE = 0.10  # of the measured peak
_SHARDING = {DistributedType.FSDP: "fsdp2", DistributedType.DEEPSPEED: "zero3"}


class MemoryMixin(GRPOTrainer):
    """The methods of [`GRPOTrainer`] around a micro-batch's forward and backward.

    Overridden, and why:
        `_prepare_inputs`: a second try takes the batch that was generated for the first, and starts from the state behind
            the generation.
        `compute_loss`: where generation ends and the measured part of a step begins.
        `training_step`: catches what runs out of memory; reads the peak.
    """

    args: GptOssGRPOConfig
    _prepared: tuple[int, dict[str, Any]] | None = None  # micro-step and its batch
    _start: tuple[int, dict[str, Any], float] | None = (
        None  # bytes in use, batch, and bytes of gradients still to come
    )
    _before: "_Before | None" = None  # what an attempt changes, as it was
    _checked: bool = False
    _retries: int = 0

    def _prepare_inputs(self, generation_batch: Any) -> dict[str, Any]:
        if not self.model.training:
            return super()._prepare_inputs(generation_batch)
        if self._prepared is None or self._prepared[0] != self._step:
            self._prepared = (self._step, super()._prepare_inputs(generation_batch))
        self._before = _Before.of(self) if self._can_retry else None  # now: what generation has logged stays
        return self._prepared[1]

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: torch.Tensor | int | None = None,
    ) -> torch.Tensor:
        if self._start is None and self.accelerator.device.type == "cuda" and model.training:
            torch.cuda.reset_peak_memory_stats()
            missing = sum(
                p.numel() * p.element_size() for p in self.model.parameters() if p.requires_grad and p.grad is None
            )
            self._start = (torch.cuda.memory_allocated(), inputs, missing)
        return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)

    def training_step(
        self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: torch.Tensor | int | None = None
    ) -> torch.Tensor:
        self._prepared = None
        try:
            while True:
                self._start = None
                with self._undone_if_out_of_memory() as attempt:
                    loss = super().training_step(model, inputs, num_items_in_batch)
                    self._measure()
                    return loss
                self._divide_further(attempt.error)
        finally:
            self._prepared = self._start = self._before = None

    # ---- running out ----

    @contextmanager
    def _undone_if_out_of_memory(self) -> Iterator["_Attempt"]:
        """Catches an out-of-memory error after generation, and puts back what the attempt has changed."""
        attempt = _Attempt()
        try:
            yield attempt
        except torch.OutOfMemoryError as error:
            if self._prepared is None:  # while generating: nothing to divide
                raise
            if self._before is None:
                raise torch.OutOfMemoryError(f"{error}\n{self.explain_out_of_memory()}") from error
            attempt.error = str(error).partition("\n")[0]
        if attempt.error is not None:  # here, because the exception's frames keep the tensors of the step alive
            self._scores = None  # of a turn whose backward failed: with its graph
            self._before.restore(self)
            self._before = None
            if self.accelerator.device.type == "cuda":
                torch.cuda.empty_cache()

    @property
    def _can_retry(self) -> bool:
        return self._retries < self.args.oom_retries and self.accelerator.num_processes == 1

    def _divide_further(self, error: str) -> None:
        """Half the tokens per micro-batch, for the rest of the run."""
        self._retries += 1
        inputs = self._prepared[1]
        largest = self._largest_micro_batch(inputs)
        smaller = max(largest // 2, *(sum(row) for row in inputs[ROW_LENGTHS].tolist()))
        if smaller >= largest:
            raise torch.OutOfMemoryError(
                f"{error}\nThe micro-batch is one row of {largest} tokens already and cannot be divided.\n"
                f"{self.explain_out_of_memory()}"
            )
        self.args.max_tokens_per_micro_batch = smaller
        logger.warning(
            f"Out of memory with {largest} tokens in a micro-batch ({error}). Trying again with "
            f"max_tokens_per_micro_batch={smaller}, which stays for the rest of the run ({self._retries} of "
            f"{self.args.oom_retries} retries)."
        )

    def explain_out_of_memory(self) -> str:
        """What held memory, and which setting to change next.

        Returns:
            `str`: Several lines, for an error message.
        """
        lines = []
        if self.accelerator.device.type == "cuda":
            lines.append(
                f"In use when the step began: {self._start[0] / GIB:.1f} GiB; reserved by PyTorch now: "
                f"{torch.cuda.memory_reserved() / GIB:.1f} GiB."
                if self._start is not None
                else f"Reserved by PyTorch: {torch.cuda.memory_reserved() / GIB:.1f} GiB."
            )
        tokens = self._largest_micro_batch(self._prepared[1])
        lines.append(f"The micro-batch has {tokens} tokens on this device.")
        shape = self._shape()
        if shape is not None:
            parts = predict_memory(shape, self._setup(tokens)).parts
            listed = ", ".join(f"{name} {size / GIB:.1f}" for name, size in parts.items())
            lines.append(f"By the planner a step needs, in GiB: {listed}.")
        lines.append(f"Next: {self._next_lever()}.")
        return "\n".join(lines)

    def _next_lever(self) -> str:
        args = self.args
        config = self._base_model.config
        if not args.activation_checkpointing:
            return "activation_checkpointing=True"
        if args.max_tokens_per_micro_batch is None and args.per_device_train_batch_size > 1:
            return "max_tokens_per_micro_batch, or a smaller per_device_train_batch_size"
        if is_gpt_oss(config):
            if config.get_text_config()._experts_implementation != "gptoss_fused":
                return "experts_implementation='gptoss_fused'"
            if not config.get_text_config().to_dict().get("experts_token_chunk"):
                return "experts_token_chunk=8192"
            if not args.fused_elementwise:
                return "fused_elementwise=True (extra `fast`)"
        if not args.activation_offloading:
            return "activation_offloading=True"
        return (
            "sequence_parallel_size, sharding (configs/accelerate/fsdp2.yaml), LoRA, or a smaller max_rollout_tokens"
        )

    # ---- measured against predicted ----

    def _measure(self) -> None:
        """Log the peak; once, in a step after the first, compare it with the planner's."""
        if self._start is None:
            return
        before, inputs, missing = self._start
        peak = torch.cuda.max_memory_allocated()
        self._metrics["train"]["memory/peak_gib"].append(peak / GIB)
        shape = self._shape()
        if self._checked or shape is None or self.state.global_step == 0:
            return
        self._checked = True
        in_turns = self.args.max_tokens_per_micro_batch is not None or self.args.sequence_parallel_size > 1
        setup = self._setup(self._largest_micro_batch(inputs), accumulates=in_turns or not missing)
        predicted = before + missing + predict_memory(shape, setup).activations
        if (message := difference(predicted, peak)) is not None:
            logger.warning(message)

    def _shape(self) -> ModelShape | None:
        config = self._base_model.config
        return ModelShape.from_config(config.get_text_config()) if is_gpt_oss(config) else None

    def _largest_micro_batch(self, inputs: dict[str, Any]) -> int:
        if ROW_LENGTHS not in inputs:
            return inputs["prompt_ids"].numel() + inputs["completion_ids"].numel()
        lengths = inputs[ROW_LENGTHS].tolist()
        return max(sum(sum(lengths[row]) for row in rows) for rows in self._micro_batches(lengths))

    def _lora_config(self) -> "LoraConfig | None":
        if not is_peft_model(self.model):
            return None
        from peft import LoraConfig

        return next((config for config in self.model.peft_config.values() if isinstance(config, LoraConfig)), None)

    def _setup(self, tokens: int, accumulates: bool = True) -> TrainSetup:
        args, text = self.args, self._base_model.config.get_text_config()
        lora = self._lora_config()
        world = self.accelerator.num_processes
        fused = text._experts_implementation == "gptoss_fused"
        return TrainSetup(
            tokens=max(tokens, 1),
            method="full" if lora is None else "lora",
            lora_rank=16 if lora is None else lora.r,
            lora_experts=lora is not None and bool(lora.target_parameters),
            num_gpus=world,
            sequence_parallel_size=args.sequence_parallel_size,
            sharding=_SHARDING.get(self.accelerator.distributed_type, "none") if world > 1 else "none",
            activation_checkpointing=args.activation_checkpointing,
            activation_offloading=args.activation_offloading,
            optimizer="adamw_8bit" if args.optim in EIGHT_BIT_ADAMW else "adamw",
            experts_implementation="gptoss_fused" if fused else "grouped_mm",
            experts_token_chunk=(text.to_dict().get("experts_token_chunk") or 0) if fused else 0,
            fused_elementwise=args.fused_elementwise,
            master_weights=next(self.model.parameters()).dtype == torch.float32,
            accumulates=accumulates,
        )


@dataclass(slots=True)
class _Attempt:
    error: str | None = None  # of what ran out of memory


# Beside metrics and gradients, what a forward changes: rows of the next log, the step of the last recomputation, and TRL's
# controller of the entropy.
_CHANGED = ("_correction_rows", "_checked_at", "entropy_coef", "_last_world_entropy", "_entropy_window_stats")


@dataclass(slots=True)
class _Before:
    """What a micro-batch changes, as it was before its forward. Gradients are copies."""

    gradients: list[tuple[nn.Parameter, torch.Tensor | None]]
    metric_counts: dict[str, int]
    attributes: dict[str, Any]
    random: RandomState  # dropout of a second try is that of a run that began with its micro-batches

    @classmethod
    def of(cls, trainer: MemoryMixin) -> "_Before":
        return cls(
            gradients=[(p, None if p.grad is None else p.grad.clone()) for p in trainer.model.parameters()],
            metric_counts={name: len(values) for name, values in trainer._metrics["train"].items()},
            attributes={name: copy.copy(getattr(trainer, name)) for name in _CHANGED},
            random=RandomState.capture(),
        )

    def restore(self, trainer: MemoryMixin) -> None:
        for parameter, gradient in self.gradients:
            parameter.grad = gradient
        metrics = trainer._metrics["train"]
        for name in list(metrics):
            del metrics[name][self.metric_counts.get(name, 0) :]
            if name not in self.metric_counts:
                del metrics[name]
        for name, value in self.attributes.items():
            setattr(trainer, name, value)
        self.random.restore()


def difference(predicted: float, measured: float) -> str | None:
    """A warning if the planner is off by more than `TOLERANCE`, both in bytes."""
    off = predicted / measured - 1
    if abs(off) <= TOLERANCE:
        return None
    return (
        f"A train step peaked at {measured / GIB:.1f} GiB; the planner expected {predicted / GIB:.1f} GiB ({off:+.0%}). Its "
        "advice (`trl-gptoss plan`) is off for this model and these settings; please report the configuration."
    )
