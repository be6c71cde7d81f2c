"""Rows are read back, compared only if they can be, and drawn; the grid is complete and keeps to its time."""

import csv
import sys
import threading
import time
from dataclasses import asdict

import figures
import pytest
import run_all
import summary
from causes import CAUSES
from cell import UNFINISHED, Cell, columns, rows_of, write_csv
from results import check_comparable, read_result, read_results

SMALL = {"steps": 3, "precision": "float32"}


def write(folder, cell, rewards, **about):
    """A CSV as cell.py writes it, of a made-up run (in the test's own folder)."""
    history = [
        {"step": i + 1, "grad_norm": 1.0, "reward": r, "kl": float("nan"), "rollout_correction/kl_k3": 1e-3}
        for i, r in enumerate(rewards)
    ]
    history += [{"step": len(rewards), "eval_reward": 0.0}, {"step": len(rewards), "train_loss": 0.0}]
    measured = {
        "before": {"accuracy": 0.25, "problems": 4, "low": 0.2, "high": 0.3},
        "after": {"accuracy": 0.5, "problems": 4, "low": 0.4, "high": 0.6},
    }
    about = {"hardware": "none", "model": "0" * 12, **about}
    write_csv(folder / f"{cell.name}.csv", rows_of(cell, about, history, measured))


def test_rows_come_back_with_the_configuration_in_each(tmp_path):
    cell = Cell(task="tool", cause="no_sinks", strength=0.3, seed=2, **SMALL)
    write(tmp_path, cell, [0.1, 0.2, 0.3])
    (result,) = read_results(tmp_path)
    assert result.path.name == "tool-no_sinks-0.3-seed2.csv"
    assert result.curve("reward") == {1: 0.1, 2: 0.2, 3: 0.3}
    assert result.curve("kl") == {} and result.curve("clip_fraction") == {}  # not finite, not logged
    assert result.accuracies == (0.25, 0.5) and [row["accuracy"] for row in result.steps] == ["0.25", "", "", "0.5"]
    for row in result.steps:
        assert list(row) == columns()
        assert {name: row[name] for name in asdict(cell)} == {name: str(v) for name, v in asdict(cell).items()}


def test_what_is_no_result_of_a_finished_cell_is_refused(tmp_path):
    cell = Cell(task="tool", cause="right", **SMALL)
    write(tmp_path, cell, [0.1, 0.2])
    with pytest.raises(ValueError, match="expected the steps 0 to 3"):
        read_results(tmp_path)
    (tmp_path / "other.csv").write_text("a,b\n1,2\n")
    with pytest.raises(ValueError, match="no result of cell.py"):
        read_result(tmp_path / "other.csv")


def test_unfinished_cells_are_read_from_their_folder_until_they_are_finished(tmp_path):
    cell, gap = (Cell(task="tool", cause="right", seed=seed, **SMALL) for seed in (0, 1))
    write(tmp_path / "unfinished", cell, [0.1, 0.2])
    (begun,) = read_results(tmp_path)
    assert not begun.finished and begun.curve("reward") == {1: 0.1, 2: 0.2}
    (line,) = summary.lines([begun])
    assert [c.strip() for c in line.split("|")][5:10] == ["2", "0.150", "", "0.250 [0.200, 0.300]", "-"]
    write(tmp_path, cell, [0.1, 0.2, 0.3])
    (done,) = read_results(tmp_path)
    assert done.finished and done.path.parent == tmp_path and done.accuracies == (0.25, 0.5)
    write(tmp_path / "unfinished", gap, [0.1, 0.2])
    path = tmp_path / "unfinished" / f"{gap.name}.csv"
    path.write_text("".join(line for i, line in enumerate(path.read_text().splitlines(True)) if i != 2))
    with pytest.raises(ValueError, match="expected the steps"):
        read_results(tmp_path)


