"""Sampling that goes on while tools run: requests go in at any time, samples come out as they are finished.

    rollout 0   sample ---- tool -- sample ----------- |
    rollout 1   sample ------------ tool ---- sample - |      no rollout waits for the slowest of its batch
    rollout 2   sample - tool sample - tool - sample - |

A backend that takes requests while it samples (a vLLM engine) is a stream itself. One that samples a batch from start to
end gets its requests in waves: each wave is whatever is ready.
"""

import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from .backend import GenerationBackend, Sample, SamplingOptions

# A wave waits for tools that are nearly done, because a batch of two costs hardly more than one of one: at most this part
# of the time of the wave before it, in these limits (seconds).
_PATIENCE = 0.25
_LEAST_PATIENCE, _MOST_PATIENCE = 0.02, 5.0


@dataclass(kw_only=True, slots=True)
class SampleRequest:
    """What to sample next.

    prompt (`list[int]`): token ids.
    max_new_tokens (`int`): at least 1.
    sampling ([`SamplingOptions`]): how.
    """

    prompt: list[int]
    max_new_tokens: int
    sampling: SamplingOptions


@runtime_checkable
class SampleStream(Protocol):
    """Takes requests while it samples. Used from one thread.

    `waiting` is the number of requests without a sample so far, `patience` the seconds for which it is worth to wait for
    more requests before the next `poll`; `None`: until no tool runs any more.
    """

    waiting: int
    patience: float | None

    def submit(self, key: int, request: SampleRequest) -> None:
        """Add a request; `key` names it in `poll`."""
        ...

    def poll(self, wait: float) -> list[tuple[int, Sample]]:
        """Samples finished since the last call; go on for about `wait` seconds if there are none."""
        ...

    def reset(self) -> None:
        """Forget all requests. Called before every batch: one that was broken off must not reach the next one."""
        ...


class WaveStream:
    """A [`SampleStream`] on top of a backend that samples a batch from start to end.

    Args:
        backend ([`GenerationBackend`]): what samples.
        any_rank (`Callable[[bool], bool]`): logical or over all ranks, used if the backend is collective.
        whole (`bool`, *optional*, defaults to `False`):
            Each wave waits for all tools: what is in it does not depend on how long they take.
    """

    def __init__(self, backend: GenerationBackend, any_rank: Callable[[bool], bool], whole: bool = False) -> None:
        self.backend = backend
        self.any_rank = any_rank
        self.whole = whole
        self.patience = None if whole else _LEAST_PATIENCE
        self._queued: dict[int, SampleRequest] = {}

    @property
    def waiting(self) -> int:
        return len(self._queued)

    def submit(self, key: int, request: SampleRequest) -> None:
        """See [`SampleStream.submit`]."""
        self._queued[key] = request

    def poll(self, wait: float) -> list[tuple[int, Sample]]:
        """See [`SampleStream.poll`]: one wave. A collective backend is called on all ranks if any has a request."""
        if not (self.any_rank(bool(self._queued)) if self.backend.collective else self._queued):
            return []
        # By their keys: the order in which tools return must not move a row of the batch, and with it a last bit.
        wave, self._queued = dict(sorted(self._queued.items())), {}
        start = time.monotonic()
        samples = self.backend.generate(
            [r.prompt for r in wave.values()],
            [r.max_new_tokens for r in wave.values()],
            [r.sampling for r in wave.values()],
        )
        if not self.whole:
            self.patience = min(max(_PATIENCE * (time.monotonic() - start), _LEAST_PATIENCE), _MOST_PATIENCE)
        return list(zip(wave, samples, strict=True))

    def reset(self) -> None:
        """See [`SampleStream.reset`]."""
        self._queued = {}


class ThreadStream:
    """A [`SampleStream`] on top of a backend whose `generate` may be called from several threads at once: a server.

    Args:
        backend ([`GenerationBackend`]): what samples; not collective.
    """

    patience = 0.0

    def __init__(self, backend: GenerationBackend) -> None:
        self.backend = backend
        self.waiting = 0
        self._done: queue.SimpleQueue[tuple[int, Sample | Exception]] = queue.SimpleQueue()

    def submit(self, key: int, request: SampleRequest) -> None:
        """See [`SampleStream.submit`]. A thread per request: the server does the queueing."""

        done = self._done  # of this batch: `reset` leaves it to the requests that nobody waits for any more

        def ask() -> None:
            try:
                [outcome] = self.backend.generate([request.prompt], [request.max_new_tokens], [request.sampling])
            except Exception as error:  # raised again in the thread that polls
                outcome = error
            done.put((key, outcome))

        self.waiting += 1
        threading.Thread(target=ask, daemon=True).start()

    def reset(self) -> None:
        """See [`SampleStream.reset`]. Requests that were sent go on, and nobody takes what comes back."""
        self.waiting = 0
        self._done = queue.SimpleQueue()

    def poll(self, wait: float) -> list[tuple[int, Sample]]:
        """See [`SampleStream.poll`]. Raises what the backend raised."""
        found: list[tuple[int, Sample]] = []
        while self.waiting:
            try:
                key, outcome = self._done.get(timeout=0.0 if found else wait)
            except queue.Empty:
                break
            self.waiting -= 1
            if isinstance(outcome, Exception):
                raise outcome
            found.append((key, outcome))
        return found
