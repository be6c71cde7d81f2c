"""The model card: what was trained on what, how, with what result, and what it takes to load it.

The card is plain Markdown made from facts that the trainer hands over; secrets and local paths are taken out of the whole
text at the end, wherever they came from. Its metadata follow the Hub's model card specification
(https://github.com/huggingface/hub-docs/blob/main/modelcard.md), through `huggingface_hub.ModelCardData`.
"""

import importlib.metadata
import math
import platform
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import EvalResult, ModelCard, ModelCardData
from huggingface_hub.utils import yaml_dump

from ..intervals import wilson
from ..report.charts import Series, number, standalone_svg
from .scrub import redact
from .upload import CARD, FIGURES_FOLDER, MXFP4_FOLDER, clean_name, is_local

VERSIONS = ("trl-gptoss", "trl", "transformers", "torch", "accelerate", "peft", "datasets", "vllm", "tokenizers")
# Metrics that say whether the policy that was trained is the one that sampled, by their prefix.
_MISMATCH = ("on_policy/", "sampling/", "rollout_correction/", "rollout_weights/")
_FIGURES = {
    "reward": ("Reward", r"reward"),
    "rewards": ("Reward functions", r"rewards/(.+)/mean"),
    "on_policy": ("Largest |log ratio|", r"on_policy/(max_log_ratio\w*)"),
    "tools": ("Tool calls per rollout", r"tools/(call_frequency)"),
}
_Z95 = 1.959964


@dataclass(kw_only=True, slots=True)
class ModelCardFacts:
    """What a card is made of. Everything may be left out but the name.

    name (`str`): title.
    repo_id (`str` or `None`): where it will be, for the example.
    base_model (`str` or `None`): id on the Hub; a local folder is left out.
    datasets (`list[str]`): ids on the Hub, or names.
    task (`str`): a sentence.
    trainer (`str`): class name of the trainer.
    rewards (`dict[str, float]`): weight by reward function.
    recipe (`dict[str, Any]`): settings that differ from their default.
    evaluations (`list[dict]`): rows of evaluation.json: `correct` of `problems`, with `accuracy`, `low` and `high` or without;
        or `mean` and `std` over `problems`.
    history (`list[dict]`): the trainer's log history.
    hardware (`str`): a phrase.
    processes (`int`): how many trained.
    kind (`str`): `"full"`, `"adapter"` or `"mxfp4"`: what the root of the repository holds.
    has_mxfp4 (`bool`): whether there is a subfolder `mxfp4`.
    trained_sinks (`bool`): whether an adapter holds sinks.
    license (`str` or `None`): identifier of the Hub.
    tags (`list[str]`): further tags.
    links (`dict[str, str]`): addresses of the run's curves by tracker.
    citations (`list[str]`): BibTeX entries.
    """

    name: str
    repo_id: str | None = None
    base_model: str | None = None
    datasets: list[str] = field(default_factory=list)
    task: str = ""
    trainer: str = ""
    rewards: dict[str, float] = field(default_factory=dict)
    recipe: dict[str, Any] = field(default_factory=dict)
    evaluations: list[dict[str, Any]] = field(default_factory=list)
    history: list[dict[str, Any]] = field(default_factory=list)
    hardware: str = ""
    processes: int = 1
    kind: str = "full"
    has_mxfp4: bool = False
    trained_sinks: bool = False
    license: str | None = None
    tags: list[str] = field(default_factory=list)
    links: dict[str, str] = field(default_factory=dict)
    citations: list[str] = field(default_factory=list)


def write_card(facts: ModelCardFacts, folder: Path, secrets: Iterable[str] = (), places: Iterable[str] = ()) -> Path:
    """Write README.md and the figures it shows.

    Args:
        facts ([`ModelCardFacts`]): of the run.
        folder (`Path`): the model's; made if missing.
        secrets (`Iterable[str]`, *optional*), places (`Iterable[str]`, *optional*): see [`redact`].

    Returns:
        `Path`: the card.
    """
    folder.mkdir(parents=True, exist_ok=True)
    figures = _write_figures(facts.history, folder)
    card = folder / CARD
    card.write_text(make_card(facts, figures, secrets, places), encoding="utf-8")
    return card


def make_card(
    facts: ModelCardFacts, figures: dict[str, str], secrets: Iterable[str] = (), places: Iterable[str] = ()
) -> str:
    """The text of the card; `figures` maps a path in the repository to what the figure shows."""
    base = facts.base_model if facts.base_model and not is_local(facts.base_model) else None
    parts = [
        f"# {clean_name(facts.name)}",
        _introduction(facts, base),
        "## Use",
        _usage(facts, base),
        *_section("Task and data", _task(facts)),
        *_section("Rewards", _table(("reward function", "weight"), facts.rewards.items())),
        *_section("Evaluation", _evaluation(facts.evaluations)),
        *_section("Training curves", _curves(figures, facts.links)),
        *_section("Is it the policy that sampled?", _mismatch(facts.history)),
        *_section("Recipe", _table(("setting", "value"), ((f"`{k}`", f"`{v}`") for k, v in facts.recipe.items()))),
        *_section("Hardware and versions", _environment(facts)),
        *_section("Citation", "\n\n".join(f"```bibtex\n{entry.strip()}\n```" for entry in facts.citations)),
    ]
    body = redact("\n\n".join(part for part in parts if part), secrets, places)
    # Before they become YAML: what takes a secret's place would have to be quoted.
    metadata = yaml_dump(_redacted(_metadata(facts, base).to_dict(), secrets, places)).strip()
    return str(ModelCard(f"---\n{metadata}\n---\n\n{body}\n"))


