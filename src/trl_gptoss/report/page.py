"""The report page: one HTML file without scripts and without external resources.

Everything in it that a model, a data set or a tool wrote is escaped; the content security policy forbids scripts and
any request on top, so that a policy that writes `<script>` is only ever read.
"""

from collections.abc import Iterator
from html import escape
from itertools import groupby
from typing import Any

from .charts import number
from .rollouts import Rollout, Token
from .run import Run
from .sections import History, points, render_sections
from .style import CSS

POLICY = "default-src 'none'; style-src 'unsafe-inline'"
MAX_TOKENS_SHOWN = 4000
AUTHOR_CLASS = {"prompt": "prompt", "policy": "policy", "environment": "env"}


def _average(values: list[float]) -> float:
    return sum(values) / len(values)


def _first_and_last(history: History, name: str) -> tuple[float, float] | None:
    """Mean over the first and over the last tenth of a metric (at least one value each)."""
    values = [y for _, y in points(history, name)]
    n = max(1, len(values) // 10)
    return (_average(values[:n]), _average(values[-n:])) if values else None


def _tile(label: str, value: str, small: str = "") -> str:
    return f'<div class="tile"><span>{escape(label)}</span><b>{escape(value)}</b><small>{escape(small)}</small></div>'


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s" if minutes else f"{rest} s"


def _tiles(history: History) -> Iterator[str]:
    yield _tile("Optimizer steps", number(max((e["step"] for e in history if "step" in e), default=0)))
    seconds = sum(y for _, y in points(history, "step_time"))
    if seconds:
        yield _tile("Time in steps", _duration(seconds), f"{seconds / len(points(history, 'step_time')):.2f} s a step")
    tokens = points(history, "num_tokens")
    if tokens:
        yield _tile("Tokens", f"{tokens[-1][1]:,.0f}", "prompts and completions")
    for name, label in (
        ("reward", "Reward"),
        ("entropy", "Entropy"),
        ("tools/call_frequency", "Tool calls per rollout"),
        ("completions/mean_length", "Completion length"),
        ("loss", "Loss"),
    ):
        ends = _first_and_last(history, name)
        if ends and not (name == "loss" and points(history, "reward")):  # the policy-gradient loss says nothing
            yield _tile(label, " → ".join(f"{value:.3g}" for value in ends), "first and last tenth of the steps")
    recomputed = points(history, "on_policy/max_log_ratio_recomputed")
    if recomputed:
        yield _tile("Largest |log ratio|", number(max(y for _, y in recomputed)), "if recomputed, over the run")


def _cell(value: Any) -> str:
    return f"{value:.3f}" if isinstance(value, float) else str(value)


def _evaluations(rows: list[dict[str, Any]]) -> str:
    head = "".join(f"<th>{escape(str(key))}</th>" for key in rows[0])
    body = "".join(
        "<tr>" + "".join(f"<td>{escape(_cell(row.get(key, '')))}</td>" for key in rows[0]) + "</tr>" for row in rows
    )
    return (
        f'<h2>Held-out problems</h2><div class="scroll"><table><thead><tr>{head}</tr></thead>'
        f"<tbody>{body}</tbody></table></div>"
    )


def _visible(text: str) -> str:
    """Token text with line breaks and tabs made visible (and kept)."""
    return escape(text).replace("\n", "↵\n").replace("\t", "⇥\t")


def _tokens(tokens: list[Token]) -> str:
    parts = []
    for token in tokens[:MAX_TOKENS_SHOWN]:
        special = " s" if token.special else ""
        parts.append(f'<span class="{AUTHOR_CLASS[token.author]}{special}">{_visible(token.text)}</span>')
    if len(tokens) > MAX_TOKENS_SHOWN:
        parts.append(f"… and {len(tokens) - MAX_TOKENS_SHOWN} more tokens")
    return f'<pre class="tokens">{"".join(parts)}</pre>'


def _prompt_and_completion(tokens: list[Token]) -> str:
    """The prompt folded away: the system message of every rollout is the same."""
    prompt = [t for t in tokens if t.author == "prompt"]
    folded = f'<details class="fold"><summary>prompt</summary>{_tokens(prompt)}</details>' if prompt else ""
    return folded + _tokens(tokens[len(prompt) :])


def _rollout(rollout: Rollout, is_open: bool) -> str:
    tags = []
    if rollout.reward is not None:
        mood = "good" if rollout.reward > 0 else "bad"
        tags.append(f'<span class="tag {mood}">reward {number(rollout.reward)}</span>')
    tags += [f'<span class="tag">{escape(tag)}</span>' for tag in rollout.tags]
    facts = "".join(f"<div><dt>{escape(k)}</dt><dd>{escape(v)}</dd></div>" for k, v in rollout.facts.items())
    return (
        f'<details class="rollout"{" open" if is_open else ""}><summary><span class="q">{escape(rollout.question)}</span>'
        f'{"".join(tags)}</summary><dl class="facts">{facts}</dl>{_prompt_and_completion(rollout.tokens)}</details>'
    )


def _rollouts(rollouts: list[Rollout]) -> str:
    key = (
        '<div class="swatches"><span class="prompt">prompt</span>'
        '<span class="policy">sampled by the policy: trained on</span>'
        '<span class="env">written by the environment: masked</span><span class="s">&lt;|special token|&gt;</span></div>'
    )
    parts = ["<h2>Sampled rollouts</h2>", key]
    for step, group in groupby(rollouts, key=lambda r: r.step):
        heading = "Step unknown" if step is None else f"Step {step}"
        parts.append(f'<p class="hint">{heading}</p>')
        parts += [_rollout(rollout, is_open=(i == 0)) for i, rollout in enumerate(group)]
    return "".join(parts)


def render_page(run: Run) -> str:
    """The whole page as a string."""
    body = [f"<h1>{escape(run.name)}</h1>", f'<p class="sub">{escape(run.subtitle)}</p>']
    body.append(f'<div class="tiles">{"".join(_tiles(run.history))}</div>')
    if run.evaluations:
        body.append(_evaluations(run.evaluations))
    for heading, cards in render_sections(run.history):
        body.append(f'<h2>{escape(heading)}</h2><div class="grid-of-cards">{"".join(cards)}</div>')
    if run.rollouts:
        body.append(_rollouts(run.rollouts))
    body.append(
        "<footer>Faint curves are single steps, bold ones a moving average; point at a curve for its values.</footer>"
    )
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(run.name)}</title><style>{CSS}</style></head><body><main>{''.join(body)}</main></body></html>\n"
    )
