"""Environment classes get the settings of the configuration."""

import functools
import inspect
from collections.abc import Callable

from trl.trainer.grpo_trainer import EnvironmentFactory

from ..environments import PythonTool
from .config import GptOssGRPOConfig

_SETTINGS = ("executor", "tool_timeout", "tool_output_limit")


def check_tool_names(tools: list[Callable]) -> None:
    """A call names its tool: of two with one name TRL keeps the last one without a word.

    Raises:
        ValueError: two functions of one name.
    """
    names = [tool.__name__ for tool in tools]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(
            f"Several tools are called {', '.join(twice)}; a call could not tell them apart. Rename them."
        )


def check_environment_classes(
    tools: list[Callable], factory: EnvironmentFactory | dict[str, EnvironmentFactory] | None
) -> None:
    """`check_environment_tools` for factories that name their class; what others make is not known before they are called.

    Raises:
        ValueError: a method and a function of one name.
    """
    for each in factory.values() if isinstance(factory, dict) else [factory]:
        while isinstance(each, functools.partial):
            each = each.func
        if inspect.isclass(each):
            offered = [
                method
                for name, method in inspect.getmembers(each, predicate=inspect.isfunction)
                if not name.startswith("_") and name not in ("reset", "get_reward")  # TRL's rule
            ]
            check_environment_tools(tools, offered)


def check_environment_tools(tools: list[Callable], methods: list[Callable]) -> None:
    """The same of `tools` and the methods of an environment that go with them.

    Raises:
        ValueError: a method and a function of one name.
    """
    names = {tool.__name__ for tool in tools}
    common = [method for method in methods if method.__name__ in names]
    if common:
        raise ValueError(
            f"{', '.join(method.__qualname__ for method in common)} and one of `tools` have one name; a call could not tell them "
            "apart. Rename the function, or leave it out of `tools`."
        )


def bind_environments(
    factory: EnvironmentFactory | dict[str, EnvironmentFactory] | None, args: GptOssGRPOConfig
) -> EnvironmentFactory | dict[str, EnvironmentFactory] | None:
    """Bind `executor`, `tool_timeout` and `tool_output_limit` where the factory is a `PythonTool` class.

    They are defaults: what a `functools.partial(PythonTool, ...)` sets itself goes before. A subclass gets those that
    its constructor takes (or hands on as keyword arguments). Every other factory (a function, another class) was
    configured by whoever made it and comes back unchanged.
    """
    if isinstance(factory, dict):
        return {name: bind_environments(each, args) for name, each in factory.items()}
    if factory is not None and not callable(factory):
        raise TypeError(
            f"environment_factory is a {type(factory).__name__} object; every rollout needs its own. Pass the class, a "
            f"functools.partial of it (functools.partial({type(factory).__name__}, ...)), or a dict of those."
        )
    if isinstance(factory, functools.partial):
        bound = bind_environments(factory.func, args)
        return functools.partial(bound, *factory.args, **factory.keywords)
    if not (inspect.isclass(factory) and issubclass(factory, PythonTool)):
        return factory
    parameters = inspect.signature(factory).parameters.values()
    takes_all = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters)
    taken = {p.name for p in parameters if p.kind in (p.KEYWORD_ONLY, p.POSITIONAL_OR_KEYWORD)}
    return functools.partial(
        factory, **{name: getattr(args, name) for name in _SETTINGS if takes_all or name in taken}
    )
