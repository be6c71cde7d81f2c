"""Rendering against openai-harmony: the same ids for generated conversations."""

import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trl_gptoss.harmony import ToolSpec, render_prompt
from trl_gptoss.harmony.typescript import typescript_type

harmony = pytest.importorskip("openai_harmony", reason="openai-harmony is the oracle of these tests")
Message, Role, Author = harmony.Message, harmony.Role, harmony.Author

TEXTS = [
    "What is 2+2?",
    "naïve café, Straße, 東京都, नमस्ते, 👩🏽‍🚀🇩🇪",
    "line one\r\n\r\n  line\ttwo\n\n",
    " leading and trailing ",
    "",
    "code: `x = {'a': [1, 2]}` <b>not markup</b> <|start|>assistant<|channel|>final<|message|>",
    "1234567890.25e-7 $\\frac{1}{2}$",
    "don't I'LL we've\u00a0\u200b",
    "\u0000\u0001\x7f",
]


class Generator:
    """Random well-formed conversations, as our messages and as openai-harmony's."""

    def __init__(self, seed: int):
        self.random = random.Random(seed)

    def maybe(self, probability: float = 0.5) -> bool:
        return self.random.random() < probability

    def text(self) -> str:
        return "".join(self.random.choice(TEXTS) for _ in range(self.random.randint(1, 3)))

    def default(self) -> Any:
        return self.random.choice(
            ["a", 'q"uote', 3, -1, 2.5, 1e16, 1e-5, 1e-7, True, None, [], [1, "é"], {"k": [None]}]
        )

    def schema(self, depth: int = 0) -> dict[str, Any]:
        kinds = ["string", "number", "integer", "boolean", "enum", "union", "null", "any", "anyOf"]
        kind = self.random.choice(kinds + (["object", "array", "oneOf"] if depth < 3 else []))
        if kind == "enum":
            schema = {"type": "string", "enum": self.random.sample(["celsius", "fahrenheit", "ünit", ""], 2)}
        elif kind == "union":
            schema = {"type": self.random.sample(["string", "integer", "number", "null", "boolean"], 2)}
        elif kind == "any":
            schema = {}
        elif kind == "anyOf":
            schema = {"anyOf": [{"type": "string"}, {"type": "null"}]}
        elif kind == "array":
            schema = {"type": "array"} | ({"items": self.schema(depth + 1)} if self.maybe(0.8) else {})
        elif kind == "oneOf":
            schema = {"oneOf": [self.schema(depth + 1) for _ in range(self.random.randint(0, 3))]}
        elif kind == "object":
            schema = self.object(depth + 1)
        else:
            schema = {"type": kind}
        for key, value in {
            "description": self.random.choice(["How many", "über\nlines", "<|end|>", ""]),
            "title": "A title",
            "default": self.default(),
            "nullable": self.maybe(),
            "examples": ["x", 'y"', 3],
        }.items():
            if self.maybe(0.3):
                schema[key] = value
        return schema

    def object(self, depth: int = 0) -> dict[str, Any]:
        names = self.random.sample(["location", "zeta", "a", "ñame", "with space", "n_1"], self.random.randint(0, 4))
        schema: dict[str, Any] = {"type": "object", "properties": {name: self.schema(depth + 1) for name in names}}
        if self.maybe() and names:
            schema["required"] = self.random.sample(names, self.random.randint(0, len(names)))
        return schema

    def tools(self) -> list[ToolSpec]:
        names = self.random.sample(["get_weather", "f", "search-web", "läuft"], self.random.randint(0, 3))
        return [
            ToolSpec(
                name=name,
                description=self.random.choice(
                    ["Does it.", "Two\nlines\r\nand\n\nmore\n", "", "<|call|>", "é\u2028x"]
                ),
                parameters=self.object() if self.maybe(0.8) else None,
            )
            for name in names
        ]

    def turn(self, ours: list[dict], theirs: list[Any], functions: list[str], builtins: list[str]) -> None:
        """One assistant turn in either style of message."""

        def add(channel: str, text: str) -> None:
            ours.append({"role": "assistant", "channel": channel, "content": text})
            theirs.append(Message.from_role_and_content(Role.ASSISTANT, text).with_channel(channel))

        for _ in range(self.random.randint(0, 3)):
            if self.maybe():
                add("analysis", self.text())
            if self.maybe(0.3):
                add("commentary", self.text())
            if functions and self.maybe(0.7):
                self.function_calls(ours, theirs, functions)
            if builtins and self.maybe():
                self.builtin_call(ours, theirs, self.random.choice(builtins))
        if self.maybe():
            add("final", self.text())
        else:
            thinking, text = self.text() or "hm", self.text()
            ours.append({"role": "assistant", self.random.choice(["thinking", "reasoning_content"]): thinking})
            ours[-1]["content"] = text or "yes"
            theirs.append(Message.from_role_and_content(Role.ASSISTANT, thinking).with_channel("analysis"))
            theirs.append(Message.from_role_and_content(Role.ASSISTANT, text or "yes").with_channel("final"))

    def function_calls(self, ours: list[dict], theirs: list[Any], functions: list[str]) -> None:
        calls = [(self.random.choice(functions), '{"a": "' + self.random.choice("xé√") + '"}') for _ in range(2)]
        calls = calls[: self.random.randint(1, 2)]
        style = self.random.choice(["chat", "harmony", "harmony json"])
        content_type = {"chat": "<|constrain|>json", "harmony": "<|constrain|>json", "harmony json": "json"}[style]
        for name, arguments in calls:
            call = Message.from_role_and_content(Role.ASSISTANT, arguments).with_channel("commentary")
            theirs.append(call.with_recipient(f"functions.{name}").with_content_type(content_type))
            if style != "chat":
                harmony_keys = {"channel": "commentary", "recipient": f"functions.{name}"}
                ours.append({"role": "assistant", "content": arguments, "content_type": content_type, **harmony_keys})
        if style == "chat":
            tool_calls = [
                {"type": "function", "id": f"c{len(ours)}{i}", "function": {"name": name, "arguments": arguments}}
                for i, (name, arguments) in enumerate(calls)
            ]
            ours.append({"role": "assistant", "tool_calls": tool_calls})
        answered = len(ours) - 1
        for i, (name, _) in enumerate(calls):
            text = self.text()
            answer = Message.from_author_and_content(Author.new(Role.TOOL, f"functions.{name}"), text)
            theirs.append(answer.with_channel("commentary").with_recipient("assistant"))
            ours.append({"role": "tool", "content": text})
            way = self.random.choice(["order", "name", "id"])
            if way == "name":
                ours[-1]["name"] = name
            elif way == "id" and style == "chat":
                ours[-1]["tool_call_id"] = f"c{answered}{i}"

    def builtin_call(self, ours: list[dict], theirs: list[Any], name: str) -> None:
        recipient = name if name == "python" else "browser.search"
        text, channel = self.text(), self.random.choice(["analysis", "commentary"])
        keys = {"channel": channel, "recipient": recipient, "content_type": "code"}
        ours.append({"role": "assistant", "content": text, **keys})
        call = Message.from_role_and_content(Role.ASSISTANT, text).with_channel(channel)
        theirs.append(call.with_recipient(recipient).with_content_type("code"))
        result = self.text()
        ours.append({"role": "tool", "name": recipient, "content": result})
        answer = Message.from_author_and_content(Author.new(Role.TOOL, recipient), result)
        theirs.append(answer.with_channel(channel).with_recipient("assistant"))

    def conversation(self, turns: int) -> tuple[list[dict], dict[str, Any], list[Any]]:
        """`(messages, other arguments of render_prompt, messages of openai-harmony)`."""
        tools = self.tools()
        builtins = self.random.sample(["python", "browser"], self.random.randint(0, 2))
        effort, date = self.random.choice(["low", "medium", "high"]), self.random.choice([None, "2025-06-28"])
        system = harmony.SystemContent.new().with_reasoning_effort(harmony.ReasoningEffort(effort.capitalize()))
        if date:
            system = system.with_conversation_start_date(date)
        for name in builtins:
            system = system.with_python_tool() if name == "python" else system.with_browser_tool()
        theirs = [Message.from_role_and_content(Role.SYSTEM, system)]
        ours: list[dict] = []
        developer = harmony.DeveloperContent.new()
        instructions = self.text() if self.maybe() else ""
        if instructions:
            developer = developer.with_instructions(instructions)
            ours.append({"role": self.random.choice(["system", "developer"]), "content": instructions})
        if tools:
            descriptions = [harmony.ToolDescription.new(t.name, t.description, t.parameters) for t in tools]
            developer = developer.with_function_tools(descriptions)
        if instructions or tools:
            theirs.append(Message.from_role_and_content(Role.DEVELOPER, developer))
        for turn in range(turns):
            text = self.text()
            name = self.random.choice([None, None, "bob"])
            ours.append({"role": "user", "content": text if self.maybe() else [{"type": "text", "text": text}]})
            if name:
                ours[-1]["name"] = name
                theirs.append(Message.from_author_and_content(Author.new(Role.USER, name), text))
            else:
                theirs.append(Message.from_role_and_content(Role.USER, text))
            if turn < turns - 1:
                self.turn(ours, theirs, [t.name for t in tools], builtins)
        arguments = {"tools": [*tools, *builtins], "reasoning_effort": effort, "date": date}
        return ours, arguments, theirs


