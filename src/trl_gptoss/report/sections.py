"""Which logged metrics go into which chart. A run that lacks a metric lacks its curve, a run that has others gets them
in the last section, so any TRL run directory can be shown.
"""

import re
from dataclasses import dataclass

from .charts import Series, chart

History = list[dict[str, float]]


@dataclass(frozen=True)
class Panel:
    """A chart: a title, and the metrics in it as `(key, label)`; a key is a regular expression for the whole name, a
    label may refer to its groups (`\\1`)."""

    title: str
    metrics: tuple[tuple[str, str], ...]
    note: str = ""


SECTIONS: dict[str, tuple[Panel, ...]] = {
    "Reward": (
        Panel("Reward", (("reward", "reward"),), "Mean over the batch; the shade is one standard deviation."),
        Panel("Reward functions", ((r"rewards/(.+)/mean", r"\1"),)),
        Panel("Groups without a signal", (("frac_reward_zero_std", "all rewards equal"),), "Share of the prompts."),
        Panel(
            "Rewards that failed",
            ((r"rewards/(.+)/failure_frequency", r"\1"), ("math_reward/timeouts", "math-verify timeouts")),
        ),
        Panel("Evaluation", (("eval_reward", "reward"), (r"eval_rewards/(.+)/mean", r"\1"))),
    ),
    "On-policy": (
        Panel(
            "Largest |log ratio|",
            (
                ("on_policy/max_log_ratio", "in the loss"),
                ("on_policy/max_log_ratio_recomputed", "if recomputed by a second forward"),
            ),
            "0 means that the ratio is exactly 1.",
        ),
        Panel("On-policy ratio in force", (("on_policy/forced", "share of micro-batches"),)),
        Panel("Clipped ratios", ((r"clip_ratio/(.+)", r"\1"),)),
        Panel("Sampler against trainer", ((r"sampling/(.+)", r"\1"), (r"rollout_correction/(.+)", r"\1"))),
        Panel(
            "What quantised rollouts cost",
            (("rollout_weights/abs_log_ratio", "mean |log ratio|"), ("rollout_weights/kl", "KL")),
            "Weights that sampled against the trained ones, nats per token.",
        ),
    ),
    "Optimisation": (
        Panel("Entropy", (("entropy", "nats per token"),)),
        Panel("Gradient norm", (("grad_norm", "before clipping"),)),
        Panel("KL to the reference", (("kl", "nats per token"), ("approx_kl", "approximate"))),
        Panel("Loss", (("loss", "loss"), ("eval_loss", "held-out"), (r"loss/(.+)", r"\1"))),
        Panel("Learning rate", (("learning_rate", "learning rate"),)),
    ),
    "Rollouts": (
        Panel("Tool calls per rollout", (("tools/call_frequency", "mean"),)),
        Panel("Tool trouble", (("tools/failure_frequency", "failed"), ("tools/timeout_frequency", "timed out"))),
        Panel(
            "Damaged or cut off",
            (
                ("harmony/malformed_frequency", "malformed"),
                ("completions/truncated_frequency", "truncated"),
                ("completions/clipped_ratio", "clipped (TRL)"),
            ),
            "Share of the rollouts.",
        ),
        Panel(
            "Completion length",
            (
                ("completions/mean_length", "mean"),
                ("completions/min_length", "shortest"),
                ("completions/max_length", "longest"),
            ),
            "Tokens.",
        ),
        Panel("Turns per rollout", (("completions/mean_turns", "mean"),)),
        Panel("Seconds per step", (("step_time", "step"), (r"timing/(.+)", r"\1"))),
    ),
}

# Bookkeeping, or shown as another curve's band.
HIDDEN = re.compile(r"step|epoch|num_tokens|reward_std|total_flos|rewards/.+/std|(train|eval)_(runtime|.+_per_second)")


def metric_names(history: History) -> list[str]:
    """All numeric metrics of a log history, in the order of their first appearance."""
    return list(dict.fromkeys(k for entry in history for k, v in entry.items() if isinstance(v, int | float)))


def points(history: History, name: str) -> list[tuple[float, float]]:
    """(step, value) of one metric; a metric logged twice at a step keeps the last value."""
    found = {e["step"]: float(e[name]) for e in history if isinstance(e.get(name), int | float) and "step" in e}
    return sorted(found.items())


def _band(history: History, name: str) -> list[tuple[float, float, float]]:
    if name != "reward":
        return []
    std = dict(points(history, "reward_std"))
    return [(x, y - std[x], y + std[x]) for x, y in points(history, name) if x in std]


def _series(history: History, name: str, label: str) -> Series | None:
    """The curve of a metric; `None` for an evaluation that was done only once, which is no curve."""
    few = name.startswith("eval_")
    found = points(history, name)
    if few and len(found) < 2:
        return None
    return Series(label=label, points=found, markers=few, band=_band(history, name))


def render_sections(history: History) -> list[tuple[str, list[str]]]:
    """`(heading, charts)` for every section that has a curve; charts are SVG cards."""
    names = metric_names(history)
    used: set[str] = set()
    result = []
    for heading, panels in SECTIONS.items():
        cards = []
        for panel in panels:
            curves = []
            for pattern, label in panel.metrics:
                for name in names:
                    match = re.fullmatch(pattern, name)
                    if match and name not in used and not HIDDEN.fullmatch(name):
                        used.add(name)
                        curves.append(_series(history, name, match.expand(label)))
            cards.append(chart(panel.title, [c for c in curves if c is not None], panel.note))
        result.append((heading, [card for card in cards if card]))
    rest = [n for n in names if n not in used and not HIDDEN.fullmatch(n) and len(points(history, n)) > 1]
    result.append(
        ("Other metrics", [c for n in rest if (c := chart(n, [Series(label=n, points=points(history, n))]))])
    )
    return [(heading, cards) for heading, cards in result if cards]
