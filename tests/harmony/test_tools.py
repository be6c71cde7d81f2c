from typing import Literal

import pytest

from trl_gptoss.harmony import HarmonyVocabulary, ToolSpec, parse, render_prompt, tool_name, tool_spec
from trl_gptoss.harmony.conversation import HarmonyMessage
from trl_gptoss.harmony.render import generation_prompt, render_message


def weather(city: str, unit: Literal["c", "f"] = "c", days: int | None = None) -> str:
    """Gets the weather.

    Args:
        city: Name of the city.
        unit: Unit of the answer.
        days: Days ahead.
    """
    return city + unit + str(days)


class Environment:
    def act(self, move: str) -> str:
        """Acts.

        Args:
            move: What to do.
        """
        return move


SCHEMA = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Gets the weather.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}


def test_forms() -> None:
    assert tool_spec(SCHEMA) == tool_spec(SCHEMA["function"])
    spec = tool_spec(weather)
    assert (spec.name, spec.description, spec.builtin) == ("weather", "Gets the weather.", False)
    assert spec.parameters["properties"]["unit"]["enum"] == ["c", "f"]
    assert tool_spec(spec) is spec
    assert tool_spec(Environment().act).name == "act"
    assert tool_spec("python").builtin and tool_spec("python").functions == []
    assert [function.name for function in tool_spec("browser").functions] == ["search", "open", "find"]
    assert tool_spec({"name": "f"}) == ToolSpec(name="f", description="", parameters=None)


def test_names() -> None:
    tools = [weather, SCHEMA, SCHEMA["function"], tool_spec(weather), Environment().act, "python", "f"]
    assert [tool_name(tool) for tool in tools] == ["weather"] * 4 + ["act", "python", "f"]


def test_a_function_as_the_model_sees_it(small_tokenizer) -> None:
    text = small_tokenizer.decode(render_prompt([{"role": "user", "content": "x"}], small_tokenizer, [weather]))
    assert (
        """// Gets the weather.
type weather = (_: {
// Name of the city.
city: string,
// Unit of the answer.
unit?: "c" | "f",
// Days ahead.
days?: number | null,
}) => any;
"""
        in text
    )
    assert text.count("Calls to these tools must go to the commentary channel: 'functions'.") == 1


def test_an_honest_python_tool(small_tokenizer) -> None:
    tool = ToolSpec(name="python", description="Runs code. Nothing is kept.", builtin=True)
    text = small_tokenizer.decode(render_prompt([], small_tokenizer, [tool]))
    assert "# Tools\n\n## python\n\nRuns code. Nothing is kept.\n\n# Valid channels" in text
    assert "Jupyter" not in text and "commentary channel" not in text


@pytest.mark.parametrize(
    ("tool", "error", "message"),
    [
        ("search", ValueError, "Unknown builtin tool 'search'"),
        ({"description": "x"}, ValueError, "needs a name"),
        ({"function": "x"}, ValueError, "needs a name"),
        ({"name": "f", "description": 3}, ValueError, "Tool 'f' needs a description"),
        ({"name": "f", "parameters": "{}"}, ValueError, "Tool 'f' needs a description .* and parameters"),
        ({"name": "get weather"}, ValueError, "cannot be called 'get weather'.*Rename it"),
        ({"name": ""}, ValueError, "cannot be called ''"),
        ({"name": "f\n"}, ValueError, "cannot be called"),
        (3, TypeError, "got int: 3"),
    ],
)
def test_errors(tool, error, message) -> None:
    with pytest.raises(error, match=message):
        tool_spec(tool)


