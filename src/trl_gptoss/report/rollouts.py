"""Sampled rollouts of a run, token by token where the run stored ids.

Two sources, the first one found counts:

    trajectories.jsonl     ours: ids, loss mask, turns, tool results
    completions/*.parquet  TRL's `log_completions`: texts or conversations, without ids
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

MAX_STEPS, MAX_PER_STEP = 6, 4


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
    tags (`list[str]`): short marks next to the heading (stop reason, number of turns).
    facts (`dict[str, str]`): further labelled values (rewards, advantage, answer, anomalies, ...).
    """

    question: str
    step: int | None
    reward: float | None
    tokens: list[Token]
    tags: list[str] = field(default_factory=list)
    facts: dict[str, str] = field(default_factory=dict)


class Decoder:
    """Ids to single tokens as text, with the tokenizer.json that the run saved.

    Args:
        file (`Path`): a tokenizer.json.
    """

    def __init__(self, file: Path) -> None:
        self._tokenizer = Tokenizer.from_file(str(file))
        self._special = {i for i, t in self._tokenizer.get_added_tokens_decoder().items() if t.special}

    def tokens(self, ids: list[int], author: str) -> Iterator[Token]:
        """One [`Token`] per id; the ids of a character that is spread over several come as one."""
        pending: list[int] = []
        for i in ids:
            pending.append(i)
            text = self._tokenizer.decode(pending, skip_special_tokens=False)
            if text.endswith("\ufffd") and len(pending) < 4 and i not in self._special:
                continue
            yield Token(text=text, author=author, special=i in self._special)
            pending = []
        if pending:
            yield Token(text=self._tokenizer.decode(pending, skip_special_tokens=False), author=author)


def _trajectory_tokens(record: dict[str, Any], decoder: Decoder | None) -> list[Token]:
    if decoder is None:
        tokens = [Token(text=record["prompt_text"], author="prompt")]
        for turn in record["turns"]:
            tokens.append(Token(text=turn["policy_text"], author="policy"))
            tokens.append(Token(text=turn["observation_text"], author="environment"))
        return [t for t in tokens if t.text]
    tokens = list(decoder.tokens(record["prompt_ids"], "prompt"))
    ids, mask = record["completion_ids"], record["loss_mask"]
    start = 0
    for end in range(1, len(ids) + 1):  # runs of equal mask: the mask that was trained with decides the colour
        if end == len(ids) or mask[end] != mask[start]:
            tokens += decoder.tokens(ids[start:end], "policy" if mask[start] else "environment")
            start = end
    return tokens


def _value(value: float | None) -> str:
    return "none" if value is None else f"{value:.4g}"


def _from_trajectory(record: dict[str, Any], decoder: Decoder | None) -> Rollout:
    results = [r for turn in record["turns"] for r in turn["tool_results"]]
    anomalies = [a for turn in record["turns"] for a in turn["anomalies"]]
    turns = len(record["turns"])
    facts = {name: _value(value) for name, value in record["rewards"].items()}
    facts["advantage"] = _value(record["advantage"])
    facts["final text"] = "none" if record["final_text"] is None else record["final_text"]
    facts["tokens"] = f"{len(record['prompt_ids'])} prompt, {sum(record['loss_mask'])} policy, "
    facts["tokens"] += f"{record['loss_mask'].count(0)} environment"
    if results:
        facts["tool seconds"] = ", ".join(_value(r["seconds"]) for r in results)
    if anomalies:
        facts["anomalies"] = ", ".join(anomalies)
    tags = [f"{turns} turn{'s' if turns != 1 else ''}", record["stop_reason"]]
    if any(r["failed"] for r in results):
        tags.append("tool failed")
    return Rollout(
        question=_question(record["prompt"]),
        step=record["step"],
        reward=record["reward"],
        tokens=_trajectory_tokens(record, decoder),
        tags=tags,
        facts=facts,
    )


def _question(prompt: list[dict[str, Any]] | str | None) -> str:
    """Text of the last message of the data set's prompt; content may be a list of text parts."""
    if prompt is None:
        return "(of the environment)"
    if not isinstance(prompt, list):
        return str(prompt)
    content = prompt[-1]["content"]
    return content if isinstance(content, str) else "".join(str(part.get("text", "")) for part in content or [])


def _text_tokens(value: Any, author: str) -> list[Token]:
    """A prompt or completion as TRL logs it (a string or a conversation), one token per text."""
    if isinstance(value, str):
        return [Token(text=value, author=author)]
    tokens = []
    for message in value:
        body = {k: v for k, v in message.items() if k != "role" and v is not None}
        text = body["content"] if list(body) == ["content"] else json.dumps(body, ensure_ascii=False, default=str)
        wrote = "environment" if author == "policy" and message["role"] == "tool" else author
        tokens += [
            Token(text=f"{message['role']}: ", author=wrote, special=True),
            Token(text=f"{text}\n", author=wrote),
        ]
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


def select(rollouts: list[Rollout]) -> list[Rollout]:
    """At most `MAX_STEPS` steps, evenly spread with the first and the last, and of each the best, the worst and some
    between, best first."""
    by_step: dict[int, list[Rollout]] = {}
    for rollout in rollouts:
        by_step.setdefault(-1 if rollout.step is None else rollout.step, []).append(rollout)
    chosen = []
    for step in _spread(sorted(by_step), MAX_STEPS):
        ranked = sorted(by_step[step], key=lambda r: float("-inf") if r.reward is None else r.reward, reverse=True)
        chosen += _spread(ranked, MAX_PER_STEP)
    return chosen


def _spread(items: list, count: int) -> list:
    if len(items) <= count:
        return items
    return [items[round(k * (len(items) - 1) / (count - 1))] for k in range(count)]


def _records(file: Path, last_step: int) -> list[dict[str, Any]]:
    """Whole lines up to `last_step`; a torn last line is what a crash leaves."""
    records = []
    for line in file.read_text(encoding="utf-8").splitlines():
        try:
            record = json.loads(line)
        except json.JSONDecodeError:
            continue
        records.append(record)
    return [r for r in records if r["step"] <= last_step] or records


def read_rollouts(run_dir: Path, checkpoint: Path, last_step: int) -> list[Rollout]:
    """The rollouts to show, oldest step first.

    Args:
        run_dir (`Path`): the run directory.
        checkpoint (`Path`): where trainer_state.json lies; its tokenizer is used if `run_dir` has none.
        last_step (`int`): rollouts of later steps belong to work that was lost, and are left out.
    """
    if (run_dir / "trajectories.jsonl").is_file():
        files = [f for f in (run_dir / "tokenizer.json", checkpoint / "tokenizer.json") if f.is_file()]
        decoder = Decoder(files[0]) if files else None
        return select([_from_trajectory(r, decoder) for r in _records(run_dir / "trajectories.jsonl", last_step)])
    tables = sorted((run_dir / "completions").glob("*.parquet"))
    return select([rollout for file in _spread(tables, MAX_STEPS) for rollout in _completions_table(file)])
