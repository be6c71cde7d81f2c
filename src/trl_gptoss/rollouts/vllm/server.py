"""vLLM behind a server that all ranks share.

Every rank asks for its own rollouts, row by row, so no completion can reach another rank, and no rank waits for
another one's turn. Only the main process writes weights, while all ranks wait.
"""

import base64
import logging
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch

from ..backend import Sample, SamplingOptions
from ..stream import ThreadStream
from .client import VllmClient
from .engine import EngineLost, EngineUnavailable
from .nccl import NcclSender
from .snapshot import Snapshot

logger = logging.getLogger(__name__)

T = TypeVar("T")
Transport = Literal["file", "http", "nccl"]
_CONCURRENT = 512  # requests of one rank in flight; vLLM itself queues what is above its --max-num-seqs
_RECOVERIES = 3  # of one request


class ServerEngine(ThreadStream):
    """A [`VllmEngine`] behind a server, and a [`SampleStream`]: rollouts go on independently of each other.

    Args:
        client ([`VllmClient`]): of the server.
        stop_ids (`list[int]`): ids that end a sample.
        sampling ([`SamplingOptions`]): for rows that bring none of their own.
        extra (`dict`): further fields of each completion request.
        transport (`str`): how weights reach the server: "file" through a folder that both can read, "http" in the
            requests themselves, "nccl" from GPU to GPU.
        snapshot ([`Snapshot`]): where the weights of the last sync are kept for "file" and "http". A server that comes
            back after it was lost gets them again from there.
        sender ([`NcclSender`], *optional*): for "nccl", on the main process.
    """

    replicated = False
    collective = False

    def __init__(
        self,
        client: VllmClient,
        stop_ids: list[int],
        sampling: SamplingOptions,
        extra: dict[str, Any],
        transport: Transport,
        snapshot: Snapshot,
        sender: NcclSender | None = None,
    ) -> None:
        super().__init__(self)
        self.client = client
        self.stop_ids = list(stop_ids)
        self.sampling = sampling
        self.extra = extra
        self.transport = transport
        self.snapshot = snapshot
        self.sender = sender
        self.policy_version = ""
        self._recovering = threading.Lock()
        client.wait()
        self.info = client.describe()

    def wake(self) -> bool:
        """See [`VllmEngine.wake`]. A server does not sleep."""
        return False

    def sleep(self) -> None:
        """See [`VllmEngine.sleep`]."""

    # ---- weights ----

    def load(self, weights: Iterable[tuple[str, torch.Tensor]], policy_version: str) -> None:
        """See [`VllmEngine.load`]. Called on the main process alone."""
        if self.transport == "nccl":
            self.sender.send(self.client, weights, policy_version)
            self._forget_prefixes()
        else:
            self.snapshot.write(weights, policy_version)
            self._retry(lambda: self._load_snapshot(policy_version), policy_version)

    def _load_snapshot(self, policy_version: str) -> None:
        files = self.snapshot.files(policy_version)
        if files is None:
            raise EngineLost(
                f"The vLLM server at {self.client.base_url} was restarted and has lost the policy's weights, and they "
                f"are not in {self.snapshot.folder}. Resume the run from its last checkpoint (resume_from_checkpoint)."
            )
        if self.transport == "file":
            self.client.rpc("policy_load_files", files, policy_version)
        else:
            for number, path in enumerate(files):
                self.client.rpc("policy_receive_bytes", number, base64.b64encode(Path(path).read_bytes()).decode())
            self.client.rpc("policy_load_received", len(files), policy_version)
        self._forget_prefixes()

    def _forget_prefixes(self) -> None:
        self.client.reset_prefix_cache(self.info.version.has("reset_prefix_cache_json"))

    def checksums(self) -> list[dict[str, int]]:
        """See [`VllmEngine.checksums`]."""
        return self._retry(lambda: self.client.rpc("policy_checksums"), self.policy_version)

    # ---- a server that is lost ----

    def _retry(self, ask: Callable[[], T], policy_version: str) -> T:
        """Ask again if the server was lost and has come back, with the weights of this policy."""
        for _ in range(_RECOVERIES):
            with self._recovering:  # a server that has just come back samples from its checkpoint
                pass
            try:
                return ask()
            except EngineLost:
                raise
            except EngineUnavailable as error:
                self._recover(error, policy_version)
        return ask()

    def _recover(self, lost: EngineUnavailable, policy_version: str) -> None:
        """Wait for the server, and bring the weights back to it if it was restarted."""
        with self._recovering:  # the other requests of this rank wait
            logger.warning("%s Waiting for it for up to %g s.", lost, self.client.server_timeout)
            try:
                self.client.wait()
            except EngineLost as error:
                raise EngineLost(
                    f"{error}\nThen resume the run from its last checkpoint (resume_from_checkpoint). How long a lost server is "
                    "waited for is vllm_server_timeout."
                ) from lost
            try:
                if self.client.describe().policy_version != policy_version:
                    self._restore(policy_version)
            except EngineLost:
                raise
            except EngineUnavailable as error:  # gone again: the request that comes next begins anew
                logger.warning("%s", error)

    def _restore(self, policy_version: str) -> None:
        if self.transport == "nccl":
            raise EngineLost(
                f"The vLLM server at {self.client.base_url} was restarted and has lost the policy's weights, which were "
                "sent over NCCL. Resume the run from its last checkpoint (resume_from_checkpoint)."
            )
        with self.snapshot.locked():  # several ranks may have noticed
            if self.client.describe().policy_version != policy_version:
                self._load_snapshot(policy_version)
                logger.warning("The vLLM server is back, with the policy's weights.")

    # ---- tokens ----

    def score(self, sequences: list[list[int]]) -> list[list[float]]:
        """See [`VllmEngine.score`]."""
        return [self._retry(lambda ids=ids: self.client.score(ids), self.policy_version) for ids in sequences]

    def generate(
        self, prompts: list[list[int]], max_new_tokens: list[int], sampling: list[SamplingOptions] | None = None
    ) -> list[Sample]:
        """See [`GenerationBackend.generate`]. May be called from several threads."""
        rows = [self.sampling] * len(prompts) if sampling is None else sampling
        if len(prompts) < 2:
            return [self._sample(*row) for row in zip(prompts, max_new_tokens, rows)]
        with ThreadPoolExecutor(min(len(prompts), _CONCURRENT)) as pool:
            return list(pool.map(self._sample, prompts, max_new_tokens, rows))

    def _sample(self, prompt: list[int], limit: int, options: SamplingOptions) -> Sample:
        return self._retry(
            lambda: self.client.complete(prompt, limit, options, self.stop_ids, self.extra), self.policy_version
        )