@pytest.mark.parametrize(
    "name", ["f", "a.b", "f-1", "f:1", "f/x", "größe", "json", "shelljson", "final", "f 1", "f,g", "f=1", "f.", "f..g"]
)
def test_a_name_is_taken_if_and_only_if_its_calls_can_be_read(name, small_tokenizer) -> None:
    vocabulary = HarmonyVocabulary.of(small_tokenizer)
    call = HarmonyMessage(
        role="assistant", author="assistant", content="{}", channel="commentary", recipient=f"functions.{name}"
    )
    sampled = render_message(call, vocabulary)[len(generation_prompt(vocabulary)) :]
    try:
        tools = [ToolSpec(name=name, description="")]
    except ValueError:
        turn = parse(sampled, small_tokenizer, ["f", "g"])
        assert [c.name for c in turn.tool_calls] != [name]
    else:
        turn = parse(sampled, small_tokenizer, tools)
        assert [c.name for c in turn.tool_calls] == [name] and not turn.anomalies


CALL_A = {"role": "assistant", "tool_calls": [{"id": "a", "function": {"name": "f", "arguments": {}}}]}


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([{"role": "robot", "content": "x"}], "Message 0 has no known role"),
        (["x"], "Message 0 has no known role"),
        ([{"role": "user", "content": None}], "content of a message with role 'user' must be a string"),
        ([{"role": "user", "content": [{"type": "image"}]}], "reads text only"),
        ([{"role": "user"}], "content of a message with role 'user'"),
        ([{"role": "assistant"}], "needs content, thinking"),
        ([{"role": "assistant", "tool_calls": [{"function": {}}]}], "needs a function with a name"),
        ([{"role": "assistant", "tool_calls": {"name": "f"}}], "must be a list of calls, got dict"),
        ([{"role": "assistant", "tool_calls": ["f"]}], "needs a function with a name; got 'f'"),
        ([{"role": "assistant", "tool_calls": [{"name": "f", "arguments": {"a": {1}}}]}], "to 'f' have no JSON form"),
        ([{"role": "assistant", "thinking": ["x"], "content": "y"}], "content of a message .* got list"),
        ([{"role": "assistant", "channel": 3, "content": "x"}], "channel of a message .* got int"),
        ([{"role": "user", "name": 3, "content": "x"}], "name of a message .* got int"),
        ([{"role": "tool", "content": "x"}], "answers no call"),
        ([{"role": "tool", "name": 3, "content": "x"}], "name of a tool message must be a string"),
        ([CALL_A, {"role": "tool", "tool_call_id": "b", "content": "x"}], r"answers no call.*earlier call \(a\)"),
        ([{**CALL_A, "channel": "final", "content": "x"}], "is one Harmony message"),
        ([{"role": "assistant", "channel": "final", "thinking": "t", "content": "x"}], "is one Harmony message"),
    ],
)
def test_bad_messages(messages, message, small_tokenizer) -> None:
    with pytest.raises(ValueError, match=message):
        render_prompt(messages, small_tokenizer)


@pytest.mark.parametrize("tools", ["python", {"name": "f"}, ToolSpec(name="f", description="x")])
def test_one_tool_is_no_list(tools, small_tokenizer) -> None:
    with pytest.raises(TypeError, match=r"must be a list of tools, got one .* tools=\["):
        render_prompt([], small_tokenizer, tools)
    with pytest.raises(TypeError, match="must be a list of tools"):
        parse([], small_tokenizer, tools)


def test_no_name_twice(small_tokenizer) -> None:
    twice = [{"name": "f", "description": text} for text in "xy"]
    with pytest.raises(ValueError, match="Two tools are called 'f'"):
        render_prompt([], small_tokenizer, twice)
    # A function `python` and the builtin are two tools with two addresses.
    render_prompt([], small_tokenizer, ["python", {"name": "python"}])


def test_only_harmonys_own_tools_are_builtin() -> None:
    with pytest.raises(ValueError, match="'notes' cannot be builtin"):
        ToolSpec(name="notes", description="x", builtin=True)


