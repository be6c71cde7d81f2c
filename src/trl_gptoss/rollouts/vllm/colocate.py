"""vLLM in the trainer's own process: on the same GPU (one engine for each rank or tensor-parallel group), or on CPU."""

import itertools
import os
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from ..backend import Sample, SamplingOptions
from .engine import WORKER_EXTENSION, EngineInfo, sample_end

if TYPE_CHECKING:
    from vllm import LLM, RequestOutput, SamplingParams


def make_llm(model: str, dtype: torch.dtype, tensor_parallel_size: int, seed: int, **options: Any) -> "LLM":
    """An engine for rollouts that runs in this process.

    Args:
        model (`str`): checkpoint.
        dtype (`torch.dtype`): bfloat16 or float32. vLLM's own choice would turn an fp32 checkpoint into bf16.
        tensor_parallel_size (`int`): ranks that share one engine; they must be neighbours.
        seed (`int`): the same on ranks that share an engine.
        options (`Any`): of `vllm.LLM`.
    """
    # The engine must not move to a process of its own: weights are handed over as they are.
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    from vllm import LLM

    return LLM(
        model=model,
        dtype=str(dtype).removeprefix("torch."),
        tensor_parallel_size=tensor_parallel_size,
        seed=seed,
        distributed_executor_backend="external_launcher",
        logprobs_mode="processed_logprobs",
        worker_extension_cls=WORKER_EXTENSION,
        **options,
    )


