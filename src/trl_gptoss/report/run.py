"""Read what a training run left in its output directory: the log history, evaluations, sampled rollouts."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .rollouts import Rollout, read_rollouts


@dataclass(kw_only=True, slots=True)
class Run:
    """A run directory.

    name (`str`): its folder's name.
    subtitle (`str`): one line: model, where the metrics come from.
    history (`list[dict]`): TRL's log history, oldest first.
    evaluations (`list[dict]`): rows of `evaluation.json`, all with the same keys; empty if there is none.
    rollouts (`list[Rollout]`): oldest first.
    """

    name: str
    subtitle: str
    history: list[dict[str, Any]]
    evaluations: list[dict[str, Any]]
    rollouts: list[Rollout]


def find_trainer_state(run_dir: Path) -> Path:
    """The newest trainer_state.json: that of the finished run, or of the last checkpoint of an interrupted one.

    One that a crash left half-written is passed over where there is an older one.

    Raises:
        `FileNotFoundError`: there is none. `ValueError`: none is whole.
    """
    found = [
        p for p in (run_dir / "trainer_state.json", *run_dir.glob("checkpoint-*/trainer_state.json")) if p.is_file()
    ]
    if not found:
        raise FileNotFoundError(
            f"{run_dir} holds no trainer_state.json, nor does a checkpoint in it: expected the output_dir of a TRL run "
            "that has saved at least once (it saves at the end and every save_steps)"
        )
    steps, torn = {}, []
    for file in found:
        try:
            steps[file] = _read_json(file)["global_step"]
        except (ValueError, KeyError, TypeError):
            torn.append(str(file))
    if not steps:
        raise ValueError(f"no trainer_state.json of {run_dir} was written to its end: {', '.join(torn)}")
    return max(steps, key=lambda p: (steps[p], p.parent == run_dir))


def _read_json(file: Path) -> Any:
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise ValueError(f"{file} is no JSON, perhaps it was not written to its end: {error}") from None


def _model_name(run_dir: Path, state_file: Path) -> str | None:
    for folder in (run_dir, state_file.parent):
        if (folder / "adapter_config.json").is_file():
            return _read_json(folder / "adapter_config.json")["base_model_name_or_path"]
        if (folder / "config.json").is_file():
            return ", ".join(_read_json(folder / "config.json").get("architectures") or []) or None
    return None


def read_run(run_dir: Path) -> Run:
    """Read a run directory. Only trainer_state.json is required.

    Raises:
        `FileNotFoundError`: `run_dir` does not exist, or holds no trainer_state.json. `ValueError`: a JSON file that was not
        written to its end; the message names it.
    """
    if not run_dir.is_dir():
        raise FileNotFoundError(f"the run directory {run_dir} does not exist")
    state_file = find_trainer_state(run_dir)
    state = _read_json(state_file)
    evaluation = run_dir / "evaluation.json"
    rollouts = read_rollouts(run_dir, state_file.parent, state["global_step"])
    parts = [_model_name(run_dir, state_file)]
    if state_file.parent != run_dir:
        parts.append(f"unfinished run, read from {state_file.parent.name}")
    return Run(
        name=run_dir.resolve().name,
        subtitle=" · ".join(part for part in parts if part),
        history=state["log_history"],
        evaluations=_read_json(evaluation) if evaluation.is_file() else [],
        rollouts=rollouts,
    )
