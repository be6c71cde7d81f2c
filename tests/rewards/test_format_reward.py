import pytest

from trl_gptoss.rewards import format_reward
from trl_gptoss.trajectory import StopReason, Trajectory, Turn


def trajectory(*anomalies, stop_reason=StopReason.FINAL):
    turns = [Turn(policy_ids=[1], anomalies=list(names)) for names in anomalies]
    return Trajectory(prompt_ids=[1], turns=turns, stop_reason=stop_reason)


@pytest.mark.parametrize(
    ("rollout", "value"),
    [
        (trajectory([], []), 0.0),
        (trajectory(["a"], []), -0.5),
        (trajectory(["a", "b", "c"], []), -0.5),  # per turn, not per anomaly
        (trajectory(["a"], ["b"]), -1.0),
        (trajectory([], stop_reason=StopReason.ENVIRONMENT), 0.0),
        (trajectory([], [], stop_reason=StopReason.TRUNCATED), -1.0),
        (trajectory([], stop_reason=StopReason.MAX_TURNS), -1.0),
        (trajectory(["a"], stop_reason=StopReason.MAX_TOKENS), -1.0),
    ],
)
def test_values(rollout, value):
    assert format_reward(completions=["x"], trajectories=[rollout], prompts=["p"]) == [value]


def test_without_harmony_the_completion_has_to_end_with_an_answer():
    answer, call = {"role": "assistant", "content": "42"}, {"role": "assistant", "content": "", "tool_calls": [{}]}
    result = {"role": "tool", "content": "42"}
    completions = ["42", " ", [call, result, answer], [call, result], [call], [answer, result], []]
    assert format_reward(completions=completions) == [0.0, -1.0, 0.0, -1.0, -1.0, -1.0, -1.0]


def test_needs_rollouts():
    with pytest.raises(ValueError, match="completions"):
        format_reward()
