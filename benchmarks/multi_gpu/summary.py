"""What the lines of a run say, as tables in Markdown:  python summary.py FOLDER [PART ...]

FOLDER holds what `run_all.py` wrote, a file of each part: `agreement.csv`, `curves.csv`, `steps.csv`, `colocated.csv`, and
`collectives.csv`; the parts that are named have to be there. Fails if a check does: gradients of ranks that share sequences may be no
further from float32 than `bound` times what one GPU is, and every deliberate mistake must be; every sync of a colocated engine
that was probed sent changed weights, and the probes let the run go on.
"""

import csv
import statistics
import sys
from collections import defaultdict
from pathlib import Path

CONTROL = 1.5  # times one GPU's error that a mistake must be off by, at least in one group
PROBES = 10  # of a colocated run
CURVE = 5.0  # times the difference between two runs of one GPU that a curve may be off by
Row = dict[str, str]


def read(folder: Path, name: str) -> list[Row]:
    path = folder / f"{name}.csv"
    if not path.is_file():
        return []
    with path.open(encoding="utf-8") as file:
        return list(csv.DictReader(file))


def agreement(rows: list[Row]) -> list[str]:
    """Prints the table and returns what fails."""
    errors: dict[str, dict[str, float]] = defaultdict(dict)
    first: dict[str, Row] = {}
    for row in rows:
        errors[row["cell"]][row["group"]] = float(row["error"])
        first.setdefault(row["cell"], row)
    failed = []
    print("\n| cell | sinks | all | largest, of one GPU's | in | loss | |\n|---|---|---|---|---|---|---|")
    for cell, row in first.items():
        floor = errors.get(f"one,{row['kind']}")
        if floor is None:
            failed.append(f"{cell}: one GPU was not run")
            continue
        # a group in which rounding leaves one GPU nearly nothing says little: compare it with the error of all
        ratios = {group: error / max(floor[group], 0.1 * floor["all"]) for group, error in errors[cell].items()}
        worst = max(ratios, key=ratios.__getitem__)
        if row["control"] == "True":
            good = ratios[worst] >= CONTROL * float(row["bound"])
        else:
            good = ratios[worst] <= float(row["bound"])
        loss, allowed = (
            float(row["largest_loss_error"]),
            float(row["bound"]) * float(first[f"one,{row['kind']}"]["largest_loss_error"]),
        )
        if row["control"] != "True" and loss > allowed + 1e-4:
            good = False
        if not good:
            failed.append(f"{cell}: {worst} {ratios[worst]:.2f}, loss {loss:.1e}")
        verdict = ("seen" if good else "NOT SEEN") if row["control"] == "True" else ("ok" if good else "WRONG")
        print(
            f"| {cell} | {errors[cell]['sinks']:.2e} | {errors[cell]['all']:.2e} | {ratios[worst]:.2f} | {worst} | "
            f"{loss:.1e} | {verdict} |"
        )
    return failed


def curves(rows: list[Row]) -> list[str]:
    by_run: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        by_run[row["run"]].append(row)
    if "one" not in by_run:
        return []
    names = ("loss", "grad_norm", "entropy")

    def apart(run: str) -> dict[str, float]:
        """Largest difference of a step, over the largest value of the curve."""
        found = {}
        for name in names:
            pairs = [(float(a[name]), float(b[name])) for a, b in zip(by_run[run], by_run["one"], strict=True)]
            found[name] = max(abs(a - b) for a, b in pairs) / max(abs(b) for _, b in pairs)
        return found

    noise = apart("one_again") if "one_again" in by_run else None
    failed = []
    print(f"\n| run | steps | {' | '.join(names)} | |\n|---|---|---|---|---|---|")
    for run in by_run:
        off = apart(run)
        good = noise is None or all(off[name] <= CURVE * noise[name] + 1e-3 for name in names)
        if not good:
            failed.append(f"curve {run}: {off}")
        print(
            f"| {run} | {len(by_run[run])} | {' | '.join(f'{off[name]:.1e}' for name in names)} | {'ok' if good else 'APART'} |"
        )
    return failed


def steps(rows: list[Row]) -> dict[tuple[str, str], dict[str, float]]:
    """The fastest step of every case and kind of rows: seconds, tokens/s, peak over ranks, predictions, shares."""
    groups: dict[tuple[str, str, str], list[Row]] = defaultdict(list)
    for row in rows:
        groups[row["case"], row["rows"], row["generation"]].append(row)
    found: dict[tuple[str, str], dict[str, float]] = {}
    for (case, kind, _), step in groups.items():
        micro_steps: dict[str, list[Row]] = defaultdict(list)
        for row in step:
            micro_steps[row["micro_step"]].append(row)
        seconds = sum(max(float(row["seconds"]) for row in ranks) for ranks in micro_steps.values())
        tokens = sum(int(ranks[0]["tokens"]) for ranks in micro_steps.values())
        entry = {
            "seconds": seconds, "tokens": tokens, "gpus": int(step[0]["gpus"]), "layers": int(step[0]["layers"]),
            "peak": max(float(row["peak_gib"]) for row in step),
            "planner_gib": max(float(row["planner_gib"]) for row in step),
            "planner_s": sum(float(ranks[0]["planner_s"]) for ranks in micro_steps.values()),
            "optimizer": max((float(row["optimizer_s"]) for row in step if row["optimizer_s"]), default=0.0),
        }  # fmt: skip
        best = found.setdefault((case, kind), entry)
        traced = [row for row in step if row["profiled"] == "True"]
        if seconds < best["seconds"]:
            best.update(entry)
        for part in ("all_to_all", "all_gather", "reduce_scatter", "all_reduce"):
            if traced:
                best[part] = max(float(row[f"{part}_s"]) for row in traced) / seconds
                best[f"exposed_{part}"] = max(float(row[f"exposed_{part}_s"]) for row in traced) / seconds
        if traced:
            best["exposed"] = max(float(row["exposed_s"]) for row in traced) / seconds
            best["compute"] = max(float(row["compute_s"]) for row in traced) / seconds
            best["all_to_all_s"] = min(float(row["all_to_all_s"]) for row in traced)
            best["all_gather_s"] = min(float(row["all_gather_s"]) for row in traced)
            best["reduce_scatter_s"] = min(float(row["reduce_scatter_s"]) for row in traced)
    return found


