"""`GptOssGRPOConfig`: TRL's `GRPOConfig` and the settings of the tool loop and of the on-policy ratio."""

import math
from dataclasses import dataclass, field
from datetime import date
from typing import Literal

from trl import GRPOConfig

from ..environments.python_tool import MINIMUM_OUTPUT_LIMIT
from .correction_config import RolloutCorrectionConfig, correction_options
from .freezing import check_freeze
from .saving_config import SavingConfig, check_saving_config
from .schedule import check_on_policy_schedule
from .vllm_config import VllmRolloutConfig

_INTEGERS = (
    *("on_policy_check_steps", "max_turns", "max_rollout_tokens", "tool_output_limit", "max_concurrent_tools"),
    *("log_trajectories", "log_completions_steps", "experts_token_chunk", "max_tokens_per_micro_batch", "oom_retries"),
    *("sequence_parallel_size", "max_completion_length", "max_tool_calling_iterations"),
)
_TRL_MAX_COMPLETION_LENGTH = GRPOConfig.__dataclass_fields__["max_completion_length"].default


@dataclass
class GptOssGRPOConfig(RolloutCorrectionConfig, SavingConfig, VllmRolloutConfig, GRPOConfig):
    r"""
    Configuration of [`GptOssGRPOTrainer`]. Everything of [`~trl.GRPOConfig`] keeps its meaning. The settings of rollout
    correction are those of [`RolloutCorrectionConfig`]; what is saved and published is described in [`SavingConfig`], what
    vLLM adds in [`VllmRolloutConfig`].

    Parameters:
        on_policy (`str`, *optional*, defaults to `"auto"`):
            `"auto"`: the ratio is exactly 1 while the weights are those that generated the batch; later optimizer
            steps on the same batch compare with log-probs of the generating weights. `"force"`: the same, but a
            configuration in which any optimizer step would be off-policy is an error. `"off"`: TRL's behaviour.
        on_policy_check_steps (`int`, *optional*, defaults to `10`):
            Measure `on_policy/max_log_ratio_recomputed` every so many optimizer steps, at the cost of one more forward
            of one micro-batch. `0` never measures it.
        max_turns (`int`, *optional*):
            Most turns the policy takes in one rollout. The same as `max_tool_calling_iterations + 1`, of which it is
            enough to set one. `None` for no limit.
        max_rollout_tokens (`int`, *optional*):
            Most tokens of one rollout after the prompt, tool results included. The same as `max_completion_length`,
            of which it is enough to set one.
        max_rollout_seconds (`float`, *optional*):
            Most wall-clock time of one rollout in seconds, waiting for the engine and for tools included; what was
            sampled until then is trained on. `None` for no limit. Harmony rollouts only.
        executor (`str`, *optional*, defaults to `"bubblewrap"`):
            Where the code of the policy runs, if `environment_factory` is [`PythonTool`], a class derived from it, or
            a `functools.partial` of one that sets no executor itself.
        tool_timeout (`float`, *optional*, defaults to `10.0`):
            Wall-clock limit of one tool call in seconds, where the environment sets no `tool_timeout` of its own.
        tool_output_limit (`int`, *optional*, defaults to `8192`):
            Most characters of one tool result that the policy is shown, the notice of the cut included; at least 128.
            Where the environment sets no `tool_output_limit` of its own.
        max_concurrent_tools (`int`, *optional*, defaults to `32`):
            Most tool calls that one process runs at the same time.
        wait_for_tools (`bool`, *optional*, defaults to `False`):
            The next turns of a batch are sampled when the tools of all its rollouts have returned: what is sampled together then
            does not depend on how long tools take, and the last bit neither. Harmony rollouts by transformers' `generate` only.
        reasoning_effort (`str`, *optional*, defaults to `"medium"`):
            `"low"`, `"medium"` or `"high"` in the system message of Harmony prompts; a column `reasoning_effort` of
            the data set goes before it.
        prompt_date (`str`, *optional*):
            Date in the system message of Harmony prompts, as YYYY-MM-DD; `None` leaves it out. A fixed date keeps a
            resumed run on the same prompts.
        log_trajectories (`int`, *optional*, defaults to `4`):
            Sampled rollouts written to `OUTPUT_DIR/trajectories.jsonl` at each logging step. `0` writes none.
        log_completions_steps (`int`, *optional*, defaults to `1`):
            With `log_completions`, conversations are printed at those logging steps that are a multiple of it.
        router_aux_loss_coef (`float`, *optional*, defaults to `0.0`):
            Weight of the router's load-balancing loss. TRL takes the model config's value, which is 0.9 for GPT-OSS.
        router_dtype (`str`, *optional*):
            `"float32"` computes the router's logits and scores in float32; `None` in the dtype of the model. GPT-OSS
            only.
        router_deterministic_top_k (`bool`, *optional*, defaults to `False`):
            Of experts with equal logits, take the one with the lower index, whatever device or batch shape. GPT-OSS
            only.
        router_replay (`str`, *optional*, defaults to `"off"`):
            `"rollout"`: the trainer's forward takes the experts that the sampler took (R3). `"old"`: optimizer steps on
            the same batch take those of the forward that gave the old log-probs (R2). GPT-OSS only.
        experts_token_chunk (`int`, *optional*):
            Tokens that the experts process at a time: less memory, one more first product in backward. `None` leaves
            it as the model has it, which is off for a new one. Needs `experts_implementation="gptoss_fused"`.
        fused_elementwise (`bool`, *optional*, defaults to `False`):
            Run RMSNorm and the rotary embedding through liger-kernel (extra `fast`). GPT-OSS on CUDA only.
        activation_offloading (`bool`, *optional*, defaults to `False`):
            Keep the inputs of checkpointed layers in pinned host memory until backward; copied beside the computation.
            Needs `activation_checkpointing`, and as many bytes on the host as it frees.
        freeze (`list[str]`, *optional*):
            Parts of the model that are not trained: `"attention"` (projections and sinks), `"sinks"`, `"router"`,
            `"experts"`, `"embeddings"` (input embedding and head). An error with PEFT.
        padding_free (`bool`, *optional*):
            Pack the real tokens of all rows into one row, in every forward pass. `None`: where the model is GPT-OSS and
            its attention keeps packed sequences apart (`sink_fa3`, `flash_attention_4`).
        max_tokens_per_micro_batch (`int`, *optional*):
            Most tokens that one device takes through the model at a time, prompts included; the rows of a device are
            divided accordingly, and a row that is longer goes alone. The loss does not depend on it. `None`: all
            `per_device_train_batch_size` rows at a time.
        oom_retries (`int`, *optional*, defaults to `0`):
            How often in a run a micro-batch that ran out of memory is divided in two and tried again; the smaller
            `max_tokens_per_micro_batch` then stays. Needs packed rows and a single process, and holds a copy of the gradients.
        sequence_parallel_size (`int`, *optional*, defaults to `1`):
            Ranks that share every sequence (Ulysses). Every rank still has its own batch; the group works on them one
            after another. Divides the number of processes and the model's heads. Not Accelerate's `cp_size` or `sp_size`.
    """

    on_policy: Literal["auto", "force", "off"] = field(
        default="auto",
        metadata={
            "help": "'auto': ratio exactly 1 while the weights are those that generated the batch; 'force': the same, "
            "and a configuration with off-policy optimizer steps is an error; 'off': TRL's behaviour."
        },
    )
    on_policy_check_steps: int = field(
        default=10,
        metadata={"help": "Measure `on_policy/max_log_ratio_recomputed` every so many optimizer steps; 0 for never."},
    )
    max_turns: int | None = field(
        default=None,
        metadata={"help": "Most turns of the policy in one rollout: `max_tool_calling_iterations` + 1."},
    )
    max_rollout_tokens: int | None = field(
        default=None,
        metadata={
            "help": "Most tokens of one rollout after the prompt, tool results included: `max_completion_length`."
        },
    )
    max_rollout_seconds: float | None = field(
        default=None,
        metadata={"help": "Most wall-clock time of one rollout in seconds; None for no limit."},
    )
    executor: str = field(
        default="bubblewrap",
        metadata={"help": "Where the policy's code runs, if the environment is (derived from) PythonTool."},
    )
    tool_timeout: float = field(
        default=10.0,
        metadata={"help": "Wall-clock limit of one tool call in seconds, unless the environment sets its own."},
    )
    tool_output_limit: int = field(
        default=8192,
        metadata={
            "help": "Most characters of one tool result that the policy is shown, unless the environment sets its own."
        },
    )
    max_concurrent_tools: int = field(
        default=32,
        metadata={"help": "Most tool calls that one process runs at the same time."},
    )
    wait_for_tools: bool = field(
        default=False,
        metadata={"help": "Sample the next turns of a batch when all its tools have returned, so that runs repeat."},
    )
    reasoning_effort: Literal["low", "medium", "high"] = field(
        default="medium",
        metadata={
            "help": "Reasoning effort in Harmony system messages; a data set column `reasoning_effort` goes before it."
        },
    )
    prompt_date: str | None = field(
        default=None,
        metadata={"help": "Date (YYYY-MM-DD) in Harmony system messages; None leaves it out."},
    )
    log_trajectories: int = field(
        default=4,
        metadata={"help": "Rollouts written to OUTPUT_DIR/trajectories.jsonl at each logging step; 0 for none."},
    )
    log_completions_steps: int = field(
        default=1,
        metadata={"help": "With `log_completions`, print at logging steps that are a multiple of it."},
    )
    router_aux_loss_coef: float | None = field(
        default=0.0,
        metadata={"help": "Weight of the router's load-balancing loss (TRL would take 0.9 from GPT-OSS's config)."},
    )
    router_dtype: Literal["float32"] | None = field(
        default=None,
        metadata={"help": "'float32' computes GPT-OSS's router logits and scores in float32; None as the model does."},
    )
    router_deterministic_top_k: bool = field(
        default=False,
        metadata={"help": "Of experts with equal router logits take the lower index (GPT-OSS)."},
    )
    router_replay: Literal["off", "rollout", "old"] = field(
        default="off",
        metadata={
            "help": "'rollout': take the experts that the sampler took; 'old': those of the forward that gave the old "
            "log-probs; 'off': the router chooses (GPT-OSS)."
        },
    )
    experts_token_chunk: int | None = field(
        default=None,
        metadata={"help": "Tokens that experts_implementation='gptoss_fused' processes at a time; None for all."},
    )
    fused_elementwise: bool = field(
        default=False,
        metadata={"help": "RMSNorm and rotary embedding of GPT-OSS through liger-kernel (CUDA, extra `fast`)."},
    )
    activation_offloading: bool = field(
        default=False,
        metadata={"help": "Keep the inputs of checkpointed layers in pinned host memory until backward."},
    )
    freeze: list[str] | None = field(
        default=None,
        metadata={
            "help": "Parts that are not trained: attention, sinks, router, experts, embeddings. An error with PEFT."
        },
    )
    padding_free: bool | None = field(
        default=None,
        metadata={"help": "Pack the rows in every forward pass; None where GPT-OSS runs on an attention that can."},
    )
    max_tokens_per_micro_batch: int | None = field(
        default=None,
        metadata={"help": "Most tokens that one device takes through the model at a time; None for all rows at once."},
    )
    oom_retries: int = field(
        default=0,
        metadata={
            "help": "How often a micro-batch that ran out of memory is divided and tried again (one process only)."
        },
    )
    sequence_parallel_size: int = field(
        default=1,
        metadata={"help": "Ranks that share every sequence (Ulysses); 1 for none."},
    )

    def __post_init__(self) -> None:
        self._read_yaml_values()
        self._unify_budgets()
        super().__post_init__()
        for name, least in (
            ("tool_output_limit", MINIMUM_OUTPUT_LIMIT),
            ("max_concurrent_tools", 1),
            ("on_policy_check_steps", 0),
            ("log_trajectories", 0),
            ("log_completions_steps", 1),
        ):
            if getattr(self, name) < least:
                raise ValueError(f"{name} is {getattr(self, name)}, it must be at least {least}.")
        if not 0 < self.temperature < math.inf:
            raise ValueError(
                f"temperature is {self.temperature}, it must be positive and finite: the loss takes the log-probs of logits "
                "divided by it. To sample the most likely tokens set top_k=1."
            )
        if not 0 <= self.beta < math.inf:
            raise ValueError(f"beta is {self.beta}, it must be at least 0, which is no KL term.")
        if not 0 < self.tool_timeout < math.inf:  # refuses NaN, too
            raise ValueError(f"tool_timeout is {self.tool_timeout} seconds, it must be positive and finite.")
        if self.max_rollout_seconds is not None and not 0 < self.max_rollout_seconds < math.inf:
            raise ValueError(
                f"max_rollout_seconds is {self.max_rollout_seconds}, it must be positive and finite, or None for no limit."
            )
        if self.wait_for_tools and self.use_vllm:
            raise ValueError(
                "wait_for_tools=True is for rollouts that transformers' generate samples in waves; vLLM takes requests while it "
                "samples, and what it samples together is its own choice. Remove one of wait_for_tools and use_vllm."
            )
        if self.prompt_date is not None:
            try:
                written = date.fromisoformat(self.prompt_date).isoformat()
            except (TypeError, ValueError):
                written = None
            if written != self.prompt_date:  # Python also reads 20260203 and 2026-W06-2
                raise ValueError(f"prompt_date is {self.prompt_date!r}, expected a date as YYYY-MM-DD.")
        if self.loss_type == "dr_grpo" and self.max_completion_length is None:
            raise ValueError(
                "loss_type='dr_grpo' divides by max_rollout_tokens, which is None. Set it, or another loss_type."
            )
        if self.on_policy not in ("auto", "force", "off"):
            raise ValueError(f"on_policy is {self.on_policy!r}, expected 'auto', 'force' or 'off'.")
        if self.reasoning_effort not in ("low", "medium", "high"):
            raise ValueError(f"reasoning_effort is {self.reasoning_effort!r}, expected 'low', 'medium' or 'high'.")
        if self.router_dtype not in (None, "float32"):
            raise ValueError(
                f"router_dtype is {self.router_dtype!r}, expected 'float32', or None for the model's own."
            )
        if self.experts_token_chunk is not None and self.experts_token_chunk < 1:
            raise ValueError(
                f"experts_token_chunk is {self.experts_token_chunk}, it must be at least 1, or None to leave it off."
            )
        if self.activation_offloading and not self.activation_checkpointing:
            raise ValueError(
                "activation_offloading=True moves the inputs of checkpointed layers, and activation_checkpointing is "
                f"{self.activation_checkpointing}. Set activation_checkpointing=True, or activation_offloading=False."
            )
        if self.router_replay not in ("off", "rollout", "old"):
            raise ValueError(f"router_replay is {self.router_replay!r}, expected 'off', 'rollout' or 'old'.")
        if self.router_replay == "old" and self.on_policy == "off":
            raise ValueError(
                "router_replay='old' replays the forward that on_policy='auto' takes for the old log-probs; with "
                "on_policy='off' that is TRL's, which records nothing. Set on_policy='auto'."
            )
        used = self.steps_per_generation * self.num_iterations
        if self.router_replay == "rollout" and self.on_policy == "off" and self.gradient_accumulation_steps % used:
            raise ValueError(
                f"router_replay='rollout' with on_policy='off', and a generation batch is used for {used} micro-batches, of which "
                f"gradient_accumulation_steps={self.gradient_accumulation_steps} make an optimizer step: the old log-probs are TRL's, "
                "at the router's own choice, and the ratio would compare two functions. Set on_policy='auto'."
            )
        correction_options(self)
        check_freeze(self.freeze)
        self._check_padding_free()
        check_saving_config(self)
        if self.on_policy == "force":
            check_on_policy_schedule(self.gradient_accumulation_steps, self.steps_per_generation, self.num_iterations)

    def _read_yaml_values(self) -> None:
        """A recipe's bare `off` is False for YAML, a date is a date, and nothing keeps a fraction from being an integer."""
        for name in ("on_policy", "router_replay", "rollout_correction_level"):
            if getattr(self, name) is False:
                setattr(self, name, "off")
        if isinstance(self.prompt_date, date):
            self.prompt_date = self.prompt_date.isoformat()
        for name in _INTEGERS:
            value = getattr(self, name)
            if value is not None and not isinstance(value, int):
                raise ValueError(f"{name} is {value!r}, it must be a whole number.")

    def _check_padding_free(self) -> None:
        if self.sequence_parallel_size < 1:
            raise ValueError(
                f"sequence_parallel_size is {self.sequence_parallel_size}, it must be at least 1 (1 for no sequence parallelism)."
            )
        if self.max_tokens_per_micro_batch is not None and self.max_tokens_per_micro_batch < 1:
            raise ValueError(
                f"max_tokens_per_micro_batch is {self.max_tokens_per_micro_batch}, it must be at least 1, or None."
            )
        if self.oom_retries < 0:
            raise ValueError(f"oom_retries is {self.oom_retries}, it must be at least 0.")
        if self.padding_free is False and (
            self.sequence_parallel_size > 1 or self.max_tokens_per_micro_batch is not None or self.oom_retries
        ):
            raise ValueError(
                f"padding_free=False with sequence_parallel_size={self.sequence_parallel_size}, "
                f"max_tokens_per_micro_batch={self.max_tokens_per_micro_batch} and oom_retries={self.oom_retries}: all of them "
                "work on packed rows. Remove padding_free."
            )

    def _unify_budgets(self) -> None:
        """`max_turns` and `max_rollout_tokens` are TRL's budgets under the names of this loop: keep both in step."""
        if self.max_turns is not None:
            if self.max_turns < 1:
                raise ValueError(f"max_turns is {self.max_turns}, it must be at least 1.")
            if self.max_tool_calling_iterations not in (None, self.max_turns - 1):
                raise ValueError(
                    f"max_turns={self.max_turns} allows {self.max_turns - 1} rounds of tool calls, but "
                    f"max_tool_calling_iterations={self.max_tool_calling_iterations}. Set only one of them."
                )
            self.max_tool_calling_iterations = self.max_turns - 1
        elif self.max_tool_calling_iterations is not None:
            self.max_turns = self.max_tool_calling_iterations + 1
        if self.max_rollout_tokens is not None:
            if self.max_rollout_tokens < 1:
                raise ValueError(f"max_rollout_tokens is {self.max_rollout_tokens}, it must be at least 1.")
            if self.max_completion_length not in (_TRL_MAX_COMPLETION_LENGTH, self.max_rollout_tokens):
                raise ValueError(
                    f"max_rollout_tokens={self.max_rollout_tokens} and "
                    f"max_completion_length={self.max_completion_length} are the same budget. Set only one of them."
                )
            self.max_completion_length = self.max_rollout_tokens
        else:
            self.max_rollout_tokens = self.max_completion_length
