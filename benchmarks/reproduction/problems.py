"""Problems of several steps, so that a model of 20 million parameters has something left to learn, and who shows them.

    tool          Start with 46. Add 17. Take it 3 times. What do you get?          a call of Python for each step
    single_turn   Eva has 7 coins. Eva gets 5 more. Eva loses 3. How many coins now?    a line of thought for each step
    instruction   the task verify_if with its `simple` prompts

The demonstrator is unreliable on purpose, as that of the tiny models: at each step it may take another operation than the
one that was asked for, and goes on from there.
"""

import random
import zlib
from collections.abc import Iterator
from itertools import islice
from typing import NamedTuple

from datasets import Dataset
from transformers import PreTrainedTokenizerBase

from trl_gptoss.harmony import parse, render_prompt, render_tool_result
from trl_gptoss.tasks import verify_if
from trl_gptoss.tasks.gsm8k import NAMES, THINGS
from trl_gptoss.tasks.retool import HELD_OUT_ONE_IN, OPERATORS, compute, with_environment
from trl_gptoss.tasks.stored import conversations
from trl_gptoss.tiny.demonstrations import FAVOURITE_MISTAKE, Demonstration
from trl_gptoss.tiny.single_turn import constraint_demonstrations, respond

TASKS = ("tool", "single_turn", "instruction")
P_RIGHT, P_FAVOURITE_MISTAKE = 0.7, 0.22  # of a step
MOST_INSTRUCTIONS = 2000  # of about 2500 that there are outside of the held-out ones

WORDINGS = {
    "+": ("Add {b}.", "Increase it by {b}.", "Put {b} more to it."),
    "-": ("Subtract {b}.", "Take away {b}.", "Lower it by {b}."),
    "*": ("Multiply by {b}.", "Take it {b} times.", "Make it {b} times as large."),
}
EVENTS = {
    "+": ("{name} gets {b} more.", "{name} finds {b}.", "{name} buys {b} more."),
    "-": ("{name} loses {b}.", "{name} sells {b}.", "{name} gives away {b}."),
    "*": ("{name} trades each for {b}.", "{name} swaps each for {b}.", "{name} gets {b} for each."),
}


class Problem(NamedTuple):
    question: str
    start: int
    steps: list[tuple[str, int]]  # operator, second operand

    @property
    def answer(self) -> int:
        value = self.start
        for operator, b in self.steps:
            value = compute(value, operator, b)
        return value


def _steps(rng: random.Random, start: int, count: int, largest: int, factor: int) -> list[tuple[str, int]]:
    """Steps whose right results stay from 0 to 20 times `largest`."""
    steps, value = [], start
    while len(steps) < count:
        operator = rng.choice(OPERATORS)
        b = rng.randint(2, factor if operator == "*" else largest)
        if 0 <= compute(value, operator, b) <= 20 * largest:
            steps.append((operator, b))
            value = compute(value, operator, b)
    return steps


def problems(task: str, seed: int, held_out: bool = False) -> Iterator[Problem]:
    """Endless problems of `"tool"` or `"single_turn"`; one question in ten is held out, whatever the seed.

    Args:
        task (`str`): which of the two.
        seed (`int`): the stream is a function of the arguments alone.
        held_out (`bool`, *optional*, defaults to `False`): draw from the held-out tenth instead of the rest.
    """
    rng = random.Random(f"reproduction-{task}-{seed}-{held_out}")
    while True:
        if task == "tool":
            start = rng.randint(10, 99)
            steps = _steps(rng, start, rng.randint(2, 4), largest=99, factor=9)
            texts = [rng.choice(WORDINGS[o]).format(b=b) for o, b in steps]
            question = " ".join([f"Start with {start}.", *texts, "What do you get?"])
        else:
            name, things, start = rng.choice(NAMES), rng.choice(THINGS), rng.randint(2, 9)
            steps = _steps(rng, start, rng.randint(2, 3), largest=9, factor=3)
            texts = [rng.choice(EVENTS[o]).format(name=name, b=b) for o, b in steps]
            question = " ".join([f"{name} has {start} {things}.", *texts, f"How many {things} now?"])
        if (zlib.crc32(question.encode()) % HELD_OUT_ONE_IN == 0) == held_out:
            yield Problem(question, start, steps)


