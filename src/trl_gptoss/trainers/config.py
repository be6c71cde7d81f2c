"""`GptOssGRPOConfig`: TRL's `GRPOConfig` and the settings of the tool loop and of the on-policy ratio."""

from dataclasses import dataclass, field
from datetime import date
from typing import Literal

from trl import GRPOConfig

from ..environments.python_tool import MINIMUM_OUTPUT_LIMIT
from .schedule import check_on_policy_schedule
from .vllm_config import VllmRolloutConfig

_TRL_MAX_COMPLETION_LENGTH = GRPOConfig.__dataclass_fields__["max_completion_length"].default


@dataclass
class GptOssGRPOConfig(VllmRolloutConfig, GRPOConfig):
    r"""
    Configuration of [`GptOssGRPOTrainer`]. Everything of [`~trl.GRPOConfig`] keeps its meaning. The settings of vLLM are
    those of [`VllmRolloutConfig`].

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
        experts_token_chunk (`int`, *optional*):
            Tokens that the experts process at a time: less memory, one more first product in backward. `None` leaves
            it as the model has it, which is off for a new one. Needs `experts_implementation="gptoss_fused"`.
        fused_elementwise (`bool`, *optional*, defaults to `False`):
            Run RMSNorm and the rotary embedding through liger-kernel (extra `fast`). GPT-OSS on CUDA only.
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
    experts_token_chunk: int | None = field(
        default=None,
        metadata={"help": "Tokens that experts_implementation='gptoss_fused' processes at a time; None for all."},
    )
    fused_elementwise: bool = field(
        default=False,
        metadata={"help": "RMSNorm and rotary embedding of GPT-OSS through liger-kernel (CUDA, extra `fast`)."},
    )

    def __post_init__(self) -> None:
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
        if not self.tool_timeout > 0:  # refuses NaN, too
            raise ValueError(f"tool_timeout is {self.tool_timeout} seconds, it must be positive.")
        if self.prompt_date is not None:
            try:
                written = date.fromisoformat(self.prompt_date).isoformat()
            except ValueError:
                written = None
            if written != self.prompt_date:  # Python also reads 20260203 and 2026-W06-2
                raise ValueError(f"prompt_date is {self.prompt_date!r}, expected a date as YYYY-MM-DD.")
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
        if self.on_policy == "force":
            check_on_policy_schedule(self.gradient_accumulation_steps, self.steps_per_generation, self.num_iterations)

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
