"""GSM8K: word problems that a policy solves by thinking, without tools. Data set and rewards in one place.

Two sources of problems, each split into training and held-out problems that share no question:

    "stories"        generated here: one step with two numbers from 2 to 9, small enough for the tiny model
    anything else    a Hub id (`openai/gsm8k`, with the configuration `main`), or a local file or folder in any format
                     that the ReTool task reads

Rows have two columns: `prompt` (a conversation: `list[dict]`) and `answer` (`str`, the reference the reward reads). There
is no environment: a rollout is one turn.
"""

import random
import zlib
from collections.abc import Iterator
from itertools import islice

from datasets import Dataset

from ..rewards import format_reward, math_reward
from .retool import HELD_OUT_ONE_IN, OPERATORS, compute
from .stored import conversations, evaluation_problems, train_and_held_out

NAMES = ("Ann", "Ben", "Eva", "Tom", "Kim", "Leo")
THINGS = ("apples", "books", "coins", "eggs", "pens", "shells")

# Nine stories, three per operation. Every one names the first number first, so that copying both is enough to think.
STORIES = {
    "+": (
        "{name} has {a} {things} and gets {b} more. How many {things} now?",
        "{name} buys {a} {things} and then {b} more. How many {things} in all?",
        "{name} has {a} {things} and finds {b}. How many {things} now?",
    ),
    "-": (
        "{name} has {a} {things} and loses {b}. How many {things} are left?",
        "{name} has {a} {things} and sells {b}. How many {things} are left?",
        "{name} has {a} {things} and gives away {b}. How many {things} are left?",
    ),
    "*": (
        "{name} has {a} boxes of {b} {things}. How many {things} in all?",
        "{name} fills {a} bags with {b} {things} each. How many {things} in all?",
        "{name} buys {a} packs of {b} {things}. How many {things} in all?",
    ),
}

# What the task pays for: a correct final answer. Malformed or cut-off turns cost a little (`reward_weights`).
REWARDS = [math_reward, format_reward]
ENVIRONMENTS = None
INSTRUCTIONS = "Solve the problem step by step. End with the final answer inside \\boxed{}."


def stories(seed: int, held_out: bool = False) -> Iterator[tuple[int, str, int, str]]:
    """Endless `(a, operator, b, question)`: two numbers from 2 to 9, a >= b for subtraction.

    One question in ten (its whole text) is held out, whatever the seed.

    Args:
        seed (`int`): the stream is a function of `seed` and `held_out` alone.
        held_out (`bool`, *optional*, defaults to `False`): draw from the held-out tenth instead of the rest.
    """
    rng = random.Random(f"stories-{seed}-{held_out}")
    while True:
        operator = rng.choice(OPERATORS)
        a, b = rng.randint(2, 9), rng.randint(2, 9)
        if operator == "-" and a < b:
            a, b = b, a
        question = rng.choice(STORIES[operator]).format(name=rng.choice(NAMES), things=rng.choice(THINGS), a=a, b=b)
        if (zlib.crc32(question.encode()) % HELD_OUT_ONE_IN == 0) == held_out:
            yield a, operator, b, question


def _story_rows(n: int, seed: int, held_out: bool) -> list[tuple[str, str]]:
    """`n` different questions with their answers."""
    rows: dict[str, str] = {}
    for a, operator, b, question in islice(stories(seed, held_out), 20 * n):
        rows[question] = str(compute(a, operator, b))
        if len(rows) == n:
            break
    if len(rows) < n:
        raise ValueError(f"asked for {n} different stories, found only {len(rows)}: lower the number")
    return list(rows.items())


def load_problems(
    dataset_name: str = "stories",
    *,
    dataset_config: str | None = None,
    train_split: str = "train",
    test_split: str = "test",
    test_dataset_name: str | None = None,
    test_dataset_config: str | None = None,
    train_size: int = 2000,
    held_out_size: int = 200,
    seed: int = 0,
    instructions: str | None = None,
) -> tuple[Dataset, Dataset]:
    """Training and held-out problems, `(train, held_out)`, without a common question.

    Args:
        dataset_name (`str`, *optional*, defaults to `"stories"`): source, see the top of this file.
        Others: as for [`~trl_gptoss.tasks.retool.load_problems`].

    Returns:
        `tuple[Dataset, Dataset]`: columns as at the top of this file.

    Raises:
        `ValueError`: a split or column is missing, or there are fewer stories than asked for.
        `FileNotFoundError`: the local file does not exist.
    """
    if dataset_name == "stories":
        # The held-out problems are the same for every seed, so that runs can be compared.
        train, held_out = _story_rows(train_size, seed, False), _story_rows(held_out_size, 0, True)
        if test_dataset_name is not None:
            held_out = evaluation_problems(test_dataset_name, test_dataset_config, test_split)[:held_out_size]
    else:
        train, held_out = train_and_held_out(
            dataset_name,
            dataset_config=dataset_config,
            train_split=train_split,
            test_split=test_split,
            test_dataset_name=test_dataset_name,
            test_dataset_config=test_dataset_config,
            held_out_size=held_out_size,
            seed=seed,
        )
    return conversations(train[:train_size], instructions), conversations(held_out, instructions)
