import dataclasses

import pytest
from trl import TrlParser

from trl_gptoss import GptOssGRPOConfig
from trl_gptoss.trainers.sampling import EpochRepeatSampler


def config(**settings):
    return GptOssGRPOConfig("out", use_cpu=True, bf16=False, report_to="none", **settings)


def test_budgets_have_two_names_and_one_value():
    assert config(max_turns=3).max_tool_calling_iterations == 2
    assert config(max_tool_calling_iterations=2).max_turns == 3
    assert config().max_turns is None and config().max_tool_calling_iterations is None
    assert config(max_turns=3, max_tool_calling_iterations=2).max_turns == 3
    assert config(max_rollout_tokens=77).max_completion_length == 77
    assert config(max_completion_length=77).max_rollout_tokens == 77
    assert config().max_rollout_tokens == config().max_completion_length
    first = config(max_turns=3, max_rollout_tokens=77)
    budgets = ("max_turns", "max_tool_calling_iterations", "max_rollout_tokens", "max_completion_length")
    again = config(**{name: getattr(first, name) for name in budgets})  # as a saved configuration comes back
    assert [getattr(again, name) for name in budgets] == [3, 2, 77, 77]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_turns": 3, "max_tool_calling_iterations": 3}, "2 rounds of tool calls.*Set only one"),
        ({"max_rollout_tokens": 77, "max_completion_length": 78}, "same budget"),
        ({"max_turns": 0}, "max_turns is 0"),
        ({"max_rollout_tokens": 0}, "max_rollout_tokens is 0"),
        ({"tool_timeout": 0.0}, "tool_timeout"),
        ({"temperature": 0.0}, "temperature is 0.0, it must be positive.*top_k=1"),
        ({"beta": -0.1}, "beta is -0.1"),
        ({"loss_type": "dr_grpo", "max_completion_length": None}, "'dr_grpo' divides by max_rollout_tokens"),
        ({"tool_timeout": float("inf")}, "tool_timeout is inf seconds, it must be positive and finite"),
        ({"max_rollout_seconds": float("inf")}, "positive and finite, or None for no limit"),
        ({"max_rollout_seconds": 0.0}, "max_rollout_seconds is 0.0"),
        ({"tool_output_limit": 3}, "tool_output_limit is 3, it must be at least 128"),
        ({"max_concurrent_tools": 0}, "max_concurrent_tools"),
        ({"wait_for_tools": True, "use_vllm": True}, "Remove one of wait_for_tools and use_vllm"),
        ({"on_policy_check_steps": -1}, "on_policy_check_steps"),
        ({"log_trajectories": -1}, "log_trajectories"),
        ({"prompt_date": "3 March"}, "YYYY-MM-DD"),
        ({"prompt_date": 20260102}, "YYYY-MM-DD"),
        ({"max_rollout_tokens": 64.5}, "max_rollout_tokens is 64.5, it must be a whole number"),
        ({"prompt_date": "20260203"}, "YYYY-MM-DD"),
        ({"on_policy": "always"}, "'auto', 'force' or 'off'"),
        ({"reasoning_effort": "extreme"}, "'low', 'medium' or 'high'"),
        ({"on_policy": "force", "num_iterations": 2}, "num_iterations=1"),
    ],
    ids=str,
)
def test_bad_settings_say_what_to_do(settings, message):
    with pytest.raises(ValueError, match=message):
        config(**settings)


def test_every_field_is_documented_and_can_be_set_from_a_command_line():
    own = [f for f in dataclasses.fields(GptOssGRPOConfig) if f.name in GptOssGRPOConfig.__annotations__]
    for f in own:
        assert f.metadata["help"] and f"{f.name} (`" in GptOssGRPOConfig.__doc__
    line = "--output_dir out --use_cpu true --bf16 false --report_to none --on_policy force --max_turns 4"
    [args] = TrlParser(GptOssGRPOConfig).parse_args_and_config(f"{line} --prompt_date 2026-01-02".split())
    assert (args.on_policy, args.max_turns, args.prompt_date) == ("force", 4, "2026-01-02")


def test_a_recipe_may_leave_quotes_out(tmp_path):
    """YAML reads a bare `off` as False and a date as a date."""
    recipe = tmp_path / "recipe.yaml"
    names = ("on_policy", "router_replay", "rollout_correction_level")
    settings = [
        "output_dir: out",
        "use_cpu: true",
        "bf16: false",
        "prompt_date: 2026-01-02",
        *(f"{n}: off" for n in names),
    ]
    recipe.write_text("\n".join(settings))
    [args] = TrlParser(GptOssGRPOConfig).parse_args_and_config(["--config", str(recipe)])
    assert [getattr(args, name) for name in names] == ["off"] * 3 and args.prompt_date == "2026-01-02"


def test_the_order_of_prompts_depends_on_seed_and_epoch_alone():
    def order(epoch, seed=3, before=0):
        sampler = EpochRepeatSampler(list(range(10)), mini_repeat_count=2, batch_size=5, seed=seed)
        for e in range(before):
            sampler.epoch = e
            list(sampler)
        sampler.epoch = epoch
        return list(sampler)

    assert order(1) == order(1, before=1) != order(0)
    assert order(0) != order(0, seed=4)
    assert sorted(order(5)) == sorted(list(range(10)) * 2)
