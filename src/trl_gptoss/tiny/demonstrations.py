"""Harmony tool-use conversations for the warm start, by a demonstrator that is unreliable on purpose.

Every conversation is well-formed: the demonstrator calls Python with an expression over the two numbers of the problem,
reads the result and repeats it as its answer. But it usually picks the wrong operator. So the warm-started model calls
the tool, trusts it, and is wrong more often than right: reinforcement learning has to turn its favourite choice around,
and it can, because every choice occurs. (A model that saw only right demonstrations, stopped early, has not learned to
copy numbers yet and gets no reward to learn from.)

    <|start|>system ... user<|message|>Add 10 and 28.<|end|><|start|>assistant     context: prompt
    <|channel|>analysis to=python code<|message|>10-28<|call|>                     policy
    <|start|>python to=assistant<|channel|>analysis<|message|>-18<|end|>...        context: what the tool really says
    <|channel|>final<|message|>-18<|return|>                                       policy
"""

import random
from dataclasses import dataclass

from ..tasks.retool import OPERATORS

P_RIGHT, P_FAVOURITE_MISTAKE = 0.30, 0.45  # and 0.25 for the third operator
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
