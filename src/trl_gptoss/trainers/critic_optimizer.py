"""The critic's optimizer: its own learning rate on the policy's schedule, and gradients averaged where nobody else does."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LRScheduler
from transformers import get_scheduler

from .critics import BackboneCritic, Critic
from .ppo_config import GptOssPPOConfig

# Parameters by name -> optimizer.
MakeOptimizer = Callable[[dict[str, nn.Parameter]], torch.optim.Optimizer]


class CriticOptimizer:
    """Optimizers of the parts of a critic: one for what every process holds whole (head, adapter) and, for a separate
    critic, one for the backbone, which the accelerator wraps or shards as it does the policy.

    Args:
        critic ([`Critic`]): its backbone is prepared here.
        accelerator (`Accelerator`): has prepared the policy already, and `backward` of DeepSpeed belongs to that one.
        args ([`GptOssPPOConfig`]): schedule and gradient clipping.
        make (`Callable`): makes an optimizer for parameters by name.
    """

    def __init__(self, critic: Critic, accelerator: Accelerator, args: GptOssPPOConfig, make: MakeOptimizer) -> None:
        self.critic = critic
        self.accelerator = accelerator
        self.args = args
        self.local = make(critic.local_parameters())
        self.backbone: torch.optim.Optimizer | None = None
        self._engine: Any = None  # DeepSpeedEngineWrapper
        if isinstance(critic, BackboneCritic):
            optimizer = make(dict(critic.model.backbone.named_parameters()))
            critic.model.backbone, self.backbone = accelerator.prepare(critic.model.backbone, optimizer)
            if accelerator.distributed_type == DistributedType.DEEPSPEED:
                from accelerate.utils import DeepSpeedEngineWrapper  # is there only if DeepSpeed is installed

                self._engine = DeepSpeedEngineWrapper(critic.model.backbone)
        self.schedulers: list[LRScheduler] = []
        self._set_aside: dict[str, torch.Tensor] = {}  # gradients so far, by name

    @property
    def optimizers(self) -> list[torch.optim.Optimizer]:
        return [self.local] if self.backbone is None else [self.local, self.backbone]

    @property
    def learning_rate(self) -> float:
        return self.local.param_groups[0]["lr"]

    def start_schedule(self, num_training_steps: int) -> None:
        """A schedule like the policy's, from its beginning."""
        self.schedulers = [
            get_scheduler(
                self.args.lr_scheduler_type,
                optimizer=optimizer,
                num_warmup_steps=self.args.get_warmup_steps(num_training_steps),
                num_training_steps=num_training_steps,
                scheduler_specific_kwargs=self.args.lr_scheduler_kwargs,
            )
            for optimizer in self.optimizers
        ]
        self.zero_grad()
        if self.backbone is not None:
            # Its optimizer does not, where a run was broken off between two micro-batches.
            self.critic.model.backbone.zero_grad()

    @contextmanager
    def accumulating(self, last: bool) -> Iterator[None]:
        """The context of a forward and backward: DDP reduces with the last one of an optimizer step only. (FSDP2 always
        does: unreduced gradients would be as large as the whole model.)

        Args:
            last (`bool`): whether an update follows.
        """
        wrapped = None if self.backbone is None else self.critic.model.backbone
        if isinstance(wrapped, DistributedDataParallel) and not last:
            with wrapped.no_sync():
                yield
        else:
            yield

    def backward(self, loss: torch.Tensor, last: bool) -> None:
        """Gradients of a micro-batch or a part of it.

        Args:
            loss (`torch.Tensor`): 0-d.
            last (`bool`): whether an update follows.
        """
        if self._engine is not None:
            self._engine.backward(loss, sync_gradients=last, scale_wrt_gas=False)
        else:
            loss.backward()
        # An adapter lies among the policy's parameters, where the policy's clipping would count its gradient.
        for name, parameter in self.critic.local_parameters().items():
            if parameter.grad is not None:
                before = self._set_aside.get(name)
                self._set_aside[name] = parameter.grad if before is None else before.add_(parameter.grad)
                parameter.grad = None

    def step(self) -> dict[str, float]:
        """One update and the numbers to log; the schedule stays. DeepSpeed's engine has stepped its part in `backward`."""
        parameters = self.critic.local_parameters()
        for name, gradient in self._set_aside.items():
            parameters[name].grad = gradient
        self._average_local_gradients()
        norms = []
        if self.args.max_grad_norm > 0:
            norms.append(nn.utils.clip_grad_norm_(self._local_parameters(), self.args.max_grad_norm))
            if self.backbone is not None and self._engine is None:
                parameters = self.critic.model.backbone.parameters()
                norms.append(self.accelerator.clip_grad_norm_(parameters, self.args.max_grad_norm))
            elif self._engine is not None and (norm := self._engine.get_global_grad_norm()) is not None:
                norms.append(torch.tensor(norm))
        logs = {"critic/learning_rate": self.learning_rate}
        if norms:
            logs["critic/grad_norm"] = torch.stack([_whole(n).float().cpu() for n in norms]).norm().item()
        for optimizer in self.optimizers:
            optimizer.step()
        self.zero_grad()
        return logs

    def advance_schedule(self) -> None:
        """Once for each optimizer step of the run, however many updates of the critic it had."""
        for scheduler in self.schedulers:
            scheduler.step()

    def zero_grad(self) -> None:
        self._set_aside = {}
        for optimizer in self.optimizers:
            optimizer.zero_grad()

    def _local_parameters(self) -> list[nn.Parameter]:
        return list(self.critic.local_parameters().values())

    def _average_local_gradients(self) -> None:
        """In one flat message per dtype; a rank without a gradient sends zeros."""
        if self.accelerator.num_processes == 1:
            return
        from torch.distributed.tensor import DTensor  # FSDP2 has averaged its own

        parameters = [p for p in self._local_parameters() if not isinstance(p, DTensor)]
        for dtype in {p.dtype for p in parameters}:
            group = [p for p in parameters if p.dtype == dtype]
            flat = torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in group])
            flat = self.accelerator.reduce(flat, "mean")
            for parameter, mean in zip(group, flat.split([p.numel() for p in group])):
                parameter.grad = mean.view_as(parameter).clone()


def _whole(norm: torch.Tensor | float) -> torch.Tensor:
    from torch.distributed.tensor import DTensor

    norm = torch.as_tensor(norm)
    return norm.full_tensor() if isinstance(norm, DTensor) else norm
