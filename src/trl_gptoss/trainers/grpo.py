"""`GptOssGRPOTrainer`: TRL's GRPO with a token-exact tool loop and a ratio that is exactly 1 where it has to be."""

import copy
import functools
import inspect
import math
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from accelerate.logging import get_logger
from accelerate.utils import gather_object, is_peft_model
from datasets import Dataset, DatasetDict, IterableDataset, IterableDatasetDict
from torch import nn
from torch.utils.data import Sampler
from transformers import (
    AutoConfig,
    AutoProcessor,
    BitsAndBytesConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    ProcessorMixin,
    TrainerCallback,
)
from transformers.trainer_callback import ProgressCallback
from trl import GRPOTrainer
from trl.extras.profiling import profiling_context
from trl.models import unwrap_model_for_generation
from trl.trainer.grpo_trainer import EnvironmentFactory, RewardFunc, RolloutFunc
from trl.trainer.utils import get_config_model_id

from .._compat import leave_head_to_root, silence_renamed_attributes
from ..attention import selftest
from ..environments import Environment
from ..harmony import HarmonyVocabulary, is_harmony, set_response_template, tool_spec
from ..hub.adapters import train_sinks
from ..hub.publish import check_save_format
from ..parallelism import keep_float32_results
from ..rollouts import GenerationBackend, RolloutLimits, ToolRunner
from ..rollouts.sglang_backend import SglangBackend
from ..rollouts.transformers_backend import TransformersBackend
from ..rollouts.vllm.stream import rollout_backend
from ..trajectory import Trajectory
from .callbacks import RolloutProgressCallback, SyncAgainCallback
from .config import GptOssGRPOConfig
from .corrected_loss import CorrectionMixin
from .environments import (
    bind_environments,
    check_environment_classes,
    check_environment_tools,
    check_tool_names,
)
from .experts_options import check_experts_options, prepare_experts
from .freezing import freeze
from .guards import check_model
from .harmony_rollouts import HarmonyRollouts, check_generation_kwargs, check_template_kwargs
from .loading import ATTENTION, is_gpt_oss, load_reward_models, model_init_kwargs
from .memory_guard import MemoryMixin
from .offload import CheckpointOffload
from .on_policy import OnPolicyMixin
from .optimizer_options import check_optimizer
from .resumable import ResumableMixin
from .reward_guard import discard_failed_rows, guard
from .rollout_metrics import gather_rollout_metrics
from .rollout_weights import check_rollout_weights, sampling_weights
from .router_replay import record_generation
from .sampled_logs import SampledLogs, SampledRollout
from .sampling import EpochRepeatSampler
from .saving import SavingMixin
from .sequence_options import check_corrected_parts, choose_padding_free
from .vllm_rollouts import VllmMixin

if TYPE_CHECKING:
    from peft import PeftConfig, PeftModel

logger = get_logger(__name__)


