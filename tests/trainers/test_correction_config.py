import dataclasses

import pytest
from trl import TrlParser

from trl_gptoss import GptOssGRPOConfig
from trl_gptoss.correction import LONG_ROLLOUTS
from trl_gptoss.trainers.correction_config import SHORT_ROLLOUTS, RolloutCorrectionConfig, correction_options


def config(**settings):
    return GptOssGRPOConfig("out", use_cpu=True, bf16=False, report_to="none", **settings)


def options(**settings):
    found = correction_options(config(**settings))
    if found is not None:
        assert found.pop("clamp") == 20.0
        found = {name: value for name, value in found.items() if value is not None}
    return found


def test_the_default_depends_on_the_budget():
    assert options(max_rollout_tokens=16384) == LONG_ROLLOUTS
    assert options(max_rollout_tokens=1024) == LONG_ROLLOUTS
    assert options(max_rollout_tokens=1023) == SHORT_ROLLOUTS
    assert options(max_rollout_tokens=16384, loss_type="vespo") == SHORT_ROLLOUTS
    assert options(rollout_correction_level="off") is None


@pytest.mark.parametrize(
    ("trl", "own"),
    [
        ({"correction": False}, None),
        ({"mode": "token_truncate"}, {"level": "token", "mode": "truncate", "high": 3.0}),
        ({"mode": "token_mask", "clip_min": 0.5}, {"level": "token", "mode": "icepop", "low": 0.5, "high": 3.0}),
        (
            {"mode": "sequence_truncate", "clip_max": None, "clip_min": 0.5},
            {"level": "sequence", "mode": "truncate", "low": 0.5},
        ),
        ({"clip_max": 2.0}, {"level": "sequence", "mode": "icepop", "high": 2.0}),
        ({"cap": 2.5}, {"level": "sequence", "mode": "icepop", "high": 2.5}),
    ],
    ids=str,
)
def test_trl_options_map_onto_ours(trl, own):
    assert options(**{f"vllm_importance_sampling_{name}": value for name, value in trl.items()}) == own


def test_a_saved_configuration_comes_back_as_the_same():
    for settings in (
        {},
        {"vllm_importance_sampling_correction": False},
        {"vllm_importance_sampling_mode": "token_truncate"},
        {"rollout_correction_level": "turn", "rollout_correction_mode": "truncate", "rollout_correction_high": 4.0},
    ):
        first = config(**settings)
        again = dataclasses.replace(first, generation_batch_size=None)
        assert correction_options(again) == correction_options(first)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"level": "auto", "high": 2.0}, "goes without rollout_correction_high"),
        ({"level": "off", "mode": "mask"}, "goes without rollout_correction_mode"),
        ({"level": "token"}, "needs a rollout_correction_mode"),
        ({"level": "tokens", "mode": "mask"}, "level='tokens' is unknown"),
        ({"level": "token", "mode": "mask", "low": 2.0, "high": 1.0}, "low=2.0 must be below high=1.0"),
        ({"level": "token", "mode": "mask", "low": 1.5}, "low=1.5 leaves out 1"),
        ({"level": "geometric", "mode": "mask", "low": 1e-10}, "low=1e-10 lies beyond clamp=20"),
        ({"level": "token", "mode": "truncate", "token_cap": 2.0}, "the limit is `high`"),
        ({"level": "token", "mode": "mask", "veto": 2.0}, "between 0 and 1"),
        ({"clamp": 100.0}, "clamp=100.0"),
        ({"min_ess": 2.0}, "min_ess is 2.0"),
    ],
    ids=str,
)
def test_bad_settings_say_what_to_do(settings, message):
    with pytest.raises(ValueError, match=message):
        config(**{f"rollout_correction_{name}": value for name, value in settings.items()})


def test_both_names_at_once_are_refused_and_the_equivalent_is_named():
    own = {"rollout_correction_level": "token", "rollout_correction_mode": "truncate"}
    with pytest.raises(ValueError, match="rollout_correction_level='token', rollout_correction_mode='icepop', roll"):
        config(**own, vllm_importance_sampling_mode="token_mask")
    with pytest.raises(ValueError, match="the same as rollout_correction_level='off'"):
        config(**own, vllm_importance_sampling_correction=False)
    with pytest.raises(ValueError, match="none of TRL's"):
        config(vllm_importance_sampling_mode="turn_mask")
    with pytest.raises(ValueError, match="loss_type='vespo'.*Set rollout_correction_level='token'"):
        config(loss_type="vespo", vllm_importance_sampling_mode="sequence_truncate")


def test_every_field_is_documented_and_can_be_set_from_a_command_line():
    for f in dataclasses.fields(RolloutCorrectionConfig):
        assert f.metadata["help"] and f"{f.name} (`" in RolloutCorrectionConfig.__doc__
    line = "--output_dir out --use_cpu true --bf16 false --report_to none --rollout_correction_level geometric"
    line += " --rollout_correction_mode mask --rollout_correction_high 1.01 --rollout_correction_veto 1e-4"
    [args] = TrlParser(GptOssGRPOConfig).parse_args_and_config(line.split())
    assert correction_options(args)["high"] == 1.01 and correction_options(args)["veto"] == 1e-4
