"""PPO's losses over two real processes give the gradient of one."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest
from launching import run_well, torchrun

pytestmark = pytest.mark.distributed
SCRIPT = Path(__file__).with_name("ppo_two_ranks.py")


@pytest.fixture(scope="module")
def gradients(tmp_path_factory) -> dict[str, dict]:
    folder = tmp_path_factory.mktemp("gradients")
    for launcher in ([sys.executable], torchrun(2)):
        run_well([*launcher, SCRIPT, folder], timeout=240, ACCELERATE_USE_CPU="true")
    return {path.stem: json.loads(path.read_text()) for path in folder.iterdir()}


@pytest.mark.parametrize("mode", ["token_mean", "sequence_mean", "fixed_length"])
def test_two_ranks_and_accumulation_give_the_gradient_of_one_process(gradients, mode: str) -> None:
    one, first, second = (gradients[f"gradient_{x}"] for x in ("1_0", "2_0", "2_1"))
    np.testing.assert_allclose(first[f"{mode} False"], one[f"{mode} False"], rtol=1e-10, atol=1e-14)
    assert first == second
    # Control: counts of its own for each micro-batch and rank.
    assert np.abs(np.subtract(first[f"{mode} True"], one[f"{mode} False"])).max() > 1e-2
