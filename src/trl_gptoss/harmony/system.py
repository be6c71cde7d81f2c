"""Text of the two messages that open every Harmony prompt: system (who, when, how hard, builtin tools) and developer.

Harmony's system message is not what chat data sets call "system": that text goes to the developer message, under
`# Instructions`.
"""

from collections.abc import Iterator

from .header import CHANNELS
from .tools import ToolSpec
from .typescript import typescript_type

DEFAULT_IDENTITY = "You are ChatGPT, a large language model trained by OpenAI."
KNOWLEDGE_CUTOFF = "2024-06"
REASONING_EFFORTS = ("low", "medium", "high")


def system_text(
    tools: list[ToolSpec], reasoning_effort: str, date: str | None, model_identity: str = DEFAULT_IDENTITY
) -> str:
    """Text of the system message; `tools` are all tools of the conversation."""
    if reasoning_effort not in REASONING_EFFORTS:
        raise ValueError(
            f"Unknown reasoning_effort {reasoning_effort!r}: GPT-OSS was trained with {', '.join(REASONING_EFFORTS)}."
        )
    top = [model_identity, f"Knowledge cutoff: {KNOWLEDGE_CUTOFF}"]
    if date is not None:
        top.append(f"Current date: {date}")
    sections = ["\n".join(top), f"Reasoning: {reasoning_effort}"]
    builtins = sorted((tool for tool in tools if tool.builtin), key=lambda tool: tool.name)
    if builtins:
        sections += ["# Tools", *(_namespace(tool.name, tool.description, tool.functions) for tool in builtins)]
    channels = f"# Valid channels: {', '.join(CHANNELS)}. Channel must be included for every message."
    if len(builtins) < len(tools):
        channels += "\nCalls to these tools must go to the commentary channel: 'functions'."
    return "\n\n".join([*sections, channels])


def developer_text(instructions: str | None, tools: list[ToolSpec]) -> str | None:
    """Text of the developer message, `None` if there is nothing to say."""
    sections = ["# Instructions", instructions] if instructions else []
    functions = [tool for tool in tools if not tool.builtin]
    if functions:
        sections += ["# Tools", _namespace("functions", None, functions)]
    return "\n\n".join(sections) if sections else None


def _namespace(name: str, description: str | None, functions: list[ToolSpec]) -> str:
    lines = [f"## {name}\n"]
    lines += [f"// {line}" if functions else line for line in _lines(description or "")]
    if functions:
        lines.append(f"namespace {name} {{\n")
        for function in functions:
            lines += [f"// {line}" for line in _lines(function.description)]
            arguments = "" if function.parameters is None else f"_: {typescript_type(function.parameters)}"
            lines.append(f"type {function.name} = ({arguments}) => any;\n")
        lines.append(f"}} // namespace {name}")
    return "\n".join(lines)


def _lines(text: str) -> Iterator[str]:
    """Lines as Rust's `str::lines` splits them: at `\\n` and `\\r\\n` only, unlike `str.splitlines`."""
    if text:
        yield from (line.removesuffix("\r") for line in text.removesuffix("\n").split("\n"))