def test_results_find_calls_by_number_and_by_a_name_with_a_dot(small_tokenizer) -> None:
    def call(name: str, **more) -> dict:
        return {"function": {"name": name, "arguments": {}}, **more}

    by_id = [
        {"role": "assistant", "tool_calls": [call("f", id=0), call("g", id=1)]},
        {"role": "tool", "tool_call_id": 1, "content": "G"},
        {"role": "tool", "tool_call_id": 0, "content": "F"},
    ]
    text = small_tokenizer.decode(render_prompt(by_id, small_tokenizer))
    assert "functions.g to=assistant<|channel|>commentary<|message|>G<|end|>" in text
    assert "functions.f to=assistant<|channel|>commentary<|message|>F<|end|>" in text
    by_name = [
        {"role": "assistant", "tool_calls": [call("math.add")]},
        {"role": "tool", "name": "math.add", "content": "3"},
    ]
    text = small_tokenizer.decode(render_prompt(by_name, small_tokenizer))
    assert "functions.math.add to=assistant<|channel|>commentary<|message|>3<|end|>" in text


def test_bad_effort(small_tokenizer) -> None:
    with pytest.raises(ValueError, match="Unknown reasoning_effort 'extreme'"):
        render_prompt([], small_tokenizer, reasoning_effort="extreme")


def test_nothing_reads_the_clock(small_tokenizer) -> None:
    assert "Current date" not in small_tokenizer.decode(render_prompt([], small_tokenizer))
    dated = small_tokenizer.decode(render_prompt([], small_tokenizer, date="2025-06-28"))
    assert "Knowledge cutoff: 2024-06\nCurrent date: 2025-06-28\n\nReasoning: medium" in dated


def test_calls_of_builtins_in_chat_form(small_tokenizer) -> None:
    call = {"function": {"name": "python", "arguments": {"code": "print(1)"}}}
    messages = [{"role": "assistant", "tool_calls": [call]}, {"role": "tool", "content": "1"}]
    builtin = small_tokenizer.decode(render_prompt(messages, small_tokenizer, ["python"]))
    assert "<|start|>assistant to=python<|channel|>analysis code<|message|>print(1)<|call|>" in builtin
    assert "<|start|>python to=assistant<|channel|>analysis<|message|>1<|end|>" in builtin
    function = small_tokenizer.decode(render_prompt(messages, small_tokenizer))
    assert (
        '<|start|>assistant to=functions.python<|channel|>commentary <|constrain|>json<|message|>{"code": "print(1)"}'
        in function
    )
    assert "<|start|>functions.python to=assistant<|channel|>commentary<|message|>1<|end|>" in function


def test_results_find_their_calls(small_tokenizer) -> None:
    def results(*answers: dict) -> list[str]:
        calls = [
            {"id": f"c{i}", "function": {"name": name, "arguments": "{}"}} for i, name in enumerate(["f", "g", "f"])
        ]
        messages = [
            {"role": "assistant", "tool_calls": calls},
            *({"role": "tool", "content": "r"} | a for a in answers),
        ]
        text = small_tokenizer.decode(render_prompt(messages, small_tokenizer))
        return [part.split(" to=")[0] for part in text.split("<|start|>") if " to=assistant" in part]

    assert results({}, {}, {}) == ["functions.f", "functions.g", "functions.f"]
    assert results({"tool_call_id": "c1"}, {}, {}) == ["functions.g", "functions.f", "functions.f"]
    assert results({"name": "g"}, {}, {}) == ["functions.g", "functions.f", "functions.f"]
    assert results({"name": "functions.h"}, {}) == ["functions.h", "functions.f"]
    assert results({"name": "h", "tool_call_id": "unknown"}) == ["functions.h"]


def test_columns_of_datasets(small_tokenizer) -> None:
    """`datasets` gives every message of a column the keys of all of them, with None."""
    keys = [
        "name",
        "channel",
        "recipient",
        "content_type",
        "thinking",
        "reasoning_content",
        "tool_calls",
        "tool_call_id",
    ]
    filled = [
        {"role": "user", "content": "u"},
        {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]},
        {"role": "tool", "content": "r"},
        {"role": "assistant", "content": "a", "thinking": "t"},
        {"role": "assistant", "content": "a", "channel": "final"},
    ]
    padded = [dict.fromkeys(keys) | message for message in filled]
    assert render_prompt(padded, small_tokenizer) == render_prompt(filled, small_tokenizer)