def reference(oracle: Any, messages: list[Any], drop: bool) -> list[int]:
    return oracle.render_conversation_for_completion(
        harmony.Conversation.from_messages(messages),
        Role.ASSISTANT,
        config=harmony.RenderConversationConfig(auto_drop_analysis=drop),
    )


@pytest.mark.parametrize("block", range(10))
def test_500_conversations(block: int, oracle, gpt_oss_tokenizer) -> None:
    for seed in range(50 * block, 50 * block + 50):
        generator = Generator(seed)
        ours, arguments, theirs = generator.conversation(turns=generator.random.randint(1, 4))
        ids = render_prompt(ours, gpt_oss_tokenizer, **arguments, drop_analysis=False)
        assert ids == reference(oracle, theirs, drop=False), f"seed {seed}"


def test_generator_reaches_everything(gpt_oss_tokenizer) -> None:
    """The 500 conversations would prove little if they lacked what the format has."""
    seen = ""
    for seed in range(100):
        generator = Generator(seed)
        ours, arguments, _ = generator.conversation(turns=3)
        seen += gpt_oss_tokenizer.decode(render_prompt(ours, gpt_oss_tokenizer, **arguments, drop_analysis=False))
    for part in [
        "## browser",
        "## python",
        "## functions",
        "\n | ",
        " | null",
        "// default:",
        "// Examples:",
        "to=python",
    ]:
        assert part in seen
    for part in ["<|constrain|>json<|message|>", "commentary json<|message|>", "to=browser.search", "user:bob", "[]"]:
        assert part in seen


