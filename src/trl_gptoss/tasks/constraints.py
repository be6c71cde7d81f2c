"""Constraints on a response that a program can check: drawn at random, and refused where no response can follow them all.

The kinds, their checkers and their wordings are those of IFEval, in the package `if-verifiable` (extra `tasks`).
"""

import random
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from ..rewards.instruction_checker import require_if_verifiable

AT_LEAST, LESS_THAN = "at least", "less than"
KEYWORDS = ("bridge", "garden", "lantern", "market", "mirror", "music", "river", "silver", "storm", "window")
END_PHRASES = ("Any other questions?", "That is all you need.", "Is there anything else I can help with?")


@dataclass(frozen=True, kw_only=True, slots=True)
class Constraint:
    """id (`str`): kind, e.g. `"punctuation:no_comma"`. kwargs (`dict`): its arguments, as IFEval names them."""

    id: str
    kwargs: dict[str, Any] = field(default_factory=dict)


def _nothing(rng: random.Random) -> dict[str, Any]:
    return {}


def _two_keywords(rng: random.Random) -> dict[str, Any]:
    return {"keywords": sorted(rng.sample(KEYWORDS, 2))}


def _frequency(rng: random.Random) -> dict[str, Any]:
    relation = rng.choice((AT_LEAST, LESS_THAN))
    return {"keyword": rng.choice(KEYWORDS), "frequency": rng.randint(2, 4), "relation": relation}


def _letter(rng: random.Random) -> dict[str, Any]:
    return {"letter": rng.choice("bcdfgjkmpqvwxyz"), "let_frequency": rng.randint(3, 8), "let_relation": AT_LEAST}


def _words(rng: random.Random) -> dict[str, Any]:
    relation = rng.choice((AT_LEAST, LESS_THAN))
    return {"num_words": rng.choice((50, 80, 100, 150, 200)), "relation": relation}


def _first_word(rng: random.Random) -> dict[str, Any]:
    number = rng.randint(2, 4)
    return {"num_paragraphs": number, "nth_paragraph": rng.randint(1, number), "first_word": rng.choice(KEYWORDS)}


# How the arguments of a kind are drawn. `combination:repeat_prompt` gets the request when the prompt is written;
# `detectable_format:constrained_response` is left out: it goes with no other constraint and with few requests.
GENERATED: dict[str, Callable[[random.Random], dict[str, Any]]] = {
    "keywords:existence": _two_keywords,
    "keywords:frequency": _frequency,
    "keywords:forbidden_words": lambda rng: {"forbidden_words": sorted(rng.sample(KEYWORDS, 2))},
    "keywords:letter_frequency": _letter,
    "language:response_language": lambda rng: {"language": rng.choice(("de", "es", "fr", "it", "pt"))},
    "length_constraints:number_sentences": lambda rng: {
        "num_sentences": rng.randint(3, 8),
        "relation": rng.choice((AT_LEAST, LESS_THAN)),
    },
    "length_constraints:number_paragraphs": lambda rng: {"num_paragraphs": rng.randint(2, 4)},
    "length_constraints:number_words": _words,
    "length_constraints:nth_paragraph_first_word": _first_word,
    "detectable_content:number_placeholders": lambda rng: {"num_placeholders": rng.randint(1, 4)},
    "detectable_content:postscript": lambda rng: {"postscript_marker": rng.choice(("P.S.", "P.P.S"))},
    "detectable_format:number_bullet_lists": lambda rng: {"num_bullets": rng.randint(2, 5)},
    "detectable_format:number_highlighted_sections": lambda rng: {"num_highlights": rng.randint(1, 4)},
    "detectable_format:multiple_sections": lambda rng: {
        "section_spliter": rng.choice(("Section", "SECTION")),
        "num_sections": rng.randint(2, 4),
    },
    "detectable_format:json_format": _nothing,
    "detectable_format:title": _nothing,
    "combination:two_responses": _nothing,
    "combination:repeat_prompt": _nothing,
    "startend:end_checker": lambda rng: {"end_phrase": rng.choice(END_PHRASES)},
    "startend:quotation": _nothing,
    "change_case:capital_word_frequency": lambda rng: {
        "capital_frequency": rng.randint(2, 5),
        "capital_relation": rng.choice((AT_LEAST, LESS_THAN)),
    },
    "change_case:english_capital": _nothing,
    "change_case:english_lowercase": _nothing,
    "punctuation:no_comma": _nothing,
}