@pytest.mark.parametrize(
    "change, allowed", [({"seed": 1}, True), ({"learning_rate": 1e-5}, False), ({"model": "1"}, False)]
)
def test_only_cells_with_the_same_settings_are_compared(tmp_path, change, allowed):
    write(tmp_path, Cell(task="tool", cause="right", **SMALL), [0.1, 0.2, 0.3])
    write(tmp_path, Cell(task="tool", cause="dense", **SMALL), [0.1, 0.2, 0.3], model="another, by its nature")
    write(tmp_path, Cell(task="single_turn", cause="right", **SMALL, answers=2), [0.1, 0.2, 0.3])
    about = {"model": change.pop("model")} if "model" in change else {}
    write(tmp_path, Cell(task="tool", cause="no_sinks", **SMALL, **change), [0.1, 0.2, 0.3], **about)
    results = read_results(tmp_path)
    assert len(results) == 4
    if allowed:
        check_comparable(results)
    else:
        with pytest.raises(ValueError, match="cannot be compared"):
            check_comparable(results)


def test_figures_show_mean_and_spread_of_the_seeds(tmp_path):
    for seed, rewards in enumerate(([0.0, 0.1, 0.2], [0.2, 0.3, 0.8])):
        write(tmp_path, Cell(task="tool", cause="right", seed=seed, **SMALL), rewards)
    write(tmp_path, Cell(task="tool", cause="no_sinks", **SMALL), [0.0, 0.0, 0.0])
    drawn = figures.figures(read_results(tmp_path))
    # one line is no comparison: no figure of strengths or switches; the remedies' two are among the causes'; no KL is finite
    assert set(drawn) == {f"tool_causes_{q}.svg" for q in ("reward", "grad_norm")}
    svg = drawn["tool_causes_reward.svg"]
    assert "everything right (2 seeds): 0.5<" in svg and "no sinks (1 seed): 0<" in svg and svg.count("<polygon") == 1
    runs = figures.lines("tool", "causes", read_results(tmp_path))["everything right"]
    series = figures.series("right", runs, "reward")
    assert series.band == [(1, 0.0, 0.2), (2, 0.1, 0.3), (3, 0.2, 0.8)]
    for run in runs:
        for row, kl in zip(run.steps[1:], ("0.0", "0.01", "100.0")):
            row["kl"] = kl
    assert figures.series("right", runs, "kl").points == [(2.0, -2.0), (3.0, 2.0)]  # no logarithm of nothing
    write(tmp_path, Cell(task="tool", cause="no_sinks", strength=0.3, **SMALL), [0.0, 0.0, 0.0])
    more = figures.figures(read_results(tmp_path))
    assert "30% of the sinks missing" in more["tool_strength_reward.svg"]
    assert more["tool_causes_reward.svg"] == svg
    for name in ("right", "no_sinks"):
        write(tmp_path / "other", Cell(task="tool", cause=name, **SMALL, tool_tokens=7), [0.0, 0.5, 0.5])
    both = figures.all_figures(tmp_path)
    assert set(both) == {*more, *(f"other/tool_causes_{q}.svg" for q in ("reward", "grad_norm"))}
    assert "(7 tokens)" in both["other/tool_causes_reward.svg"] and both["tool_causes_reward.svg"] == svg


def test_no_figure_has_more_lines_than_colours_and_every_cause_is_in_one():
    assert all(len(group) <= 6 for group in figures.GROUPS.values())
    assert {name for group in figures.GROUPS.values() for name in group} == set(CAUSES)


def test_without_rows_it_says_what_to_run_and_with_old_figures_that_they_are(tmp_path, monkeypatch, capsys):
    def call(*options):
        monkeypatch.setattr(
            sys, "argv", ["figures.py", "--results", str(tmp_path / "r"), "--out", str(tmp_path / "f"), *options]
        )
        return figures.main(), capsys.readouterr().out

    status, said = call()
    assert status == 1 and "run_all.py" in said and not (tmp_path / "f").exists()
    for name in ("right", "no_sinks"):
        write(tmp_path / "r", Cell(task="tool", cause=name, **SMALL), [0.1, 0.2, 0.3])
    assert call("--check")[0] == 1 and not (tmp_path / "f").exists()
    assert call()[0] == 0 and call("--check") == (0, "out of date: none\n")
    (tmp_path / "f" / "tool_causes_reward.svg").write_text("drawn by hand")
    assert call("--check") == (1, "out of date: tool_causes_reward.svg\n")


def test_the_committed_figures_are_those_of_the_committed_rows():
    drawn = figures.all_figures(figures.HERE / "results")
    folder = figures.FIGURES
    on_disk = {p.relative_to(folder).as_posix(): p.read_text(encoding="utf-8") for p in folder.rglob("*.svg")}
    assert on_disk == drawn and drawn