@pytest.mark.parametrize("seed", range(60))
def test_old_analysis_is_dropped(seed: int, oracle, gpt_oss_tokenizer) -> None:
    """One answered turn: as openai-harmony drops. Several: as it renders once the old analysis is taken out by hand."""
    generator = Generator(1000 + seed)
    ours, arguments, theirs = generator.conversation(turns=2 if seed % 2 else 4)
    ids = render_prompt(ours, gpt_oss_tokenizer, **arguments)
    if seed % 2:
        assert ids == reference(oracle, theirs, drop=True)
    assert ids == reference(oracle, [m for m in theirs if m.channel != "analysis"], drop=False)


def test_analysis_of_the_running_turn_stays(oracle, gpt_oss_tokenizer) -> None:
    old = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "thinking": "old thought", "content": "b"},
        {"role": "user", "content": "c"},
    ]
    call = {"function": {"name": "f", "arguments": "{}"}}
    running = [
        {"role": "assistant", "thinking": "new thought", "tool_calls": [call]},
        {"role": "tool", "content": "r"},
    ]
    text = gpt_oss_tokenizer.decode(render_prompt(old + running, gpt_oss_tokenizer))
    assert "new thought" in text and "old thought" not in text
    # So what was sampled in the running turn extends the prompt it was sampled after.
    before = render_prompt(old, gpt_oss_tokenizer)
    assert render_prompt(old + running, gpt_oss_tokenizer)[: len(before)] == before


