"""`GptOssPPOTrainer`: PPO with a critic, on the rollouts, the ratio and the checkpoints of the GRPO trainer.

rollouts, rewards (GRPO's) -> values of the critic -> GAE, whitening -> mini-batches: surrogate, then value loss
"""

import logging
import re
import textwrap
from typing import Any

import torch
from accelerate.utils import gather_object
from huggingface_hub import CommitInfo
from torch import nn
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_optimizer import is_optimizer_factory
from trl.trainer.utils import split_tensor_dict

from ..losses import kl_estimate
from ..trajectory import StopReason
from .critic_checkpoint import load_critic, save_critic
from .critic_optimizer import CriticOptimizer
from .critic_passes import CriticPassesMixin
from .critics import (
    AdapterCritic,
    BackboneCritic,
    Critic,
    StatesCritic,
    kind_of_critic,
    load_backbone,
    place_backbone,
)
from .grpo import GptOssGRPOTrainer
from .kl_term import KLTerm
from .padding_free import ROW_LENGTHS
from .ppo_config import GptOssPPOConfig
from .ppo_targets import ppo_targets
from .value_head import SharedCritic

logger = logging.getLogger(__name__)

_CUT_OFF = {StopReason.TRUNCATED, StopReason.MAX_TURNS, StopReason.MAX_TOKENS, StopReason.MAX_SECONDS}
_NO_DECAY = re.compile(r"^head\.|bias|layernorm|rmsnorm|(?:^|\.)norm(?:$|\.)|_norm(?:$|\.)")


