import io

import pytest
from rich.console import Console

from trl_gptoss.harmony import format_conversation, parse, render_prompt

MESSAGES = [
    {"role": "system", "content": "be brief"},
    {"role": "user", "content": "2+2?"},
    {"role": "assistant", "thinking": "hm", "tool_calls": [{"function": {"name": "f", "arguments": {"a": 1}}}]},
    {"role": "tool", "content": "4"},
    {"role": "assistant", "content": "four"},
]


def printed(text, colours: bool = False) -> str:
    console = Console(
        file=io.StringIO(), width=200, force_terminal=colours, color_system="truecolor" if colours else None
    )
    console.print(text)
    return console.file.getvalue()


def style_of(text, word: str) -> str:
    at = text.plain.index(word)
    return " ".join(str(span.style) for span in text.spans if span.start <= at < span.end)


def test_messages_and_ids_show_the_same_bodies(tokenizer) -> None:
    from_messages = format_conversation(MESSAGES, tokenizer)
    from_ids = format_conversation(render_prompt(MESSAGES, tokenizer), tokenizer)
    for text in (from_messages, from_ids):
        for body in ["be brief", "2+2?", "hm", '{"a": 1}', "four"]:
            assert text.plain.count(body) == 1
        assert "assistant final" in text.plain
        assert "magenta" in style_of(text, '{"a": 1}')  # the call
        assert "magenta" in style_of(text, "4\n")  # its result
        assert "bright_black" in style_of(text, "hm")
        assert "bold cyan" in style_of(text, "four")
        assert "green" in style_of(text, "2+2?")
        assert "blue" in style_of(text, "be brief")


def test_every_sampled_character_is_shown(tokenizer) -> None:
    ids = tokenizer.encode("<|channel|>final<|message|>Use <|channel|> now<|return|><|return|>tail<|message|>x")
    text = format_conversation(ids, tokenizer)
    for part in ["assistant final", "Use <|channel|> now", "<|return|>", "tail", "x"]:
        assert part in text.plain
    assert "red" in style_of(text, "<|channel|>")


@pytest.mark.parametrize(
    "evil", ["\x1b[31mred", "\x1b]0;title\x07", "a\rb", "\x9b2J", "\u202eabc", "\x08\x08", "\ud800"]
)
def test_untrusted_text_cannot_drive_the_terminal(evil: str, small_tokenizer) -> None:
    messages = [{"role": "user", "content": evil}, {"role": "tool", "name": evil, "content": evil}]
    for conversation in (messages, render_prompt(messages, small_tokenizer)):
        shown = printed(format_conversation(conversation, small_tokenizer))
        assert all(character.isprintable() or character in "\n\t" for character in shown)
        shown.encode()


def test_console_markup_is_text(small_tokenizer) -> None:
    evil = "[bold red]x[/] [link=http://a]b[/link] \\[z]"
    assert evil in printed(format_conversation([{"role": "user", "content": evil}], small_tokenizer))


def test_writing_systems_and_emoji_stay(small_tokenizer) -> None:
    text = "🧑🏽\u200d🚀 東京 नमस्ते می\u200cخواهم\tx\n"
    assert text.strip() in format_conversation([{"role": "user", "content": text}], small_tokenizer).plain


@pytest.mark.parametrize(
    ("generation", "said"),
    [
        ("", ""),
        ("blah", "blah"),
        ("<|start|><|start|>", ""),
        ("<|channel|>x<|end|><|start|>asistant<|message|>y<|end|>", "y"),
    ],
)
def test_malformed_turns(generation: str, said: str, small_tokenizer) -> None:
    ids = small_tokenizer.encode(generation)
    for conversation in (ids, parse(ids, small_tokenizer).as_messages()):
        assert said in format_conversation(conversation, small_tokenizer).plain


def test_colours(small_tokenizer) -> None:
    assert "\x1b[" in printed(format_conversation(MESSAGES, small_tokenizer), colours=True)
