"""Environment classes get the settings of the configuration."""

import functools
import inspect

from trl.trainer.grpo_trainer import EnvironmentFactory

from ..environments import PythonTool
from .config import GptOssGRPOConfig


def bind_environments(
    factory: EnvironmentFactory | dict[str, EnvironmentFactory] | None, args: GptOssGRPOConfig
) -> EnvironmentFactory | dict[str, EnvironmentFactory] | None:
    """Bind `executor`, `tool_timeout` and `tool_output_limit` where the factory is a `PythonTool` class.

    Subclasses take part if their constructor hands keyword arguments on. Every other factory (a function, a
    `functools.partial`, another class) was configured by whoever made it and comes back unchanged.
    """
    if isinstance(factory, dict):
        return {name: bind_environments(each, args) for name, each in factory.items()}
    if not (inspect.isclass(factory) and issubclass(factory, PythonTool)):
        return factory
    return functools.partial(
        factory, executor=args.executor, tool_timeout=args.tool_timeout, tool_output_limit=args.tool_output_limit
    )
