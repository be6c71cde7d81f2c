"""Bias, variance and effective sample size of every rollout correction, on a policy gradient whose true value is known.

    python benchmarks/correction/simulate.py [--scale 1] [--csv ...] [--figure docs/figures/rollout_correction.svg]

The model (one seed, no network, no data): at token t the sampler draws x_t ~ N(0, 1) and z_t ~ N(0, 1). Under the trainer
x_t ~ N(s_t, 1), so the log-ratio l_t = s_t x_t - s_t^2 / 2 is exact, has standard deviation s_t, and its exponential has mean
1. With X = sum x_t / sqrt(T), Z alike and c = 0.1, a rollout succeeds when Y = c X + sqrt(1 - c^2) Z > 1 (16 % do). The
parameter moves every token along Y; its score under the trainer is c (x_t - s_t) + sqrt(1 - c^2) z_t. Then

    gradient of P(success) under the trainer = phi(1 - c sum s_t / sqrt(T))        phi: standard normal density

and a corrected estimate over N rollouts is sum_i (success_i - 0.159) sum_t w_it score_it / sqrt(T), divided by the fraction of
tokens that `keep` leaves and by N. Given x, z is Gaussian: the bias uses its exact conditional mean, the spread 64 draws
of z per rollout.

Scenarios: `rounding` s_t = 0.02; `router flips` s_t = 0.5 on every 200th token; `broken rollouts` rounding, and 1 rollout in 32
with s_t = 0.5 throughout (sampled by an engine that was wrong). A turn is 512 sampled tokens; one tool token parts turns.

Columns: `bias` relative to the true gradient, with its standard error `bias_se`; `bias_no_baseline` the same with 0 instead of
0.159 (the score of a token has mean 0 only under the trainer, so that a wrong baseline leaks unless tokens are weighted); `std` of one rollout's contribution
relative to the true gradient (so std / sqrt(N) is the relative error of a batch of N); `ess`, the effective fraction of
tokens by the weights; `kept`, tokens with a nonzero weight. With sequence weights the spread is that of a sample that has
hardly met the few rollouts that matter: `std` and `bias_se` are too small there, which `ess_sequence` gives away. The clamp is 80, so that
it plays no part: at the default of 20 all sequence weights of 64k tokens with router flips are e^-20.
"""

import argparse
import csv
import math
import time
from pathlib import Path

import torch

from trl_gptoss.correction import LONG_ROLLOUTS, rollout_correction, summarize_stats

HERE = Path(__file__).parent
ROLLOUTS = {2048: 512, 16384: 128, 65536: 64}  # sampled tokens: rollouts
DRAWS = 64  # of z per rollout
SCENARIOS = ("rounding", "router flips", "broken rollouts")
TURN, CORRELATION, THRESHOLD, BROKEN_EVERY = 512, 0.1, 1.0, 32
LIMITS = {
    "token": {"truncate": (None, 2.0), "mask": (0.5, 2.0), "icepop": (0.5, 5.0)},
    "turn": {"truncate": (None, 2.0), "mask": (0.5, 2.0), "icepop": (0.5, 2.0)},
    "sequence": {"truncate": (None, 3.0), "mask": (None, 3.0), "icepop": (None, 3.0)},
    "geometric": {"truncate": (0.99, 1.01), "mask": (0.99, 1.01), "icepop": (0.99, 1.01)},
}
METHODS = {
    f"{level} {mode}": {"level": level, "mode": mode, "low": low, "high": high, "clamp": 80.0}
    for level, modes in LIMITS.items()
    for mode, (low, high) in modes.items()
} | {"LONG_ROLLOUTS": LONG_ROLLOUTS}
SHOWN = (
    "none",
    "token truncate",
    "token icepop",
    "turn truncate",
    "sequence icepop",
    "sequence truncate",
    "LONG_ROLLOUTS",
)


def shifts(scenario: str, length: int, rows: torch.Tensor) -> torch.Tensor:
    """s_t of each row, (B, length)."""
    shift = torch.full((len(rows), length), 0.02)
    if scenario == "router flips":
        shift[:, ::200] = 0.5
    if scenario == "broken rollouts":
        shift[rows % BROKEN_EVERY == 0] = 0.5
    return shift


def normal_density(x: torch.Tensor) -> torch.Tensor:
    return torch.exp(-0.5 * x.square()) / math.sqrt(2 * math.pi)


def with_tool_tokens(x: torch.Tensor, fill: float) -> torch.Tensor:
    """(B, T) -> (B, T + T / TURN): one position after every turn."""
    return torch.nn.functional.pad(x.unflatten(1, (-1, TURN)), (0, 1), value=fill).flatten(1)