def test_the_summary_compares_the_seeds_of_a_cause_with_those_of_everything_right(tmp_path):
    ends = {"right": (0.5, 0.7), "no_sinks": (0.2, 0.4), "two_forwards": (0.6, 0.65), "router_replay": (0.8, 0.9)}
    for name, rewards in ends.items():
        for seed, reward in enumerate(rewards):
            write(tmp_path, Cell(task="tool", cause=name, seed=seed, **SMALL), [reward] * 3)
    found = {
        line.split("|")[3].strip(): [c.strip() for c in line.split("|")]
        for line in summary.lines(read_results(tmp_path))
    }
    assert next(iter(found)) == "everything right" and found["everything right"][5:8] == [
        "3",
        "0.600 [0.500, 0.700]",
        "",
    ]
    compared = [found[CAUSES[name].what][7] for name in ("no_sinks", "two_forwards", "router_replay")]
    assert compared == ["below", "no", "above"]
    alone = [r for r in read_results(tmp_path) if (r.about["cause"], r.about["seed"]) != ("right", "1")]
    assert all(line.split("|")[7].strip() in ("", "-") for line in summary.lines(alone))  # no spread to be beyond of
    assert found["no sinks"][8:10] == ["0.250 [0.200, 0.300]", "0.500 [0.400, 0.600]"]
    assert all(len(cells) == summary.HEADER.split("\n")[0].count("|") + 1 for cells in found.values())
    write(tmp_path, Cell(task="tool", cause="no_sinks", seed=2, **SMALL), [0.55] * 3)  # one seed among those of right
    (again,) = [line for line in summary.lines(read_results(tmp_path)) if "| no sinks |" in line]
    assert "| 3 | 3 |" in again and "| no |" in again


def test_rewards_are_compared_at_steps_that_a_cause_and_everything_right_have(tmp_path):
    seven = {**SMALL, "steps": 7}
    write(tmp_path, Cell(task="tool", cause="right", **seven), [9.0, 0.1, 0.2, 0.3, 0.4, 0.5, 9.0])
    write(tmp_path / "unfinished", Cell(task="tool", cause="no_sinks", **seven), [9.0, 0.4, 0.4, 0.4, 0.4, 0.4])
    results = read_results(tmp_path)
    assert [summary.reward_until(r, 6) for r in results] == pytest.approx([0.3, 0.4])
    right, wrong = summary.lines(results)
    assert "| 7 | 2.080 |" in right and "| 6 | 0.400 | - |" in wrong
    write(
        tmp_path / "unfinished", Cell(task="tool", cause="dense", **seven), [0.1]
    )  # takes no steps away from the others
    assert summary.lines(read_results(tmp_path))[:2] == [right, wrong]


def test_the_table_of_the_docs_is_that_of_the_rows():
    text = (figures.HERE.parents[1] / "docs/reproduction.md").read_text(encoding="utf-8")
    assert "\n".join([summary.HEADER, *summary.lines(read_results(figures.HERE / "results"))]) in text


def plan(**changes):
    everything = {
        "tasks": ["tool", "single_turn"],
        "causes": list(CAUSES),
        "seeds": 3,
        "other_seeds": 1,
        "strengths": [0.1],
    }
    return run_all.Plan(**{**everything, **changes})


def test_the_grid_has_every_cell_once_and_the_first_seed_first():
    cells = plan().cells({"steps": 7})
    names = [cell.name for cell in cells]
    assert len(set(names)) == len(names) == len(CAUSES) * (3 + 1) + 1
    assert "tool-no_sinks-0.1-seed0" in names and all(cell.steps == 7 for cell in cells)
    assert [cell.seed for cell in cells] == sorted(cell.seed for cell in cells)
    assert {cell.seed for cell in cells if cell.task == "single_turn"} == {0}


@pytest.mark.parametrize(
    "bad, message",
    [({"task": "chess"}, "task"), ({"cause": "bad luck"}, "cause"), ({"micro_batches": 5}, "cannot be divided"),
     ({"strength": 0.5}, "no fault"), ({"precision": "int4"}, "precision"), ({"sampler": "dice"}, "sampler")],
)  # fmt: skip
def test_a_cell_that_makes_no_sense_is_an_error(bad, message):
    with pytest.raises(ValueError, match=message):
        Cell(**{"task": "tool", "cause": "right", **bad})


