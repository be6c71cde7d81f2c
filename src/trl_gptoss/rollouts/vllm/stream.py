"""vLLM engines as streams: a rollout's next turn joins the batch that is being decoded, whatever the others do."""

import time

from ..backend import GenerationBackend, Sample
from ..stream import SampleRequest, ThreadStream
from .colocate import ColocateEngine
from .engine import VllmEngine
from .server import ServerEngine


def rollout_backend(engine: VllmEngine) -> GenerationBackend:
    """The engine in the form in which rollouts advance independently.

    A server takes every rollout's requests by themselves. An engine of this process is stepped between two looks at the
    tools. Ranks that share a colocated engine (tensor parallelism) have to ask together: their requests go in waves.
    """
    if isinstance(engine, ServerEngine):
        return ServerStream(engine)
    if isinstance(engine, ColocateEngine) and not engine.collective:
        return ColocateStream(engine)
    return engine


class ServerStream(ThreadStream):
    """A [`SampleStream`] on top of a [`ServerEngine`].

    Args:
        engine ([`ServerEngine`]): the server.
    """

    collective = False

    def __init__(self, engine: ServerEngine) -> None:
        super().__init__(engine)
        self.sampling = engine.sampling


class ColocateStream:
    """A [`SampleStream`] on top of a [`ColocateEngine`] that this rank has for itself.

    Args:
        engine ([`ColocateEngine`]): the engine.
    """

    collective = False
    patience = 0.0

    def __init__(self, engine: ColocateEngine) -> None:
        self.engine = engine
        self.sampling = engine.sampling
        self._keys: dict[str, int] = {}

    @property
    def waiting(self) -> int:
        return len(self._keys)

    def submit(self, key: int, request: SampleRequest) -> None:
        """See [`SampleStream.submit`]."""
        self._keys[self.engine.add(request.prompt, request.max_new_tokens, request.sampling)] = key

    def poll(self, wait: float) -> list[tuple[int, Sample]]:
        """See [`SampleStream.poll`]: at least one step of the engine, and more until a sample is finished."""
        end = time.monotonic() + wait
        while self._keys:
            # A user's own requests to the engine are not in `_keys`.
            found = [(self._keys.pop(name), sample) for name, sample in self.engine.step() if name in self._keys]
            if found or time.monotonic() >= end:
                return found
        return []

    def reset(self) -> None:
        """See [`SampleStream.reset`]."""
        self.engine.abort()
        self._keys = {}
