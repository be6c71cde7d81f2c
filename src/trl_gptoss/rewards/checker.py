"""A small pool of worker programs that are killed when they take too long and started again when needed.

A worker reads one JSON line per job on standard input and answers with one JSON line; the first line it writes is `{}`:
ready (see _serving.py). What it is asked may send it into a computation without end or crash it; the caller sits
outside, kills it and goes on.
"""

import atexit
import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import LifoQueue
from typing import Any

WALL_CLOCK_FACTOR = 10
START_SECONDS = 120.0  # importing sympy takes 1-2 s, on a loaded machine much more


@dataclass(frozen=True, slots=True)
class Reply:
    """value (`dict` or `None`): a worker's answer. timed_out, crashed (`bool`): it gave none."""

    value: dict[str, Any] | None
    timed_out: bool = False
    crashed: bool = False


class _Idle(LifoQueue):
    """The workers without a job. Those that run come first; `None`, the place of one to be started (seconds), is last."""

    def _put(self, item: "_Worker | None") -> None:
        self.queue.insert(0 if item is None else len(self.queue), item)


class WorkerPool:
    """Runs jobs in worker programs. Safe to use from several threads and after a fork.

    Args:
        program (`Path`): the worker program, run by this Python.
        workers (`int`, *optional*): processes at most; they are started when needed. Defaults to the number of cores,
            but no more than 4.
        seconds (`int`, *optional*, defaults to 3): CPU time of one job, after which the worker is killed. Counted in
            CPU time, so that a busy machine does not turn right answers into wrong ones; ten times as much wall-clock
            time is the last resort.
        environment (`dict[str, str]`, *optional*): further environment variables of the workers.
    """

    def __init__(
        self,
        program: Path,
        *,
        workers: int | None = None,
        seconds: int = 3,
        environment: dict[str, str] | None = None,
    ) -> None:
        self.program = program
        self.workers = workers or min(4, os.cpu_count() or 1)
        self.seconds = seconds
        self.environment = environment or {}
        self._owner = -1
        self._lock = threading.Lock()

    def run(self, jobs: list[dict[str, Any]]) -> list[Reply]:
        """The replies to `jobs`, in order; raises nothing because of what is in them."""
        self._own()
        if not jobs:
            return []
        with ThreadPoolExecutor(max_workers=min(self.workers, len(jobs))) as threads:
            return list(threads.map(self._run_one, jobs))

    def close(self) -> None:
        """End all workers. The next check starts new ones."""
        if self._owner != os.getpid():
            return
        with self._closing:  # two that each hold some of the workers would wait for one another
            taken = []
            try:
                for _ in range(self.workers):
                    taken.append(self._idle.get())
            finally:  # Ctrl-C may end the wait for one that is busy
                for worker in taken:
                    if worker is not None:
                        worker.kill()
                    self._idle.put(None)

    def _own(self) -> None:
        """Workers of the process that forked us are not ours: start over."""
        with self._lock:
            if self._owner != os.getpid():
                self._owner = os.getpid()
                self._closing = threading.Lock()
                self._idle = _Idle()
                for _ in range(self.workers):
                    self._idle.put(None)
                atexit.register(self.close)

    def _run_one(self, job: dict[str, Any]) -> Reply:
        worker = self._idle.get()
        try:
            if worker is not None and worker.has_ended():  # no fault of the job that comes now
                worker.kill()
                worker = None
            if worker is None:
                worker = _Worker(self.program, self.environment)
            reply = worker.run(job, self.seconds)
            if reply.value is None:
                worker = None
            return reply
        finally:
            self._idle.put(worker)


class _Worker:
    """One running worker program."""

    def __init__(self, program: Path, environment: dict[str, str]) -> None:
        # -P: the folder of the program, with its module names, must not come first on the import path
        self._process = subprocess.Popen(
            [sys.executable, "-P", str(program)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
            start_new_session=True,  # Ctrl-C goes to the trainer, which still wants its verdicts
        )
        self._buffer = b""
        if self._line(time.monotonic() + START_SECONDS) != b"{}":
            self.kill()
            raise RuntimeError(
                "A reward worker does not start. Run this to see why: "
                f"`echo | {sys.executable} -P {program}` (it should print `{{}}`)."
            )

    def run(self, job: dict[str, Any], seconds: int) -> Reply:
        line_out = json.dumps({**job, "seconds": seconds}) + "\n"
        deadline = time.monotonic() + WALL_CLOCK_FACTOR * seconds
        try:
            self._process.stdin.write(line_out.encode())
            self._process.stdin.flush()
            line = self._line(deadline)
        except BrokenPipeError:
            line = b""
        if line:
            return Reply(json.loads(line))
        self.kill()
        timed_out = line is None or self._process.returncode == -signal.SIGXCPU
        return Reply(None, timed_out=timed_out, crashed=not timed_out)

    def has_ended(self) -> bool:
        return self._process.poll() is not None

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            with contextlib.suppress(BrokenPipeError):
                pipe.close()

    def _line(self, deadline: float) -> bytes | None:
        """The next line of its answer; `b""` if it has ended, `None` at the deadline."""
        poll = select.poll()
        poll.register(self._process.stdout, select.POLLIN)
        while b"\n" not in self._buffer:
            left = deadline - time.monotonic()
            if left <= 0 or not poll.poll(left * 1000):
                return None
            part = os.read(self._process.stdout.fileno(), 1 << 16)
            if not part:
                return b""
            self._buffer += part
        line, self._buffer = self._buffer.split(b"\n", 1)
        return line


@dataclass(frozen=True, slots=True)
class Verdict:
    """correct (`bool` or `None`): `None` if the gold answer cannot be read. timed_out, crashed (`bool`): not correct."""

    correct: bool | None
    timed_out: bool = False
    crashed: bool = False


class MathChecker(WorkerPool):
    """Compares answers with math-verify, in other processes (_worker.py). Arguments: those of [`WorkerPool`]."""

    def __init__(self, *, workers: int | None = None, seconds: int = 3) -> None:
        super().__init__(Path(__file__).with_name("_worker.py"), workers=workers, seconds=seconds)

    def check(self, golds: list[str], texts: list[str]) -> list[Verdict]:
        """Whether each text states its gold answer; in order, raises nothing because of what the texts say."""
        replies = self.run([{"gold": gold, "text": text} for gold, text in zip(golds, texts, strict=True)])
        return [
            Verdict(False, reply.timed_out, reply.crashed) if reply.value is None else Verdict(reply.value["verdict"])
            for reply in replies
        ]


shared_checker = MathChecker()
