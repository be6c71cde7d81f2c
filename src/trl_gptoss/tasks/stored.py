"""Problems that are stored somewhere: a Hub id, or a local file or folder, as `(question, answer)` pairs or as rows."""

import logging
import random
from pathlib import Path
from typing import Any

from datasets import Dataset, DatasetDict, load_dataset

logger = logging.getLogger(__name__)

QUESTION_COLUMNS = ("problem", "question", "input", "prompt")
ANSWER_COLUMNS = ("answer", "final_answer", "output", "solution")


def load(dataset_name: str, dataset_config: str | None) -> DatasetDict:
    """A local file, a local folder or a Hub id as a `DatasetDict`.

    Raises:
        `ValueError`: a file of another kind.
        `FileNotFoundError`: the local file does not exist.
    """
    path = Path(dataset_name)
    if path.is_file():
        builder = {".jsonl": "json", ".json": "json", ".parquet": "parquet", ".csv": "csv"}.get(path.suffix)
        if builder is None:
            raise ValueError(f"cannot read the data set {path}: expected .jsonl, .json, .parquet or .csv")
        return load_dataset(builder, data_files=str(path))
    if path.suffix in (".jsonl", ".json", ".parquet", ".csv"):
        raise FileNotFoundError(f"the data set file {path} does not exist (looked in {Path.cwd()})")
    return load_dataset(dataset_name, dataset_config)


def split_of(data: DatasetDict, dataset_name: str, split: str, option: str) -> Dataset:
    """One split.

    Raises:
        `ValueError`: it is not there; names the option to set.
    """
    if split not in data:
        raise ValueError(f"{dataset_name} has the splits {list(data)}, not {split!r}: set {option}")
    return data[split]


def only_split(data: DatasetDict, dataset_name: str, split: str, option: str) -> Dataset:
    """`split`, or the only split there is: benchmarks are stored under any name (`train` for AIME and IFEval)."""
    return next(iter(data.values())) if len(data) == 1 else split_of(data, dataset_name, split, option)


def held_out_split(data: DatasetDict, dataset_name: str, split: str, train_split: str) -> Dataset | None:
    """The split to hold out, `None` where that is a part of the training split: `split` is the training split, or it is `"test"`,
    the default, and not there.

    Raises:
        `ValueError`: another one that is not there.
    """
    if split == train_split or (split == "test" and split not in data):
        return None
    return split_of(data, dataset_name, split, "--dataset_test_split")


def _answer_text(answer: Any) -> str:
    """An answer column's entry as text, `""` for none; what follows `####` of a GSM8K solution, OlympiadBench's lists joined."""
    if answer is None:
        return ""
    if isinstance(answer, list):
        answer = ", ".join(map(str, answer))
    return str(answer).rsplit("####", 1)[-1].strip()


def question_text(entry: str | list[dict[str, str]] | None, where: str) -> str:
    """A question column's entry as text, `""` for none: text, or a conversation of one message of the user.

    Args:
        entry (`str`, `list[dict]` or `None`): what the column holds.
        where (`str`): row and data set, for the error.

    Raises:
        `ValueError`: another conversation, of which the task would ask a part only.
    """
    if not isinstance(entry, list):
        return "" if entry is None else str(entry)
    roles = [message.get("role") for message in entry]
    if roles != ["user"]:
        raise ValueError(
            f"{where} has a conversation of the roles {roles} for its question, expected one message of the user: give a "
            "system message as `instructions`, and leave out rows of several turns"
        )
    return question_text(entry[0].get("content"), where)


def question_and_answer(data: Dataset, dataset_name: str) -> list[tuple[str, str]]:
    """`(question, reference answer)` of every row that has both, each question once; says how many have not.

    Raises:
        `ValueError`: no column with questions or none with answers, or conversations that are no question.
    """
    question = next((c for c in QUESTION_COLUMNS if c in data.column_names), None)
    answer = next((c for c in ANSWER_COLUMNS if c in data.column_names), None)
    if question is None or answer is None:
        raise ValueError(
            f"{dataset_name} has the columns {data.column_names}; expected one of {QUESTION_COLUMNS} and one of "
            f"{ANSWER_COLUMNS}: rename them, or write a new file with those names"
        )
    rows: dict[str, str] = {}
    incomplete = 0
    for number, (q, a) in enumerate(zip(data[question], data[answer])):
        q, a = question_text(q, f"row {number} of {dataset_name}"), _answer_text(a)
        if q.strip() and a:
            rows[q] = a
        else:
            incomplete += 1
    if incomplete:
        logger.warning(
            "%s: %d of %d rows are left out, because their %r or %r is empty.", dataset_name, incomplete, len(data), question, answer
        )  # fmt: skip
    return list(rows.items())


def train_and_held_out(
    dataset_name: str,
    *,
    dataset_config: str | None,
    train_split: str,
    test_split: str,
    test_dataset_name: str | None,
    test_dataset_config: str | None,
    held_out_size: int,
    seed: int,
) -> tuple[list[tuple[str, str]], list[tuple[str, str]]]:
    """Training pairs in a seeded order and held-out pairs in theirs, without a common question.

    Held out is the test data set if one is named, else `held_out_split`, else a fifth of the training split at most.

    Raises:
        `ValueError`, `FileNotFoundError`: see above.
    """
    data = load(dataset_name, dataset_config)
    train = question_and_answer(split_of(data, dataset_name, train_split, "--dataset_train_split"), dataset_name)
    random.Random(seed).shuffle(train)
    if test_dataset_name is not None:
        held_out = evaluation_problems(test_dataset_name, test_dataset_config, test_split)[:held_out_size]
    elif (split := held_out_split(data, dataset_name, test_split, train_split)) is not None:
        held_out = question_and_answer(split, dataset_name)[:held_out_size]
    else:
        n = min(held_out_size, len(train) // 5)
        held_out, train = train[:n], train[n:]
    asked = {question for question, _ in held_out}
    return [row for row in train if row[0] not in asked], held_out


def evaluation_problems(dataset_name: str, dataset_config: str | None, test_split: str) -> list[tuple[str, str]]:
    """`(question, answer)` of a data set that is only evaluated on."""
    data = load(dataset_name, dataset_config)
    return question_and_answer(only_split(data, dataset_name, test_split, "--dataset_test_split"), dataset_name)


def conversations(rows: list[tuple[str, str]], instructions: str | None) -> Dataset:
    """Columns `prompt` (a conversation) and `answer` (`str`).

    Args:
        rows (`list[tuple[str, str]]`): `(question, answer)`.
        instructions (`str` or `None`): a system message put before every question.
    """
    start = [{"role": "system", "content": instructions}] if instructions else []
    return Dataset.from_dict(
        {
            "prompt": [[*start, {"role": "user", "content": question}] for question, _ in rows],
            "answer": [answer for _, answer in rows],
        }
    )
