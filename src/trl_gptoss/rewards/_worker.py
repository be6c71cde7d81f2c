"""The program that runs math-verify for us, in a process that can be killed.

Sympy can be sent into computations without end (`9^9^9^9`), and while one long integer power is computed no signal
handler and no other thread of the process gets its turn. So the caller sits outside and kills.

A job is `{"gold": str, "text": str, "seconds": n}`, its answer `{"verdict": true | false | null}` (null: the gold answer
cannot be read); see _serving.py.
"""

import logging
import re
import sys
from pathlib import Path
from typing import Any

from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

# run as a script: importing this file's package would import transformers, which takes longer than all the rest
sys.path.append(str(Path(__file__).parent))
from _serving import serve  # noqa: E402
from answers import gold_answer, normalized, stated_answer  # noqa: E402

_SCIENTIFIC = re.compile(r"(?<![\w.])(-?\d+(?:\.\d+)?)[eE]([+-]?\d+)(?!\w)")
_MATH_ONLY = re.compile(r"(?:\\[A-Za-z]+|[A-Za-z](?![A-Za-z])|[^A-Za-z])*")


def read(text: str) -> list:
    """What math-verify makes of `text`; never by its own timeout, which relies on signals."""
    text = _SCIENTIFIC.sub(r"\1 \\times 10^{\2}", text)
    return parse(text, extraction_config=[LatexExtractionConfig(), ExprExtractionConfig()], parsing_timeout=None)


def read_formula(text: str) -> list:
    """Like `read`, for a text that is a formula whether or not it says so by dollar signs."""
    bare = text.strip().rstrip(".").strip()
    return read(f"${bare}$") or read(bare)


def read_stated(kind: str, stated: str) -> list:
    delimited = any(mark in stated for mark in ("$", "\\(", "\\["))
    if kind == "boxed":
        return read(f"\\boxed{{{stated}}}") or read_formula(stated)
    if not delimited and ((kind == "phrase" and "\\" in stated) or _MATH_ONLY.fullmatch(stated)):
        return read_formula(stated)
    return read(stated)


def judge(gold: str, text: str) -> bool | None:
    """Whether `text` states the answer `gold`; `None` if the gold answer cannot be read."""
    gold = gold_answer(gold)
    kind, stated = stated_answer(text)
    if gold and normalized(gold) == normalized(stated):
        return True
    wanted = read_formula(gold)
    if not wanted:
        return None
    return verify(wanted, read_stated(kind, stated), timeout_seconds=None)


def answer(job: dict[str, Any]) -> dict[str, Any]:
    try:
        return {"verdict": judge(job["gold"], job["text"])}
    except (
        ArithmeticError,
        AttributeError,
        MemoryError,
        RecursionError,
        TypeError,
        ValueError,
        NotImplementedError,
    ):
        return {"verdict": False}  # sympy raises all of these on odd input; anything else ends the worker


def warm_up() -> None:
    logging.disable(logging.CRITICAL)  # math-verify warns that its timeout is off
    judge(r"\frac{1}{2}", r"The answer is $\frac{2}{4}$.")  # sympy builds its tables on first use


if __name__ == "__main__":
    serve(answer, warm_up)
