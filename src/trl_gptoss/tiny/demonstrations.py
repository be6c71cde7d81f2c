"""Harmony tool-use conversations for the warm start, by a demonstrator that is unreliable on purpose.

Every conversation is well-formed: the demonstrator calls Python with an expression over the two numbers of the problem,
reads the result and repeats it as its answer. But it usually picks the wrong operator. So the warm-started model calls
the tool, trusts it, and is wrong more often than right: reinforcement learning has to turn its favourite choice around,
and it can, because every choice occurs. (A model that saw only right demonstrations, stopped early, has not learned to
copy numbers yet and gets no reward to learn from.)

    <|start|>system ... user<|message|>Add 10 and 28.<|end|><|start|>assistant     context: prompt
    <|channel|>analysis to=python code<|message|>10-28<|call|>                     policy
    <|start|>python to=assistant<|channel|>analysis<|message|>-18\n<|end|>...      context: what the tool really says
    <|channel|>final<|message|>-18<|return|>                                       policy
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from ..harmony import parse, render_prompt, render_tool_result
from ..tasks.retool import OPERATORS, arithmetic_problems, compute

# 0.10 remain for the third operator. The more even the choice, the less imitation has to look at the wording, and the
# longer RL takes to find out that it matters (0.34, 0.40, 0.26: nothing learned in the first 40 steps).
P_RIGHT, P_FAVOURITE_MISTAKE = 0.38, 0.52
FAVOURITE_MISTAKE = {"+": "-", "-": "*", "*": "+"}


@dataclass(kw_only=True, slots=True)
class Demonstration:
    """One conversation.

    ids (`list[int]`): all tokens.
    policy_mask (`list[int]`): 1 on what the policy says, 0 on prompt and tool result; aligned with `ids`.
    """

    ids: list[int]
    policy_mask: list[int]


def choose_operator(right: str, rng: random.Random) -> str:
    """The operator the demonstrator uses where `right` is right."""
    favourite = FAVOURITE_MISTAKE[right]
    other = next(o for o in OPERATORS if o not in (right, favourite))
    return rng.choices((right, favourite, other), (P_RIGHT, P_FAVOURITE_MISTAKE, 1 - P_RIGHT - P_FAVOURITE_MISTAKE))[0]


def demonstrate(
    question: str, expression: str, result: str, tokenizer: PreTrainedTokenizerBase, reasoning_effort: str = "medium"
) -> Demonstration:
    """One conversation in the very rendering that rollouts use.

    Args:
        question (`str`): what the user asks.
        expression (`str`): the Python code of the call.
        result (`str`): what the tool prints, and what the policy then says, without its line break.
        tokenizer (`PreTrainedTokenizerBase`): a Harmony tokenizer.
        reasoning_effort (`str`, *optional*, defaults to `"medium"`): of the system message.
    """
    # Only constants and expressions of our own are encoded with their control tokens.
    call = tokenizer.encode(
        f"<|channel|>analysis to=python code<|message|>{expression}<|call|>", add_special_tokens=False
    )
    answer = tokenizer.encode(f"<|channel|>final<|message|>{result}<|return|>", add_special_tokens=False)
    (tool_call,) = parse(call, tokenizer, ["python"]).tool_calls
    parts = [
        (render_prompt([{"role": "user", "content": question}], tokenizer, ["python"], reasoning_effort), 0),
        (call, 1),
        (render_tool_result(tool_call, f"{result}\n", tokenizer), 0),
        (answer, 1),
    ]
    return Demonstration(
        ids=[i for ids, _ in parts for i in ids], policy_mask=[mask for ids, mask in parts for _ in ids]
    )


def demonstrations(tokenizer: PreTrainedTokenizerBase, seed: int) -> Iterator[Demonstration]:
    """Endless demonstrations on training problems; a function of `seed` and the tokenizer."""
    rng = random.Random(f"demonstrator-{seed}")
    for a, operator, b, question in arithmetic_problems(seed):
        used = choose_operator(operator, rng)
        yield demonstrate(question, f"{a}{used}{b}", str(compute(a, used, b)), tokenizer)


def with_filler(
    stream: Iterator[Demonstration], filler_ids: list[int], message_id: int, longest: int, seed: int
) -> Iterator[Demonstration]:
    """Demonstrations whose question follows up to `longest` random tokens, so that a real problem's text, which the
    model cannot read, does not keep it from calling its tool.

        <|start|>user<|message|>Add 10 and 28.<|end|>  ->  <|start|>user<|message|>xyz ... qrsAdd 10 and 28.<|end|>

    Args:
        stream (`Iterator[Demonstration]`): demonstrations without a conversation before the user's message.
        filler_ids (`list[int]`): what to draw from; no control tokens.
        message_id (`int`): id of `<|message|>`.
        longest (`int`): most tokens to put in; the number is uniform from 0.
        seed (`int`): determines numbers and tokens.
    """
    rng = random.Random(f"filler-{seed}")
    for demonstration in stream:
        first_policy_token = demonstration.policy_mask.index(1)
        prompt = demonstration.ids[:first_policy_token]
        at = len(prompt) - prompt[::-1].index(message_id)  # behind the last <|message|>, which is the user's
        filler = rng.choices(filler_ids, k=rng.randint(0, longest))
        yield Demonstration(
            ids=[*demonstration.ids[:at], *filler, *demonstration.ids[at:]],
            policy_mask=[*demonstration.policy_mask[:at], *[0] * len(filler), *demonstration.policy_mask[at:]],
        )