class GptOssPPOTrainer(GptOssGRPOTrainer, CriticPassesMixin):
    """PPO with a critic. Rollouts, Harmony, guards, rewards, the ratio and resumption are [`GptOssGRPOTrainer`]'s.

    Arguments are those of [`GptOssGRPOTrainer`], with a [`GptOssPPOConfig`]. Evaluation samples and scores; it does not
    ask the critic, and `eval_loss` is GRPO's.

    Overridden methods, and why:
        `_before_loading`, `_add_targets`, `_row_advantages`: the seams of [`GptOssGRPOTrainer`].
        `_prepare_for_training`: the critic is prepared after the policy, and loaded with it.
        `_prepare_inputs`: the denominators of a mini-batch.
        `_compute_loss`: a shared critic watches the forward. The loss is [`PPOLossMixin`]'s, below rollout correction,
            packing and the ratio. Passes of the critic alone are [`CriticPassesMixin`]'s.
        `training_step`: the critic's part of a micro-batch; steps of the critic alone.
        `_save`, `merge_and_push`: keep the critic's adapter out of what is saved.
        `_save_optimizer_and_scheduler`: the critic goes into checkpoints.
    """

    _config_class = GptOssPPOConfig
    _tag_names = ["trl", "ppo", "trl-gptoss"]
    _name = "PPO"
    _paper = {
        "title": "Proximal Policy Optimization Algorithms",
        "id": "1707.06347",
        "citation": textwrap.dedent("""\
            @article{schulman2017proximal,
                title        = {{Proximal Policy Optimization Algorithms}},
                author       = {John Schulman and Filip Wolski and Prafulla Dhariwal and Alec Radford and Oleg Klimov},
                year         = 2017,
                eprint       = {arXiv:1707.06347},
            }"""),
    }

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.critic = self._make_critic()
        self.kl_term = KLTerm(self.args, self._sum_over_ranks)
        self._critic_optimizer = None
        self._micro_batch: dict[str, torch.Tensor] | None = None
        self.add_callback(_AfterOptimizerStep(self))

    # ---- the critic ----

    def _before_loading(self, model: Any, args: GptOssPPOConfig, has_adapters: bool) -> None:
        if not isinstance(args, GptOssPPOConfig):
            raise TypeError(f"{type(self).__name__} needs a GptOssPPOConfig, found a {type(args).__name__}.")
        self._critic_kind = kind_of_critic(args, has_adapters)
        if self._critic_kind != "separate" and args.critic_model_name_or_path is not None:
            raise ValueError(
                f"critic_model_name_or_path has no effect with critic={self._critic_kind!r}, which PEFT policies have by "
                "default. Remove it, or set critic='separate'."
            )
        # Now, because the policy's decoder is copied before PEFT puts adapters into it.
        self._backbone_critic = load_backbone(args, model) if self._critic_kind == "separate" else None

    def _make_critic(self) -> Critic:
        sharded = self.is_deepspeed_enabled or self.is_fsdp_enabled
        if self._backbone_critic is not None:
            place_backbone(self.args, self._backbone_critic, self.accelerator, sharded)
            return BackboneCritic(self._backbone_critic, self.accelerator)
        if self._critic_kind == "lora":
            if sharded:
                raise ValueError(
                    "critic='lora' does not work with FSDP or DeepSpeed: its adapter lives in modules whose parameters "
                    "they flatten for one optimizer. Use critic='shared' or 'separate', or DDP."
                )
            return AdapterCritic(self.model, self.args.seed, self.accelerator)
        model = SharedCritic(self._base_model.config.get_text_config().hidden_size, detach=self.args.critic_detach)
        return StatesCritic(model.to(self.accelerator.device), self.accelerator)

    def _prepare_for_training(
        self, max_steps: int, train_dataloader: Any, resume_from_checkpoint: str | None
    ) -> tuple:
        result = super()._prepare_for_training(max_steps, train_dataloader, resume_from_checkpoint)
        if self.args.critic_warmup_steps >= max_steps:
            logger.warning(
                f"critic_warmup_steps={self.args.critic_warmup_steps} and the run has {max_steps} optimizer steps: all of them "
                "train the critic only, and the policy stays as it is. If it is to learn, lower critic_warmup_steps."
            )
        if self._critic_optimizer is None:
            self._critic_optimizer = CriticOptimizer(
                self.critic, self.accelerator, self.args, self._make_critic_optimizer
            )
        self._critic_optimizer.start_schedule(max_steps)
        if resume_from_checkpoint is not None:
            load_critic(resume_from_checkpoint, self._critic_optimizer, self.kl_term.controller, self.accelerator)
        return result

    def _make_critic_optimizer(self, parameters: dict[str, nn.Parameter]) -> torch.optim.Optimizer:
        """The policy's kind of optimizer, with the critic's learning rate."""
        make, settings = self.get_optimizer_cls_and_kwargs(self.args)
        if is_optimizer_factory(make):
            raise ValueError(
                f"optim={self.args.optim!r} builds its optimizer from a whole model and cannot train a critic. Use one "
                "that takes parameters, such as 'adamw_torch'."
            )
        if self.args.critic_learning_rate is not None:
            settings["lr"] = self.args.critic_learning_rate
        decayed = [p for n, p in parameters.items() if not _NO_DECAY.search(n)]
        others = [p for n, p in parameters.items() if _NO_DECAY.search(n)]
        groups = [{"params": decayed, "weight_decay": self.args.weight_decay}, {"params": others, "weight_decay": 0.0}]
        return make([group for group in groups if group["params"]], **settings)

    def save_critic(self, output_dir: str) -> None:
        """Write the critic to `output_dir/critic`, which the next run takes as `critic_model_name_or_path` if it is a
        separate one. Checkpoints have it anyway.

        Args:
            output_dir (`str`): a folder.

        Raises:
            RuntimeError: before training, when there is nothing to save.
        """
        if self._critic_optimizer is None:
            raise RuntimeError("The critic has not been trained yet; call train() first.")
        save_critic(output_dir, self._critic_optimizer, self.kl_term.controller, self.accelerator)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        super()._save_optimizer_and_scheduler(output_dir)
        self.save_critic(output_dir)

    def _save(self, output_dir: str | None = None, state_dict: dict | None = None) -> None:
        if isinstance(self.critic, AdapterCritic):  # PEFT leaves out the weights of adapters that it knows only
            whole = self.model.state_dict() if state_dict is None else state_dict
            state_dict = {name: tensor for name, tensor in whole.items() if name not in self.critic.adapter}
        with self.critic.hidden_from(self.model):
            super()._save(output_dir, state_dict)

    def merge_and_push(self, *args: Any, **kwargs: Any) -> CommitInfo | None:
        with self.critic.hidden_from(self.model):
            return super().merge_and_push(*args, **kwargs)

    # ---- a generation batch ----

    def _add_targets(self, output: dict[str, Any]) -> None:
        if "pixel_values" in output:
            raise ValueError("PPO trains on text only, but the batch has images. Use GptOssGRPOTrainer for images.")
        mask_BT = output["completion_mask"] * output.get("tool_mask", 1)
        values_BT1, logps_BT = self._evaluate_policy_and_critic(output)
        kl_BT = None
        if self._kl_in("reward"):
            kl_BT = kl_estimate(logps_BT, output["ref_per_token_logps"], mask_BT, self.args.kl_estimator)
            output["reward_kl"] = kl_BT
        unscored_B = self._local_rewards.isnan().all(1)
        rewards_B = (self._local_rewards * self.reward_weights.to(self._local_rewards.device)).nansum(1)
        targets, metrics = ppo_targets(
            self.args,
            rewards_B=rewards_B.masked_fill(unscored_B, torch.nan),
            values_BT1=values_BT1,
            mask_BT=mask_BT,
            truncated_B=self._cut_off(output),
            kl_BT=kl_BT,
            kl_coef=0.0 if kl_BT is None else self.kl_term.coef,
            reduce=self._sum_over_ranks,
        )
        output.update({name: getattr(targets, name) for name in targets.__slots__})
        for name, value in metrics.items():
            self._metrics["train"][name].append(value)
        self._logs["advantages"].clear()  # TRL has put group-relative ones there
        self._logs["advantages"].extend(gather_object(self._row_advantages(output)))

    def _row_advantages(self, output: dict[str, Any]) -> list[float]:
        mask = output["policy_mask"]
        return ((output["advantages"] * mask).sum(1) / mask.sum(1).clamp(min=1)).tolist()

    def _cut_off(self, output: dict[str, Any]) -> torch.Tensor:
        """(B,) bool: rollouts that a budget ended."""
        if self._engine is not None:
            flags = [row["trajectories"].stop_reason in _CUT_OFF for row in self._rows]
        else:
            ends = {*self.eos_token_ids, self._tokenizer.pad_token_id}
            lengths = output["completion_mask"].sum(1).tolist()
            flags = [n > 0 and int(ids[n - 1]) not in ends for ids, n in zip(output["completion_ids"], lengths)]
        return torch.tensor(flags, device=output["completion_ids"].device)

    @torch.no_grad()
    def _evaluate_policy_and_critic(self, output: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor | None]:
        """(B, T + 1) values and, if the reward needs them, (B, T) log-probs, without dropout, before any update."""
        names = ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask", ROW_LENGTHS)
        batch = {name: output[name] for name in names if name in output}
        values, logps = [], []
        for chunk in split_tensor_dict(batch, self.args.steps_per_generation):
            if isinstance(self.critic, StatesCritic):  # one forward for both
                with self.critic.watching(self.model) as states:
                    logps.append(self._eval_logps(chunk))
                values.append(self.critic.values_of(states, self._critic_rows(chunk)))
                continue
            values.append(self._evaluate_critic(chunk))
            if self._kl_in("reward"):
                logps.append(self._eval_logps(chunk))
        return torch.cat(values), torch.cat(logps) if logps else None

    # ---- a micro-batch ----

    def _set_up_padding_free(self, enabled: bool) -> None:
        if self.args.oom_retries:
            raise ValueError(
                f"oom_retries={self.args.oom_retries}: GptOssPPOTrainer does not try again, because the critic's part of a "
                "micro-batch would count twice. Set oom_retries=0 and choose max_tokens_per_micro_batch with `trl-gptoss plan`."
            )
        super()._set_up_padding_free(enabled)

    def _prepare_inputs(self, generation_batch: Any) -> dict[str, Any]:
        inputs = super()._prepare_inputs(generation_batch)
        if self.model.training and self._step % self.args.gradient_accumulation_steps == 0:
            self.kl_term.start_mini_batch()
            slices = self._mini_batch(self._step)
            self._normalizers = (self._count(slices, "policy_mask"), self._count(slices, "value_mask"))
        return inputs

    def _compute_loss(self, model: nn.Module, inputs: dict[str, Any]) -> torch.Tensor:
        """Around everything that may run the policy's forward, which a shared critic reads from."""
        if self.model.training and not self._in_turn:
            self._micro_batch = inputs
        with self.critic.watching(model) as self._states:
            return super()._compute_loss(model, inputs)

    def training_step(
        self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: torch.Tensor | int | None = None
    ) -> torch.Tensor:
        warming_up = self.state.global_step < self.args.critic_warmup_steps
        self._metrics["train"]["critic/warmup"].append(float(warming_up))
        if warming_up:
            return self._train_critic_only(model, inputs)
        loss = super().training_step(model, inputs, num_items_in_batch)
        if self.critic.has_forward and not self._critic_has_passes:
            self._train_critic(model, self._micro_batch, last=self.accelerator.sync_gradients)
        self._micro_batch = None
        return loss

    def _train_critic_only(self, model: nn.Module, inputs: dict[str, Any]) -> torch.Tensor:
        """A micro-batch of the warm-up. The policy gets no gradient, so that its optimizer passes over it."""
        model.train()
        inputs = self._prepare_inputs(inputs)
        if not self._critic_has_passes:
            self._train_critic(model, inputs, last=self.accelerator.sync_gradients)
        self._step += 1
        if self.accelerator.sync_gradients and self._generated_at == self.state.global_step:
            self._generated_at += 1  # after this step the weights are still those that sampled the batch
        return torch.zeros((), device=self.accelerator.device)


class _AfterOptimizerStep(TrainerCallback):
    """The critic steps right after the policy, before anything can be saved."""

    def __init__(self, trainer: GptOssPPOTrainer) -> None:
        self.trainer = trainer

    def on_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        trainer = self.trainer
        if trainer._critic_has_passes:
            trainer._critic_passes()
        else:
            trainer._critic_step()
        trainer._critic_optimizer.advance_schedule()
        for name, value in trainer.kl_term.step().items():
            trainer._metrics["train"][name].append(value)
