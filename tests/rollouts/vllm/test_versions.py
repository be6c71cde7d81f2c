import warnings

import pytest
import torch

from trl_gptoss.rollouts.vllm.versions import CHANGES, VERIFIED, EngineVersion


def version(number, device="cuda"):
    return EngineVersion(version=number, device=device)


@pytest.mark.parametrize("number", ["0.22.0", "0.26.0", "0.28.1", "0.31.0", "0.26.0+cu130"])
def test_gpu_engines_load_in_place(number):
    assert version(number).loading == "in_place"


@pytest.mark.parametrize("number, way", [("0.29.0", "reload"), ("0.30.0", "reload"), ("0.31.0", "reload")])
def test_cpu_engines_reload(number, way):
    assert version(number, "cpu").loading == way


@pytest.mark.parametrize("number", ["0.22.0", "0.26.0", "0.28.9"])
def test_cpu_engines_without_names_for_experts_are_refused(number):
    with pytest.raises(NotImplementedError, match="0.29 to 0.31"):
        version(number, "cpu").check(True, torch.bfloat16)


@pytest.mark.parametrize("number", ["0.21.3", "0.32.0", "1.0.0"])
def test_versions_that_trl_does_not_take_are_refused(number):
    with pytest.raises(NotImplementedError, match="0.22 to 0.31"):
        version(number).check(True, torch.bfloat16)


def test_verified_versions_pass_silently_and_others_need_the_probe():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for release, device in VERIFIED:
            version(f"{release}.0", device).check(False, torch.bfloat16)
    unverified = version("0.23.0")
    assert ("0.23", "cuda") not in VERIFIED
    with pytest.warns(UserWarning, match="has not been verified"):
        unverified.check(True, torch.bfloat16)
    with pytest.raises(ValueError, match="vllm_probe_every to 1"):
        unverified.check(False, torch.bfloat16)


def test_float32_on_cpu_begins_with_031():
    with pytest.raises(NotImplementedError, match="bf16 sinks"):
        version("0.30.0", "cpu").check(True, torch.float32)
    version("0.31.0", "cpu").check(True, torch.float32)


def test_changes_hold_between_their_versions():
    assert not version("0.27.9").has("trainer_engine") and version("0.28.0").has("trainer_engine")
    assert version("0.30.5", "cpu").has("cpu_bf16_sinks") and not version("0.31.0", "cpu").has("cpu_bf16_sinks")
    assert not version("0.30.5", "cuda").has("cpu_bf16_sinks")
    assert all(change.what for change in CHANGES.values())
