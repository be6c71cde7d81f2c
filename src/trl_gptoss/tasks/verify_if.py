"""Verifiable instruction following: requests with constraints that a program checks. Data set and rewards in one place.

Training prompts, each with several constraints that do not contradict each other:

    "generated"      made here, with 24 of the 25 kinds of IFEval
    "simple"         made here, with six kinds that show in a few characters, small enough for the tiny model
    anything else    a Hub id, or a local file or folder, with IFEval's columns

Held out are prompts of the same generator, or any stored set in the columns of IFEval (`google/IFEval`) or IFBench
(`allenai/IFBench_test`): IFBench's 58 kinds do not occur in training. Stored sets have the columns `prompt`,
`instruction_id_list` and `kwargs`.

Rows have three columns: `prompt` (a conversation: `list[dict]`), `constraints` (JSON) and `benchmark` (`"ifeval"` or
`"ifbench"`: whose checkers). There is no environment: a rollout is one turn.
"""

import json
import logging
import random
import zlib
from collections.abc import Iterator
from itertools import islice
from typing import Any

from datasets import Dataset

from ..rewards import format_reward, instruction_reward
from ..rewards.instruction_checker import require_if_verifiable, shared_instruction_checker
from .constraints import GENERATED, SIMPLE, Constraint, contradiction, describe, draw
from .retool import HELD_OUT_ONE_IN
from .stored import held_out_split, load, only_split, question_text, split_of

logger = logging.getLogger(__name__)

FORMS = (
    "Write a short text about {topic}.",
    "Explain {topic} to a child.",
    "Write a letter to a friend about {topic}.",
    "Give some advice about {topic}.",
    "Write an advertisement for {topic}.",
    "Describe {topic} for a travel guide.",
)
TOPICS = (
    "a night train", "beekeeping", "the old harbour", "baking bread", "a chess club", "the first day of school",
    "growing tomatoes", "a mountain hut", "learning the violin", "a small library", "sailing", "winter tyres",
    "a village fair", "public transport", "keeping a diary", "a second-hand bicycle", "the northern lights",
    "repairing shoes", "a lost umbrella", "urban gardens", "an astronomy lesson", "a family dinner", "rainy holidays",
    "a running group",
)  # fmt: skip
SIMPLE_FORMS = ("Write about {topic}.", "Tell me about {topic}.")
SIMPLE_TOPICS = ("rain", "snow", "bread", "cats", "dogs", "trains", "tea", "trees")

# What the task pays for: the share of the constraints that are followed. A rollout counts as right when it is 1.
REWARDS = [instruction_reward, format_reward]
ENVIRONMENTS = None
INSTRUCTIONS = None

Row = tuple[str, list[Constraint], str]  # prompt, constraints, benchmark


def generated_prompts(
    seed: int, held_out: bool = False, simple: bool = False
) -> Iterator[tuple[str, str, list[Constraint]]]:
    """Endless `(prompt, topic, constraints)`; one prompt in ten (its whole text) is held out, whatever the seed.

    Args:
        seed (`int`): the stream is a function of the arguments alone.
        held_out (`bool`, *optional*, defaults to `False`): draw from the held-out tenth instead of the rest.
        simple (`bool`, *optional*, defaults to `False`): the kinds and topics of `"simple"`, 2 constraints; 2 to 4 of
            all kinds otherwise.
    """
    rng = random.Random(f"constraints-{seed}-{held_out}-{simple}")
    forms, topics, kinds = (SIMPLE_FORMS, SIMPLE_TOPICS, SIMPLE) if simple else (FORMS, TOPICS, GENERATED)
    while True:
        topic = rng.choice(topics)
        request = rng.choice(forms).format(topic=topic)
        constraints = draw(rng, 2 if simple else rng.randint(2, 4), kinds, request)
        prompt = " ".join([request, *map(describe, constraints)])
        if (zlib.crc32(prompt.encode()) % HELD_OUT_ONE_IN == 0) == held_out:
            yield prompt, topic, constraints


def _generated_rows(n: int, seed: int, held_out: bool, simple: bool) -> list[Row]:
    """`n` different prompts."""
    rows: dict[str, Row] = {}
    for prompt, _, constraints in islice(generated_prompts(seed, held_out, simple), 20 * n):
        rows[prompt] = (prompt, constraints, "ifeval")
        if len(rows) == n:
            break
    if len(rows) < n:
        raise ValueError(f"asked for {n} different prompts, found only {len(rows)}: lower the number")
    return list(rows.values())


def _benchmark(ids: set[str], dataset_name: str) -> str:
    """Whose checkers know all of these kinds."""
    require_if_verifiable()
    from if_verifiable.ifeval.instructions_registry import INSTRUCTION_DICT

    unknown = ids - set(INSTRUCTION_DICT)
    if not unknown:
        return "ifeval"
    mixed = sorted(ids - unknown)
    if mixed:
        raise ValueError(
            f"{dataset_name} mixes kinds of constraints of IFEval ({mixed[:3]}, ...) with others "
            f"({sorted(unknown)[:3]}, ...): split it into two data sets"
        )
    return "ifbench"


