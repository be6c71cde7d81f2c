from dataclasses import dataclass

import pytest

from trl_gptoss.environments import OpenEnvEnvironment, ToolOutput


@dataclass
class Move:
    by: int


@dataclass
class Seen:
    position: int
    secret: int


@dataclass
class Result:
    observation: Seen
    reward: float | None = None
    done: bool = False


class LocalServer:
    """Stands in for a synchronous OpenEnv client: walk to the goal; reward 1 there, -0.1 for each other step."""

    def __init__(self):
        self.calls = []

    def reset(self, seed=0):
        self.calls.append(("reset", seed))
        self.position, self.goal = 0, seed
        return Result(Seen(0, self.goal))

    def step(self, action):
        self.calls.append(("step", action))
        self.position += action.by
        there = self.position == self.goal
        return Result(Seen(self.position, self.goal), 1.0 if there else -0.1, there)

    def close(self):
        self.calls.append(("close",))


class Walk(OpenEnvEnvironment):
    reset_columns = ("seed",)

    def move(self, by: int) -> str:
        """Walk.

        Args:
            by: Steps.
        """
        return self._step(Move(by))

    def _show(self, observation):
        return f"at {observation.position}"


def test_episode_through_the_environment_protocol():
    env = Walk(LocalServer())
    assert env.reset(prompt="p", seed=3, answer="42") == "at 0"
    assert not env.done
    assert env.move(1) == "at 1"
    assert env.get_reward() == pytest.approx(-0.1)
    first = env.move(2)
    assert isinstance(first, ToolOutput) and first == "at 3" and not first.failed
    assert env.done
    assert env.get_reward() == pytest.approx(0.9)
    late = env.move(1)
    assert late.failed and env.get_reward() == pytest.approx(0.9)
    assert env.client.calls == [("reset", 3), ("step", Move(1)), ("step", Move(2))]  # no answer column, no late step

    assert env.reset(seed=5) == "at 0" and not env.done and env.get_reward() == 0.0
    env.close()
    assert env.client.calls[-1] == ("close",)


def test_trl_sees_only_the_tool(trl_tools):
    tools, has_reset, has_reward = trl_tools(Walk(LocalServer()))
    assert [tool.__name__ for tool in tools] == ["move"]
    assert has_reset and has_reward


def test_missing_column_and_asynchronous_client():
    with pytest.raises(ValueError, match="seed"):
        Walk(LocalServer()).reset(prompt="p")

    class Asynchronous(LocalServer):
        async def reset(self, seed=0): ...

    with pytest.raises(TypeError, match="sync"):
        Walk(Asynchronous())
