"""vLLM in `GptOssGRPOTrainer`: our engine and weight sync in the place of TRL's for GPT-OSS models."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any

from transformers import PreTrainedModel
from trl import GRPOTrainer
from trl.extras.profiling import profiling_context

from ..rollouts.vllm.colocate import ColocateEngine
from ..rollouts.vllm.engine import VllmEngine
from .callbacks import SyncAgainCallback
from .policy_weights import PolicyWeights
from .rollout_weights import sampling_weights
from .vllm_setup import make_engine
from .weight_sync import WeightSync

if TYPE_CHECKING:
    from .config import GptOssGRPOConfig


class TrlGeneration:
    """Our engine behind the interface of [`~trl.generation.vllm_generation.VLLMGeneration`], for TRL's own tool loop
    (tokenizers without Harmony) and for rollout functions, which find it as `trainer.vllm_generation`.

    Args:
        engine ([`VllmEngine`]): what samples.
        prepare (`Callable`): brings the current weights to the engine.
        args ([`GptOssGRPOConfig`]): for the number of tokens.
    """

    def __init__(self, engine: VllmEngine, prepare: Any, args: "GptOssGRPOConfig") -> None:
        self.engine = engine
        self.prepare = prepare
        self.args = args
        self.mode = args.vllm_mode
        if isinstance(engine, ColocateEngine):
            self.llm = engine.llm  # TRL's tool loop asks it for the length of the context

    def sync_weights(self) -> None:
        """Bring the current weights to the engine, if it does not have them."""
        self.prepare()

    def generate(
        self,
        prompts: list[list[int]],
        images: list[list | None] | None,
        num_generations: int,
        profiler: AbstractContextManager | None = None,
    ) -> tuple:
        """As in TRL. `prompts` holds every prompt as often as it is to be continued."""
        if images is not None and any(image is not None for image in images):
            raise NotImplementedError("GPT-OSS takes no images.")
        room = self.engine.info.max_model_len - max(map(len, prompts), default=0)
        if room < 1:
            raise ValueError(
                f"A prompt leaves no room for a completion in vLLM's {self.engine.info.max_model_len} tokens."
            )
        context, budget = self.engine.info.max_model_len, self.args.max_completion_length
        limits = [context - len(prompt) if budget is None else min(budget, context - len(prompt)) for prompt in prompts]
        samples = self.engine.generate(prompts, limits)
        logps = [[[p] for p in sample.logps] for sample in samples]
        ids = [[[i] for i in sample.ids] for sample in samples]
        return prompts, [sample.ids for sample in samples], logps, ids


class VllmMixin(GRPOTrainer):
    """The parts of [`GptOssGRPOTrainer`] that start and feed a vLLM engine. Overrides nothing."""

    weight_sync: WeightSync | None = None

    @contextmanager
    def _engine_of_our_own(self, args: "GptOssGRPOConfig", ours: bool) -> Iterator[None]:
        """Keep TRL's constructor from starting its own engine, which would be without our worker extension."""
        if not (args.use_vllm and ours):
            yield
            return
        args.use_vllm = False
        try:
            yield
        finally:
            args.use_vllm = True
            self.use_vllm = True

    def _start_vllm(self, model: PreTrainedModel, stop_ids: list[int], record_routing: bool) -> None:
        """Start or connect to the engine, and put it where TRL looks for it."""
        engine = make_engine(self.args, model, self._tokenizer, self.accelerator, stop_ids, record_routing)
        self.weight_sync = WeightSync(
            engine,
            PolicyWeights(self.model, self._dist),
            self.accelerator,
            self.args.vllm_probe_every,
            self.args.vllm_probe_tolerance,
        )
        self.vllm_generation = TrlGeneration(engine, self._sync_vllm_weights, self.args)
        self._last_loaded_step = -1
        self.add_callback(SyncAgainCallback(self.weight_sync))

    def _sync_vllm_weights(self) -> None:
        """Wake the engine and bring the current weights to it, once for all turns of the rollouts that follow."""
        policy = self.accelerator.unwrap_model(self.model)
        with profiling_context(self, "sync_weights"), sampling_weights(policy, self.args.rollout_weights):
            self.weight_sync.prepare(self.state.global_step)
        mode = "train" if self.model.training else "eval"
        for name, value in self.weight_sync.metrics.items():
            self._metrics[mode][name].append(value)
        self.weight_sync.metrics = {}

    @contextmanager
    def _engine_awake(self) -> Iterator[None]:
        """Weights are synced before the block, and memory is given back after it."""
        if self.weight_sync is None:
            yield
            return
        self._sync_vllm_weights()
        try:
            yield
        finally:
            self.weight_sync.engine.sleep()
