"""OpenEnv environments as environments of ours.

OpenEnv has one action type and `step`; a policy has tools. A subclass says which tool makes which action:

    class Wordle(OpenEnvEnvironment):
        def guess(self, word: str) -> str:
            \"""Guess the word.

            Args:
                word: Five letters.
            \"""
            return self._step(TextArenaAction(message=word))

        def _show(self, observation: TextArenaObservation) -> str:
            return observation.prompt

    GptOssGRPOTrainer(..., environment_factory=lambda: Wordle(TextArenaEnv(base_url=url).sync()))

OpenEnv itself is not imported: any client with its three synchronous methods will do.
"""

import inspect
import time
from typing import Any, Protocol

from .protocol import Environment, ToolOutput, not_a_tool


class StepResult(Protocol):
    """What OpenEnv's `reset` and `step` return."""

    observation: Any
    reward: float | None
    done: bool


class OpenEnvClient(Protocol):
    """A synchronous OpenEnv client, as given by `EnvClient.sync()`."""

    def reset(self, **kwargs: Any) -> StepResult: ...

    def step(self, action: Any) -> StepResult: ...

    def close(self) -> None: ...


class OpenEnvEnvironment(Environment):
    """Base class of adapters. Its tools are the public methods that a subclass adds; they call `_step`.

    A step with `done` ends the episode; tools called after it are told so and reach no server. The rewards of the steps
    add up to the environment's own reward, which TRL uses alongside `reward_funcs`.

    Args:
        client (`OpenEnvClient`): a synchronous client with a session of its own.

    Attributes:
        reset_columns (`tuple[str, ...]`, class attribute): columns of the data set row that go to the client's `reset`
            (such as `seed`). None unless set: a row also holds the answer.
    """

    reset_columns: tuple[str, ...] = ()

    def __init__(self, client: OpenEnvClient) -> None:
        for method in (client.reset, client.step):
            if inspect.iscoroutinefunction(method):
                raise TypeError(
                    f"{type(client).__name__} is an asynchronous client. Pass its synchronous form, `client.sync()`."
                )
        self.client = client
        self._reward = 0.0

    def reset(self, **kwargs: Any) -> str | None:
        """Start an episode; the first observation is appended to the prompt."""
        super().reset(**kwargs)
        missing = [name for name in self.reset_columns if name not in kwargs]
        if missing:
            raise ValueError(f"{type(self).__name__} needs the columns {missing}; the row has {sorted(kwargs)}.")
        result = self.client.reset(**{name: kwargs[name] for name in self.reset_columns})
        self._reward = float(result.reward or 0.0)
        self.done = bool(result.done)
        return self._show(result.observation) or None

    def get_reward(self) -> float:
        """Sum of the rewards of this episode's steps."""
        return self._reward

    @not_a_tool
    def close(self) -> None:
        """End the session with the server."""
        self.client.close()

    def _step(self, action: Any) -> str:
        """Take one step and show its observation to the policy."""
        if self.done:
            return ToolOutput("The episode is over.", failed=True)
        start = time.monotonic()
        result = self.client.step(action)
        self._reward += float(result.reward or 0.0)
        self.done = bool(result.done)
        return ToolOutput(self._show(result.observation), seconds=time.monotonic() - start)

    def _show(self, observation: Any) -> str:
        """Text of an observation; a subclass picks the fields that the policy may see."""
        raise NotImplementedError(f"{type(self).__name__} must define `_show(observation) -> str`.")