def print_steps(rows: list[Row]) -> None:
    found = steps(rows)
    print(
        "\n| case | rows | s | tokens/s | per GPU | of one GPU | optimizer s | peak GiB | planner | planner s | all-to-all | "
        "gathers | scatters | hidden by nothing |\n|---|---|---|---|---|---|---|---|---|---|---|---|---|---|"
    )
    for (case, kind), step in found.items():
        one = {"short": "lora_one", "long": "lora_one_long"}[kind] if case.startswith("lora") else "full_one_12"
        reference = found.get((one, kind))
        each = step["tokens"] / step["seconds"] / step["gpus"]
        efficiency = ""
        if reference and reference["layers"] == step["layers"]:
            efficiency = f"{each / (reference['tokens'] / reference['seconds']):.0%}"
        shares = [
            f"{step[part]:.1%}" if part in step else ""
            for part in ("all_to_all", "all_gather", "reduce_scatter", "exposed")
        ]
        print(
            f"| {case} | {kind} | {step['seconds']:.3f} | {step['tokens'] / step['seconds']:.0f} | {each:.0f} | {efficiency} | "
            f"{step['optimizer']:.3f} | {step['peak']:.1f} | {step['planner_gib']:.1f} | {step['planner_s']:.3f} | "
            f"{' | '.join(shares)} |"
        )


def print_collectives(rows: list[Row]) -> None:
    print("\n| collective | MB sent by a rank | ms | GB/s |\n|---|---|---|---|")
    for row in rows:
        sent, seconds = int(row["bytes_sent"]), float(row["seconds"])
        print(f"| {row['collective']} | {sent / 1e6:.0f} | {1e3 * seconds:.3f} | {row['gb_per_s']} |")


def colocated(rows: list[Row]) -> list[str]:
    """Prints what a step with an engine on the same GPUs is made of, and returns what fails."""
    cases: dict[str, dict[str, list[Row]]] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        cases[row["case"]][row["step"]].append(row)
    failed = []
    print(
        "\n| case | steps | step s | sync s, not probed | of a step | sync s, probed | probe s | wake s | sleep s | sampling s | train s | "
        "optimizer s | probes passed | mean, largest | changed | GiB sampling, asleep, after the step |\n"
        "|---|---|---|---|---|---|---|---|---|---|---|---|---|---|---|---|"
    )
    for case, by_step in cases.items():
        steps = [ranks for step, ranks in by_step.items() if step != "1"]  # the first compiles

        def seconds(name: str, probed: str | None = None, steps: list[list[Row]] = steps) -> str:
            """Median of the steps, of the slowest rank."""
            found = [max(float(row[name]) for row in ranks) for ranks in steps if probed in (None, ranks[0]["probed"])]
            return f"{statistics.median(found):.3f}" if found else ""

        probes = [ranks for ranks in by_step.values() if ranks[0]["probed"] == "True"]
        means = [float(row["probe_mean"]) for ranks in probes for row in ranks]
        changed = [int(row["changed"]) for ranks in probes for row in ranks]
        tensors = {row["tensors"] for ranks in probes for row in ranks}
        gib = [
            max(float(row[f"{when}_gib"]) for row in rows if row["case"] == case)
            for when in ("rollout", "asleep", "train")
        ]
        largest = f"{max(means):.3g}" if means else ""
        if len(probes) < PROBES:
            failed.append(f"colocated {case}: {len(probes)} of {PROBES} probed steps")
        if not all(changed):
            failed.append(f"colocated {case}: syncs of weights that had not changed")
        wake = [
            max(float(row["wake_weights_s"]) + float(row["wake_kv_cache_s"]) for row in ranks) for ranks in steps
        ] or [0.0]
        print(
            f"| {case} | {len(by_step)} | {seconds('step_s', 'False')} | {seconds('sync_s', 'False')} | {seconds('sync_share', 'False')} | "
            f"{seconds('sync_s', 'True')} | {seconds('probe_s', 'True')} | {statistics.median(wake):.3f} | {seconds('sleep_s')} | "
            f"{seconds('sampling_s')} | {seconds('train_s')} | {seconds('optimizer_s')} | {len(probes)} | {largest} | "
            f"{min(changed, default=0)} to {max(changed, default=0)} of {', '.join(tensors)} | {', '.join(f'{value:.1f}' for value in gib)} |"
        )
    return failed


def main() -> int:
    folder, *wanted = Path(sys.argv[1]), *sys.argv[2:]
    rows = {name: read(folder, name) for name in ("agreement", "curves", "steps", "collectives", "colocated")}
    failed = [f"no lines of {name}" for name in wanted if not rows[name]]
    checks = {
        "agreement": agreement,
        "curves": curves,
        "steps": print_steps,
        "collectives": print_collectives,
        "colocated": colocated,
    }
    for name, check in checks.items():
        if rows[name]:
            failed += check(rows[name]) or []
    print("\n" + ("\n".join(f"FAILED {line}" for line in failed) or "all checks hold"), flush=True)
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