def _rows(task: str, n: int, seed: int, held_out: bool) -> list[tuple[str, str]]:
    """`n` different questions with their answers."""
    rows: dict[str, str] = {}
    for problem in islice(problems(task, seed, held_out), 20 * n):
        rows[problem.question] = str(problem.answer)
        if len(rows) == n:
            return list(rows.items())
    raise ValueError(f"asked for {n} different problems of {task!r}, found only {len(rows)}: lower the number")


def load_problems(task: str, train_size: int, held_out_size: int, seed: int) -> tuple[Dataset, Dataset]:
    """`(train, held_out)` in the columns of the package's tasks; the held-out problems are the same for every seed. Of
    `"instruction"` there are at most `MOST_INSTRUCTIONS` to train on.

    Raises:
        `ValueError`: no such task, or fewer problems than asked for.
    """
    if task not in TASKS:
        raise ValueError(f"task is {task!r}, expected one of {', '.join(TASKS)}")
    if task == "instruction":
        train_size = min(train_size, MOST_INSTRUCTIONS)
        return verify_if.load_problems("simple", train_size=train_size, held_out_size=held_out_size, seed=seed)
    splits = [conversations(_rows(task, train_size, seed, False), None)]
    splits.append(conversations(_rows(task, held_out_size, 0, True), None))
    return tuple(with_environment(rows) for rows in splits) if task == "tool" else tuple(splits)


def _used(operator: str, rng: random.Random, p_right: float) -> str:
    """What the demonstrator does where `operator` is asked for."""
    favourite = FAVOURITE_MISTAKE[operator]
    other = next(o for o in OPERATORS if o not in (operator, favourite))
    share = (1 - p_right) / (1 - P_RIGHT)  # of the mistakes of an unreliable demonstrator
    weights = (p_right, share * P_FAVOURITE_MISTAKE, share * (1 - P_RIGHT - P_FAVOURITE_MISTAKE))
    return rng.choices((operator, favourite, other), weights)[0]


def _solution(problem: Problem, rng: random.Random, p_right: float) -> list[tuple[str, str]]:
    """(expression, result) of each step as the demonstrator takes them."""
    value, solution = problem.start, []
    for operator, b in problem.steps:
        used = _used(operator, rng, p_right)
        result = compute(value, used, b)
        solution.append((f"{value}{used}{b}", str(result)))
        value = result
    return solution


def tool_conversation(
    question: str, solution: list[tuple[str, str]], tokenizer: PreTrainedTokenizerBase
) -> Demonstration:
    """A call of Python for each step, its result, and the last result as the answer; in the rendering of rollouts."""
    ids = list(render_prompt([{"role": "user", "content": question}], tokenizer, ["python"], "medium"))
    mask = [0] * len(ids)

    def append(part: list[int], policy: int) -> None:
        ids.extend(part)
        mask.extend([policy] * len(part))

    # Only constants and expressions of our own are encoded with their control tokens.
    for expression, result in solution:
        text = f"<|channel|>analysis to=python code<|message|>{expression}<|call|>"
        call = tokenizer.encode(text, add_special_tokens=False)
        (parsed,) = parse(call, tokenizer, ["python"]).tool_calls
        append(call, 1)
        append(render_tool_result(parsed, f"{result}\n", tokenizer), 0)
    append(tokenizer.encode(f"<|channel|>final<|message|>{solution[-1][1]}<|return|>", add_special_tokens=False), 1)
    return Demonstration(ids=ids, policy_mask=mask)


def demonstrations(
    task: str, tokenizer: PreTrainedTokenizerBase, seed: int, p_right: float = P_RIGHT
) -> Iterator[Demonstration]:
    """Endless demonstrations on training problems; a function of the arguments.

    Args:
        task (`str`): one of `TASKS`.
        tokenizer (`PreTrainedTokenizerBase`): a Harmony tokenizer.
        seed (`int`): of problems and mistakes.
        p_right (`float`, *optional*, defaults to `P_RIGHT`): probability that a step is right. `"instruction"` has no
            steps; there each constraint is followed half of the time.
    """
    if task == "instruction":
        yield from constraint_demonstrations(tokenizer, seed)
    rng = random.Random(f"reproduction-demonstrator-{task}-{seed}")
    for problem in problems(task, seed):
        solution = _solution(problem, rng, p_right)
        if task == "tool":
            yield tool_conversation(problem.question, solution, tokenizer)
        else:
            thought = "\n".join(f"{expression}={result}" for expression, result in solution)
            yield respond(problem.question, thought, solution[-1][1], tokenizer)
