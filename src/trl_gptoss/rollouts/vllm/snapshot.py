"""The weights of the last sync as files, so that they can be loaded by a server, and again by one that was restarted.

    FOLDER/00000.safetensors ...   tensors in the dtype of the engine, one file for each layer or so
    FOLDER/policy.json             written last: name of the policy, the files

A new snapshot replaces the old one; at most one of them is whole.
"""

import fcntl
import json
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors.torch import save_file

_MANIFEST = "policy.json"


class Snapshot:
    """The snapshot in a folder.

    Args:
        folder (`str` or `Path`): made if it does not exist.
        file_bytes (`int`, *optional*, defaults to 1 GiB): a file is closed once it holds that much.
    """

    def __init__(self, folder: str | Path, file_bytes: int = 1 << 30) -> None:
        self.folder = Path(folder).absolute()
        self.file_bytes = file_bytes

    def write(self, weights: Iterable[tuple[str, torch.Tensor]], policy_version: str) -> list[str]:
        """Replace the snapshot. Holds one file's tensors in memory at a time. Returns the paths of the files."""
        self.folder.mkdir(parents=True, exist_ok=True)
        self.clear()
        paths: list[str] = []
        pending: dict[str, torch.Tensor] = {}
        size = 0
        for name, tensor in weights:
            # A copy: the tensor may be gathered memory that is given up when the next one is asked for.
            pending[name] = torch.empty_like(tensor, device="cpu", memory_format=torch.contiguous_format).copy_(tensor)
            size += tensor.nbytes
            if size >= self.file_bytes:
                paths.append(self._save(pending, len(paths)))
                pending, size = {}, 0
        if pending:
            paths.append(self._save(pending, len(paths)))
        temporary = self.folder / f"{_MANIFEST}.tmp"
        temporary.write_text(json.dumps({"policy_version": policy_version, "files": paths}))
        os.replace(temporary, self.folder / _MANIFEST)
        return paths

    def files(self, policy_version: str) -> list[str] | None:
        """The paths of a snapshot of this policy, or `None` if there is no whole one."""
        try:
            manifest = json.loads((self.folder / _MANIFEST).read_text())
        except FileNotFoundError:
            return None
        return manifest["files"] if manifest["policy_version"] == policy_version else None

    def clear(self) -> None:
        """Remove the files of the snapshot, the manifest first."""
        (self.folder / _MANIFEST).unlink(missing_ok=True)
        for path in self.folder.glob("*.safetensors"):
            path.unlink()

    @contextmanager
    def locked(self) -> Iterator[None]:
        """One process of this machine at a time."""
        with open(self.folder / "lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    def _save(self, tensors: dict[str, torch.Tensor], number: int) -> str:
        path = self.folder / f"{number:05}.safetensors"
        save_file(tensors, path)
        return str(path)