def stored_rows(data: Dataset, dataset_name: str) -> list[Row]:
    """Rows of a data set in the columns of IFEval or IFBench.

    Raises:
        `ValueError`: a column is missing, a row has not as many arguments as kinds, a prompt is no single question, or the kinds are of
            both benchmarks.
    """
    missing = [c for c in ("prompt", "instruction_id_list", "kwargs") if c not in data.column_names]
    if missing:
        raise ValueError(f"{dataset_name} has the columns {data.column_names}; {missing} are missing")
    rows = []
    for number, row in enumerate(data):
        ids, kwargs = row["instruction_id_list"], row["kwargs"]
        if len(ids) != len(kwargs):
            raise ValueError(
                f"row {number} of {dataset_name} has {len(ids)} kinds and {len(kwargs)} sets of arguments"
            )
        prompt = question_text(row["prompt"], f"row {number} of {dataset_name}")
        constraints = [
            Constraint(id=i, kwargs={name: value for name, value in (k or {}).items() if value is not None})
            for i, k in zip(ids, kwargs)
        ]
        rows.append((prompt, constraints))
    benchmark = _benchmark({c.id for _, constraints in rows for c in constraints}, dataset_name)
    return [(prompt, constraints, benchmark) for prompt, constraints in rows]


def without_contradictions(rows: list[Row], dataset_name: str) -> list[Row]:
    """Training rows that some response can follow; says how many were dropped. IFBench's kinds are not judged."""
    reasons = [contradiction(constraints) if benchmark == "ifeval" else None for _, constraints, benchmark in rows]
    dropped = [reason for reason in reasons if reason is not None]
    if dropped:
        logger.warning(
            "%s: %d of %d prompts have contradictory constraints and are left out, the first because %s.",
            dataset_name, len(dropped), len(rows), dropped[0],
        )  # fmt: skip
    return [row for row, reason in zip(rows, reasons) if reason is None]


def checkable(rows: list[Row], dataset_name: str) -> list[Row]:
    """Rows whose checkers run here; says what is missing for the others (NLTK data that IFBench downloads)."""
    kinds: dict[str, tuple[str, Constraint, str]] = {}
    for prompt, constraints, benchmark in rows:
        for constraint in constraints:
            kinds.setdefault(constraint.id, (prompt, constraint, benchmark))
    trials = list(kinds.values())
    checked = shared_instruction_checker.check(
        [benchmark for _, _, benchmark in trials],
        [prompt for prompt, _, _ in trials],
        [[_plain(constraint)] for _, constraint, _ in trials],
        ["One plain sentence."] * len(trials),
    )
    lacking = {
        kind for kind, result in zip(kinds, checked) if result.errors[0] and result.errors[0].startswith("LookupError")
    }
    kept = [row for row in rows if lacking.isdisjoint(c.id for c in row[1])]
    if lacking:
        logger.warning(
            "%s: %d of %d prompts are left out, because the checkers of %s need NLTK data that is neither here nor could "
            "be downloaded. Run `python -m nltk.downloader stopwords averaged_perceptron_tagger_eng` to get it.",
            dataset_name, len(rows) - len(kept), len(rows), sorted(lacking),
        )  # fmt: skip
    return kept


def _plain(constraint: Constraint) -> dict[str, Any]:
    return {"id": constraint.id, "kwargs": constraint.kwargs}


def _dataset(rows: list[Row], instructions: str | None) -> Dataset:
    start = [{"role": "system", "content": instructions}] if instructions else []
    return Dataset.from_dict(
        {
            "prompt": [[*start, {"role": "user", "content": prompt}] for prompt, _, _ in rows],
            "constraints": [json.dumps([_plain(c) for c in constraints]) for _, constraints, _ in rows],
            "benchmark": [benchmark for _, _, benchmark in rows],
        }
    )


def load_problems(
    dataset_name: str = "simple",
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
    """Training and held-out prompts, `(train, held_out)`, without a common prompt.

    Args:
        dataset_name (`str`, *optional*, defaults to `"simple"`): source, see the top of this file.
        test_dataset_name (`str`, *optional*): a stored data set to hold out instead, e.g. `allenai/IFBench_test`.
        Others: as for [`~trl_gptoss.tasks.retool.load_problems`].

    Returns:
        `tuple[Dataset, Dataset]`: columns as at the top of this file.

    Raises:
        `ValueError`: a split or column is missing, kinds are unknown, or there are fewer prompts than asked for.
        `FileNotFoundError`: the local file does not exist.
        `ModuleNotFoundError`: the extra `tasks` is not installed.
    """
    if dataset_name in ("generated", "simple"):
        simple = dataset_name == "simple"
        train = _generated_rows(train_size, seed, False, simple)
        # The held-out prompts are the same for every seed, so that runs can be compared.
        held_out = [] if test_dataset_name else _generated_rows(held_out_size, 0, True, simple)
    else:
        data = load(dataset_name, dataset_config)
        train = stored_rows(split_of(data, dataset_name, train_split, "--dataset_train_split"), dataset_name)
        random.Random(seed).shuffle(train)
        if test_dataset_name:
            held_out = []
        elif (split := held_out_split(data, dataset_name, test_split, train_split)) is not None:
            held_out = checkable(stored_rows(split, dataset_name), dataset_name)
        else:
            n = min(held_out_size, len(train) // 5)
            held_out, train = checkable(train[:n], dataset_name), train[n:]
        train = without_contradictions(train, dataset_name)
    if test_dataset_name:
        data = load(test_dataset_name, test_dataset_config)
        data = only_split(data, test_dataset_name, test_split, "--dataset_test_split")
        held_out = checkable(stored_rows(data, test_dataset_name), test_dataset_name)
    held_out = held_out[:held_out_size]
    asked = {prompt for prompt, _, _ in held_out}
    train = [row for row in train if row[0] not in asked]
    return _dataset(train[:train_size], instructions), _dataset(held_out, instructions)
