"""Which files of this machine a sandboxed interpreter needs: the executable, the standard library, shared libraries.

Nothing else is shown to the sandbox: no site-packages except those asked for, no /etc, no home, no project.
"""

import importlib.metadata
import os
import re
import struct
import subprocess
import sys
import sysconfig
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from .executor import ExecutorUnavailable

# Folders that hold nothing but libraries are shown whole; everywhere else only the library itself is (conda keeps
# libpython next to site-packages). Each bind mount costs about 0.15 ms per sandbox.
_LIBRARY_FOLDER = re.compile(r"(/usr)?/(lib64|lib/(x86_64|aarch64)-linux-gnu)")
_DEFAULT_FOLDER = re.compile(r"(/usr)?/(lib|lib64|lib/(x86_64|aarch64)-linux-gnu)")
_PACKAGE_FOLDERS = ("site-packages", "dist-packages")


@dataclass(frozen=True, slots=True)
class RuntimeFiles:
    """What to bind read-only, at the same path inside.

    python (`str`): the executable.
    binds (`tuple[tuple[str, str], ...]`): (path outside, path inside), packages included.
    packages (`tuple[tuple[str, str], ...]`): the binds that are packages.
    masks (`tuple[str, ...]`): folders below the binds to hide behind an empty one.
    import_path (`tuple[str, ...]`): folders to append to `sys.path`.
    library_path (`tuple[str, ...]`): folders for `LD_LIBRARY_PATH`.
    """

    python: str
    binds: tuple[tuple[str, str], ...]
    packages: tuple[tuple[str, str], ...]
    masks: tuple[str, ...]
    import_path: tuple[str, ...]
    library_path: tuple[str, ...]


def find_runtime_files(packages: Sequence[str] = ()) -> RuntimeFiles:
    """Locate the files of the interpreter that runs this process.

    Args:
        packages (`Sequence[str]`, *optional*): names of installed distributions to make importable inside, together
            with what they require.

    Raises:
        `ExecutorUnavailable`: a package is not installed, or the interpreter is not an ordinary dynamic ELF program.
    """
    python = os.path.realpath(sys._base_executable)
    stdlib = os.path.realpath(sysconfig.get_path("stdlib"))
    package_binds = _package_entries(packages)
    loader = _elf_interpreter(python)
    objects = [python, *_shared_objects([stdlib]), *_shared_objects([source for source, _ in package_binds])]
    libraries = _needed_libraries(loader, objects, within=(stdlib, *(source for source, _ in package_binds)))

    folders = sorted({str(Path(lib).parent) for lib in libraries})
    whole = [folder for folder in folders if _LIBRARY_FOLDER.fullmatch(folder)]
    single = [lib for lib in libraries if str(Path(lib).parent) not in whole]
    binds = [(folder, folder) for folder in whole] + [(lib, lib) for lib in single if lib != python]
    binds += [(stdlib, stdlib), (python, python)]
    masks = [
        str(path)
        for root in (*whole, stdlib)
        for pattern in _PACKAGE_FOLDERS
        for path in (Path(root) / pattern, *Path(root).glob(f"python*/{pattern}"))
        if path.is_dir()
    ]
    return RuntimeFiles(
        python=python,
        binds=(*binds, *package_binds),
        packages=tuple(package_binds),
        masks=tuple(masks),
        import_path=("/packages",) if packages else (),
        # the default folders must stay last: a system's libpython would win over the interpreter's own
        library_path=tuple(folder for folder in folders if not _DEFAULT_FOLDER.fullmatch(folder)),
    )


def _elf_interpreter(executable: str) -> str:
    """The loader that an ELF executable names (PT_INTERP)."""
    with open(executable, "rb") as file:
        header = file.read(64)
        if header[:5] == b"\x7fELF\x02":
            offset, entry_size, entries = *struct.unpack_from("<Q", header, 32), *struct.unpack_from("<HH", header, 54)
            file.seek(offset)
            table = file.read(entry_size * entries)
            for i in range(entries):
                kind, _, start, _, _, size = struct.unpack_from("<IIQQQQ", table, i * entry_size)
                if kind == 3:
                    file.seek(start)
                    return file.read(size).rstrip(b"\0").decode()
    raise ExecutorUnavailable(
        f"The Python executable {executable} is not a dynamically linked 64-bit ELF program, so the libraries that it "
        "needs cannot be listed for the sandbox. Use another Python build, or executor='unsafe_subprocess'."
    )


def _shared_objects(roots: Iterable[str]) -> list[str]:
    found = []
    for root in roots:
        if os.path.isfile(root):
            found += [root] if ".so" in Path(root).name else []
            continue
        for folder, below, files in os.walk(root):
            below[:] = [name for name in below if name not in _PACKAGE_FOLDERS]
            found += [os.path.join(folder, name) for name in files if re.search(r"\.so(\.|$)", name)]
    return found


def _needed_libraries(loader: str, objects: Sequence[str], within: Sequence[str]) -> list[str]:
    """Paths under which the loader looks up what the objects need, itself included, without those `within` folders."""
    needed = {loader}
    for start in range(0, len(objects), 16):
        running = [
            subprocess.Popen([loader, "--list", path], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
            for path in objects[start : start + 16]
        ]
        for process in running:
            output, _ = process.communicate()
            needed.update(re.findall(r"=> (/\S+)", output))
    return sorted(os.path.normpath(lib) for lib in needed if not lib.startswith(tuple(f"{w}/" for w in within)))


def _package_entries(packages: Sequence[str]) -> list[tuple[str, str]]:
    """Top-level files and folders of the distributions and of what they require, to appear in /packages."""
    entries: dict[str, str] = {}
    waiting, seen = list(packages), set()
    while waiting:
        name = waiting.pop()
        if name.lower() in seen:
            continue
        seen.add(name.lower())
        try:
            distribution = importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:
            raise ExecutorUnavailable(
                f"The sandbox is asked to offer the package {name!r}, which is not installed here. Install it or leave "
                "it out of `packages`."
            ) from None
        for file in distribution.files or ():
            top = file.parts[0]
            if top != ".." and not top.endswith((".dist-info", ".pth")) and top != "__pycache__":
                entries[top] = str(distribution.locate_file(top))
        for requirement in distribution.requires or ():
            if "extra ==" not in requirement:
                waiting.append(re.match(r"[\w.-]+", requirement)[0])
    return [(source, f"/packages/{top}") for top, source in sorted(entries.items()) if os.path.exists(source)]
