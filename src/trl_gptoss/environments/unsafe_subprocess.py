"""An executor that isolates nothing: a plain child process with the same interpreter program and resource limits.

The code can read every file that the trainer can, use the network, and leave processes behind. It is meant for machines
that cannot make sandboxes and may be lost as a whole, such as a throw-away container.
"""

import contextlib
import os
import shutil
import signal
import sys
import tempfile
import warnings
from collections.abc import Sequence
from pathlib import Path

from ._spawner import spawn
from .executor import ExecutionResult
from .process import InterpreterProcess
from .runtime_files import find_runtime_files

_warned = False


class UnsafeSubprocessExecutor:
    """Runs code in a child process, **without isolation**. Warns once per process.

    Args:
        memory_limit_mb (`int`, *optional*, defaults to 1024): address space of each process, in MiB.
        disk_limit_mb (`int`, *optional*, defaults to 64): size of a single file that it writes, in MiB.
        packages (`Sequence[str]`, *optional*): installed distributions that the code may import.
    """

    def __init__(self, *, memory_limit_mb: int = 1024, disk_limit_mb: int = 64, packages: Sequence[str] = ()) -> None:
        self.memory_limit_mb, self.disk_limit_mb = memory_limit_mb, disk_limit_mb
        self._import_path = sorted({str(Path(outside).parent) for outside in find_runtime_files(packages).packages})

    def probe(self) -> None:
        global _warned
        if not _warned:
            _warned = True
            warnings.warn(
                "executor='unsafe_subprocess' runs code written by the policy WITHOUT isolation: it can read the "
                "trainer's files and the gold answers, use the network and leave processes behind.",
                stacklevel=2,
            )

    def run(self, code: str, *, timeout: float, output_limit: int) -> ExecutionResult:
        process = self._start()
        try:
            return process.call(code, timeout=timeout, output_limit=output_limit, keep=False)
        finally:
            process.close()

    def session(self) -> "UnsafeSubprocessSession":
        return UnsafeSubprocessSession(self)

    def close(self) -> None:
        """Nothing is held between calls."""

    def _start(self) -> InterpreterProcess:
        stdin, to_stdin = os.pipe()
        from_stdout, stdout = os.pipe()
        from_done, done = os.pipe()
        folder = tempfile.mkdtemp(prefix="trl_gptoss_")
        program = str(Path(__file__).with_name("_interpreter.py"))
        arguments = [self.memory_limit_mb << 20, 0, self.disk_limit_mb << 20, folder]
        command = [sys.executable, "-I", "-S", "-B", program, *map(str, arguments), *self._import_path]
        pid = spawn(command, {"LANG": "C.UTF-8", "HOME": folder}, [stdin, stdout, stdout, done])
        for fd in (stdin, stdout, done):
            os.close(fd)

        def kill() -> None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)

        def exit_code() -> int | None:
            kill()  # what it left in its process group
            code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            return None if code == -signal.SIGKILL else 128 - code if code < 0 else code

        return InterpreterProcess(
            stdin=to_stdin,
            stdout=from_stdout,
            done=from_done,
            pidfd=os.pidfd_open(pid),
            kill=kill,
            send=lambda number: os.killpg(pid, number),
            exit_code=exit_code,
            release=lambda: shutil.rmtree(folder, ignore_errors=True),
        )


class UnsafeSubprocessSession:
    """An interpreter that keeps its variables; a call that runs into a limit costs them."""

    def __init__(self, executor: UnsafeSubprocessExecutor) -> None:
        self._executor = executor
        self._process: InterpreterProcess | None = None

    def run(self, code: str, *, timeout: float, output_limit: int) -> ExecutionResult:
        if self._process is None or not self._process.alive:
            self._process = self._executor._start()
        return self._process.call(code, timeout=timeout, output_limit=output_limit, keep=True)

    def close(self) -> None:
        if self._process is not None:
            self._process.close()
            self._process = None