def _redacted(value: Any, secrets: Iterable[str], places: Iterable[str]) -> Any:
    if isinstance(value, str):
        return redact(value, secrets, places)
    if isinstance(value, list):
        return [_redacted(v, secrets, places) for v in value]
    return {k: _redacted(v, secrets, places) for k, v in value.items()} if isinstance(value, dict) else value


def hardware() -> str:
    """The devices of this machine in words; no host name."""
    count = torch.cuda.device_count()
    if count == 0:
        return f"CPU ({platform.machine()})"
    names = [torch.cuda.get_device_name(i) for i in range(count)]
    return ", ".join(f"{names.count(name)} x {name}" for name in dict.fromkeys(names))


def _section(title: str, text: str) -> list[str]:
    return [f"## {title}", text] if text else []


def _cell(value: Any) -> str:
    text = number(value) if isinstance(value, float) else str(value)
    return text.replace("\\", "\\\\").replace("|", "\\|").replace("\n", " ").replace("\r", " ")


def _table(head: tuple[str, ...], rows: Iterable[Iterable[Any]]) -> str:
    lines = ["| " + " | ".join(map(_cell, row)) + " |" for row in rows]
    return "\n".join(["| " + " | ".join(head) + " |", "|" + "---|" * len(head), *lines]) if lines else ""


def _metadata(facts: ModelCardFacts, base: str | None) -> ModelCardData:
    results = [
        EvalResult(
            task_type="text-generation",
            task_name="Text Generation",
            dataset_type=next(iter(_datasets(facts)), "held-out"),
            dataset_name=_label(row) or "held-out problems",
            metric_type="accuracy",
            metric_name="accuracy",
            metric_value=share[0],
        )
        for row in facts.evaluations
        if (share := _share(row)) is not None
    ]
    hub_ids = [name for name in _datasets(facts) if _is_hub_id(name)]
    return ModelCardData(
        base_model=base,
        datasets=hub_ids or None,
        eval_results=results or None,
        library_name="peft" if facts.kind == "adapter" else "transformers",
        license=facts.license,
        model_name=clean_name(facts.name),
        pipeline_tag="text-generation",
        tags=sorted({"generated_from_trainer", "reinforcement-learning", *filter(None, facts.tags)}),
        **({"base_model_relation": "adapter" if facts.kind == "adapter" else "finetune"} if base else {}),
    )


def _introduction(facts: ModelCardFacts, base: str | None) -> str:
    source = f"[{base}](https://huggingface.co/{base})" if base else "a model of our own"
    what = {"adapter": "Adapters for", "mxfp4": "An MXFP4 checkpoint, trained from"}.get(facts.kind, "Trained from")
    trainer = f" with `{facts.trainer}`" if facts.trainer else ""
    text = f"{what} {source}{trainer} of `trl_gptoss`, on top of [TRL](https://github.com/huggingface/trl)."
    if facts.trained_sinks:
        text += " The attention sinks were trained, too, and are part of the adapter."
    return text


def _usage(facts: ModelCardFacts, base: str | None) -> str:
    repo = facts.repo_id or "path/to/this/model"
    if facts.kind == "adapter":
        load = (
            "from peft import PeftModel\n\n"
            f'model = AutoModelForCausalLM.from_pretrained("{base or "the base model"}", device_map="auto", dtype="auto")\n'
            f'model = PeftModel.from_pretrained(model, "{repo}")'
        )
    else:
        load = f'model = AutoModelForCausalLM.from_pretrained("{repo}", device_map="auto", dtype="auto")'
    code = (
        "```python\nfrom transformers import AutoModelForCausalLM, AutoTokenizer\n"
        f'{load}\ntokenizer = AutoTokenizer.from_pretrained("{repo}")\n'
        'messages = [{"role": "user", "content": "What is 37 times 24?"}]\n'
        "inputs = tokenizer.apply_chat_template(\n"
        '    messages, add_generation_prompt=True, return_dict=True, return_tensors="pt"\n).to(model.device)\n'
        "output = model.generate(**inputs, max_new_tokens=256)\n"
        'print(tokenizer.decode(output[0, inputs["input_ids"].shape[1] :]))\n```'
    )
    notes = ["Nothing but transformers" + (" and PEFT" if facts.kind == "adapter" else "") + " is needed to load it."]
    if facts.kind == "mxfp4":
        notes.append(
            "The experts are in MXFP4 as in openai/gpt-oss; without a GPU that runs it natively pass "
            "`quantization_config=Mxfp4Config(dequantize=True)`."
        )
    if facts.has_mxfp4:
        merged = ", merged," if facts.kind == "adapter" else ""
        notes.append(f'The same weights{merged} with the experts in MXFP4 are in `subfolder="{MXFP4_FOLDER}"`.')
    return code + "\n\n" + " ".join(notes)


