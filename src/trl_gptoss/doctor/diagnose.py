"""From two sets of log-probs of the same ids to a culprit.

The mismatch is measured, every hypothesis of `faults.py` is tried on the trainer's side, the one that explains most is taken,
and the search goes on with what is left.
"""

from contextlib import ExitStack
from dataclasses import dataclass, field

import torch
from transformers import PreTrainedModel

from .faults import Fault, faults_of, swapped_experts
from .scoring import Reading, score
from .sides import ScoringEngine, fingerprints

_ENOUGH = 0.8  # part of the mismatch that a hypothesis has to explain
_MOST_FAULTS = 3
_BOUND = 30.0  # of a log-ratio: ids outside of a nucleus have a log-prob of -inf
THRESHOLDS = {torch.float32: 1e-4, torch.float64: 1e-6, torch.bfloat16: 0.02, torch.float16: 0.01}

PROBE_MESSAGES = [
    {"role": "user", "content": "What is 12 * 7? Answer with the number."},
    {"role": "assistant", "content": "84"},
    {"role": "user", "content": "And half of it?"},
]


@dataclass(kw_only=True, slots=True)
class Trial:
    """One hypothesis, tried.

    fault ([`Fault`]): the hypothesis.
    difference, kl (`float`): mean |log-prob difference| and KL (k3) in nats per token that would be left with it.
    """

    fault: Fault
    difference: float
    kl: float


@dataclass(kw_only=True, slots=True)
class Diagnosis:
    """What the doctor found.

    tokens (`int`): how many log-probs were compared.
    difference, kl (`float`): mean |log-prob difference| and KL (k3) in nats per token.
    threshold (`float`): largest difference that passes.
    culprits (`list[Trial]`): faults that explain the mismatch, each beside those before it.
    trials (`list[Trial]`): all that were tried on the whole mismatch, the best first.
    template (`str` or `None`): how the two prompts differ.
    weights (`list[str]`): names of tensors whose fingerprints differ.
    """

    tokens: int
    difference: float
    kl: float
    threshold: float
    culprits: list[Trial] = field(default_factory=list)
    trials: list[Trial] = field(default_factory=list)
    template: str | None = None
    weights: list[str] = field(default_factory=list)

    @property
    def healthy(self) -> bool:
        return self.difference <= self.threshold and self.template is None

    @property
    def names(self) -> list[str]:
        """Names of the culprits."""
        return (["chat template"] if self.template is not None else []) + [t.fault.culprit for t in self.culprits]

    def report(self) -> str:
        """The table for a terminal."""
        lines = [
            f"{self.tokens} tokens: mean |log-prob difference| {self.difference:.3g} (threshold {self.threshold:g}), "
            f"KL {self.kl:.3g} nats per token"
        ]
        if self.template is not None:
            lines += [f"chat template: {self.template}"]
        if self.healthy:
            return "\n".join([*lines, "healthy: the two sides agree"])
        if self.weights:
            shown = ", ".join(self.weights[:6]) + (
                f" and {len(self.weights) - 6} more" if len(self.weights) > 6 else ""
            )
            lines.append(f"tensors that differ: {shown}")
        if self.trials and self.difference > self.threshold:
            lines += ["", f"{'if the trainer had it, too':<72} {'KL left':>9} {'explained':>10}"]
            for trial in self.trials[:8]:
                part = 1 - trial.kl / self.kl if self.kl else 0.0
                lines.append(f"{trial.fault.finding[:72]:<72} {trial.kl:>9.2g} {max(part, -9.99):>10.1%}")
            lines.append("")
        for trial in self.culprits:
            lines += [f"culprit: {trial.fault.culprit}: {trial.fault.finding}", f"fix: {trial.fault.fix}"]
        if self.difference > self.threshold and (not self.culprits or self.culprits[-1].difference > self.threshold):
            left = self.culprits[-1].difference if self.culprits else self.difference
            lines.append(f"not explained: a difference of {left:.3g}. Compare kernels and versions of the two sides.")
        return "\n".join(lines)


