"""From the trainer's weights to the engine's, and the proof that they are the same.

PolicyWeights -> cast to the engine's dtype -> checksum -> engine.load        every rank walks, the engine takes
                                                   |
                           engine.checksums, engine.score  ->  probe          every `probe_every` syncs
"""

import time
import uuid
from collections.abc import Iterator

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list, gather_object

from ..rollouts.vllm.engine import EngineUnavailable, VllmEngine
from ..rollouts.vllm.loading import merge_ranks, trainer_checksums
from .policy_weights import PolicyWeights
from .sync_probe import TOLERANCE, ProbeResult, compare, probe_ids, trainer_scores


class WeightSync:
    """Keeps one engine (or one for each rank) at the policy's weights.

    Args:
        engine ([`VllmEngine`]): on the main process of a shared one, and on every rank, too.
        weights ([`PolicyWeights`]): of the policy.
        accelerator ([`~accelerate.Accelerator`]): for what ranks have to agree on.
        probe_every (`int`): probe every so many syncs, the first one included; 0 never.
        tolerance (`float` or `None`): largest mean difference of the log-probs; `None` for the one of the engine's dtype.
    """

    def __init__(
        self,
        engine: VllmEngine,
        weights: PolicyWeights,
        accelerator: Accelerator,
        probe_every: int,
        tolerance: float | None,
    ) -> None:
        engine.info.check(probing=probe_every == 1)
        self.engine = engine
        self.weights = weights
        self.accelerator = accelerator
        self.probe_every = probe_every
        self.tolerance = TOLERANCE[engine.info.dtype] if tolerance is None else tolerance
        self.syncs = 0
        self.metrics: dict[str, float] = {}
        self._run = broadcast_object_list([uuid.uuid4().hex])[0]
        self._step: int | None = None
        rows = weights.model.config.get_text_config().vocab_size  # PEFT may wrap the embedding
        self._probe_ids = probe_ids(rows, engine.info.max_model_len)

    def invalidate(self) -> None:
        """The weights may have changed without an optimizer step."""
        self._step = None

    def prepare(self, step: int) -> None:
        """Make the engine ready to sample from the policy as it is after `step` optimizer steps. A collective.

        Raises:
            StaleWeightsError: the probe found that it is not.
            EngineUnavailable: the engine was lost.
        """
        lost = self.engine.wake()
        if lost or self._step != step:
            self._step = None
            self.sync(step)
            self._step = step

    def sync(self, step: int) -> None:
        """Send all weights, and probe if it is time to."""
        probing = self.probe_every > 0 and self.syncs % self.probe_every == 0
        policy_version = f"{self._run}:{self.syncs}"
        started = time.perf_counter()
        sent: dict[str, int] = {}
        self._load(policy_version, sent if probing else None)
        self.syncs += 1
        self.metrics = {"vllm/sync_seconds": time.perf_counter() - started}
        if probing:
            started = time.perf_counter()
            result = self._probe(sent)
            self.metrics |= {
                "vllm/probe_seconds": time.perf_counter() - started,
                "vllm/probe_mean": result.mean,
                "vllm/probe_max": result.max,
            }
            result.check(f"optimizer step {step}")

    # ---- sending ----

    def _load(self, policy_version: str, sent: dict[str, int] | None) -> None:
        stream = self._stream(sent)
        error: BaseException | None = None
        try:
            if self.engine.replicated or self.accelerator.is_main_process:
                self.engine.load(stream, policy_version)
        except BaseException as problem:  # noqa: BLE001 - raised below, once no rank waits for this one any more
            error = problem
        for _ in stream:  # the others gather what is left
            pass
        problems = gather_object([None if error is None else f"{type(error).__name__}: {error}"])
        if error is not None:
            raise error
        if any(problems):
            raise EngineUnavailable(f"Weight sync failed on another process: {next(filter(None, problems))}")
        if not self.engine.replicated:
            self.engine.policy_version = policy_version

    def _stream(self, sent: dict[str, int] | None) -> Iterator[tuple[str, torch.Tensor]]:
        """All tensors in the engine's dtype; fills `sent` with their checksums."""
        dtypes = self.engine.info.dtypes
        missing = set(dtypes)
        for name, tensor in self.weights:
            if name not in dtypes:
                raise KeyError(
                    f"The policy has a tensor {name}, the vLLM engine has none of that name: they are different models."
                )
            missing.discard(name)
            tensor = tensor.to(dtypes[name])
            if sent is not None:
                sent |= trainer_checksums(name, tensor, tensor.dtype)
            yield name, tensor
        if missing:
            raise KeyError(f"The policy has no tensors {sorted(missing)[:5]}, which the vLLM engine has.")

    # ---- checking ----

    def _probe(self, sent: dict[str, int]) -> ProbeResult:
        """The same result on all ranks: the worst one."""
        ours = trainer_scores(self.weights.model, self._probe_ids, self.accelerator.device)
        result: ProbeResult | None = None
        if self.engine.replicated or self.accelerator.is_main_process:
            held = merge_ranks(self.engine.checksums())
            result = compare(sent, held, ours, self.engine.score(self._probe_ids), self.tolerance)
        results = [r for r in gather_object([result]) if r is not None]
        return max(results, key=lambda r: (len(r.stale), r.mean))
