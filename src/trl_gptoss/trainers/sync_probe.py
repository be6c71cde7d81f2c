"""Does the engine hold, and compute with, the weights that the trainer just sent?

Two questions after a sync, because either answer alone can be right by accident:

    checksums   of every tensor, exact: did each one arrive? Sees a stale router bias long before the log-probs do.
    log-probs   of fixed ids, scored by engine and trainer: is what arrived used in the right way? Sees a packed layout
                that is wrong, a sink that is not applied, an adapter that was merged wrongly.
"""

import re
from collections import Counter
from dataclasses import dataclass

import torch
from torch import nn

# Mean absolute difference in nats. Random tiny GPT-OSS: 4e-7 in fp32 and 0.014 in bf16 on CPU, 0.017 in bf16 on an
# H200, where a random one with the widths of the 20B has 0.015 to 0.046 (4 layers) and 0.07 to 0.15 (24): its routers are
# nearly tied. Sinks that are not applied: 0.25. One stale group of tensors at a large learning rate: 0.1 to 1, and the checksums see it anyway.
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 0.1}
_LENGTHS = (40, 72, 168)  # the last one is longer than the sliding window of GPT-OSS


class StaleWeightsError(RuntimeError):
    """The engine does not hold the weights that were sent to it, or does not compute with them."""


@dataclass(kw_only=True, frozen=True)
class ProbeResult:
    """What a probe found.

    stale (`list[str]`): names of tensors whose checksums differ.
    tensors (`int`): how many were compared.
    mean, max (`float`): absolute difference of the log-probs, in nats; infinite where one side has none.
    tokens (`int`): how many ids were scored.
    tolerance (`float`): largest mean that passes.
    """

    stale: list[str]
    tensors: int
    mean: float
    max: float
    tokens: int
    tolerance: float

    @property
    def passed(self) -> bool:
        return not self.stale and self.mean <= self.tolerance

    def check(self, when: str) -> None:
        """Raise [`StaleWeightsError`] unless the probe passed.

        Args:
            when (`str`): for the message, such as "optimizer step 3".
        """
        if self.passed:
            return
        lines = [
            f"At {when} the vLLM engine does not compute the policy that is being trained: mean |log-prob difference| "
            f"{self.mean:.3g} over {self.tokens} tokens (tolerance {self.tolerance:.3g}), largest {self.max:.3g}."
        ]
        if self.stale:
            lines.append(f"Stale tensors, {len(self.stale)} of {self.tensors}: {summarise(self.stale)}.")
        else:
            lines.append(
                f"All {self.tensors} tensors have arrived (their checksums agree), so the engine uses them in another "
                "way than the trainer: dtype, a packed layout, attention sinks or the merge of an adapter."
            )
        lines.append("The run stops instead of training on samples of another policy; checkpoints are not affected.")
        raise StaleWeightsError("\n".join(lines))


def summarise(names: list[str], shown: int = 12) -> str:
    """Names with their numbers folded: `model.layers.{0,3}.self_attn.sinks`."""
    patterns = Counter(re.sub(r"\d+", "*", name) for name in names)
    parts = []
    for pattern, count in list(patterns.items())[:shown]:
        members = [name for name in names if re.sub(r"\d+", "*", name) == pattern]
        parts.append(", ".join(members) if count <= 4 else f"{members[0]} and {count - 1} more of {pattern}")
    if len(patterns) > shown:
        parts.append(f"{len(patterns) - shown} further groups")
    return "; ".join(parts)


def stale_tensors(sent: dict[str, int], held: dict[str, set[int]]) -> list[str]:
    """Names whose checksum at the engine (any of `held[name]` will do) is not the one that was sent."""
    return [name for name in sent | held if name not in sent or sent[name] not in held.get(name, ())]


def probe_ids(vocabulary: int, max_model_len: int) -> list[list[int]]:
    """Fixed sequences of ids below `vocabulary`, that leave room for the one id an engine must sample."""
    generator = torch.Generator().manual_seed(20)
    lengths = [min(length, max_model_len - 1) for length in _LENGTHS]
    return [torch.randint(vocabulary, (length,), generator=generator).tolist() for length in lengths]


def trainer_scores(model: nn.Module, sequences: list[list[int]], device: torch.device) -> list[list[float]]:
    """Log-probs in nats, at temperature 1, of all ids but the first of each sequence, in eval mode, one at a time."""
    training = model.training
    model.eval()
    try:
        with torch.no_grad():
            return [_score(model, torch.tensor([ids], device=device)) for ids in sequences]
    finally:
        model.train(training)


def _score(model: nn.Module, ids_1T: torch.Tensor) -> list[float]:
    logits_1TV = model(input_ids=ids_1T, attention_mask=torch.ones_like(ids_1T), use_cache=False).logits
    logps_TV = logits_1TV[0, :-1].float().log_softmax(dim=-1)
    return logps_TV.gather(1, ids_1T[0, 1:, None])[:, 0].tolist()


def compare(
    sent: dict[str, int],
    held: dict[str, set[int]],
    ours: list[list[float]],
    theirs: list[list[float]],
    tolerance: float,
) -> ProbeResult:
    """Put both answers together."""
    pairs = [(a, b) for row, other in zip(ours, theirs, strict=True) for a, b in zip(row, other, strict=True)]
    ours_N, theirs_N = torch.tensor(pairs, dtype=torch.float64).unbind(dim=1)
    difference_N = (ours_N - theirs_N).abs().nan_to_num(nan=torch.inf)
    return ProbeResult(
        stale=stale_tensors(sent, held),
        tensors=len(sent),
        mean=difference_N.mean().item(),
        max=difference_N.max().item(),
        tokens=len(pairs),
        tolerance=tolerance,
    )