def diagnose(
    model: PreTrainedModel,
    engine: ScoringEngine,
    rows: list[list[int]],
    *,
    reference: dict[str, torch.Tensor] | None = None,
    reading: Reading | None = None,
    render=None,
    threshold: float | None = None,
) -> Diagnosis:
    """Compare an engine with the model that is trained, and find out what is different.

    Args:
        model (`PreTrainedModel`): the trainer's side.
        engine ([`ScoringEngine`]): the other side.
        rows (`list[list[int]]`): ids to score; longer than the sliding window, or nothing can be said about it.
        reference (`dict[str, torch.Tensor]`, *optional*): weights of the checkpoint that both started from: finds what is
            stale.
        reading ([`Reading`], *optional*): temperature and top-p of the run.
        render (`Callable`, *optional*): the trainer's messages to prompt ids.
        threshold (`float`, *optional*): largest mean |log-prob difference| that passes; by default 1e-4 for fp32, 0.02 for
            bf16.

    Returns:
        [`Diagnosis`]

    Raises:
        ValueError: no row has two ids.
    """
    if not any(len(row) > 1 for row in rows):
        raise ValueError("Nothing to compare: give at least one row of two or more ids.")
    reading = reading or Reading()
    theirs = torch.cat([torch.tensor(row, dtype=torch.float64) for row in engine.score(rows)])
    difference, kl = _mismatch(torch.cat(score(model, rows, reading)), theirs)
    found = Diagnosis(
        tokens=len(theirs),
        difference=difference,
        kl=kl,
        threshold=THRESHOLDS[model.dtype] if threshold is None else threshold,
        template=_compare_templates(engine, render),
    )
    if difference > found.threshold:
        _explain(found, model, engine, rows, theirs, reading, reference)
    return found


def _explain(
    found: Diagnosis,
    model: PreTrainedModel,
    engine: ScoringEngine,
    rows: list[list[int]],
    theirs: torch.Tensor,
    reading: Reading,
    reference: dict[str, torch.Tensor] | None,
) -> None:
    faults = faults_of(model, reference, reading.temperature, reading.top_p)
    marks = engine.fingerprints()
    if marks is not None:
        own = fingerprints(model)
        found.weights = [name for name, mark in marks.items() if name in own and own[name] != mark]
        faults += swapped_experts(own, marks)
    left = found.difference
    with ExitStack() as stack:
        for _ in range(_MOST_FAULTS):
            trials = sorted((_try(f, model, rows, theirs, reading) for f in faults), key=lambda t: t.difference)
            found.trials = found.trials or trials
            best = trials[0]
            if best.difference > (1 - _ENOUGH) * left:
                return
            found.culprits.append(best)
            left = best.difference
            if left <= found.threshold:
                return
            model = stack.enter_context(best.fault.change(model))
            reading = best.fault.reading(reading)
            faults = [f for f in faults if f is not best.fault]


def _try(fault: Fault, model: PreTrainedModel, rows: list[list[int]], theirs: torch.Tensor, reading: Reading) -> Trial:
    with fault.change(model) as changed:
        difference, kl = _mismatch(torch.cat(score(changed, rows, fault.reading(reading))), theirs)
    return Trial(fault=fault, difference=difference, kl=kl)


def _mismatch(own: torch.Tensor, theirs: torch.Tensor) -> tuple[float, float]:
    """Mean |l| and mean of e^l - 1 - l, for l = own - theirs."""
    both_out = own.isinf() & theirs.isinf()
    log_ratio = torch.where(both_out, 0.0, own - theirs).nan_to_num(nan=_BOUND).clamp(-_BOUND, _BOUND)
    return log_ratio.abs().mean().item(), (log_ratio.expm1() - log_ratio).mean().item()


def _compare_templates(engine: ScoringEngine, render) -> str | None:
    if render is None:
        return None
    theirs = engine.render(PROBE_MESSAGES)
    if theirs is None:
        return None
    own = render(PROBE_MESSAGES)
    if own == theirs:
        return None
    position = next((i for i, (a, b) in enumerate(zip(own, theirs)) if a != b), min(len(own), len(theirs)))
    return (
        f"the prompts of the two sides differ from token {position} on ({len(own)} and {len(theirs)} tokens): "
        f"{own[position : position + 5]} and {theirs[position : position + 5]}. Give the engine token ids, or the trainer's "
        "chat template, date and reasoning effort."
    )
