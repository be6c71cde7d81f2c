"""The two tools that GPT-OSS knows from its training, `python` and `browser`, as openai-harmony declares them.

The texts are data: the models were trained on exactly these words.
"""

from typing import Any

PYTHON_DESCRIPTION = """Use this tool to execute Python code in your chain of thought. The code will not be shown to the user. This \
tool should be used for internal reasoning, but not for code that is intended to be visible to the user (e.g. when \
creating plots, tables, or files).

When you send a message containing Python code to python, it will be executed in a stateful Jupyter notebook \
environment. python will respond with the output of the execution or time out after 120.0 seconds. The drive at \
'/mnt/data' can be used to save and persist user files. Internet access for this session is UNKNOWN. Depends on the \
cluster."""

BROWSER_DESCRIPTION = """Tool for browsing.
The `cursor` appears in brackets before each browsing display: `[{cursor}]`.
Cite information from the tool using the following format:
`【{cursor}†L{line_start}(-L{line_end})?】`, for example: `【6†L9-L11】` or `【8†L3】`.
Do not quote more than 10 words directly from the tool output.
sources=web (default: web)"""

_SEARCH = "Searches for information related to `query` and displays `topn` results."
_OPEN = """Opens the link `id` from the page indicated by `cursor` starting at line number `loc`, showing `num_lines` \
lines.
Valid link ids are displayed with the formatting: `【{id}†.*】`.
If `cursor` is not provided, the most recent page is implied.
If `id` is a string, it is treated as a fully qualified URL associated with `source`.
If `loc` is not provided, the viewport will be positioned at the beginning of the document or centered on the most \
relevant passage, if available.
Use this function without `id` to scroll to a new location of an opened page."""
_FIND = "Finds exact matches of `pattern` in the current page, or the page given by `cursor`."


def _number(default: int) -> dict[str, Any]:
    return {"type": "number", "default": default}


def _function(name: str, description: str, required: list[str], **properties: dict[str, Any]) -> dict[str, Any]:
    parameters = {"type": "object", "properties": properties, "required": required}
    return {"name": name, "description": description, "parameters": parameters}


_TEXT = {"type": "string"}
BROWSER_FUNCTIONS = [
    _function("search", _SEARCH, ["query"], query=_TEXT, topn=_number(10), source=_TEXT),
    _function(
        "open",
        _OPEN,
        [],
        id={"type": ["number", "string"], "default": -1},
        cursor=_number(-1),
        loc=_number(-1),
        num_lines=_number(-1),
        view_source={"type": "boolean", "default": False},
        source=_TEXT,
    ),
    _function("find", _FIND, ["pattern"], pattern=_TEXT, cursor=_number(-1)),
]
BUILTIN_FUNCTIONS = {"python": (), "browser": tuple(function["name"] for function in BROWSER_FUNCTIONS)}
