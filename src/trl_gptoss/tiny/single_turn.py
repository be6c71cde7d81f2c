"""Demonstrations of the two tasks without tools, by demonstrators that are unreliable on purpose (see demonstrations.py).

gsm8k: thinks in one line, usually with the wrong operation, and repeats its result. verify_if: follows each constraint in
every second response or so; what nobody asked for it never does.

    <|start|>system ... user<|message|>Ann has 7 apples and gets 5 more. How many apples now?<|end|><|start|>assistant
    <|channel|>analysis<|message|>7-5=2<|end|><|start|>assistant<|channel|>final<|message|>2<|return|>
"""

import random
from collections.abc import Iterator

from transformers import PreTrainedTokenizerBase

from ..harmony import render_prompt
from ..tasks.constraints import KEYWORDS, Constraint
from ..tasks.gsm8k import stories
from ..tasks.retool import compute
from ..tasks.verify_if import generated_prompts
from .demonstrations import Demonstration, choose_operator

P_FOLLOW = 0.5
POSTSCRIPT = "\nP.S. bye"


def respond(
    question: str,
    thought: str | None,
    answer: str,
    tokenizer: PreTrainedTokenizerBase,
    reasoning_effort: str = "medium",
) -> Demonstration:
    """One turn in the very rendering that rollouts use.

    Args:
        question (`str`): what the user asks.
        thought (`str` or `None`): an analysis message before the answer.
        answer (`str`): the final message.
        tokenizer (`PreTrainedTokenizerBase`): a Harmony tokenizer.
        reasoning_effort (`str`, *optional*, defaults to `"medium"`): of the system message.
    """
    # Only constants and texts of our own are encoded with their control tokens.
    analysis = "" if thought is None else f"<|channel|>analysis<|message|>{thought}<|end|><|start|>assistant"
    turn = tokenizer.encode(f"{analysis}<|channel|>final<|message|>{answer}<|return|>", add_special_tokens=False)
    prompt = render_prompt([{"role": "user", "content": question}], tokenizer, [], reasoning_effort)
    return Demonstration(ids=prompt + turn, policy_mask=[0] * len(prompt) + [1] * len(turn))


def story_demonstrations(tokenizer: PreTrainedTokenizerBase, seed: int) -> Iterator[Demonstration]:
    """Endless demonstrations of `gsm8k`; a function of `seed` and the tokenizer."""
    rng = random.Random(f"story-demonstrator-{seed}")
    for a, operator, b, question in stories(seed):
        used = choose_operator(operator, rng)
        result = compute(a, used, b)
        yield respond(question, f"{a}{used}{b}={result}", str(result), tokenizer)


def imperfect_response(topic: str, constraints: list[Constraint], rng: random.Random) -> str:
    """A response to a `simple` prompt that follows each constraint with probability `P_FOLLOW`."""
    asked = {c.id: c.kwargs for c in constraints}
    followed = {kind for kind in asked if rng.random() < P_FOLLOW}
    good = f"good {topic}" if "punctuation:no_comma" in followed else f"good, {topic}"
    if "keywords:existence" in asked:
        keyword = asked["keywords:existence"]["keywords"][0]
        others = [k for k in KEYWORDS if k != keyword]
        good += f" and {keyword if 'keywords:existence' in followed else rng.choice(others)}"
    bullets = asked.get("detectable_format:number_bullet_lists")
    if bullets is not None:
        number = bullets["num_bullets"]
        if "detectable_format:number_bullet_lists" not in followed:
            number = rng.choice([n for n in (1, 2, 3) if n != number])
        good = "\n".join([f"* {good}"] * number)
    if "detectable_format:title" in followed:
        good = f"<<{topic}>>\n{good}"
    if "detectable_content:postscript" in followed:
        good += POSTSCRIPT
    if "startend:quotation" in followed:
        # a bullet counts at the beginning of a line only
        return f'"\n{good}\n"' if bullets is not None else f'"{good}"'
    return good


def constraint_demonstrations(tokenizer: PreTrainedTokenizerBase, seed: int) -> Iterator[Demonstration]:
    """Endless demonstrations of `verify_if`; a function of `seed` and the tokenizer."""
    rng = random.Random(f"constraint-demonstrator-{seed}")
    for prompt, topic, constraints in generated_prompts(seed, simple=True):
        yield respond(prompt, None, imperfect_response(topic, constraints, rng), tokenizer)
