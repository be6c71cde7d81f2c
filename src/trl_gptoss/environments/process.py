"""One running interpreter, seen from the trainer: give it code, collect what it prints, stop it in time.

What the code prints is the result, byte for byte; no markers are looked for in it, so there is nothing to forge. The end
of a stateless call is the end of the process. Only a session has a channel of its own for "done".
"""

import os
import select
import signal
import time
from collections.abc import Callable

from .executor import ExecutionResult

MAX_OUTPUT_BYTES = 4 << 20  # what is read of one call at all; code that prints more is stopped
NO_OUTPUT = "(no output; print what you want to see)"


def cut(text: str, limit: int) -> str:
    """`text` in at most `limit` characters: the middle is left out, and a notice in its place says how much."""
    if len(text) <= limit:
        return text
    notice = "\n[... {} of {} characters cut ...]\n"
    kept = max(0, limit - len(notice.format(len(text), len(text))))
    tail = kept // 4  # the last lines of a traceback say what went wrong
    return text[: kept - tail] + notice.format(len(text) - kept, len(text)) + text[len(text) - tail :]


class InterpreterProcess:
    """An interpreter that waits for code. Not for use from two threads at once.

    Args:
        stdin, stdout, done (`int`): descriptors of our ends of its standard input, its output and its channel 3.
        pidfd (`int`): becomes readable when it has ended.
        kill (`Callable[[], None]`): kills it with all that it started; harmless after its end.
        send (`Callable[[int], None]`): sends the interpreter itself a signal; to freeze it between the calls of a session.
        exit_code (`Callable[[], int | None]`): its exit status (128 + n for signal n) once it has ended, `None` if it
            was killed from outside.
        release (`Callable[[], None]`): called once after its end.
    """

    def __init__(
        self,
        *,
        stdin: int,
        stdout: int,
        done: int,
        pidfd: int,
        kill: Callable[[], None],
        send: Callable[[int], None],
        exit_code: Callable[[], int | None],
        release: Callable[[], None],
    ) -> None:
        self.stdin, self.stdout, self.done, self.pidfd = stdin, stdout, done, pidfd
        self._kill, self._send, self._exit_code, self._release = kill, send, exit_code, release
        self._frozen = False
        self.alive = True  # until it is closed
        self._ended, self._code = False, None
        os.set_blocking(stdin, False)
        os.set_blocking(stdout, False)

    def call(self, code: str, *, timeout: float, output_limit: int, keep: bool) -> ExecutionResult:
        """Run `code`. With `keep` the interpreter stays alive for the next call if it can, otherwise it ends."""
        start = time.monotonic()
        if self._frozen:
            self._send(signal.SIGCONT)
        token = os.urandom(16)
        source = code.encode("utf-8", "replace")
        cpu_seconds = max(1, round(timeout)).to_bytes(4, "little")
        frame = token + (b"k" if keep else b"s") + cpu_seconds + len(source).to_bytes(8, "little") + source
        output, reply, ended, over = self._exchange(frame, start + timeout, keep)

        stays = keep and not ended and not over and reply in (token + b"0", token + b"1")
        code_of_exit: int | None = None
        if not stays:
            code_of_exit = self._stop()
            self._drain(output)
            self.close()
        else:
            self._frozen = True  # threads that the code has left behind get no time until the next call
            self._send(signal.SIGSTOP)
        timed_out = over or (not stays and code_of_exit == 128 + signal.SIGXCPU)
        flooded = len(output) >= MAX_OUTPUT_BYTES
        notes = []
        if flooded:
            notes.append(f"[stopped: it printed more than {MAX_OUTPUT_BYTES} bytes]")
        elif timed_out:
            notes.append(f"[stopped: it did not finish within {timeout:g} s]")
        elif not stays and code_of_exit is None:
            notes.append("[the interpreter was killed]")
        elif not stays and code_of_exit > 128:
            notes.append(f"[the interpreter was killed by signal {code_of_exit - 128}]")
        elif keep and not stays:
            notes.append("[the interpreter has ended]")
        if keep and not stays:
            notes.append("[its variables are lost]")
        text, note = bytes(output).decode("utf-8", "replace"), "\n".join(notes)
        text = cut(text, output_limit - len(note) - 1 if note else output_limit)
        if text and note and not text.endswith("\n"):
            text += "\n"
        failed = flooded or timed_out or (reply != token + b"0" if stays else code_of_exit != 0 or keep)
        return ExecutionResult(
            text=text + note or NO_OUTPUT,
            failed=failed,
            timed_out=timed_out,
            seconds=time.monotonic() - start,
        )

    def _exchange(self, frame: bytes, deadline: float, keep: bool) -> tuple[bytearray, bytes, bool, bool]:
        """Feed the frame and collect output until the call is done: (output, reply, ended, over the deadline)."""
        output, reply, pending = bytearray(), b"", memoryview(frame)
        poll = select.poll()
        poll.register(self.stdin, select.POLLOUT)
        poll.register(self.stdout, select.POLLIN)
        poll.register(self.pidfd, select.POLLIN)
        if keep:
            poll.register(self.done, select.POLLIN)
        while len(output) < MAX_OUTPUT_BYTES:
            left = deadline - time.monotonic()
            if left <= 0:
                return output, reply, False, True
            events = dict(poll.poll(left * 1000))
            if self.stdin in events:
                try:
                    pending = pending[os.write(self.stdin, pending) :]
                except BrokenPipeError:
                    pending = pending[:0]
                if not pending:
                    poll.unregister(self.stdin)
            if self.stdout in events and not self._read(output):
                poll.unregister(self.stdout)
            if self.pidfd in events:
                return output, reply, True, False
            if self.done in events:
                reply = os.read(self.done, 64)
                if reply:
                    self._drain(output)
                    return output, reply, False, False
                poll.unregister(self.done)  # closed: it is ending, or the code closed it and goes on
        return output, reply, False, False

    def _read(self, output: bytearray) -> bool:
        """Take over what can be read now; `False` at the end of the output."""
        part = os.read(self.stdout, 1 << 16)
        output += part
        return bool(part)

    def _drain(self, output: bytearray) -> None:
        try:
            while len(output) < MAX_OUTPUT_BYTES and self._read(output):
                pass
        except BlockingIOError:
            pass

    def _stop(self) -> int | None:
        """Kill it if it still runs, wait until it is gone; returns the exit status (of the first call)."""
        if self._ended:
            return self._code
        ended = select.poll()
        ended.register(self.pidfd, select.POLLIN)
        if not ended.poll(0):
            self._kill()
            if not ended.poll(10_000):
                raise RuntimeError("A killed sandbox is still there after 10 s; this machine is not in order.")
        self._ended, self._code = True, self._exit_code()
        return self._code

    def close(self) -> None:
        """Kill it if it still runs and give its descriptors back. Can be called again."""
        if not self.alive:
            return
        self.alive = False
        try:
            self._stop()
        finally:
            for fd in (self.stdin, self.stdout, self.done, self.pidfd):
                os.close(fd)
            self._release()
