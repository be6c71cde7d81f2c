"""Tools in the forms that users have them in, brought into one: `ToolSpec`."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from transformers.utils import get_json_schema

from .builtin_tools import BROWSER_DESCRIPTION, BROWSER_FUNCTIONS, BUILTIN_FUNCTIONS, PYTHON_DESCRIPTION
from .header import RECIPIENT_NAME


@dataclass(kw_only=True, slots=True)
class ToolSpec:
    """A tool as the prompt declares it.

    name (`str`): name without namespace: letters, digits, `_` and `-`, and between them also `.`, `:` and `/`. A call with
        any other name could not be read; `ValueError`.
    description (`str`): what the model is told about it.
    parameters (`dict` or `None`, *optional*): JSON schema of the arguments object; `None` for a tool without any.
    builtin (`bool`, *optional*, defaults to `False`): declare it in the system message under its own name instead of
        the developer message's `functions` namespace. Its calls are addressed `to=python`. Only for `python` and
        `browser`, the names that the models were trained with; `ValueError` for any other.
    functions (`list[ToolSpec]`): of a builtin namespace with functions (`browser.search`, ...).
    """

    name: str
    description: str
    parameters: dict[str, Any] | None = None
    builtin: bool = False
    functions: "list[ToolSpec]" = field(default_factory=list)

    def __post_init__(self) -> None:
        if RECIPIENT_NAME.fullmatch(self.name) is None or ".." in self.name:
            raise ValueError(
                f"A tool cannot be called {self.name!r}, because the header of a call could not be read; expected letters, digits, "
                "'_', '-', and '.', ':' or '/' between them. Rename it."
            )
        if not isinstance(self.description, str) or not isinstance(self.parameters, dict | None):
            raise ValueError(
                f"Tool {self.name!r} needs a description (str) and parameters (a JSON schema as dict, or None); got "
                f"{self.description!r} and {self.parameters!r}."
            )
        if self.builtin and self.name not in BUILTIN_FUNCTIONS:
            raise ValueError(
                f"ToolSpec {self.name!r} cannot be builtin: Harmony's builtin tools are "
                f"{', '.join(map(repr, BUILTIN_FUNCTIONS))}. Declare it as a function (builtin=False)."
            )


Tool = Callable[..., Any] | dict[str, Any] | ToolSpec | str


def tool_name(tool: Tool) -> str:
    """Name of a tool in any of the forms of `tool_spec`, without building its schema; a string is its own name."""
    if isinstance(tool, str):
        return tool
    if isinstance(tool, ToolSpec):
        return tool.name
    if isinstance(tool, dict):
        return _function_of(tool)["name"]
    if not callable(tool):
        raise _no_tool(tool)
    return tool.__name__


def _function_of(schema: dict[str, Any]) -> dict[str, Any]:
    function = schema.get("function", schema)
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise ValueError(
            f"A tool schema needs a name: expected {{'type': 'function', 'function': {{'name': ..., 'description': ..., "
            f"'parameters': ...}}}} or its inner part, got {schema!r}."
        )
    return function


def listed(tools: Iterable[Tool]) -> list[Tool]:
    """`tools` as a list. Raises `TypeError` for a single tool, whose letters or keys would pass for tools."""
    if isinstance(tools, str | dict | ToolSpec) or callable(tools):
        raise TypeError(f"tools must be a list of tools, got one {type(tools).__name__}: write tools=[{tools!r}].")
    return list(tools)


def tool_specs(tools: Iterable[Tool] | None) -> list[ToolSpec]:
    """`ToolSpec`s of the tools of a prompt. Raises what `tool_spec` raises, and `ValueError` for a name given twice."""
    specs = [tool_spec(tool) for tool in listed(tools or ())]
    for i, spec in enumerate(specs):
        if any((spec.name, spec.builtin) == (other.name, other.builtin) for other in specs[:i]):
            raise ValueError(f"Two tools are called {spec.name!r}; a call could not tell them apart. Rename one.")
    return specs


def tool_spec(tool: Tool) -> ToolSpec:
    """`ToolSpec` of a tool.

    Args:
        tool (`Callable`, `dict`, `ToolSpec` or `str`):
            A function or bound method with type hints and a Google-style docstring; a JSON schema, with or without the
            outer `{"type": "function", "function": ...}`; a `ToolSpec` (returned as it is); or the name of one of
            Harmony's builtin tools, `"python"` or `"browser"`. Harmony's own description of `python` promises a
            stateful notebook with a drive; where that is not what runs the code, declare what does:
            `ToolSpec(name="python", description=..., builtin=True)`.

    Raises `ValueError` for a name that is no builtin and for a schema without a name, `TypeError` for anything else.
    Functions without the hints or docstring that a schema needs raise what `transformers.utils.get_json_schema` raises.
    """
    if isinstance(tool, ToolSpec):
        return tool
    if isinstance(tool, str):
        return _builtin(tool)
    if isinstance(tool, dict):
        function = _function_of(tool)
    elif callable(tool):
        function = _function_of(get_json_schema(tool))
    else:
        raise _no_tool(tool)
    return _from_schema(function)


def _no_tool(tool: Any) -> TypeError:
    return TypeError(
        f"A tool is a function, a JSON schema (dict), a ToolSpec, or one of {', '.join(map(repr, BUILTIN_FUNCTIONS))}; got "
        f"{type(tool).__name__}: {tool!r}."
    )


def _from_schema(function: dict[str, Any]) -> ToolSpec:
    return ToolSpec(
        name=function["name"],
        description=function.get("description") or "",
        parameters=function.get("parameters"),
    )


def _builtin(name: str) -> ToolSpec:
    if name == "python":
        return ToolSpec(name="python", description=PYTHON_DESCRIPTION, builtin=True)
    if name == "browser":
        functions = [_from_schema(function) for function in BROWSER_FUNCTIONS]
        return ToolSpec(name="browser", description=BROWSER_DESCRIPTION, builtin=True, functions=functions)
    raise ValueError(
        f"Unknown builtin tool {name!r}: Harmony has {', '.join(map(repr, BUILTIN_FUNCTIONS))}. Give any other tool as "
        "a function, a JSON schema or a ToolSpec."
    )
