"""One commit of the files that belong to a model, each looked at before it leaves.

What a run leaves beside the model stays here: `training_args.bin` (a pickle with the Hub's token and local paths),
trajectories, the report, optimizer states, event files with the host's name.
"""

import json
import os
from collections.abc import Iterable
from concurrent.futures import Future
from pathlib import Path, PurePosixPath
from typing import Any

from huggingface_hub import CommitInfo, CommitOperationAdd, CommitOperationDelete, HfApi

from .scrub import check_no_secret, redact, redact_json, redact_secrets

CARD = "README.md"
MXFP4_FOLDER = "mxfp4"
FIGURES_FOLDER = "figures"
NEVER = ("training_args.bin",)
_WEIGHTS = ("model*.safetensors", "model.safetensors.index.json")
_MODEL = (
    *_WEIGHTS,
    "adapter_model.safetensors",
    "adapter_config.json",
    "config.json",
    "generation_config.json",
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab*",
    "merges.txt",
    "*processor_config.json",
    "chat_template*",
    "additional_chat_templates/*",
)
_BESIDE = (CARD, "evaluation.json", f"{FIGURES_FOLDER}/*.svg")
_TEXT = {".json", ".jsonl", ".md", ".txt", ".jinja", ".yaml", ".yml", ".html", ".svg", ".csv", ".toml", ".cfg"}
_VOCABULARIES = {"tokenizer.json", "vocab.json", "merges.txt"}  # megabytes of arbitrary strings
# Where transformers and PEFT note what a model was loaded from: a repository of the Hub, or a folder of this machine.
_SOURCES = ("_name_or_path", "name_or_path", "base_model_name_or_path")


def model_files(folder: str | os.PathLike) -> dict[str, Path]:
    """The files of a saved model by their path in the repository: weights, configurations, tokenizer, card, figures.

    Args:
        folder (`str` or `os.PathLike`): an output directory; its subfolder `mxfp4`, if there is one, is a model of its own.

    Returns:
        `dict[str, Path]`: sorted; empty if there is no model.
    """
    folder = Path(folder)
    patterns = (*_MODEL, *_BESIDE, *(f"{MXFP4_FOLDER}/{pattern}" for pattern in _MODEL))
    found = {str(p.relative_to(folder)): p for pattern in patterns for p in folder.glob(pattern) if p.is_file()}
    return dict(sorted(found.items()))


def all_files(folder: str | os.PathLike) -> dict[str, Path]:
    """Every file of a checkpoint that resuming needs; `training_args.bin` is not one of them."""
    folder = Path(folder)
    found = {str(p.relative_to(folder)): p for p in folder.rglob("*") if p.is_file() and p.name not in NEVER}
    return dict(sorted(found.items()))


def additions(files: dict[str, Path], secrets: Iterable[str] = ()) -> list[CommitOperationAdd]:
    """The files as parts of a commit, text files without secrets and local paths.

    Args:
        files (`dict[str, Path]`): by path in the repository.
        secrets (`Iterable[str]`, *optional*): further ones to look for.

    Raises:
        [`SecretFound`]: a file other than the card holds a secret.
    """
    secrets = list(secrets)
    return [
        CommitOperationAdd(name, _clean(name, path, secrets) if _is_text(path) else path)
        for name, path in files.items()
    ]


def upload(
    repo_id: str,
    files: dict[str, Path],
    *,
    commit_message: str,
    token: str | None = None,
    revision: str | None = None,
    run_as_future: bool = False,
    into: str = "",
    replace: bool = False,
) -> CommitInfo | Future[CommitInfo]:
    """Upload files in one commit.

    Args:
        repo_id (`str`): exists already.
        files (`dict[str, Path]`): see [`model_files`]. Looked at before anything is sent, also with `run_as_future`.
        commit_message (`str`): of the commit.
        token (`str`, *optional*): the stored one if not given.
        revision (`str`, *optional*): branch, the default one if not given.
        run_as_future (`bool`, *optional*, defaults to `False`): upload in the background.
        into (`str`, *optional*, defaults to `""`): folder in the repository.
        replace (`bool`, *optional*, defaults to `False`): remove weights that the repository has and `files` has not:
            shards of an earlier upload, or unquantised weights beside quantised ones, which loaders would prefer.

    Raises:
        [`SecretFound`]: nothing was sent. `ValueError`: no files. `HfHubHTTPError`: the Hub refused.
    """
    if not files:
        raise ValueError(f"there is nothing to upload to {repo_id}: no file of a model was found")
    api = HfApi(token=token)
    operations: list[Any] = additions(files, [token] if token else [])
    for operation in operations:
        operation.path_in_repo = str(PurePosixPath(into, operation.path_in_repo))
    if replace:
        uploaded = {operation.path_in_repo for operation in operations}
        stale = [
            name
            for name in api.list_repo_files(repo_id, revision=revision)
            if name not in uploaded and _is_stale(PurePosixPath(name))
        ]
        operations += [CommitOperationDelete(name) for name in stale]
    return api.create_commit(
        repo_id, operations, commit_message=commit_message, revision=revision, run_as_future=run_as_future
    )


def _is_stale(name: PurePosixPath) -> bool:
    """Whether a file that is not uploaded again belongs to a model that is: weights, or anything of the quantised one."""
    weights = (*_WEIGHTS, "adapter_model.safetensors")
    return str(name.parent) == MXFP4_FOLDER or (len(name.parts) == 1 and any(name.match(p) for p in weights))


def _is_text(path: Path) -> bool:
    return path.suffix in _TEXT and path.name not in _VOCABULARIES


def _clean(name: str, path: Path, secrets: list[str]) -> bytes:
    text = path.read_text(encoding="utf-8")
    if name == CARD:
        return redact(text, secrets).encode()
    check_no_secret(name, text, secrets)
    if path.name.startswith("chat_template"):  # its text is part of every prompt: as it is, or not at all
        return text.encode()
    if path.suffix == ".json":
        return _clean_json(name, text, secrets).encode()
    return redact(text).encode()


def _clean_json(name: str, text: str, secrets: list[str]) -> str:
    """The text, if nothing in it has to go. Looked at once more without JSON's escapes: `\\/` is a slash."""
    try:
        content = json.loads(text)
    except json.JSONDecodeError:
        return redact(text)
    check_no_secret(f"{name}, decoded", json.dumps(content, indent=2, ensure_ascii=False), secrets)
    cleaned = redact_json(_without_local_sources(content))
    return text if cleaned == content else json.dumps(cleaned, indent=2, ensure_ascii=False) + "\n"


def _without_local_sources(content: Any) -> Any:
    """A configuration in which `name_or_path` and the like are null where they name a folder of this machine."""
    if isinstance(content, list):
        return [_without_local_sources(value) for value in content]
    if not isinstance(content, dict):
        return content
    return {
        key: None if key in _SOURCES and isinstance(value, str) and is_local(value) else _without_local_sources(value)
        for key, value in content.items()
    }


def is_local(model_id: str) -> bool:
    """Whether a model id is a folder, and not a repository of the Hub."""
    return model_id != "" and (os.path.isdir(model_id) or redact(model_id) != model_id or model_id.startswith("."))


def clean_name(text: str) -> str:
    """A name for a title: the last part of a path, on one line, without secrets."""
    return " ".join(redact_secrets(PurePosixPath(text.rstrip("/")).name or text).split())
