"""Read what a training run left in its output directory: the log history, evaluations, sampled rollouts."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(kw_only=True, slots=True)
class Token:
    """One token of a rollout: its text, who wrote it, and whether it is a special token.

    author (`str`): "prompt", "policy" (trained on, loss mask 1) or "environment" (loss mask 0).
    """

    text: str
    author: str
    special: bool = False


@dataclass(kw_only=True, slots=True)
class Rollout:
    """One sampled rollout as the page shows it.

    question (`str`): its heading.
    step (`int` or `None`): the training step it was sampled at.
    tokens (`list[Token]`): all tokens in order; a run without stored tokens has one per message or text.
    facts (`dict[str, str]`): further labelled values (rewards, stop reason, answer, anomalies, ...).
    """

    question: str
    step: int | None
    reward: float | None
    tokens: list[Token]
    facts: dict[str, str] = field(default_factory=dict)


@dataclass(kw_only=True, slots=True)
class Run:
    """A run directory.

    history (`list[dict]`): TRL's log history, oldest first.
    evaluations (`list[dict]`): rows of `evaluation.json`, all with the same keys; empty if there is none.
    rollouts (`list[Rollout]`): oldest first.
    """

    name: str
    model: str | None
    history: list[dict[str, Any]]
    evaluations: list[dict[str, Any]]
    rollouts: list[Rollout]


def find_trainer_state(run_dir: Path) -> Path:
    """The newest trainer_state.json: that of the finished run, or of the last checkpoint of an interrupted one.

    Raises:
        `FileNotFoundError`: there is none.
    """
    found = [p for p in (run_dir / "trainer_state.json", *run_dir.glob("checkpoint-*/trainer_state.json")) if p.is_file()]
    if not found:
        raise FileNotFoundError(
            f"{run_dir} holds no trainer_state.json, nor does a checkpoint in it: expected the output_dir of a TRL run "
            "that has saved at least once (it saves at the end and every save_steps)"
        )
    return max(found, key=lambda p: (json.loads(p.read_text())["global_step"], p.parent == run_dir))


def _model_name(run_dir: Path, state_file: Path) -> str | None:
    for folder in (run_dir, state_file.parent):
        for name, key in (("config.json", "_name_or_path"), ("adapter_config.json", "base_model_name_or_path")):
            if (folder / name).is_file():
                config = json.loads((folder / name).read_text())
                architecture = ", ".join(config.get("architectures") or [])
                return config.get(key) or architecture or None
    return None


def _text_tokens(value: Any, author: str) -> list[Token]:
    """A prompt or completion as TRL logs it (a string or a conversation), one token per text."""
    if isinstance(value, str):
        return [Token(text=value, author=author)]
    tokens = []
    for message in value:
        body = {k: v for k, v in message.items() if k != "role" and v is not None}
        text = body["content"] if list(body) == ["content"] else json.dumps(body, ensure_ascii=False, default=str)
        wrote = "environment" if author == "policy" and message["role"] == "tool" else author
        tokens += [Token(text=f"{message['role']}: ", author=wrote, special=True), Token(text=f"{text}\n", author=wrote)]
    return tokens


def _completions_table(file: Path) -> list[Rollout]:
    """Rollouts of one of TRL's `completions/*.parquet`: texts only, so the authors are known per message."""
    import pyarrow.parquet

    rollouts = []
    for row in pyarrow.parquet.read_table(file).to_pylist():
        known = {"step", "prompt", "completion", "advantage"}
        rewards = {k: v for k, v in row.items() if k not in known and isinstance(v, float)}
        facts = {k: f"{v:.4g}" for k, v in rewards.items()}
        if isinstance(row.get("advantage"), float):
            facts["advantage"] = f"{row['advantage']:.4g}"
        prompt = _text_tokens(row["prompt"], "prompt")
        rollouts.append(
            Rollout(
                question=prompt[-1].text.strip(),
                step=row.get("step"),
                reward=sum(rewards.values()) if rewards else None,
                tokens=[*prompt, *_text_tokens(row["completion"], "policy")],
                facts=facts,
            )
        )
    return rollouts