# What the tiny model can learn: every one shows in a few characters.
SIMPLE: dict[str, Callable[[random.Random], dict[str, Any]]] = {
    "punctuation:no_comma": _nothing,
    "startend:quotation": _nothing,
    "detectable_format:title": _nothing,
    "detectable_content:postscript": lambda rng: {"postscript_marker": "P.S."},
    "detectable_format:number_bullet_lists": lambda rng: {"num_bullets": rng.randint(1, 3)},
    "keywords:existence": lambda rng: {"keywords": [rng.choice(KEYWORDS)]},
}


def _registry() -> Any:
    require_if_verifiable()
    from if_verifiable.ifeval import instructions_registry

    return instructions_registry


def describe(constraint: Constraint) -> str:
    """The sentence that asks for it, in IFEval's words.

    Raises:
        `ValueError`: no such kind.
        `ModuleNotFoundError`: the extra `tasks` is not installed.
    """
    kinds = _registry().INSTRUCTION_DICT
    if constraint.id not in kinds:
        raise ValueError(f"{constraint.id!r} is no kind of constraint of IFEval; expected one of {sorted(kinds)}")
    return kinds[constraint.id](constraint.id).build_description(**constraint.kwargs)


def _required_texts(constraints: list[Constraint]) -> list[str]:
    """What a response has to contain word for word."""
    texts: list[str] = []
    for c in constraints:
        if c.id == "keywords:existence":
            texts += c.kwargs["keywords"]
        elif c.id == "keywords:frequency" and c.kwargs["relation"] == AT_LEAST:
            texts += [c.kwargs["keyword"]] * c.kwargs["frequency"]
        texts += [c.kwargs[name] for name in ("end_phrase", "first_word", "prompt_to_repeat") if name in c.kwargs]
        if "section_spliter" in c.kwargs:
            texts += [f"{c.kwargs['section_spliter']} {n + 1}" for n in range(c.kwargs["num_sections"])]
    return texts


def _fewest_words(constraints: list[Constraint]) -> int:
    """A lower bound of the words in a response that follows everything but a limit on its words."""
    bound = max([1, len({w for text in _required_texts(constraints) for w in re.findall(r"\w+", text.lower())})])
    for c in constraints:
        if c.id == "length_constraints:number_sentences" and c.kwargs["relation"] == AT_LEAST:
            bound = max(bound, c.kwargs["num_sentences"])
        for name in ("num_placeholders", "num_highlights", "num_paragraphs", "num_bullets"):
            bound = max(bound, c.kwargs.get(name, 0))
        if c.id == "change_case:capital_word_frequency" and c.kwargs["capital_relation"] == AT_LEAST:
            bound = max(bound, c.kwargs["capital_frequency"])
    return bound


def _banned_words(constraints: list[Constraint]) -> list[str]:
    words: list[str] = []
    for c in constraints:
        words += c.kwargs.get("forbidden_words", [])
        if c.id == "keywords:frequency" and c.kwargs["relation"] == LESS_THAN and c.kwargs["frequency"] <= 1:
            words.append(c.kwargs["keyword"])
    return words


def _kinds_conflict(constraints: list[Constraint]) -> str | None:
    registry = _registry()
    conflicts = registry.INSTRUCTION_CONFLICTS
    for i, first in enumerate(constraints):
        for second in constraints[i + 1 :]:
            if second.id in conflicts[first.id] or first.id in conflicts[second.id]:
                return f"{first.id} and {second.id} do not go together"
    return None


