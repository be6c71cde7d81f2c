r"""Finding the answer in a text, and comparing plain numbers; no dependency, used in the trainer and in the worker.

gold    "... makes 9 * 2 = $18.\n#### 18"  ->  18         (GSM8K)
        "... so it is \boxed{\frac12}."    ->  \frac12    (a full solution)
        "27.0", "\frac12", "$\frac12$"     ->  the same, without dollar signs
policy  "... \boxed{18}"                   ->  18         (the last box)
        "So the answer is 18 dollars."     ->  18 dollars (the rest of the line after the last such phrase)
        anything else                      ->  the whole text, whose last number or formula counts
"""

import re
from decimal import Decimal

TAIL = 4096  # characters at the end of a text in which an answer is looked for

_ANSWER = re.compile(r"\banswer\b[^\n:=]{0,40}?(?:\bis\b|\bare\b|:|=)", re.IGNORECASE)
_BRACE = re.compile(r"\\(?:boxed|fbox)\s*\{|\\.|[{}]", re.DOTALL)
_NUMBER = r"-?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?"
_PLAIN_NUMBER = re.compile(_NUMBER)
# parentheses and "!" next to a number can mean something
_ONE_NUMBER = re.compile(
    rf"(?P<before>[A-Za-z\s,:;'*]*)\$?(?P<number>{_NUMBER})(?P<after>(?:[\s,;:'.*](?:[A-Za-z,;'.*][A-Za-z\s,;'!*.]*|\s*))?)"
)
# words that may change the value of a number next to them, left to math-verify; single letters may be variables
_NUMBER_WORDS = re.compile(
    r"\b(?:[A-Za-z]|minus|negative|per\s?cent|percent\w*|hundreds?|thousands?|millions?|billions?|trillions?|dozens?"
    r"|half|halves|thirds?|quarters?|pi|inf\w*|oo|or|and|sqrt|times|over|plus)\b",
    re.IGNORECASE,
)

# how formulas write what changes nothing, multiplication and minus
_DECORATION = re.compile(r"\\(?:left|right|[dt]?frac|[()\[\],;! ])|[\s$]")
_TIMES = re.compile(r"\\(?:times|cdot)|[×·⋅∗]")
_POWER_OF_TEN = re.compile(r"\*10\^(?:\{-?\d+\}|-?\d+)")
_OPERATION = re.compile(r"\d[)}]*[+*-][({]*[+-]?\d")


def last_boxed(text: str) -> str | None:
    r"""The content of the last complete `\boxed{...}` (or `\fbox{...}`). Linear in the length, whatever the text."""
    last: tuple[int, str] | None = None
    opened: list[tuple[bool, int]] = []
    for mark in _BRACE.finditer(text):
        if mark[0].endswith("{") and mark[0] != "\\{":
            opened.append((len(mark[0]) > 1, mark.end()))
        elif mark[0] == "}" and opened:
            boxed, start = opened.pop()
            if boxed and (last is None or start > last[0]):
                last = start, text[start : mark.start()].strip()
    return None if last is None else last[1]


def gold_answer(gold: str) -> str:
    """The bare answer in a data set's column, see the top of this file."""
    if "####" in gold:
        gold = gold.rsplit("####", 1)[1]
    boxed = last_boxed(gold)
    gold = (gold if boxed is None else boxed).strip()
    if gold.startswith("\\(") and gold.endswith("\\)"):
        gold = gold[2:-2].strip()
    if gold.endswith("$."):
        gold = gold[:-1]
    if gold.startswith("$") and gold.endswith("$") and gold.count("$") in (2, 4):
        gold = gold.strip("$").strip()
    return gold.lstrip("$") if _PLAIN_NUMBER.fullmatch(gold.lstrip("$")) else gold


def stated_answer(text: str) -> tuple[str, str]:
    """Where the policy states its answer: (`"boxed"`, `"phrase"` or `"text"`, that part of the text)."""
    text = text[-TAIL:].strip()
    boxed = last_boxed(text)
    if boxed is not None:
        return "boxed", boxed
    phrases = list(_ANSWER.finditer(text))
    if phrases:
        rest = text[phrases[-1].end() :].lstrip(":=* \t\n")
        line = rest.split("\n", 1)[0].strip()
        if line and line not in ("$$", "\\["):
            return "phrase", line
        if rest:
            return "phrase", rest
    return "text", text


def plain_number(text: str) -> Decimal | None:
    """`text` as a number if it is an ordinary integer or decimal, thousands separators allowed."""
    return Decimal(text.replace(",", "")) if _PLAIN_NUMBER.fullmatch(text) else None


def _calculation(formula: str) -> str:
    """The digits and operators that a formula ends with, without decoration."""
    bare = _DECORATION.sub("", _TIMES.sub("*", formula)).replace("\u2212", "-")
    bare = _POWER_OF_TEN.sub("", bare)  # 1.5 * 10^3 is a way to write a number
    return bare[len(bare.rstrip("0123456789.,()+-*/^{}")) :]


def is_left_to_the_reader(stated: str, wanted: Decimal) -> bool:
    """Whether a stated answer ends in a sum or product that nobody has worked out, such as `12 * 34` for 408.

    math-verify would work it out, and repeating the question would be a right answer.
    """
    *before, last = stated.rstrip().rsplit("\n", 1)[-1].split("=")
    if not _OPERATION.search(_calculation(last)):
        return False
    return all(plain_number(_calculation(part).rstrip(".,")) != wanted for part in before)


def compare_plain(gold: str, text: str) -> bool | None:
    """Whether `text` states the number `gold`; `None` where only math-verify can tell.

    Decides nothing that math-verify would decide otherwise: only texts with exactly one ordinary number and ordinary
    words around it, and only differences far above math-verify's rounding to six digits. The exception are sums and
    products that are left to the reader: they are wrong.
    """
    wanted = plain_number(gold)
    if wanted is None:
        return None
    kind, stated = stated_answer(text)
    if not any(c.isnumeric() for c in text) and "\\" not in text and len(text) < TAIL:
        return False
    if is_left_to_the_reader(stated, wanted):
        return False
    match = _ONE_NUMBER.fullmatch(stated)
    if match is None or _NUMBER_WORDS.search(match["before"]) or _NUMBER_WORDS.search(match["after"]):
        return None
    if kind == "boxed" and match["number"] != stated:
        return None
    given = plain_number(match["number"])
    if given == wanted:
        return True
    return False if abs(given - wanted) > Decimal("1e-4") else None


def normalized(text: str) -> str:
    r"""A formula without what does not change it: spaces, dollar signs, `\left`, `\,`, a full stop at the end."""
    text = re.sub(r"\\(?:left|right|displaystyle|quad|,|;|!| )|[\s$]", "", text)
    return text.replace("dfrac", "frac").replace("tfrac", "frac").rstrip(".")
