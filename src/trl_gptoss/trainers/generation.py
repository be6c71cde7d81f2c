"""Harmony rollouts in `GptOssGRPOTrainer`: the engine that makes them, what samples, and TRL's `_generate` with them."""

import copy
import math
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from accelerate.logging import get_logger
from transformers import PreTrainedModel
from trl import GRPOTrainer
from trl.extras.profiling import profiling_context
from trl.models import unwrap_model_for_generation

from ..environments import Environment
from ..harmony import HarmonyVocabulary, tool_spec
from ..rollouts import GenerationBackend, RolloutLimits, ToolRunner
from ..rollouts.sglang_backend import SglangBackend
from ..rollouts.transformers_backend import TransformersBackend
from ..rollouts.vllm.stream import rollout_backend
from ..trajectory import Trajectory
from .callbacks import SyncAgainCallback
from .harmony_rollouts import HarmonyRollouts, check_generation_kwargs
from .rollout_metrics import gather_rollout_metrics
from .rollout_weights import sampling_weights
from .router_replay import record_generation
from .sequence_options import check_corrected_parts

logger = get_logger(__name__)


class GenerationMixin(GRPOTrainer):
    """The methods of the trainer that make rollouts.

    Overridden, and why:
        `_generate`: the token-in/token-out loop, where TRL renders and parses a conversation again in every turn.
    """

    def _build_engine(self) -> HarmonyRollouts:
        stop_ids = HarmonyVocabulary.of(self._tokenizer).stop_ids
        self._check_stop_ids(stop_ids)
        self._base_model.generation_config.eos_token_id = list(stop_ids)
        self.eos_token_ids = list(stop_ids)
        args = self.args
        if self.weight_sync is not None:
            backend = rollout_backend(self.weight_sync.engine)
        else:
            self.generation_config.eos_token_id = list(stop_ids)
            backend = TransformersBackend(
                open_model=self._open_model,
                generation_config=self.generation_config,
                stop_ids=stop_ids,
                pad_id=self._tokenizer.pad_token_id,
                device=self.accelerator.device,
                collective=self._dist.is_zero3 or self._dist.is_fsdp,
                record_routing=record_generation if self._router is not None else None,
            )
        limits = RolloutLimits(
            max_turns=args.max_turns,
            max_rollout_tokens=args.max_rollout_tokens or sys.maxsize,
            max_context=self._context_length(),
            max_seconds=args.max_rollout_seconds,
        )
        runner = ToolRunner(
            output_limit=args.tool_output_limit,
            max_concurrent=args.max_concurrent_tools,
            event_loop=self.async_loop if self._has_async_funcs else None,
        )
        for tool in self.tools:  # hints and docstrings are checked now, not when the first prompt is rendered
            tool_spec(tool)
        return HarmonyRollouts(args, self._tokenizer, backend, runner, limits, self._any_rank, self._router)

    def use_backend(self, backend: GenerationBackend) -> None:
        """Let something else sample the Harmony rollouts, before `train`; tools, budgets and masks stay the same.

        Args:
            backend ([`GenerationBackend`]): e.g. [`SglangBackend`]. It has to sample from the current weights, and to end
                samples with the ids of `HarmonyVocabulary.stop_ids`.

        Raises:
            ValueError: rollouts are TRL's own here (another tokenizer, or a `rollout_func`), it samples with another temperature
                than the loss reads, or the loss cannot be corrected in parts.
        """
        if self._engine is None:
            raise ValueError(
                "use_backend needs the Harmony rollouts of this trainer; with another tokenizer, or with a rollout_func, "
                "completions are made by TRL. Pass a rollout_func instead."
            )
        if backend.sampling.temperature != self.temperature:
            raise ValueError(
                f"The backend samples with temperature={backend.sampling.temperature}, and the loss takes log-probs with "
                f"temperature={self.temperature} of the configuration. Make it with SamplingOptions(temperature={self.temperature})."
            )
        if self._correction is not None:
            check_corrected_parts(self.args)
        self._engine.backend = backend
        if isinstance(backend, SglangBackend):
            self.add_callback(SyncAgainCallback(backend))
        self._only_measures = False  # another program samples now, and rollout_correction_level="auto" corrects for it

    def _check_stop_ids(self, stop_ids: list[int]) -> None:
        """The three ids that end a Harmony turn are not negotiable, and the model must be able to sample them."""
        rows = self._base_model.config.get_text_config().vocab_size  # PEFT may wrap the embedding, ZeRO-3 empties it
        if max(stop_ids) >= rows:
            raise ValueError(
                f"The tokenizer ends turns with the ids {stop_ids}, but the model's embedding has only {rows} rows: they "
                "do not belong together. Pass the tokenizer of this model as processing_class."
            )
        check_generation_kwargs(self.args, stop_ids)

    def _context_length(self) -> int:
        if self.weight_sync is not None:
            return self.weight_sync.engine.info.max_model_len
        return self._base_model.config.get_text_config().max_position_embeddings

    @contextmanager
    def _open_model(self) -> Iterator[PreTrainedModel]:
        """The policy for `generate`, as TRL opens it: unwrapped, gathered under ZeRO-3 and FSDP1; in the mixed precision of
        training."""
        with (
            profiling_context(self, "transformers.generate"),
            unwrap_model_for_generation(
                self.model_wrapped,
                self.accelerator,
                gather_deepspeed3_params=self.args.ds3_gather_for_generation,
                gradient_checkpointing_kwargs=self.args.gradient_checkpointing_kwargs,
            ) as model,
            self._dist.summon_full_params(self.model_wrapped, recurse=False),
            sampling_weights(model, self.args.rollout_weights),
            # The forward that Accelerate prepares is not always the one that samples: `generate` goes around PEFT's wrapper,
            # and an evaluation before training leaves the policy as it is where the reference model has been prepared. Last,
            # because autocast remembers what it has cast, and these weights may be there for sampling only.
            self.accelerator.autocast(),
        ):
            yield model

    def _any_rank(self, here: bool) -> bool:
        flags = self.accelerator.gather(torch.tensor([int(here)], device=self.accelerator.device))
        return bool(flags.any())

    def _generate(self, prompts: list) -> tuple:
        with self._engine_awake():
            return super()._generate(prompts) if self._engine is None else self._generate_harmony(prompts)

    def _generate_harmony(self, prompts: list) -> tuple:
        mode = "train" if self.model.training else "eval"
        functions: list[dict[str, Callable]] = [{} for _ in prompts]
        if self.tools:
            functions = [{**a, **b} for a, b in zip(self._sync_tool_dicts, self._async_tool_dicts, strict=True)]
        episodes = self._engine.run(copy.deepcopy(prompts), self._rows, functions, self.environments)
        self._retire_hung_environments(episodes)
        trajectories = [e.trajectory for e in episodes]
        metrics, tokens = gather_rollout_metrics(trajectories, self._engine.stop_ids, self.accelerator)
        if mode == "train":
            self.state.num_input_tokens_seen += tokens
        self._metrics[mode]["num_tokens"] = [self.state.num_input_tokens_seen]
        for name, value in metrics.items():
            self._metrics[mode][name].append(value)
        logps = [t.sampling_logps for t in trajectories]
        return (
            [t.prompt_ids for t in trajectories],
            [t.completion_ids for t in trajectories],
            [t.loss_mask for t in trajectories],
            [e.messages for e in episodes],
            _complete(logps, trajectories),
            {"trajectories": trajectories},
            None,
            [],
        )

    def _retire_hung_environments(self, episodes: list) -> None:
        """An environment whose tool never returned may still be written to by that call: never use it again."""
        if self.environments is None:
            return
        hung = {id(env) for env, episode in zip(self.environments, episodes) if episode.toolbox.hung}
        for name, pool in self._environment_pool.items():
            self._environment_pool[name] = [env for env in pool if id(env) not in hung]

    def _end_environments(self) -> None:
        """Close the pooled environments; an evaluation after the run makes new ones."""
        if self.environments is None:
            return
        for name, pool in self._environment_pool.items():
            for environment in pool:
                if isinstance(environment, Environment):
                    try:
                        environment.close()
                    except Exception as error:  # foreign code, and a trained model waits to be saved behind it
                        logger.warning(f"{type(environment).__name__}.close() raised {type(error).__name__}: {error}")
            self._environment_pool[name] = []
        self.environments = None


def _complete(logps: list[list[float] | None], trajectories: list[Trajectory]) -> list[list[float]] | None:
    """NaN for rollouts whose sampler reported no log-probs, `None` if no rollout has any."""
    if all(row is None for row in logps):
        return None
    return [
        [math.nan] * len(trajectory.completion_ids) if row is None else row
        for row, trajectory in zip(logps, trajectories)
    ]
