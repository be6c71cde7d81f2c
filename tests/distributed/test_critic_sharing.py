"""PPO's critic with sequence parallelism has the loss, the gradients and the parameters of one process: DDP, FSDP2, HSDP, ZeRO-3.

`test_sharing.py` does the same for the policy.
"""

import itertools
from pathlib import Path

import pytest
from launching import needs_deepspeed
from test_sharing import launch

pytestmark = [pytest.mark.distributed, pytest.mark.slow, pytest.mark.timeout(1800)]
SCRIPT = Path(__file__).with_name("critic_sharing.py")
TENSORS = {"separate": 38, "lora": 18}
LEVELS = ("checkpointing", "plain")
WRONG = ("first_sinks", "summed_gradient", "own_tokens")


def check(cell, ranks):
    """Bounds as for the policy. The trainer logs the loss in float32."""
    _, size, kind, _, dtype, *_ = cell.split(",")
    print(cell, ranks[0])
    for seen in ranks:
        bound = 1e-12 if dtype == "float64" else 1e-5
        assert seen["world"] == 4 and seen["group"] == int(size) and seen["tensors"] == TENSORS[kind]
        assert seen["gradients"] <= bound and seen["parameters"] <= bound and seen["loss"] <= 1e-6, seen


@pytest.mark.parametrize(("wrapper", "size"), itertools.product(("ddp", "fsdp2", "hsdp"), (2, 4)))
def test_the_grid(tmp_path, wrapper, size):
    """The LoRA critic refuses sharded weights."""
    kinds = ("separate", "lora") if wrapper == "ddp" else ("separate",)
    cells = [
        f"{wrapper},{size},{kind},{level},{rest}"
        for kind, level, rest in itertools.product(kinds, LEVELS, ("float64", "float64,10", "float32,10"))
    ]
    for cell, ranks in launch(tmp_path, cells, timeout=1500, script=SCRIPT).items():
        check(cell, ranks)


@needs_deepspeed
@pytest.mark.parametrize(("size", "level"), itertools.product((2, 4), LEVELS))
def test_zero3(tmp_path, size, level):
    """DeepSpeed compiles an operator at its first start, for minutes; set TORCH_EXTENSIONS_DIR to keep it."""
    cell = f"zero3,{size},separate,{level},float32,10"
    check(cell, launch(tmp_path, [cell], timeout=1700, zero3=True, script=SCRIPT)[cell])


def test_wrong_variants_are_seen(tmp_path):
    seen = launch(tmp_path, [f"wrong,{name}" for name in ("none", *WRONG)], script=SCRIPT)
    assert all(rank["gradients"] < 1e-12 for rank in seen["wrong,none"])
    for name in WRONG:
        assert all(rank["gradients"] > 1e-2 for rank in seen[f"wrong,{name}"]), name