class GptOssGRPOTrainer(
    MemoryMixin, CorrectionMixin, OnPolicyMixin, ResumableMixin, SavingMixin, VllmMixin, GRPOTrainer
):
    """[`~trl.GRPOTrainer`] for GPT-OSS and other models.

    The tokenizer decides how completions are made: with a Harmony tokenizer by the token-in/token-out loop of
    `trl_gptoss.rollouts`, with any other one, or with a `rollout_func`, by TRL itself. Everything else is the same for
    all models. Arguments are those of [`~trl.GRPOTrainer`], with a [`GptOssGRPOConfig`]; reward functions additionally
    get `trajectories` (`list[Trajectory]`) with Harmony tokenizers, and `completions` hold every message with its
    channel.

    Overridden methods, and why:
        `__init__`: loading of GPT-OSS, guards, options of the experts, stop ids, the rollout engine.
        `create_accelerator_and_postprocess`: under FSDP2 log-probs stay in float32, and the head can be fused.
        `_generate_and_score_completions`: rows are kept for their columns; remembers which weights generated.
        `_generate`: the Harmony loop.
        `_calculate_rewards`: a failed reward function discards its rows; columns of `log_extra` stay complete.
        `_get_train_sampler`, `_start_epoch`: a shuffle that can be resumed in any epoch.
        `log`: sampled rollouts to disk, conversations to the terminal.
        In [`CorrectionMixin`]: `_generate_and_score_completions`, `_compute_loss`,
            `_get_per_token_logps_and_entropies`: rollout correction.
        In [`OnPolicyMixin`]: `compute_loss`, `training_step`, `_get_per_token_logps_and_entropies`: the ratio.
        In [`PaddingFreeMixin`]: the same and `_generate_and_score_completions`: packed rows, token budget, sequence
            parallelism.
        In [`RouterReplayMixin`]: `_generate_and_score_completions`, `compute_loss`, `training_step`: router replay.
        In [`MemoryMixin`]: `_prepare_inputs`, `compute_loss`, `training_step`: memory measured, explained, tried again.
        In [`ResumableMixin`]: `train`, `_init_training_state`, `_run_epoch`, `_save_rng_state`, `_load_rng_state`: exact
            resumption.
        In [`SavingMixin`]: `_save`, `create_model_card`, `push_to_hub`, `_push_from_checkpoint`: formats and publishing.
    """

    _config_class: type[GptOssGRPOConfig] = GptOssGRPOConfig
    _tag_names = ["trl", "grpo", "trl-gptoss"]

    def __init__(
        self,
        model: "str | PreTrainedModel | PeftModel",
        reward_funcs: RewardFunc | list[RewardFunc] | None = None,
        args: GptOssGRPOConfig | None = None,
        train_dataset: Dataset | IterableDataset | None = None,
        eval_dataset: Dataset
        | IterableDataset
        | DatasetDict
        | IterableDatasetDict
        | dict[str, Dataset | IterableDataset]
        | None = None,
        processing_class: PreTrainedTokenizerBase | ProcessorMixin | None = None,
        reward_processing_classes: PreTrainedTokenizerBase | list[PreTrainedTokenizerBase] | None = None,
        callbacks: list[TrainerCallback] | None = None,
        optimizers: tuple[torch.optim.Optimizer | None, torch.optim.lr_scheduler.LambdaLR | None] = (None, None),
        quantization_config: BitsAndBytesConfig | None = None,
        peft_config: "PeftConfig | None" = None,
        tools: list[Callable] | None = None,
        rollout_func: RolloutFunc | None = None,
        environment_factory: EnvironmentFactory | dict[str, EnvironmentFactory] | None = None,
    ) -> None:
        silence_renamed_attributes()
        model_id = model if isinstance(model, str) else get_config_model_id(model.config)
        if args is None:
            args = self._config_class(f"{model_id.split('/')[-1]}-{self._name}")
        if isinstance(model, str):
            reward_funcs = load_reward_models(reward_funcs, args.model_init_kwargs, args.trust_remote_code)
            args.model_init_kwargs = model_init_kwargs(model, args.model_init_kwargs, args.trust_remote_code)
            config = AutoConfig.from_pretrained(
                model,
                revision=(args.model_init_kwargs or {}).get("revision"),
                trust_remote_code=args.trust_remote_code,
            )
            experts = (args.model_init_kwargs or {}).get("experts_implementation")
        else:
            check_model(model)
            config, experts = model.config, model.config.get_text_config()._experts_implementation
        check_experts_options(args, config, experts)
        check_save_format(args.save_format, config)
        if processing_class is None:
            processing_class = AutoProcessor.from_pretrained(
                model_id,
                revision=(args.model_init_kwargs or {}).get("revision") if isinstance(model, str) else None,
                truncation_side="left",
                padding_side="left",
                trust_remote_code=args.trust_remote_code,
            )
        self.speaks_harmony = isinstance(processing_class, PreTrainedTokenizerBase) and is_harmony(processing_class)
        if self.speaks_harmony:
            set_response_template(processing_class)
            if args.use_transformers_continuous_batching:
                raise ValueError(
                    "use_transformers_continuous_batching=True does not work with Harmony rollouts: continuous batching "
                    "knows only the attention names of transformers. Unset it, or use use_vllm=True."
                )
            if rollout_func is None:
                check_template_kwargs(args, reward_funcs if isinstance(reward_funcs, list) else [reward_funcs])
        check_tool_names(tools or ())
        check_environment_classes(tools or (), environment_factory)
        environment_factory = bind_environments(environment_factory, args)
        self._before_loading(
            model, args, has_adapters=peft_config is not None or (not isinstance(model, str) and is_peft_model(model))
        )
        own_vllm = self.speaks_harmony or is_gpt_oss(config)
        with self._engine_of_our_own(args, own_vllm):
            super().__init__(
                model=model,
                reward_funcs=reward_funcs,
                args=args,
                train_dataset=train_dataset,
                eval_dataset=eval_dataset,
                processing_class=processing_class,
                reward_processing_classes=reward_processing_classes,
                callbacks=callbacks,
                optimizers=optimizers,
                quantization_config=quantization_config,
                peft_config=peft_config,
                tools=tools,
                rollout_func=rollout_func,
                environment_factory=environment_factory,
            )
        for offered in self._env_tools.values() if self.environment_factories is not None else ():
            check_environment_tools(self._standalone_tools, offered[len(self._standalone_tools) :])
        self._setup_router_replay(self._base_model)
        same_weights = args.rollout_weights == "trained"
        self._setup_correction(own_policy_samples=not args.use_vllm and rollout_func is None and same_weights)
        check_model(self._base_model)
        check_optimizer(args, self.accelerator)
        check_rollout_weights(args.rollout_weights, self._base_model.config, self.accelerator)
        self._train_sinks()
        reference = None if self.ref_model is None else self.accelerator.unwrap_model(self.ref_model)
        self._set_up_padding_free(choose_padding_free(args, self.model, self.accelerator))
        if self._corrects:
            check_corrected_parts(args)
        prepare_experts(args, self.model, reference, self.accelerator.device)
        if args.activation_offloading:
            CheckpointOffload(self._base_model)
        freeze(self.model, args.freeze)
        if self._base_model.config._attn_implementation == ATTENTION and self.accelerator.device.type == "cuda":
            selftest(self.accelerator.device)  # two seconds, before hours with a gradient that may be wrong
        self.reward_funcs = [
            f if isinstance(f, nn.Module) else guard(f, name, self._give_up)
            for f, name in zip(self.reward_funcs, self.reward_func_names)
        ]
        self.sampled_logs = SampledLogs(args, self._tokenizer, self.speaks_harmony and rollout_func is None)
        self._train_sampler: EpochRepeatSampler | None = None
        self._rows: list[dict[str, Any]] = []
        self._local_rewards: torch.Tensor | None = None
        if args.use_vllm and own_vllm:
            stop_ids = HarmonyVocabulary.of(self._tokenizer).stop_ids if self.speaks_harmony else self.eos_token_ids
            self._start_vllm(self._base_model, stop_ids, self._router is not None)
        self._engine = self._build_engine() if self.speaks_harmony and rollout_func is None else None
        if self.pop_callback(ProgressCallback) is not None:
            self.add_callback(RolloutProgressCallback())

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        if self.accelerator.is_fsdp2:
            keep_float32_results(self.accelerator.state.fsdp_plugin)
            leave_head_to_root(self.accelerator)

    def _before_loading(
        self, model: "str | PreTrainedModel | PeftModel", args: GptOssGRPOConfig, has_adapters: bool
    ) -> None:
        """For subclasses: called before TRL loads the policy or puts adapters into it."""

    @property
    def _base_model(self) -> PreTrainedModel:
        return self.model.get_base_model() if is_peft_model(self.model) else self.model

    def _train_sinks(self) -> None:
        if not self.args.train_sinks or not is_peft_model(self.model):
            return
        if self.beta != 0.0:
            raise ValueError(
                f"train_sinks=True does not go with beta={self.beta}: the KL term compares with the model whose adapters are "
                "disabled, in which the sinks would be the trained ones. Use beta=0.0, or train_sinks=False."
            )
        train_sinks(self.model)

    # ---- what a model card says ----

    def _describe_task(self) -> str:
        environments = sorted({_name_of(factory) for factory in (self.environment_factories or {}).values()})
        tools = sorted({tool.__name__ for tool in self.tools or ()})
        parts = ["Multi-turn rollouts" if environments or tools else "Single-turn completions"]
        parts += [f"environment {', '.join(environments)}"] if environments else []
        parts += [f"tools {', '.join(tools)}"] if tools else []
        parts += [f"at most {self.args.max_turns} turns"] if self.args.max_turns else []
        parts.append(f"at most {self.args.max_rollout_tokens} tokens after the prompt")
        return "; ".join(parts) + "."

    def _reward_weights(self) -> dict[str, float]:
        return dict(zip(self.reward_func_names, self.reward_weights.tolist()))

    # ---- generation ----

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

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        # Copies: TRL writes the trajectories into the rows, and an iterable data set may yield one object many times.
        self._rows = [dict(row) for row in inputs]
        self._check_columns(self._rows[0])
        training = self.model.training
        with self._without_second_forward():
            output = super()._generate_and_score_completions(self._rows)
        if training:
            self._generated_at = self.state.global_step
            self._add_targets(output)
            self.sampled_logs.remember(
                [
                    SampledRollout(
                        prompt=row.get("prompt"),
                        trajectory=row.get("trajectories"),
                        rewards=dict(zip(self.reward_func_names, rewards)),
                        advantage=advantage,
                    )
                    for row, rewards, advantage in zip(
                        self._rows, self._local_rewards.tolist(), self._row_advantages(output)
                    )
                ]
            )
        return output

    def _add_targets(self, output: dict[str, Any]) -> None:
        """For subclasses: what their loss needs beside TRL's advantages, in the order of `_rows`, before the shuffle."""

    def _row_advantages(self, output: dict[str, Any]) -> list[float]:
        """One advantage per rollout, for the log."""
        return output["advantages"].tolist()

    # ---- rewards, data, logs ----

    def _check_columns(self, row: dict[str, Any]) -> None:
        """Reward functions get the columns as keyword arguments, beside those of the rollouts."""
        if "prompt" not in row and self.environment_factories is None:  # an environment may say the prompt in `reset`
            raise ValueError(
                f"The data set has the columns {sorted(row)}, and none of them is `prompt`. Rename the column that holds the "
                "prompts, each a list of messages ([{'role': 'user', 'content': ...}])."
            )
        taken = {"prompts", "completions"} | ({"trajectories"} if self._engine is not None else set())
        clash = sorted(taken.intersection(row))
        if clash:
            raise ValueError(
                f"The data set has columns {clash}: reward functions get the rollouts themselves under these names. "
                "Rename the columns."
            )

    def _calculate_rewards(
        self, inputs: list[dict[str, Any]], prompts: list, completions: list, completion_ids_list: list[list[int]]
    ) -> torch.Tensor:
        rewards_NF = super()._calculate_rewards(inputs, prompts, completions, completion_ids_list)
        self._complete_extra_columns(len(prompts))
        rewards_NF = discard_failed_rows(rewards_NF)
        start = self.accelerator.process_index * len(prompts)
        self._local_rewards = rewards_NF[start : start + len(prompts)]
        return rewards_NF

    def _complete_extra_columns(self, rows: int) -> None:
        """None where `log_extra` was not called (a reward that failed, or that logs some batches only): TRL writes a table of the
        last batches, whose columns have to be of one length and about the same rollouts."""
        columns = self._logs["extra"]
        for name in set(gather_object(list(self._pending_extra_logs))) - set(columns):
            columns[name].extend([None] * len(self._logs["prompt"]))
        for name in set(columns) - set(self._pending_extra_logs):
            self._pending_extra_logs[name] = [None] * rows

    def _get_train_sampler(self, dataset: Dataset | None = None) -> Sampler:
        sampler = super()._get_train_sampler(dataset)
        if len(sampler) == 0:  # `train` would end at once, without an error, with the model as it was
            raise ValueError(
                f"The data set has {sampler.num_samples} row(s), and a generation batch takes {sampler.batch_size} different prompts "
                f"(generation_batch_size={self.args.generation_batch_size} completions, num_generations={self.num_generations}): "
                "nothing could be trained on. Set a larger num_generations, or smaller batches."
            )
        self._train_sampler = EpochRepeatSampler(
            data_source=sampler.data_source,
            mini_repeat_count=sampler.mini_repeat_count,
            batch_size=sampler.batch_size,
            repeat_count=sampler.repeat_count,
            shuffle=sampler.shuffle,
            seed=sampler.seed,
        )
        return self._train_sampler

    def _start_epoch(self, epoch: int) -> None:
        if self._train_sampler is not None:  # an iterable data set has none
            self._train_sampler.epoch = epoch

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        training = self.model.training
        # TRL prints a table of texts where we print conversations; what it writes to disk and to trackers stays.
        printed = self.num_completions_to_print
        if self._engine is not None:
            self.num_completions_to_print = 0
        try:
            super().log(logs, start_time)
        finally:
            self.num_completions_to_print = printed
        if training and self.accelerator.is_main_process:
            self.sampled_logs.write(self.state.global_step)


def _complete(logps: list[list[float] | None], trajectories: list[Trajectory]) -> list[list[float]] | None:
    """NaN for rollouts whose sampler reported no log-probs, `None` if no rollout has any."""
    if all(row is None for row in logps):
        return None
    return [
        [math.nan] * len(trajectory.completion_ids) if row is None else row
        for row, trajectory in zip(logps, trajectories)
    ]


def _name_of(factory: Callable) -> str:
    """The class or function behind a factory of environments."""
    while isinstance(factory, functools.partial):
        factory = factory.func
    return factory.__name__ if inspect.isclass(factory) or inspect.isfunction(factory) else type(factory).__name__
