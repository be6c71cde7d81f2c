"""Sequence parallelism on DDP, FSDP2, HSDP and ZeRO-3 gives the loss, the gradients and the parameters of one process."""

import itertools
import json
from pathlib import Path

import pytest
from launching import accelerate, needs_deepspeed, run, run_well, torchrun
from wrong_sharing import VARIANTS

pytestmark = pytest.mark.distributed
SCRIPT = Path(__file__).with_name("sharing.py")
TENSORS = {"full": 37, "lora": 18}


def launch(folder, cells, processes=4, timeout=280, zero3=False, script=SCRIPT):
    launcher = accelerate("zero3", processes) if zero3 else torchrun(processes)
    environment = {} if zero3 else {"ACCELERATE_USE_CPU": "true"}
    run_well([*launcher, script, folder, *cells], timeout, **environment)
    return {c: [json.loads((folder / f"{c}_{rank}.json").read_text()) for rank in range(processes)] for c in cells}


def check(cell, ranks, processes=4):
    """Against float64 arithmetic on the same numbers; see `difference` in `sharing.py`. In float32 the gradients of a step are
    compared with those at the parameters that it starts from: at the oracle's own, the rounding of the optimizer (1e-6, in
    `parameters`) would count as theirs and become up to 1.2e-5."""
    _, size, kind, _, dtype, *_ = cell.split(",")
    for seen in ranks:
        bound = 1e-12 if dtype == "float64" else 1e-5
        assert seen["world"] == processes and seen["group"] == int(size)
        assert seen["tensors"] == TENSORS[kind]
        assert max(seen["loss"], seen["gradients"], seen["parameters"]) <= bound, (cell, seen)


FAST = (
    "ddp,2,lora,checkpointing,float64,sequence",
    "fsdp2,4,full,checkpointing,float64",
    "hsdp,2,full,plain,float32,token,fused,10",  # TRL's fused head, several micro-batches per rank
)


@pytest.fixture(scope="module")
def seen(tmp_path_factory):
    """One launch: starting processes takes longer than what they do."""
    cells = [*FAST, *(f"wrong,{name}" for name in ("none", *VARIANTS))]
    return launch(tmp_path_factory.mktemp("sharing"), cells)


@pytest.mark.parametrize("cell", FAST)
def test_representative_cells(seen, cell):
    check(cell, seen[cell])


@pytest.mark.parametrize("name", VARIANTS)
def test_wrong_variants_are_seen(seen, name):
    assert all(rank["gradients"] < 1e-12 for rank in seen["wrong,none"])
    assert all(rank["gradients"] > 1e-2 for rank in seen[f"wrong,{name}"])


KINDS = list(itertools.product(("full", "lora"), ("checkpointing", "plain"), ("token", "sequence")))


@pytest.mark.slow
@pytest.mark.timeout(1600)
@pytest.mark.parametrize(("wrapper", "size"), itertools.product(("ddp", "fsdp2", "hsdp"), (2, 4)))
def test_the_grid(tmp_path, wrapper, size):
    cells = [f"{wrapper},{size},{a},{b},{dtype},{level}" for a, b, level in KINDS for dtype in ("float64", "float32")]
    cells += [f"{wrapper},{size},{a},{b},float32,{level},fused,10" for a, b, level in KINDS]
    for cell, ranks in launch(tmp_path, cells, timeout=1500).items():
        print(cell, ranks[0])
        check(cell, ranks)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@needs_deepspeed
@pytest.mark.parametrize(
    ("size", "kind", "checkpointing"), itertools.product((2, 4), ("full", "lora"), ("checkpointing", "plain"))
)
def test_zero3(tmp_path, size, kind, checkpointing):
    """DeepSpeed compiles an operator at its first start, for minutes; set TORCH_EXTENSIONS_DIR to keep it."""
    cell = f"zero3,{size},{kind},{checkpointing},float32,token,fused,10"
    ranks = launch(tmp_path, [cell], timeout=1700, zero3=True)[cell]
    print(cell, ranks[0])
    check(cell, ranks)


@pytest.mark.slow
@pytest.mark.parametrize(("processes", "size"), [(2, 2), (1, 1), (4, 4)])
def test_a_sharded_checkpoint_goes_on_with_another_number_of_ranks(tmp_path, processes, size):
    launch(tmp_path, ["resumed,save,2"])
    for seen in launch(tmp_path, [f"resumed,load,{size}"], processes)[f"resumed,load,{size}"]:
        assert seen["world"] == processes and seen["same"] and seen["parameters"] <= 1e-12, seen


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("config", "kind"),
    [
        ("ddp", "MULTI_CPU"),
        pytest.param("zero3", "DEEPSPEED", marks=needs_deepspeed),
        pytest.param("zero3_sp", "DEEPSPEED", marks=needs_deepspeed),
    ],
)
def test_the_configurations_as_they_are(tmp_path, config, kind):
    """The fsdp2 files need GPUs: there Accelerate shards nothing without them, which the trainer refuses."""
    run_well([*accelerate(config, 2), SCRIPT.with_name("launched.py"), tmp_path], timeout=1700)
    for rank in range(2):
        seen = json.loads((tmp_path / f"{rank}.json").read_text())
        assert seen["type"] == kind and seen["world"] == 2 and seen["changed"] and len(seen["log"]) == 3
        assert seen["wrapper"] == ("DistributedDataParallel" if kind == "MULTI_CPU" else "DeepSpeedEngine")
        assert seen["partitioned"] == (0 if kind == "MULTI_CPU" else seen["parameters"])


@pytest.mark.slow
def test_an_fsdp_launch_that_accelerate_ignores_is_refused(tmp_path):
    done = run([*accelerate("fsdp2", 2), SCRIPT.with_name("launched.py"), tmp_path], timeout=280)
    assert done.returncode != 0 and "nothing would be sharded" in done.stderr, done.stderr[-6000:]
