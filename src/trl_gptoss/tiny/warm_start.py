"""The warm start: supervised steps on demonstrations, before any reinforcement learning."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from tqdm.auto import tqdm
from transformers import GptOssForCausalLM

from .demonstrations import Demonstration

# Prompt and tool tokens count a little: predicting them teaches the digits, and copying needs the digits.
CONTEXT_WEIGHT = 0.3


@dataclass(frozen=True, kw_only=True)
class WarmStart:
    """Settings of the warm start. Steps, not seconds, so that a slow machine gets the same model.

    steps (`int`): optimizer steps.
    batch_size (`int`): demonstrations in a step.
    learning_rate (`float`): of AdamW, after `warmup` steps, constant.
    """

    steps: int = 180
    batch_size: int = 64
    learning_rate: float = 2e-3
    warmup: int = 10


def collate(demonstrations: list[Demonstration], pad_id: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Right-padded ids and the weight of every token as a target.

    Two demonstrations, the second with one token less; `c` context, `p` policy tokens:

        ids      c   c   p   p        weights  0.3 0.3 1.0 1.0
                 c   p   p   pad               0.3 1.0 1.0 0.0

    Returns:
        ids (`torch.Tensor` of shape (batch, longest), int64), weights (same shape, float32).
    """
    longest = max(len(d.ids) for d in demonstrations)
    ids = torch.full((len(demonstrations), longest), pad_id)
    weights = torch.zeros(len(demonstrations), longest)
    for row, demonstration in enumerate(demonstrations):
        n = len(demonstration.ids)
        ids[row, :n] = torch.tensor(demonstration.ids)
        mask = torch.tensor(demonstration.policy_mask, dtype=torch.float32)
        weights[row, :n] = mask + CONTEXT_WEIGHT * (1 - mask)
    return ids, weights


def weighted_loss(
    logits_BSV: torch.Tensor, ids_BS: torch.Tensor, weights_BS: torch.Tensor, n_absent: int
) -> torch.Tensor:
    """Mean next-token cross-entropy in nats, weighted, over a vocabulary of V + `n_absent` ids.

    The absent ids have the logit 0: a head with `n_absent` further rows of zeros would give exactly this loss, and
    exactly these gradients for everything but those rows, without ever computing the wide logits.
    """
    logits = logits_BSV[:, :-1].float()
    targets = ids_BS[:, 1:, None]
    weights = weights_BS[:, 1:]
    normaliser = logits.logsumexp(-1)
    if n_absent:
        normaliser = torch.logaddexp(normaliser, torch.tensor(math.log(n_absent)))
    losses = normaliser - logits.gather(-1, targets).squeeze(-1)
    return (losses * weights).sum() / weights.sum()


@contextmanager
def deterministic_algorithms() -> Iterator[None]:
    """torch's deterministic algorithms inside, the setting from before afterwards.

    On several threads of a CPU the gradient of `bias[expert]` in transformers' `grouped_mm` is otherwise added up in the order in
    which the threads come, which is another one in every run. Warns where torch has no deterministic algorithm.
    """
    before = torch.get_deterministic_debug_mode()
    torch.set_deterministic_debug_mode(max(before, 1))
    try:
        yield
    finally:
        torch.set_deterministic_debug_mode(before)


@deterministic_algorithms()
def train(
    model: GptOssForCausalLM, demonstrations: Iterator[Demonstration], settings: WarmStart, n_absent: int = 0
) -> list[float]:
    """Train `model` in place; the same on the same machine with the same number of threads, bit for bit.

    Args:
        model (`GptOssForCausalLM`): float32, on the CPU.
        demonstrations (`Iterator[Demonstration]`): ids below the model's vocabulary size; `steps * batch_size` are taken.
        settings (`WarmStart`): steps, batch size, learning rate.
        n_absent (`int`, *optional*, defaults to 0): ids of the final vocabulary that the model has no rows for.

    Returns:
        `list[float]`: the loss of every step.
    """
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=settings.learning_rate, betas=(0.9, 0.98), weight_decay=0.0, foreach=True
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / settings.warmup))
    losses = []
    model.train()
    progress = tqdm(range(settings.steps), desc="warm start", unit="step", mininterval=2)
    for _ in progress:
        batch = [next(demonstrations) for _ in range(settings.batch_size)]
        ids, weights = collate(batch, model.config.pad_token_id)
        # Right padding needs no attention mask: attention is causal, and padding is no target.
        loss = weighted_loss(model(input_ids=ids, use_cache=False).logits, ids, weights, n_absent)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
        progress.set_postfix(loss=f"{losses[-1]:.3f}")
    model.eval()
    return losses
