"""`GptOssPPOConfig`: the settings of the critic, of GAE and of PPO's loss, on top of those that GRPO shares."""

from dataclasses import dataclass, field
from typing import Any, Literal

from transformers import SchedulerType
from trl import GRPOConfig

from .config import GptOssGRPOConfig

# Fields of GRPOConfig that PPO's loss does not read, and what does their work here.
_NOT_OF_PPO = {
    "loss_type": "the loss is PPO's; loss_normalization chooses its denominator",
    "scale_rewards": "advantages come from a critic; whiten_advantages scales them",
    "multi_objective_aggregation": "rewards are summed with reward_weights",
    "importance_sampling_level": "the ratio is that of a token",
    "delta": "dual_clip is this bound",
    "use_bias_correction_kl": "kl_estimator chooses the KL term",
    "top_entropy_quantile": "every policy token is trained on",
    "off_policy_mask_threshold": "clipping is what bounds later mini-batches",
    "use_adaptive_entropy": "entropy_coef is constant",
    "vespo_k_pos": "it belongs to loss_type='vespo'",
    "vespo_lambda_pos": "it belongs to loss_type='vespo'",
    "vespo_k_neg": "it belongs to loss_type='vespo'",
    "vespo_lambda_neg": "it belongs to loss_type='vespo'",
    "sapo_temperature_pos": "it belongs to loss_type='sapo'",
    "sapo_temperature_neg": "it belongs to loss_type='sapo'",
}


_BY_METRIC = (SchedulerType.REDUCE_ON_PLATEAU, SchedulerType.GREEDY)


class _GroupOfOne(int):
    """1, for the one comparison in which GRPOConfig asks whether a group is too small to be its own baseline."""

    def __lt__(self, other: Any) -> bool:
        return False


