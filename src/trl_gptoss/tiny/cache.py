"""A folder that is made once for everything that determines its content."""

import hashlib
import json
import os
import shutil
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

MARKER = "tiny_model.json"


def default_cache_dir() -> Path:
    """`$TRL_GPTOSS_CACHE`, or `~/.cache/trl_gptoss`."""
    return Path(os.environ.get("TRL_GPTOSS_CACHE", "~/.cache/trl_gptoss")).expanduser()


def digest(text: str) -> str:
    """SHA-256 of a text, in hex."""
    return hashlib.sha256(text.encode()).hexdigest()


def content_key(recipe: dict[str, Any]) -> str:
    """SHA-256 of a recipe: equal for equal recipes, whatever the order of their keys."""
    return digest(json.dumps(recipe, sort_keys=True))


def cached_folder(cache_dir: Path, recipe: dict[str, Any], make: Callable[[Path], None]) -> Path:
    """The folder that belongs to `recipe`, made by `make(folder)` if the cache does not have it yet.

    A folder appears in the cache only when it is complete: an interrupted `make` leaves nothing behind, and of two
    processes that make the same folder at the same time one wins.
    """
    key = content_key(recipe)
    folder = cache_dir / "tiny" / key[:20]
    if (folder / MARKER).is_file():
        return folder
    unfinished = folder.parent / f".unfinished-{uuid.uuid4().hex}"
    unfinished.mkdir(parents=True)
    try:
        make(unfinished)
        (unfinished / MARKER).write_text(json.dumps({"key": key, "recipe": recipe}, indent=2) + "\n")
        try:
            unfinished.rename(folder)
        except OSError:
            if not (folder / MARKER).is_file():
                raise
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return folder


def check_out(out: Path) -> None:
    """Before minutes are spent on what `copy_folder` could not copy there.

    Raises:
        `ValueError`: `out` is a file, or holds something else than an earlier copy.
    """
    if out.exists() and not out.is_dir():
        raise ValueError(f"{out} is a file, expected a folder: name another one")
    if out.is_dir() and any(out.iterdir()) and not (out / MARKER).is_file():
        raise ValueError(f"{out} exists and holds no tiny model made by this command: name another folder")


def copy_folder(source: Path, out: Path) -> None:
    """Copy a cached folder to `out`, which must be new, empty, or an earlier copy (see `check_out`)."""
    check_out(out)
    shutil.copytree(source, out, dirs_exist_ok=True)
