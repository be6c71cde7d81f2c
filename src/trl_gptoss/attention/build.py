"""Compile `kernels/sink_fa3` into one shared library with nvcc, nothing else.

torch's stable ABI makes one library serve every torch from 2.11 on, and the headers of any torch wheel, CPU ones included,
are enough to compile against. This file imports neither torch nor trl_gptoss, so that a build backend can load it by path.
"""

import importlib.util
import os
import re
import shutil
import subprocess
import sysconfig
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

LIBRARY = "libsink_fa3.so"
MIN_NVCC = (12, 4)
TORCH_TARGET_VERSION = "0x020b000000000000"  # 2.11
_HERE = Path(__file__).resolve().parent
_STABLE_HEADER = Path("torch/csrc/stable/library.h")


class BuildError(RuntimeError):
    """The library cannot be built here; the message says what is missing or what the compiler said."""


def build_kernels(
    output: Path | None = None,
    *,
    source: Path | None = None,
    torch_dir: Path | None = None,
    jobs: int | None = None,
    log: Callable[[str], None] = print,
) -> Path:
    """Compile the Hopper kernels.

    Args:
        output (`Path`, *optional*): The library to write. Defaults to the place inside this package where it is found.
        source (`Path`, *optional*): The `sink_fa3` project. Defaults to the checkout's `kernels/sink_fa3` or the packaged copy.
        torch_dir (`Path`, *optional*): The installed torch package. Defaults to the one of this Python environment.
        jobs (`int`, *optional*): Compilers at a time. Defaults to the number of CPU cores.
        log (`Callable`, defaults to `print`): Receives one line per step.

    Returns:
        `Path`: The library.

    Raises:
        `BuildError`: nvcc is missing or too old, torch's headers are missing, or the compiler fails.
    """
    nvcc = find_nvcc()
    source = find_source() if source is None else source
    torch_dir = find_torch() if torch_dir is None else torch_dir
    output = _HERE / "_kernels" / LIBRARY if output is None else output
    units = translation_units(source)
    started = time.monotonic()
    log(f"compiling {len(units)} files of {source} with {nvcc}, headers of {torch_dir}")
    with tempfile.TemporaryDirectory(prefix="sink_fa3_") as scratch:
        objects = [Path(scratch) / f"{unit.stem}.o" for unit in units]
        with ThreadPoolExecutor(jobs or os.cpu_count() or 1) as pool:
            commands = [compile_command(nvcc, unit, target, source, torch_dir) for unit, target in zip(units, objects)]
            for unit, seconds in zip(units, pool.map(_run, commands)):
                log(f"  {unit.name} {seconds:.0f} s")
        output.parent.mkdir(parents=True, exist_ok=True)
        linked = Path(scratch) / LIBRARY
        _run(link_command(nvcc, objects, linked, Path(scratch), torch_dir))
        partial = output.with_suffix(".partial")
        shutil.copyfile(linked, partial)
        partial.replace(output)  # a process that has the old library mapped keeps it
    log(f"built {output} ({output.stat().st_size / 2**20:.1f} MiB) in {time.monotonic() - started:.0f} s")
    return output


def translation_units(source: Path) -> list[Path]:
    """Every csrc/*.cu and torch-ext/*.cpp of the project."""
    kernels, bindings = sorted((source / "csrc").glob("*.cu")), sorted((source / "torch-ext").glob("*.cpp"))
    if not kernels or not bindings:
        raise BuildError(f"{source} holds no csrc/*.cu or no torch-ext/*.cpp; expected the sink_fa3 project.")
    return [*kernels, *bindings]


def compile_command(nvcc: Path, unit: Path, target: Path, source: Path, torch_dir: Path) -> list[str]:
    """The nvcc call for one translation unit."""
    cuda = ["-gencode", "arch=compute_90a,code=sm_90a", "--expt-relaxed-constexpr", "-lineinfo"]
    return [
        str(nvcc),
        "-c",
        str(unit),
        "-o",
        str(target),
        "-O3",
        "-std=c++17",
        "-Xcompiler",
        "-fPIC",
        "-DNDEBUG",
        "-DUSE_CUDA",
        f"-DTORCH_TARGET_VERSION={TORCH_TARGET_VERSION}ULL",
        "-DTORCH_EXTENSION_NAME=sink_fa3",
        f"-I{source / 'csrc'}",
        f"-I{torch_dir / 'include'}",
        *(cuda if unit.suffix == ".cu" else []),
    ]