def _arguments_conflict(constraints: list[Constraint]) -> str | None:
    by_kind = {c.id: c.kwargs for c in constraints}
    texts = _required_texts(constraints)
    for word in _banned_words(constraints):
        if any(re.search(rf"\b{re.escape(word)}\b", text, flags=re.IGNORECASE) for text in texts):
            return f"{word!r} is both asked for and forbidden"
    if "punctuation:no_comma" in by_kind and any("," in text for text in texts):
        return "commas are forbidden, and a text with a comma is asked for"
    for c in constraints:
        if c.id == "keywords:letter_frequency" and c.kwargs["let_relation"] == LESS_THAN:
            letter = c.kwargs["letter"].lower()
            if sum(text.lower().count(letter) for text in set(texts)) >= c.kwargs["let_frequency"]:
                return f"the letter {letter!r} has to be rare, and what is asked for is full of it"
        if c.id == "keywords:frequency" and c.kwargs["relation"] == LESS_THAN:
            keyword = c.kwargs["keyword"].lower()
            if sum(text.lower().count(keyword) for text in set(texts)) >= c.kwargs["frequency"]:
                return f"{keyword!r} has to be rare, and what is asked for is full of it"
    words = by_kind.get("length_constraints:number_words", {})
    if words.get("relation") == LESS_THAN and _fewest_words(constraints) >= words["num_words"]:
        return f"less than {words['num_words']} words do not hold what is asked for"
    sentences = by_kind.get("length_constraints:number_sentences", {})
    if sentences.get("relation") == LESS_THAN and sentences["num_sentences"] <= 1:
        return "less than one sentence is no response"
    spliter = by_kind.get("detectable_format:multiple_sections", {}).get("section_spliter", "")
    for kind, cased in (
        ("change_case:english_lowercase", spliter.lower()),
        ("change_case:english_capital", spliter.upper()),
    ):
        if kind in by_kind and spliter != cased:
            return f"{spliter!r} has to be written as it is, and {kind} forbids it"
    first = by_kind.get("length_constraints:nth_paragraph_first_word", {})
    if first.get("nth_paragraph", 0) > first.get("num_paragraphs", 0):
        return f"there is no paragraph {first['nth_paragraph']} of {first['num_paragraphs']}"
    return None


def contradiction(constraints: list[Constraint]) -> str | None:
    """Why no response can follow all constraints, or `None` if nothing speaks against it.

    Kinds that IFEval says do not go together, and arguments that exclude each other: a word asked for and forbidden, a
    comma in a text that has to appear, too few words, a section title in the wrong case.

    Args:
        constraints (`list[Constraint]`): of IFEval's kinds.

    Raises:
        `ValueError`: a kind that IFEval does not know.
    """
    unknown = sorted({c.id for c in constraints} - set(_registry().INSTRUCTION_DICT))
    if unknown:
        raise ValueError(f"unknown kinds of constraints: {unknown}; only IFEval's can be judged")
    return _kinds_conflict(constraints) or _arguments_conflict(constraints)


def draw(
    rng: random.Random,
    number: int,
    kinds: dict[str, Callable[[random.Random], dict[str, Any]]],
    request: str,
) -> list[Constraint]:
    """`number` constraints that go together, by rejection.

    Args:
        rng (`random.Random`): what to draw from.
        number (`int`): how many; no two of one kind.
        kinds (`dict[str, Callable]`): the kinds and how their arguments are drawn.
        request (`str`): what the user asks for, for `combination:repeat_prompt`.
    """
    names = list(kinds)
    while True:
        constraints = []
        for kind in rng.sample(names, number):
            kwargs = {"prompt_to_repeat": request} if kind == "combination:repeat_prompt" else kinds[kind](rng)
            constraints.append(Constraint(id=kind, kwargs=kwargs))
        if contradiction(constraints) is None:
            return constraints
