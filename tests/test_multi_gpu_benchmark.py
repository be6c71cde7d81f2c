"""Of benchmarks/multi_gpu: shares of a profiled step, the prediction for many nodes, and the order of jobs."""

import importlib.util
import sys
from pathlib import Path

import pytest
import torch

FOLDER = Path(__file__).resolve().parents[1] / "benchmarks/multi_gpu"
sys.path.append(str(FOLDER))


def load(name):
    spec = importlib.util.spec_from_file_location(f"multi_gpu_{name}", FOLDER / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_shares_of_overlapping_kernels():
    seconds = load("gpu_time").shares(
        [
            ("gemm", 0.0, 4.0),
            ("gemm", 3.0, 5.0),  # on another stream
            ("ncclDevKernel_AllGather_RING_LL(...)", 4.0, 7.0),  # 2 of 3 s exposed
            ("ncclDevKernel_SendRecv(...)", 6.0, 8.0),  # 2 s exposed, 1 of them beside the gather
            ("ncclDevKernel_ReduceScatter_Sum_f32", 1.0, 2.0),  # hidden
            ("ncclKernel_Something", 9.0, 9.5),
            ("Memcpy DtoD", 8.0, 8.5),
        ]
    )
    assert seconds["compute_s"] == pytest.approx(5.5)
    assert (seconds["all_gather_s"], seconds["exposed_all_gather_s"]) == pytest.approx((3.0, 2.0))
    assert (seconds["all_to_all_s"], seconds["exposed_all_to_all_s"]) == pytest.approx((2.0, 2.0))
    assert (seconds["reduce_scatter_s"], seconds["exposed_reduce_scatter_s"]) == pytest.approx((1.0, 0.0))
    assert (seconds["other_nccl_s"], seconds["exposed_s"]) == pytest.approx((0.5, 3.5))


def test_a_cpu_has_no_kernels():
    assert set(load("gpu_time").shares([]).values()) == {0}


def test_prediction_with_links_that_cost_nothing_or_everything():
    cluster = load("cluster")
    free = cluster.Pieces(lengths=[8192], gpu_seconds=8.0, link=1e30, exchange=1e30, source="")
    one, many = (cluster.predict(free, nodes, network=1e30) for nodes in (1, 16))
    for row in (one, many):  # eight GPUs on what takes one 8 s
        assert row["least_s"] == pytest.approx(1.0) and row["most_s"] == pytest.approx(1.0)
    assert many["gpus"] == 128 and many["peak_gib"] < one["peak_gib"]
    slow = cluster.predict(free, 16, network=1e9)  # 20.9e9 parameters, 8 bytes each in all, 15/16 of an eighth of them
    moved = 8 * 20.9147e9 * 15 / 16 / 8 / 1e9
    assert slow["gathers_s"] + slow["scatters_s"] == pytest.approx(moved, rel=1e-3)
    assert slow["least_s"] == pytest.approx(moved, rel=1e-3) and slow["most_s"] == pytest.approx(moved + 1, rel=1e-3)


def test_measured_pieces_come_from_the_profiled_step():
    cluster = load("cluster")
    row = {
        "case": "a",
        "profiled": "True",
        "seconds": "5",
        "compute_s": "4",
        "lengths": "100 100",
        "gpus": "2",
        "rows": "short",
    }
    long = {**row, "rows": "long", "lengths": "900 10", "seconds": "9", "compute_s": "8"}
    others = [{**row, "profiled": "False", "seconds": "1"}, {**row, "seconds": "6", "compute_s": "3"}]
    rates = {"all_gather": (200, 300), "reduce_scatter": (250,), "all_to_all": (200,)}
    collectives = [{"collective": name, "gb_per_s": str(x)} for name, found in rates.items() for x in found]
    measured = cluster.rates_of(collectives)
    assert measured == {"link": 250e9, "exchange": 200e9}
    short, longer = cluster.from_rows([long, row, *others], "a", measured)
    assert (short.gpu_seconds, short.lengths) == (4.0, [100])  # two GPUs, two rows in 4 s
    assert (longer.gpu_seconds, longer.lengths) == (16.0, [900, 10])
    with pytest.raises(ValueError, match="No profiled step of 'b'"):
        cluster.from_rows([row], "b", measured)


def test_the_committed_prediction_is_what_the_rows_and_the_planner_say_today():
    cluster = load("cluster")
    assert cluster.read(FOLDER / "cluster_prediction.csv") == cluster.table(cluster.all_turns())


JOB = """
import sys, time
from pathlib import Path
sys.path.append({folder!r})
from ahead import wait
out, name = Path(sys.argv[1]), sys.argv[2]
def say(what):
    with (out / "said").open("a") as file:
        file.write(name + " " + what + "\\n")
say("imported")
wait()
say("begins")
while name == "a" and not {{"b imported", "hangs imported"}} <= set((out / "said").read_text().splitlines()):
    time.sleep(0.01)
while name == "hangs":
    time.sleep(0.01)
say("ends")
"""


def test_jobs_import_while_those_before_them_run_and_one_that_hangs_is_ended(tmp_path, monkeypatch, capfd):
    run_all = load("run_all")
    (tmp_path / "job.py").write_text(JOB.format(folder=str(FOLDER)))
    monkeypatch.setattr(run_all, "HERE", tmp_path)
    monkeypatch.setattr(run_all, "WRITES", {"job.py": "agreement"})
    words = {name: [str(tmp_path), name] for name in ("a", "hangs", "b", "c")}

    def job(name, limit=60):
        return run_all.Job(name=name, script="job.py", words=words[name], launcher="python", limit=limit)

    monkeypatch.setattr(run_all, "PHASES", {"1": [job("a")], "2": [job("b"), job("hangs", 2)], "3": [job("c")]})
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(sys, "argv", ["run_all.py", "--out", str(tmp_path / "out")])
    run_all.main()
    said = (tmp_path / "said").read_text().splitlines()
    assert said.index("b imported") < said.index("a ends") < said.index("b begins")  # or `a` would not have ended
    assert said.index("b ends") < said.index("c begins") < said.index("c ends")
    assert "hangs begins" in said and "hangs ends" not in said
    assert "hangs: ended after its 2 s" in capfd.readouterr().out


def test_what_is_not_timed_goes_together_with_gpus():
    grouped = load("run_all").grouped
    assert grouped(["one", "curves", "agreement"], 2) == [["curves", "agreement"], ["one"]]
    assert grouped(["agreement", "curves"], 0) == [["agreement"], ["curves"]]