def test_a_cell_is_called_with_its_whole_configuration(tmp_path):
    cell = Cell(task="tool", cause="no_sinks", strength=0.5, learning_rate=3e-4, **SMALL)
    line = run_all.command(cell, tmp_path, tmp_path, tmp_path, "bubblewrap", 10)
    given = dict(zip(line[2::2], line[3::2]))
    assert {f"--{name}": str(value) for name, value in asdict(cell).items()}.items() <= given.items()


def test_a_cell_that_does_not_stop_is_stopped(tmp_path):
    """Exit statuses pass; one that runs on is asked to save (SIGTERM)."""
    assert run_all.run_one([sys.executable, "-c", "raise SystemExit(7)"], tmp_path / "log", 30, 1, 30) == 7
    code = "import signal, time\nsignal.signal(15, lambda *a: (print('saved', flush=True), exit(0)))\nprint('on', flush=True)\ntime.sleep(60)"
    began = time.monotonic()
    assert run_all.run_one([sys.executable, "-c", code], tmp_path / "log", 1.5, 1, 30) == UNFINISHED
    assert time.monotonic() - began < 20 and (tmp_path / "log").read_text() == "on\nsaved\n"


def test_what_is_finished_is_skipped_and_what_fails_does_not_end_the_grid(tmp_path, monkeypatch, capsys):
    cells = [Cell(task="tool", cause=name, **SMALL) for name in ("right", "no_sinks", "router_replay")]
    write(tmp_path, cells[0], [0.1, 0.2, 0.3])
    called = []

    def run_one(line, log, seconds, threads, grace):
        called.append(line[line.index("--cause") + 1])
        return 1 if called[-1] == "no_sinks" else UNFINISHED

    monkeypatch.setattr(run_all, "run_one", run_one)
    models = {False: tmp_path, True: tmp_path}
    failed = run_all.run(cells, models, tmp_path / "work", tmp_path, "bubblewrap", 500)
    assert called == ["no_sinks", "router_replay"] and list(failed) == ["tool-no_sinks-seed0"]
    assert run_all.run(cells, models, tmp_path / "work", tmp_path, "bubblewrap", 100) == {}  # no time for a cell
    assert len(called) == 2
    (tmp_path / "work" / cells[2].name / "checkpoint-2").mkdir(parents=True)
    rows = run_all.table(cells, tmp_path / "work", tmp_path, failed).split("\n")
    assert "done" in rows[0] and "0.250 -> 0.500" in rows[0] and "FAILED" in rows[1] and "step 2 of 3" in rows[2]


def test_a_result_of_other_settings_is_not_taken_for_this_one(tmp_path):
    cell = Cell(task="tool", cause="right", **SMALL)
    assert run_all.finished(cell, tmp_path) is None
    write(tmp_path, cell, [0.1, 0.2, 0.3])
    assert run_all.finished(cell, tmp_path).accuracies == (0.25, 0.5)
    other = Cell(task="tool", cause="right", **SMALL, learning_rate=1e-5)
    with pytest.raises(ValueError, match="was made with learning_rate=0.0001"):
        run_all.run([other], {}, tmp_path, tmp_path, "bubblewrap", 500)


def test_jobs_run_at_the_same_time_and_each_cell_once(tmp_path, monkeypatch):
    cells = [Cell(task="tool", cause=name, **SMALL) for name in CAUSES]
    meeting, called = threading.Barrier(3, timeout=20), []

    def run_one(line, log, seconds, threads, grace):
        called.append(line[line.index("--cause") + 1])
        if len(called) <= 3:
            meeting.wait()  # breaks, and fails the test, unless three are here
        return 0

    monkeypatch.setattr(run_all, "run_one", run_one)
    run_all.run(cells, {False: tmp_path, True: tmp_path}, tmp_path / "work", tmp_path, "bubblewrap", 500, jobs=3)
    assert sorted(called) == sorted(CAUSES)


def test_csv_is_whole_or_not_there(tmp_path):
    cell = Cell(task="tool", cause="right", **SMALL)
    write(tmp_path, cell, [0.1, 0.2, 0.3])
    path = tmp_path / f"{cell.name}.csv"
    before = path.read_text()
    with pytest.raises(ValueError):
        write_csv(path, [{"unknown column": 1}])
    assert path.read_text() == before and len(list(csv.reader(before.splitlines()))) == 5