def simulate(scenario: str, length: int, sequences: int, generator: torch.Generator) -> list[dict]:
    c, rest = CORRELATION, math.sqrt(1 - CORRELATION**2)
    baseline = 0.5 * math.erfc(THRESHOLD / math.sqrt(2))
    chunk = max(1, 2**20 // length)
    parts = {method: [] for method in ("none", *METHODS)}
    stats = {method: [] for method in METHODS}
    truths = []
    for start in range(0, sequences, chunk):
        rows = torch.arange(start, min(start + chunk, sequences))
        shift = shifts(scenario, length, rows)
        x = torch.randn(len(rows), length, generator=generator)
        noise = torch.randn(2, DRAWS, len(rows), generator=generator)  # Z, and what U has beyond it
        log_ratio = with_tool_tokens((shift * x - shift.square() / 2).double(), 0.0)
        mask = with_tool_tokens(torch.ones(len(rows), length), 0.0)
        score_x = c * (x - shift)
        mean_x = c * x.sum(1) / math.sqrt(length)
        truths.append(normal_density(THRESHOLD - c * shift.sum(1) / math.sqrt(length)))
        for method in parts:
            weights = torch.ones_like(x)
            kept = weights
            if method != "none":
                correction = rollout_correction(log_ratio, torch.zeros_like(log_ratio), mask, **METHODS[method])
                sampled = mask.bool()
                weights, kept = correction.weights[sampled].view_as(x), correction.keep[sampled].view_as(x).float()
                stats[method].append(correction.stats)
            parts[method].append(contributions(weights, score_x, mean_x, noise, c, rest, baseline, length, kept))
    truth = torch.cat(truths).mean().item()
    rows = []
    for method, pieces in parts.items():
        expected, no_baseline, drawn, kept = (torch.cat(column, dim=-1).double() for column in zip(*pieces))
        scale = max(kept.mean().item(), 1e-12)
        metrics = (
            summarize_stats(torch.stack(stats[method]))
            if method != "none"
            else {"ess_weights": 1.0, "kept_fraction": 1.0}
        )
        options = METHODS.get(method, {})
        rows.append(
            {
                "scenario": scenario, "tokens": length, "sequences": sequences, "method": method,
                "low": options.get("low"), "high": options.get("high"),
                "bias": f"{expected.mean().item() / scale / truth - 1:.4f}",
                "bias_no_baseline": f"{no_baseline.mean().item() / scale / truth - 1:.4f}",
                "bias_se": f"{expected.std().item() / scale / truth / math.sqrt(sequences):.4f}",
                "std": f"{drawn.std().item() / scale / truth:.3f}",
                "ess": f"{metrics['ess_weights']:.4f}", "kept": f"{metrics['kept_fraction']:.4f}",
                "ess_sequence": f"{metrics['ess_sequence']:.4f}" if method != "none" else "",
                "torch": torch.__version__,
            }
        )  # fmt: skip
    return rows


def contributions(
    weights: torch.Tensor,
    score_x: torch.Tensor,
    mean_x: torch.Tensor,
    noise: torch.Tensor,
    c: float,
    rest: float,
    baseline: float,
    length: int,
    kept: torch.Tensor,
) -> tuple[torch.Tensor, ...]:
    """Per rollout: E[contribution | x] with the baseline and without (B,), drawn contributions (DRAWS, B), fraction of tokens kept (B,)."""
    a = (weights * score_x).sum(1) / math.sqrt(length)
    w1, w2 = weights.mean(1), weights.square().mean(1)
    u = w1 * noise[0] + (w2 - w1.square()).clamp(min=0).sqrt() * noise[1]  # sum w_t z_t / sqrt(T), jointly with Z
    margin = (THRESHOLD - mean_x) / rest
    success = 0.5 * torch.erfc(margin / math.sqrt(2))
    no_baseline = success * a + rest * w1 * normal_density(margin)
    expected = no_baseline - baseline * a
    drawn = ((noise[0] > margin).float() - baseline) * (a + rest * u)
    return expected, no_baseline, drawn, kept.mean(1)


def draw(rows: list[dict], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.fonttype"] = "none"
    matplotlib.rcParams["svg.hashsalt"] = "trl_gptoss"  # the same file from the same numbers
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(len(SCENARIOS), 3, figsize=(11, 8), sharex=True)
    columns = (("bias", "relative bias"), ("std", "std / true gradient"), ("ess", "effective fraction of tokens"))
    for line, scenario in zip(axes, SCENARIOS):
        for axis, (column, title) in zip(line, columns):
            for index, method in enumerate(SHOWN):
                own = [row for row in rows if row["scenario"] == scenario and row["method"] == method]
                values = [float(row[column]) for row in own]
                style = {"none": "C7:", "LONG_ROLLOUTS": "k-"}.get(method, f"C{index}--")
                axis.plot(
                    [int(row["tokens"]) for row in own],
                    values,
                    style,
                    marker="o",
                    ms=3 + (len(SHOWN) - index) * 0.6,
                    label=method,
                )
            axis.set_xscale("log", base=2)
            axis.set_xticks(list(ROLLOUTS), [f"{length // 1024}k" for length in ROLLOUTS])
            axis.set_title(f"{scenario}: {title}", fontsize=9)
            axis.grid(alpha=0.3)
        line[0].axhline(0, color="grey", lw=0.8)
        line[1].set_ylim(0, 2.6)
        line[2].set_ylim(-0.03, 1.05)
    figure.legend(
        *axes[0, 0].get_legend_handles_labels(), loc="lower center", ncols=len(SHOWN), fontsize=8, frameon=False
    )
    figure.supxlabel("sampled tokens per rollout", fontsize=9, y=0.035)
    figure.tight_layout(rect=(0, 0.05, 1, 1))
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--scale", type=int, default=1, help="factor on the number of rollouts")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--csv", type=Path, default=HERE / "simulate.csv")
    parser.add_argument("--figure", type=Path, default=None, help="also draw the figure (needs matplotlib)")
    args = parser.parse_args()
    started = time.perf_counter()
    generator = torch.Generator().manual_seed(args.seed)
    rows = [
        row
        for scenario in SCENARIOS
        for length, sequences in ROLLOUTS.items()
        for row in simulate(scenario, length, args.scale * sequences, generator)
    ]
    with args.csv.open("w", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    if args.figure is not None:
        draw(rows, args.figure)
    print(f"{len(rows)} rows in {time.perf_counter() - started:.0f} s, torch {torch.__version__}")


if __name__ == "__main__":
    main()