class ColocateEngine:
    """A [`VllmEngine`] in this process.

    Args:
        llm (`vllm.LLM`): from [`make_llm`].
        stop_ids (`list[int]`): ids that end a sample.
        sampling ([`SamplingOptions`]): for rows that bring none of their own.
        extra (`dict`): further arguments of `vllm.SamplingParams` for all rows.
        tensor_parallel_group (`ProcessGroup`, *optional*): the ranks that share the engine, if there are several.
        sleeps (`bool`): whether the engine gives its memory back while the trainer trains.
    """

    replicated = True

    def __init__(
        self,
        llm: "LLM",
        stop_ids: list[int],
        sampling: SamplingOptions,
        extra: dict[str, Any],
        tensor_parallel_group: "dist.ProcessGroup | None" = None,
        sleeps: bool = False,
    ) -> None:
        self.llm = llm
        self.stop_ids = list(stop_ids)
        self.sampling = sampling
        self.extra = extra
        self.group = tensor_parallel_group
        self.sleeps = sleeps
        self._names = itertools.count()
        self._running: set[str] = set()  # requests of `add` that are not finished
        self.collective = tensor_parallel_group is not None
        self.info = EngineInfo.of(llm.collective_rpc("policy_describe")[0])
        self._asleep = False
        if sleeps:
            self.sleep()

    # ---- memory ----

    def wake(self) -> bool:
        """See [`VllmEngine.wake`]. The key-value cache comes back in `load` or here, after the weights."""
        if not self._asleep:
            return False
        torch.accelerator.empty_cache()
        self.llm.wake_up(tags=["weights"])
        return True

    def sleep(self) -> None:
        """See [`VllmEngine.sleep`]. Level 2 drops the weights: they are sent again anyway after an optimizer step."""
        if self.sleeps and not self._asleep:
            self.llm.sleep(level=2)
            self._asleep = True

    # ---- weights ----

    def load(self, weights: Iterable[tuple[str, torch.Tensor]], policy_version: str) -> None:
        """See [`VllmEngine.load`].

        Raises:
            RuntimeError: vLLM kept the prefixes of the former weights.
        """
        self.abort()  # vLLM forgets no prefix while a request runs
        self.llm.collective_rpc("policy_load", args=(weights, policy_version))
        if self._asleep:
            self.llm.wake_up(tags=["kv_cache"])
            self._asleep = False
        if self.llm.reset_prefix_cache() is False:  # the probe would not see it: scoring takes nothing from the cache
            raise RuntimeError(
                "vLLM did not give up the prefixes that were computed with the former weights: requests other than the "
                "trainer's are running in its engine. Let them finish, or abort them."
            )

    def checksums(self) -> list[dict[str, int]]:
        """See [`VllmEngine.checksums`]."""
        own = self.llm.collective_rpc("policy_checksums")[0]
        return [own] if self.group is None else _gather(own, self.group)

    # ---- tokens ----

    def score(self, sequences: list[list[int]]) -> list[list[float]]:
        """See [`VllmEngine.score`]. With tensor parallelism all ranks of the group ask for the same."""
        from vllm import SamplingParams

        params = SamplingParams(temperature=1.0, max_tokens=1, prompt_logprobs=0, detokenize=False)
        outputs = self._ask(sequences, [params] * len(sequences))
        return [
            [table[i].logprob for i, table in zip(ids[1:], output.prompt_logprobs[1:])]
            for ids, output in zip(sequences, outputs)
        ]

    def generate(
        self, prompts: list[list[int]], max_new_tokens: list[int], sampling: list[SamplingOptions] | None = None
    ) -> list[Sample]:
        """See [`GenerationBackend.generate`]."""
        rows = [self.sampling] * len(prompts) if sampling is None else sampling
        requests = list(zip(prompts, max_new_tokens, rows, strict=True))
        if self.group is None:
            return self._sample(requests)
        # Every rank of the group computes a part of every sequence, and then keeps its own sequences.
        everywhere = _gather(requests, self.group)
        first = sum(len(part) for part in everywhere[: dist.get_rank(self.group)])
        samples = self._sample([request for part in everywhere for request in part])
        return samples[first : first + len(requests)]

    def _sample(self, requests: list[tuple[list[int], int, SamplingOptions]]) -> list[Sample]:
        if not requests:
            return []
        outputs = self._ask([prompt for prompt, _, _ in requests], [self._params(n, o) for _, n, o in requests])
        return [_sample_of(output) for output in outputs]

    def add(self, prompt: list[int], limit: int, options: SamplingOptions) -> str:
        """Put a request into the batch that `step` advances. Returns its name there."""
        from vllm.sampling_params import RequestOutputKind

        params = self._params(limit, options)
        params.output_kind = RequestOutputKind.FINAL_ONLY
        name = f"rollout-{next(self._names)}"
        self.llm.llm_engine.add_request(name, {"prompt_token_ids": prompt}, params)
        self._running.add(name)
        return name

    def step(self) -> list[tuple[str, Sample]]:
        """Decode one token of every running request. Returns the samples that are finished, by the names of `add`."""
        finished = [output for output in self.llm.llm_engine.step() if output.finished]
        self._running.difference_update(output.request_id for output in finished)
        return [(output.request_id, _sample_of(output)) for output in finished]

    def abort(self) -> None:
        """Give up the requests of `add` that are not finished: a batch that was broken off has left them."""
        if self._running:
            self.llm.llm_engine.abort_request(sorted(self._running))
            self._running.clear()

    def _params(self, limit: int, options: SamplingOptions) -> "SamplingParams":
        from vllm import SamplingParams

        return SamplingParams(
            max_tokens=limit,
            temperature=options.temperature,
            top_p=options.top_p,
            top_k=options.top_k,
            min_p=options.min_p,
            repetition_penalty=options.repetition_penalty,
            seed=options.seed,
            stop_token_ids=self.stop_ids,
            logprobs=0,  # of the sampled id alone
            detokenize=False,
            **self.extra,
        )

    def _ask(self, prompts: list[list[int]], params: "list[SamplingParams]") -> "list[RequestOutput]":
        return self.llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)


def _sample_of(output: "RequestOutput") -> Sample:
    [sampled] = output.outputs
    ids = list(sampled.token_ids)
    logps = [table[i].logprob for i, table in zip(ids, sampled.logprobs, strict=True)]
    return Sample(ids=ids, logps=logps, end=sample_end(sampled.finish_reason), routing=sampled.routed_experts)


def _gather(value: Any, group: "dist.ProcessGroup") -> list[Any]:
    everywhere: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(everywhere, value, group=group)
    return everywhere