def link_command(nvcc: Path, objects: list[Path], target: Path, scratch: Path, torch_dir: Path) -> list[str]:
    """The nvcc call that links. The CUDA runtime is linked statically; the driver's functions are looked up at run time."""
    if not (torch_dir / "lib" / "libtorch_cuda.so").exists():
        # a CPU torch compiles, a CUDA torch runs: name the library that it will bring
        stub = [
            "-shared",
            "-Wl,-soname,libtorch_cuda.so",
            "-o",
            str(scratch / "libtorch_cuda.so"),
            "-x",
            "c",
            "/dev/null",
        ]
        _run([os.environ.get("CC", "cc"), *stub])
    return [
        str(nvcc),
        "-shared",
        "-o",
        str(target),
        *map(str, objects),
        f"-L{scratch}",
        f"-L{torch_dir / 'lib'}",
        "-Xlinker",
        "--no-as-needed",
        "-ltorch_cpu",
        "-ltorch_cuda",
    ]


def find_nvcc() -> Path:
    """nvcc from CUDA_HOME, PATH or /usr/local/cuda.

    Raises:
        `BuildError`: None is there, or it is older than 12.4.
    """
    roots = [os.environ[name] for name in ("CUDA_HOME", "CUDA_PATH") if os.environ.get(name)]
    candidates = [Path(root, "bin", "nvcc") for root in roots]
    if on_path := shutil.which("nvcc"):
        candidates.append(Path(on_path))
    candidates.append(Path("/usr/local/cuda/bin/nvcc"))
    for nvcc in candidates:
        if nvcc.is_file():
            break
    else:
        raise BuildError(
            "nvcc was not found in CUDA_HOME, PATH or /usr/local/cuda. Install the CUDA toolkit >= 12.4 to build the Hopper "
            "kernels; without them sink_fa3 uses flash-attn-4 or torch's FlashAttention-2."
        )
    version = nvcc_version(nvcc)
    if version < MIN_NVCC:
        found, needed = (".".join(map(str, v)) for v in (version, MIN_NVCC))
        raise BuildError(f"{nvcc} is release {found}; the Hopper kernels need nvcc >= {needed}.")
    return nvcc


def nvcc_version(nvcc: Path) -> tuple[int, int]:
    """Major and minor version.

    Raises:
        `BuildError`: It says something else than a release.
    """
    said = subprocess.run([nvcc, "--version"], capture_output=True, text=True, check=True).stdout
    version = re.search(r"release (\d+)\.(\d+)", said)
    if version is None:
        raise BuildError(f"{nvcc} --version names no release: {said.strip()[:80]}")
    return int(version[1]), int(version[2])


def find_source() -> Path:
    """The `sink_fa3` project: in the checkout, or packed beside this file."""
    candidates = (_HERE.parents[2] / "kernels" / "sink_fa3", _HERE / "_kernels" / "sink_fa3")
    for source in candidates:
        if (source / "csrc").is_dir():
            return source
    raise BuildError(f"The kernel sources are in neither {candidates[0]} nor {candidates[1]}.")


def find_torch() -> Path:
    """The installed torch package, found without importing it.

    pip builds in an environment of its own in which the user's torch cannot be imported, but the interpreter is the user's,
    so its site-packages are known.

    Raises:
        `BuildError`: No torch with stable ABI headers is installed.
    """
    spec = importlib.util.find_spec("torch")
    candidates = [Path(spec.origin).parent] if spec and spec.origin else []
    candidates += [Path(sysconfig.get_path(name)) / "torch" for name in ("purelib", "platlib")]
    for torch_dir in candidates:
        if (torch_dir / "include" / _STABLE_HEADER).is_file():
            return torch_dir
    raise BuildError(
        f"No torch >= 2.11 is installed for this Python (looked in {', '.join(map(str, candidates))}); the kernels compile "
        "against its headers."
    )


def _run(command: list[str]) -> float:
    """Run a compiler; returns seconds."""
    started = time.monotonic()
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        tail = "\n".join((done.stdout + done.stderr).strip().splitlines()[-40:])
        raise BuildError(f"{' '.join(command)}\nfailed with status {done.returncode}:\n{tail}")
    return time.monotonic() - started