@dataclass
class GptOssPPOConfig(GptOssGRPOConfig):
    r"""
    Configuration of [`GptOssPPOTrainer`]. Everything of [`GptOssGRPOConfig`] keeps its meaning, but for the fields of
    GRPO's own loss, which are refused.

    An optimizer step is one mini-batch: `gradient_accumulation_steps` micro-batches of every process. The generation
    batch has `steps_per_generation` micro-batches, so `steps_per_generation / gradient_accumulation_steps` mini-batches.

    Parameters:
        num_generations (`int`, *optional*, defaults to `1`):
            Completions per prompt. The critic is the baseline, so one is enough.
        critic (`str`, *optional*):
            `"separate"`: a backbone of its own. `"shared"`: a value head on the hidden states of the policy's own
            forward. `"lora"`: a second adapter on the frozen base of a LoRA policy. `None`: `"lora"` with PEFT, else
            `"separate"`.
        critic_model_name_or_path (`str`, *optional*):
            Where the backbone of a separate critic comes from: a model, or the `critic` folder of a checkpoint, which
            brings its value head along. `None`: the weights the policy starts from.
        critic_learning_rate (`float`, *optional*):
            Learning rate of the critic, on the schedule of the policy. `None`: `learning_rate`.
        critic_warmup_steps (`int`, *optional*, defaults to `0`):
            Optimizer steps at the beginning that train the critic only. They count as steps of the run.
        critic_epochs (`int`, *optional*, defaults to `1`):
            Passes of the critic over a mini-batch for one of the policy. The policy stays on-policy: its step comes first, and
            values are asked for when a batch has been generated. Not with `critic="shared"`, which has no forward of its own.
        critic_mini_batches (`int`, *optional*, defaults to `1`):
            Updates of the critic in one pass: a mini-batch is divided into as many groups of micro-batches. Divides
            `gradient_accumulation_steps`. Not with `critic="shared"`.
        critic_detach (`bool`, *optional*, defaults to `False`):
            With `critic="shared"`: keep the value loss from the policy's weights and train the head only.
        value_coef (`float`, *optional*, defaults to `0.1`):
            With `critic="shared"` and `critic_detach=False`: weight of the value loss beside the policy's.
        gae_gamma (`float`, *optional*, defaults to `1.0`):
            Discount per step, in [0, 1].
        gae_lambda (`float`, *optional*, defaults to `1.0`):
            0 is TD(0), 1 is return minus value; in [0, 1].
        gae_level (`str`, *optional*, defaults to `"token"`):
            What a step is: a policy `"token"`, or a `"turn"`, all that is sampled between two tool results.
        bootstrap_truncated (`bool`, *optional*, defaults to `False`):
            Whether a rollout that a budget ended goes on with the critic's value of its last state. If not, running out
            of budget is an end like any other.
        whiten_advantages (`bool`, *optional*, defaults to `True`):
            Mean 0 and deviation 1 over the policy tokens of the generation batch of all processes.
        ppo_epochs (`int`, *optional*, defaults to `1`):
            Passes over a generation batch; the same as `num_iterations`, of which it is enough to set one.
        value_clip (`float`, *optional*):
            Most that one update may profit from moving a value, in units of the reward. `None` does not clip.
        dual_clip (`float`, *optional*):
            Bound of the ratio where the advantage is negative, above 1. `None` does not clip.
        loss_normalization (`str`, *optional*, defaults to `"token_mean"`):
            `"token_mean"`, `"sequence_mean"`, or `"fixed_length"` (completions times `max_completion_length`), counted
            over the whole mini-batch.
        kl_placement (`str`, *optional*, defaults to `"loss"`):
            Where the KL term of weight `beta` goes: the `"loss"` or the `"reward"`.
        kl_estimator (`str`, *optional*):
            `"k1"`, `"k2"` or `"k3"`. `None`: `"k3"` in the loss, `"k1"` in the reward. `"k1"` in the loss is refused,
            because its gradient is 0 on average.
        kl_controller (`str`, *optional*, defaults to `"fixed"`):
            `"fixed"`: the coefficient stays `beta`. `"adaptive"`: it starts there and steers to `kl_target`.
        kl_target (`float`, *optional*):
            Estimate of the KL divergence to hold, in nats per policy token. With the adaptive controller only.
        kl_horizon (`int`, *optional*, defaults to `10000`):
            Completions over which the adaptive coefficient may change by about a factor e^0.2.
    """

    num_generations: int | None = field(default=1, metadata={"help": "Completions per prompt; one is enough."})
    critic: Literal["separate", "shared", "lora"] | None = field(
        default=None,
        metadata={"help": "'separate', 'shared' or 'lora'; None takes 'lora' with PEFT and 'separate' without."},
    )
    critic_model_name_or_path: str | None = field(
        default=None,
        metadata={
            "help": "Backbone of a separate critic, or the `critic` folder of a checkpoint; None: the policy's."
        },
    )
    critic_learning_rate: float | None = field(
        default=None, metadata={"help": "Learning rate of the critic; None takes `learning_rate`."}
    )
    critic_warmup_steps: int = field(
        default=0, metadata={"help": "Optimizer steps at the beginning that train the critic only."}
    )
    critic_epochs: int = field(
        default=1, metadata={"help": "Passes of the critic over a mini-batch for one of the policy."}
    )
    critic_mini_batches: int = field(
        default=1, metadata={"help": "Updates of the critic in one pass; divides gradient_accumulation_steps."}
    )
    critic_detach: bool = field(
        default=False, metadata={"help": "With critic='shared': the value loss does not reach the policy's weights."}
    )
    value_coef: float = field(
        default=0.1,
        metadata={"help": "With critic='shared' and critic_detach=False: weight of the value loss."},
    )
    gae_gamma: float = field(default=1.0, metadata={"help": "Discount per step, in [0, 1]."})
    gae_lambda: float = field(default=1.0, metadata={"help": "0 is TD(0), 1 is return minus value."})
    gae_level: Literal["token", "turn"] = field(
        default="token", metadata={"help": "What a step of GAE is: a policy token, or a turn."}
    )
    bootstrap_truncated: bool = field(
        default=False,
        metadata={"help": "Rollouts that a budget ended go on with the critic's value of their last state."},
    )
    whiten_advantages: bool = field(
        default=True,
        metadata={"help": "Mean 0 and deviation 1 over the policy tokens of the generation batch of all processes."},
    )
    ppo_epochs: int = field(default=1, metadata={"help": "Passes over a generation batch: `num_iterations`."})
    value_clip: float | None = field(
        default=None, metadata={"help": "Clip range of the value loss in units of the reward; None does not clip."}
    )
    dual_clip: float | None = field(
        default=None, metadata={"help": "Bound of the ratio (> 1) where the advantage is negative; None: no bound."}
    )
    loss_normalization: Literal["token_mean", "sequence_mean", "fixed_length"] = field(
        default="token_mean", metadata={"help": "Denominator of the loss, counted over the whole mini-batch."}
    )
    kl_placement: Literal["loss", "reward"] = field(
        default="loss", metadata={"help": "Where the KL term of weight `beta` goes."}
    )
    kl_estimator: Literal["k1", "k2", "k3"] | None = field(
        default=None, metadata={"help": "Estimator of the KL term; None: k3 in the loss, k1 in the reward."}
    )
    kl_controller: Literal["fixed", "adaptive"] = field(
        default="fixed", metadata={"help": "Whether the KL coefficient stays `beta` or steers to `kl_target`."}
    )
    kl_target: float | None = field(
        default=None, metadata={"help": "KL divergence to hold, in nats per policy token (adaptive controller)."}
    )
    kl_horizon: int = field(
        default=10_000, metadata={"help": "Completions over which the adaptive coefficient changes by about e^0.2."}
    )

    def __post_init__(self) -> None:
        self._refuse_fields_of_grpo()
        self._unify_epochs()
        # GRPO needs a group to have a baseline and refuses a group of one; PPO's baseline is the critic.
        if self.num_generations == 1:
            self.num_generations = _GroupOfOne(1)
        super().__post_init__()
        self.num_generations = int(self.num_generations)
        self._check_choices()
        self._check_numbers()
        self._check_critic()
        self._check_kl()
        if self.steps_per_generation % self.gradient_accumulation_steps:
            raise ValueError(
                f"A generation batch of steps_per_generation={self.steps_per_generation} micro-batches is no whole number "
                f"of mini-batches of gradient_accumulation_steps={self.gradient_accumulation_steps}. Set "
                "steps_per_generation to a multiple of gradient_accumulation_steps (the default is one mini-batch)."
            )
        if self.gradient_accumulation_steps % self.critic_mini_batches:
            raise ValueError(
                f"critic_mini_batches={self.critic_mini_batches} does not divide the "
                f"gradient_accumulation_steps={self.gradient_accumulation_steps} micro-batches of a mini-batch. Set "
                "gradient_accumulation_steps to a multiple of it, with a smaller per_device_train_batch_size."
            )
        if self.lr_scheduler_type in _BY_METRIC:
            raise ValueError(
                f"lr_scheduler_type={self.lr_scheduler_type.value!r} goes by a metric, and the critic's learning rate follows a "
                "schedule of steps. Use one such as 'linear', 'cosine' or 'constant_with_warmup'."
            )
        if self.fp16:
            raise ValueError(
                "fp16=True needs one loss scaler for two optimizers, which is not supported. Use bf16=True, or neither."
            )

    def _refuse_fields_of_grpo(self) -> None:
        for name, instead in _NOT_OF_PPO.items():
            default = GRPOConfig.__dataclass_fields__[name].default
            if getattr(self, name) != default:
                raise ValueError(
                    f"{name}={getattr(self, name)!r} has no effect in PPO: {instead}. Leave it at {default!r}."
                )

    def _unify_epochs(self) -> None:
        if self.ppo_epochs < 1:
            raise ValueError(f"ppo_epochs is {self.ppo_epochs}, it must be at least 1.")
        if self.ppo_epochs != 1 and self.num_iterations not in (1, self.ppo_epochs):
            raise ValueError(
                f"ppo_epochs={self.ppo_epochs} and num_iterations={self.num_iterations} are the same number. Set only "
                "one of them."
            )
        self.ppo_epochs = self.num_iterations = max(self.ppo_epochs, self.num_iterations)

    def _check_choices(self) -> None:
        for name, choices in (
            ("critic", (None, "separate", "shared", "lora")),
            ("gae_level", ("token", "turn")),
            ("loss_normalization", ("token_mean", "sequence_mean", "fixed_length")),
            ("kl_placement", ("loss", "reward")),
            ("kl_estimator", (None, "k1", "k2", "k3")),
            ("kl_controller", ("fixed", "adaptive")),
        ):
            if getattr(self, name) not in choices:
                raise ValueError(
                    f"{name} is {getattr(self, name)!r}, expected one of {', '.join(map(repr, choices))}."
                )

    def _check_numbers(self) -> None:
        for name in ("gae_gamma", "gae_lambda"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name} is {getattr(self, name)}, expected a number in [0, 1].")
        if self.critic_warmup_steps < 0:
            raise ValueError(f"critic_warmup_steps is {self.critic_warmup_steps}, it must be at least 0.")
        for name in ("critic_epochs", "critic_mini_batches"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}, it must be at least 1.")
            if getattr(self, name) > 1 and self.critic == "shared":
                raise ValueError(
                    f"{name}={getattr(self, name)} needs a critic with a forward of its own, but critic='shared' reads the "
                    "policy's. Use critic='separate' or 'lora'."
                )
        for name, least in (("value_clip", 0), ("dual_clip", 1), ("critic_learning_rate", 0), ("value_coef", 0)):
            value = getattr(self, name)
            if value is not None and not value > least:
                raise ValueError(f"{name} is {value}, it must be greater than {least}.")
        if self.loss_normalization == "fixed_length" and self.max_completion_length is None:
            raise ValueError(
                "loss_normalization='fixed_length' divides by max_rollout_tokens, which is None. Set it, or another normalization."
            )
        high = self.epsilon if self.epsilon_high is None else self.epsilon_high
        if self.dual_clip is not None and self.dual_clip <= 1 + high:
            raise ValueError(
                f"dual_clip={self.dual_clip} is not above the upper clip bound {1 + high}: it is meant for ratios far "
                "outside of the clip range. 3 to 10 are usual."
            )

    def _check_critic(self) -> None:
        if self.critic not in (None, "separate") and self.critic_model_name_or_path is not None:
            raise ValueError(
                f"critic_model_name_or_path has no effect with critic={self.critic!r}, which has no backbone of its own. "
                "Remove it, or use critic='separate'."
            )
        default = type(self).__dataclass_fields__["value_coef"].default
        if self.value_coef != default and (self.critic != "shared" or self.critic_detach):
            raise ValueError(
                f"value_coef={self.value_coef} weighs the value loss against the policy's where both reach the same "
                f"weights: with critic='shared' and critic_detach=False. Found critic={self.critic!r} and "
                f"critic_detach={self.critic_detach}. Set critic_learning_rate instead."
            )
        if self.critic == "shared" and (
            self.max_tokens_per_micro_batch is not None or self.sequence_parallel_size > 1
        ):
            raise ValueError(
                "critic='shared' reads the hidden states of one forward over a micro-batch, which "
                f"max_tokens_per_micro_batch={self.max_tokens_per_micro_batch} and "
                f"sequence_parallel_size={self.sequence_parallel_size} divide. Use critic='separate' or 'lora'."
            )
        if self.critic_detach and self.critic != "shared":
            raise ValueError(
                f"critic_detach=True has no effect with critic={self.critic!r}, whose value loss never reaches the "
                "policy. Remove it, or use critic='shared'."
            )

    def _check_kl(self) -> None:
        if self.kl_estimator is None:
            self.kl_estimator = "k3" if self.kl_placement == "loss" else "k1"
        if self.kl_placement == "loss" and self.kl_estimator == "k1":
            raise ValueError(
                "kl_estimator='k1' in the loss penalises nothing: its gradient is 0 on average. Use 'k2' or 'k3', or "
                "kl_placement='reward'."
            )
        if (self.kl_controller == "adaptive") != (self.kl_target is not None):
            raise ValueError(
                f"found kl_controller={self.kl_controller!r} with kl_target={self.kl_target}: the adaptive controller "
                "needs a target, the fixed one has none."
            )
        if self.kl_controller == "adaptive":
            if not self.beta > 0:
                raise ValueError(
                    f"kl_controller='adaptive' starts at beta, which is {self.beta}: it could never grow. Set beta > 0."
                )
            if not self.kl_target > 0:
                raise ValueError(f"kl_target is {self.kl_target} nats per token, it must be positive.")
            batch = self.per_device_train_batch_size * self.gradient_accumulation_steps * self.world_size
            if not batch < 5 * self.kl_horizon:
                raise ValueError(
                    f"kl_horizon={self.kl_horizon} is too short for mini-batches of {batch} completions: it must be "
                    f"greater than {batch // 5}."
                )
