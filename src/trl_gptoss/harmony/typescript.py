"""JSON schema -> the TypeScript-like declarations in which Harmony prompts describe tools.

    {"type": "object", "properties": {"n": {"type": "integer", "description": "How many", "default": 3}}}

    {
    // How many
    n?: number, // default: 3
    }

The models were trained on what openai-harmony writes, so its output is followed to the letter, oddities included
(`"a" | "b"[]` for an array of enums, an object's description written twice); a property test compares the two.
"""

import json
from collections.abc import Iterator
from typing import Any

_SIMPLE = {"string": "string", "number": "number", "integer": "number", "boolean": "boolean"}


def typescript_type(schema: Any, indent: str = "") -> str:
    """Type of `schema`; lines after the first are indented by `indent`."""
    if not isinstance(schema, dict):
        return "any"
    if isinstance(schema.get("oneOf"), list):
        return "".join(f"\n{indent} | {_variant(variant, indent)}" for variant in schema["oneOf"])
    kind = schema.get("type")
    if isinstance(kind, list):
        kinds = ["number" if k == "integer" else k for k in kind if isinstance(k, str)]
        return " | ".join(kinds) if kinds else "any"
    if kind == "object":
        return _object_type(schema, indent)
    if kind == "array":
        return f"{typescript_type(schema['items'], indent)}[]" if "items" in schema else "Array<any>"
    if kind == "string" and isinstance(schema.get("enum"), list):
        values = [f'"{value}"' for value in schema["enum"] if isinstance(value, str)]
        return " | ".join(values) if values else "string"
    return _SIMPLE.get(kind, "any") if isinstance(kind, str) else "any"


def _object_type(schema: dict[str, Any], indent: str) -> str:
    properties, required = schema.get("properties"), schema.get("required")
    required = required if isinstance(required, list) else []
    lines = [*_comment(schema.get("description"), indent), "{\n"]
    for name, value in (properties if isinstance(properties, dict) else {}).items():
        value = value if isinstance(value, dict) else {}
        label = name if name in required else f"{name}?"
        lines += _leading_comments(value, indent)
        if isinstance(value.get("oneOf"), list):
            lines += _union_property(label, value, indent)
        else:
            comment = f" // {_default(value, quote_enum=False)}" if "default" in value and "oneOf" not in value else ""
            lines.append(f"{indent}{label}: {_nullable(value, indent + '    ')},{comment}\n")
    return "".join(lines) + indent + "}"


def _leading_comments(value: dict[str, Any], indent: str) -> Iterator[str]:
    if isinstance(value.get("title"), str):
        yield f"{indent}// {value['title']}\n{indent}//\n"
    if "oneOf" not in value:
        yield from _comment(value.get("description"), indent)
    if isinstance(value.get("examples"), list) and value["examples"]:
        yield f"{indent}// Examples:\n"
        yield from (f'{indent}// - "{example}"\n' for example in value["examples"] if isinstance(example, str))


def _union_property(label: str, value: dict[str, Any], indent: str) -> Iterator[str]:
    """A property whose `oneOf` variants stand on lines of their own."""
    variants, description = value["oneOf"], value.get("description")
    first = variants[0] if variants and isinstance(variants[0], dict) else {}
    above = isinstance(description, str) and first.get("description") != description
    if above:
        yield from _comment(description, indent)
    if "default" in value:
        yield f"{indent}// {_default(value, quote_enum=False)}\n"
    yield f"{indent}{label}:\n"
    for i, variant in enumerate(variants):
        silent = (i == 0 and above) or (isinstance(variant, dict) and variant.get("description") == description)
        yield f"{indent} | {_variant(variant, indent, describe=not silent, quote_enum=False)}\n"
    yield f"{indent},\n"


def _variant(variant: Any, indent: str, describe: bool = True, quote_enum: bool = True) -> str:
    variant = variant if isinstance(variant, dict) else {}
    comments = []
    if describe and isinstance(variant.get("description"), str):
        comments.append(variant["description"])
    if "default" in variant:
        comments.append(_default(variant, quote_enum=quote_enum))
    return _nullable(variant, indent + "   ") + (f" // {' '.join(comments)}" if comments else "")


def _nullable(schema: dict[str, Any], indent: str) -> str:
    written = typescript_type(schema, indent)
    return f"{written} | null" if schema.get("nullable") is True and "null" not in written else written


def _comment(text: Any, indent: str) -> list[str]:
    return [f"{indent}// {text}\n"] if isinstance(text, str) else []


def _default(schema: dict[str, Any], quote_enum: bool) -> str:
    """`default: ...` of a schema; the value of an enum goes without quotes, except in a nested union."""
    value = schema["default"]
    if not isinstance(value, str):
        return f"default: {_compact_json(value)}"
    if isinstance(schema.get("enum"), list) and schema["enum"]:
        return f"default: {_compact_json(value) if quote_enum else value}"
    return f'default: "{value}"'


def _compact_json(value: Any) -> str:
    """JSON without blanks, numbers written as serde_json does."""
    if isinstance(value, dict):
        return (
            "{" + ",".join(f"{json.dumps(k, ensure_ascii=False)}:{_compact_json(v)}" for k, v in value.items()) + "}"
        )
    if isinstance(value, list | tuple):
        return "[" + ",".join(map(_compact_json, value)) + "]"
    if isinstance(value, int) and not -(2**63) <= value < 2**64:
        value = float(value)
    if isinstance(value, float) and "e" in repr(value):
        mantissa, exponent = repr(value).split("e")
        return (
            f"{value:.{4 + len(mantissa.replace('.', '').lstrip('-'))}f}"
            if int(exponent) == -5
            else (f"{mantissa}e{int(exponent)}")
        )
    return json.dumps(value, ensure_ascii=False)