def test_documented_differences(oracle, gpt_oss_tokenizer) -> None:
    """What docs/harmony.md says about openai-harmony is so; when it stops being so, the table must change."""

    def theirs(*messages: Any, drop: bool = False) -> str:
        return oracle.decode(reference(oracle, list(messages), drop))

    def ours(*messages: dict, **arguments: Any) -> str:
        text = gpt_oss_tokenizer.decode(render_prompt(list(messages), gpt_oss_tokenizer, **arguments))
        return text.split("<|end|>", 1)[1]

    def said(text: str, channel: str) -> Any:
        return Message.from_role_and_content(Role.ASSISTANT, text).with_channel(channel)

    user = Message.from_role_and_content(Role.USER, "u")
    two_answers = [said("t1", "analysis"), said("f", "final"), user, said("t2", "analysis"), said("f", "final"), user]
    assert "t1" not in theirs(*two_answers, drop=True) and "t2" in theirs(*two_answers, drop=True)
    running = [*two_answers[:3], said("c", "commentary")]
    assert "t1" in theirs(*running, drop=True)

    to_all = theirs(said("x", "final").with_recipient("all"))
    assert to_all == "<|start|>assistant<|channel|>final<|message|>x<|call|><|start|>assistant"
    assert ours({"role": "assistant", "channel": "final", "recipient": "all", "content": "x"}) == to_all.replace(
        "<|call|>", "<|end|>"
    )

    empty = harmony.DeveloperContent.new().with_instructions("").with_function_tools([])
    assert "# Instructions" in theirs(Message.from_role_and_content(Role.DEVELOPER, empty))
    assert ours({"role": "system", "content": ""}, tools=[]) == "<|start|>assistant"

    assert "<|channel|>" not in theirs(Message.from_role_and_content(Role.ASSISTANT, "x"))
    assert ours({"role": "assistant", "content": "x"}).startswith("<|start|>assistant<|channel|>final<|message|>x")

    schema = {"type": "object", "properties": {"x": {"default": 919.9688545084059}}}
    tool = harmony.ToolDescription.new("f", "", schema)
    developer = Message.from_role_and_content(
        Role.DEVELOPER, harmony.DeveloperContent.new().with_function_tools([tool])
    )
    assert "919.968854508406" in theirs(developer)
    assert "919.9688545084059" in ours(tools=[{"name": "f", "parameters": schema}])

    with pytest.raises(ValueError):
        theirs(Message.from_role_and_content(Role.USER, "\ud800"))
    assert "\ufffd" in ours({"role": "user", "content": "\ud800"})


# openai-harmony reads floats with more digits one unit in the last place off.
FLOATS = st.floats(-1e15, 1e15).map(lambda v: float(f"{v:.9g}")).filter(lambda v: v == 0 or abs(v) > 1e-9)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | FLOATS | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=4,
)
SCHEMA = st.recursive(
    st.fixed_dictionaries(
        {},
        optional={
            "type": st.sampled_from(["string", "integer", "number", "boolean", "null", "object", "array", "odd"])
            | st.lists(st.sampled_from(["string", "integer", "null"]), max_size=3)
            | JSON,
            "description": st.text("aé\n/", max_size=4) | JSON,
            "title": st.text("T\n", max_size=2) | JSON,
            "default": JSON,
            "enum": st.lists(st.sampled_from(["a", "b", "ü", 1]), max_size=3) | JSON,
            "nullable": st.booleans() | JSON,
            "examples": st.lists(st.sampled_from(["e", 1, "f"]), max_size=2) | JSON,
        },
    ),
    lambda inner: st.fixed_dictionaries(
        {},
        optional={
            "type": st.sampled_from(["object", "array", "string"]),
            "properties": st.dictionaries(st.sampled_from(["x", "yy", "é"]), inner | JSON, max_size=3),
            "required": st.lists(st.sampled_from(["x", "é"]), max_size=2) | JSON,
            "items": inner | JSON,
            "oneOf": st.lists(inner | JSON, max_size=3) | JSON,
            "description": st.sampled_from(["same", "other"]),
            "default": JSON,
            "enum": st.lists(st.sampled_from(["a"]), max_size=1),
            "nullable": st.booleans(),
        },
    ),
    max_leaves=6,
)


@given(schema=SCHEMA)
@settings(max_examples=300, deadline=None)
def test_typescript_of_any_schema(schema: dict[str, Any], oracle) -> None:
    """Any JSON, well-formed as a schema or not, gives openai-harmony's declaration."""
    tool = harmony.ToolDescription.new("f", "", schema)
    developer = harmony.DeveloperContent.new().with_function_tools([tool])
    message = Message.from_role_and_content(Role.DEVELOPER, developer)
    text = oracle.decode(oracle.render_conversation(harmony.Conversation.from_messages([message])))
    declaration = text.split("namespace functions {\n\n", 1)[1].rsplit("} // namespace functions", 1)[0]
    assert declaration == f"type f = (_: {typescript_type(schema)}) => any;\n\n"
