"""What the Hub checks in the metadata of a model card, after https://github.com/huggingface/hub-docs/blob/main/modelcard.md.

Written from the specification: types of the known fields, identifiers of licenses, tasks and repositories, the structure of
`model-index`. huggingface_hub itself only asks the Hub.
"""

import re
from typing import Any

import yaml

LICENSES = {
    *("apache-2.0", "mit", "openrail", "bigscience-openrail-m", "creativeml-openrail-m", "bsd", "bsd-2-clause"),
    *(
        "bsd-3-clause",
        "cc",
        "cc0-1.0",
        "cc-by-4.0",
        "cc-by-sa-4.0",
        "cc-by-nc-4.0",
        "cc-by-nc-sa-4.0",
        "gpl",
        "gpl-3.0",
    ),
    *("lgpl", "agpl-3.0", "mpl-2.0", "llama3", "llama3.1", "gemma", "unknown", "other"),
}
TASKS = {
    "text-generation",
    "text-classification",
    "question-answering",
    "image-text-to-text",
    "summarization",
    "other",
}
RELATIONS = {"adapter", "merge", "quantized", "finetune"}
REPO_ID = re.compile(r"(?:[A-Za-z0-9][\w.-]*/)?[A-Za-z0-9][\w.-]{0,95}")
STRINGS = ("library_name", "license_name", "license_link", "model_name", "inference", "thumbnail")


def card_errors(content: str) -> list[str]:
    """Reasons why the Hub would refuse this card; empty if it would not."""
    match = re.match(r"---\r?\n(.*?)\r?\n---(?:\r?\n|$)", content, re.DOTALL)
    if match is None:
        return ["there is no YAML block"]
    try:
        data = yaml.safe_load(match[1])
    except yaml.YAMLError as error:
        return [f"the YAML block does not parse: {error}"]
    if not isinstance(data, dict):
        return ["the YAML block is not a mapping"]
    errors = [f"{name} must be a string" for name in STRINGS if not isinstance(data.get(name, ""), str)]
    for name in ("base_model", "datasets"):
        for value in _list(data.get(name)):
            if not isinstance(value, str) or not REPO_ID.fullmatch(value):
                errors.append(f"{name}: {value!r} is no repository id")
    for name in ("tags", "metrics", "language"):
        errors += [f"{name}: {v!r} is not a string" for v in _list(data.get(name)) if not isinstance(v, str) or not v]
    for name, allowed in (("license", LICENSES), ("pipeline_tag", TASKS), ("base_model_relation", RELATIONS)):
        if name in data and data[name] not in allowed:
            errors.append(f"{name}: {data[name]!r} is none of the Hub's")
    return errors + [e for model in _list(data.get("model-index")) for e in _model_errors(model)]


def _list(value: Any) -> list[Any]:
    return [] if value is None else value if isinstance(value, list) else [value]


def _model_errors(model: Any) -> list[str]:
    if not isinstance(model, dict) or not isinstance(model.get("name"), str):
        return ["model-index: an entry needs a name"]
    if not isinstance(model.get("results"), list) or not model["results"]:
        return ["model-index: an entry needs results"]
    errors = []
    for result in model["results"]:
        if not isinstance(result.get("task", {}).get("type"), str):
            errors.append("model-index: a result needs task.type")
        dataset = result.get("dataset", {})
        if not isinstance(dataset.get("type"), str) or not isinstance(dataset.get("name"), str):
            errors.append("model-index: a result needs dataset.type and dataset.name")
        for metric in result.get("metrics") or [{}]:
            if not isinstance(metric.get("type"), str) or metric.get("value") is None:
                errors.append("model-index: a metric needs type and value")
    return errors