def _curves(figures: dict[str, str], links: dict[str, str]) -> str:
    pictures = "\n".join(f"![{title}]({path})" for path, title in figures.items())
    return "\n\n".join(part for part in (pictures, " · ".join(f"[{n}]({url})" for n, url in links.items())) if part)


def _datasets(facts: ModelCardFacts) -> list[str]:
    return [name for name in facts.datasets if name.strip()]


def _is_hub_id(name: str) -> bool:
    return re.fullmatch(r"[\w.-]+/[\w.-]+", name) is not None and not is_local(name)


def _task(facts: ModelCardFacts) -> str:
    names = [
        f"[{n}](https://huggingface.co/datasets/{n})" if _is_hub_id(n) else " ".join(n.split())
        for n in _datasets(facts)
    ]
    data = f"Data: {', '.join(names)}." if names else ""
    return "\n\n".join(part for part in (facts.task, data) if part)


def _share(row: dict[str, Any]) -> tuple[float, float, float] | None:
    """Accuracy and its 95 % interval of a row of evaluation.json; `None` if it has no accuracy."""
    correct, problems, answers = row.get("correct"), row.get("problems"), row.get("answers", 1)
    if not isinstance(correct, int) or not isinstance(problems, int) or problems < 1:
        return None
    if _is_number(row.get("low")) and _is_number(row.get("high")) and _is_number(row.get("accuracy")):
        return row["accuracy"], row["low"], row["high"]
    if answers != 1:  # answers to one problem are not independent: without the rows' own interval there is none
        return None
    return correct / problems, *wilson(correct / problems, problems)


def _label(row: dict[str, Any]) -> str:
    return ", ".join(
        row[key] for key in ("policy", "environment", "tool", "evaluation") if isinstance(row.get(key), str)
    )


def _evaluation(rows: list[dict[str, Any]]) -> str:
    lines = []
    for row in rows:
        share = _share(row)
        if share is not None:
            result, low, high = share
        elif _is_number(row.get("mean")) and _is_number(row.get("std")) and row.get("problems"):
            half = _Z95 * row["std"] / math.sqrt(row["problems"])
            result, low, high = row["mean"], row["mean"] - half, row["mean"] + half
        else:
            continue
        problems = f"{row['problems']} x {row['answers']} answers" if row.get("answers", 1) != 1 else row["problems"]
        lines.append((_label(row) or "held-out problems", problems, f"{result:.3f}", f"{low:.3f} to {high:.3f}"))
    table = _table(("evaluation", "problems", "result", "95 % interval"), lines)
    note = "Intervals cover the draw of the problems and of the samples."
    return f"{table}\n\n{note}" if table else ""


def _mismatch(history: list[dict[str, Any]]) -> str:
    names = dict.fromkeys(k for entry in history for k in entry if k.startswith(_MISMATCH))
    rows = []
    for name in names:
        values = [e[name] for e in history if isinstance(e.get(name), int | float) and math.isfinite(e[name])]
        if values:
            rows.append((f"`{name}`", float(values[0]), float(values[-1]), float(max(values))))
    table = _table(("metric", "first", "last", "largest"), rows)
    note = (
        "`on_policy/max_log_ratio` is in the loss (0: the ratio is exactly 1), `..._recomputed` is what a second forward "
        "would have given; the others compare the sampler with the trainer."
    )
    return f"{table}\n\n{note}" if table else ""


def _environment(facts: ModelCardFacts) -> str:
    steps = max((e["step"] for e in facts.history if "step" in e), default=None)
    rows = [("hardware", facts.hardware), ("processes", facts.processes), ("optimizer steps", steps)]
    for package in VERSIONS:
        try:
            rows.append((package, importlib.metadata.version(package)))
        except importlib.metadata.PackageNotFoundError:
            continue
    return _table(("", ""), [(k, v) for k, v in rows if v not in ("", None)])


def _write_figures(history: list[dict[str, Any]], folder: Path) -> dict[str, str]:
    """Draw the curves of the run; path in the repository to title."""
    written = {}
    for stem, (title, pattern) in _FIGURES.items():
        curves = []
        for name in dict.fromkeys(k for entry in history for k in entry):
            match = re.fullmatch(pattern, name)
            points = [(float(e["step"]), float(e[name])) for e in history if "step" in e and _is_number(e.get(name))]
            if match and len(points) > 1:
                curves.append(Series(label=match[1] if match.groups() else name, points=points))
        svg = standalone_svg(title, curves)
        if svg:
            file = folder / FIGURES_FOLDER / f"{stem}.svg"
            file.parent.mkdir(exist_ok=True)
            file.write_text(svg, encoding="utf-8")
            written[f"{FIGURES_FOLDER}/{stem}.svg"] = title
    return written


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
