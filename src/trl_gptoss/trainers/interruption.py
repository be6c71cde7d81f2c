"""Ctrl-C and SIGTERM: an end of the run that loses no finished optimizer step."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class Interruption:
    """Handles SIGINT and SIGTERM while a run is going on.

    A single process stops at once, by an exception in the main thread, but never in the middle of an optimizer step.
    Several processes cannot: one that leaves a collective hangs the others. They finish the current step, agree, save
    and stop.

    Args:
        single_process (`bool`): whether this process is alone.
    """

    def __init__(self, single_process: bool) -> None:
        self.single_process = single_process
        self.requested: int | None = None  # number of the signal
        self.error: Exception | None = None  # what to raise instead of what the signal stands for
        self.deferred = False

    def __call__(self, number: int, frame: FrameType | None) -> None:
        """The signal handler."""
        self.requested = number
        if self.single_process and not self.deferred:
            self.stop()

    def fail_after_step(self, error: Exception) -> None:
        """End the run by `error` once the current step is done."""
        self.error = error
        self.requested = signal.SIGTERM

    def stop(self) -> None:
        """Leave by the error, or by the exception that the signal stands for."""
        if self.error is not None:
            raise self.error
        if self.requested == signal.SIGTERM:
            raise SystemExit(128 + signal.SIGTERM)
        raise KeyboardInterrupt

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Handle signals inside of the block. In another thread than the main one Python allows no handlers."""
        try:
            previous = {number: signal.signal(number, self) for number in (signal.SIGINT, signal.SIGTERM)}
        except ValueError:
            yield
            return
        try:
            yield
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)
