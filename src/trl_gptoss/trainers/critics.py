"""The three critics of PPO: what gives the values, and which parameters are the critic's.

    separate    own backbone + head     own forward     backbone sharded or wrapped like the policy
    lora        second adapter + head   own forward     adapter lives in the policy's modules, whose base is frozen
    shared      head                    no forward      reads the hidden states of the policy's own forward

The head (hidden size + 1 numbers in float32) is replicated on every process, because neither FSDP2 nor ZeRO-3 takes a
few float32 numbers among bf16 ones; `critic_optimizer` averages its gradient. Nothing here is a submodule of the policy but
the second adapter, which `AdapterCritic.hidden_from` keeps out of what is saved.
"""

import copy
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from accelerate import Accelerator
from accelerate.utils import is_peft_model
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModel, PreTrainedModel
from trl.trainer.utils import disable_dropout_in_model

from .critic_rows import CriticRows
from .experts_options import prepare_experts
from .guards import check_model
from .loading import model_init_kwargs
from .offload import CheckpointOffload
from .ppo_config import GptOssPPOConfig
from .value_head import RecordedStates, SeparateCritic, SharedCritic, ValueHead

if TYPE_CHECKING:
    from peft import PeftModel

ADAPTER = "critic"
HEAD_FILE = "value_head.safetensors"


class Critic(ABC):
    """What the trainer asks of a critic: values, inside of contexts that do nothing unless a critic needs them to.

    head ([`~trl_gptoss.trainers.value_head.ValueHead`]): on every process the same.
    has_forward (`bool`): whether values come from a forward of their own and the value loss is a loss of its own.
    """

    head: ValueHead
    has_forward: bool

    @abstractmethod
    def values(self, policy: nn.Module, rows: CriticRows) -> torch.Tensor:
        """(B, T + 1) values of one micro-batch by a forward, inside of `in_use`; with gradients where they are enabled.

        Args:
            policy (`nn.Module`): the policy as it is trained, wrapped or not.
            rows ([`CriticRows`]): padded or packed.
        """

    @contextmanager
    def in_use(self, policy: nn.Module) -> Iterator[None]:
        """The context of `values` and of its backward: checkpointed layers run again in backward."""
        yield

    @contextmanager
    def watching(self, policy: nn.Module) -> Iterator[RecordedStates | None]:
        """The context of a forward of the policy that a critic without a forward of its own reads from."""
        yield None

    def train(self, mode: bool) -> None:
        """Dropout on or off in the modules that are the critic's alone."""
        self.head.train(mode)

    def local_parameters(self) -> dict[str, nn.Parameter]:
        """Parameters that every process holds whole and whose gradients nobody else averages."""
        return {f"head.{name}": parameter for name, parameter in self.head.named_parameters()}

    @contextmanager
    def hidden_from(self, policy: nn.Module) -> Iterator[None]:
        """A context in which saving the policy does not see the critic."""
        yield


class BackboneCritic(Critic):
    """`critic="separate"`.

    Args:
        model ([`SeparateCritic`]): its backbone is replaced by the prepared one before training.
        accelerator (`Accelerator`): autocast as for the policy.
    """

    has_forward = True

    def __init__(self, model: SeparateCritic, accelerator: Accelerator) -> None:
        self.model = model
        self.head = model.head
        self.accelerator = accelerator

    @property
    def backbone(self) -> PreTrainedModel:
        """Without what the accelerator has put around it."""
        return self.accelerator.unwrap_model(self.model.backbone)

    def values(self, policy: nn.Module, rows: CriticRows) -> torch.Tensor:
        with self.accelerator.autocast():
            hidden = self.model.backbone(**rows.model_inputs()).last_hidden_state
        return rows.values(self.head, hidden)

    def train(self, mode: bool) -> None:
        self.model.train(mode)


class StatesCritic(Critic):
    """`critic="shared"`.

    Args:
        model ([`SharedCritic`]): the head.
        accelerator (`Accelerator`): to find the policy under its wrapper.
    """

    has_forward = False

    def __init__(self, model: SharedCritic, accelerator: Accelerator) -> None:
        self.model = model
        self.head = model.head
        self.accelerator = accelerator

    @contextmanager
    def watching(self, policy: nn.Module) -> Iterator[RecordedStates]:
        with self.model.record(self.accelerator.unwrap_model(policy)) as states:
            yield states

    def values_of(self, states: RecordedStates, rows: CriticRows) -> torch.Tensor:
        """(B, T + 1) values of the forward that was watched."""
        return rows.values(self.head, states.hidden.detach() if self.model.detach else states.hidden)

    def values(self, policy: nn.Module, rows: CriticRows) -> torch.Tensor:
        """Without a gradient for the policy: this is for the moments when the policy is not trained."""
        with self.watching(policy) as states, torch.no_grad(), self.accelerator.autocast():
            _forward_of_states(policy, rows)
        return self.values_of(states, rows)


class AdapterCritic(Critic):
    """`critic="lora"`.

    Args:
        policy (`PeftModel`): gets a second adapter like the one that is trained, without its `modules_to_save`.
        seed (`int`): of the adapter's random half, so that all processes have the same one.
        accelerator (`Accelerator`): to find the policy under its wrapper.

    Raises:
        ValueError: the policy's adapter is called "critic".
    """

    has_forward = True

    def __init__(self, policy: "PeftModel", seed: int, accelerator: Accelerator) -> None:
        if ADAPTER in policy.peft_config:
            raise ValueError(
                f"The policy already has an adapter named {ADAPTER!r}, which is the critic's name here. Load the policy's "
                "adapter under another name."
            )
        self.accelerator = accelerator
        self.policy_adapter = policy.active_adapter
        config = copy.deepcopy(policy.peft_config[self.policy_adapter])
        config.inference_mode = False
        config.modules_to_save = (
            None  # whole copies, which whatever reads the policy by name would take for the policy's
        )
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            policy.add_adapter(ADAPTER, config)
        policy.set_adapter(self.policy_adapter)
        base = policy.get_base_model()
        self.model = SharedCritic(base.config.get_text_config().hidden_size, detach=False)
        self.model.to(base.device)
        self.head = self.model.head
        self.adapter = {n: p for n, p in policy.named_parameters() if f".{ADAPTER}." in n}

    @contextmanager
    def in_use(self, policy: nn.Module) -> Iterator[None]:
        """The critic's adapter instead of the policy's, and nothing else trainable: not the policy's adapter, nor what it
        trains beside (sinks, for example)."""
        model = self.accelerator.unwrap_model(policy)
        trained = [p for n, p in model.named_parameters() if p.requires_grad and n not in self.adapter]
        model.set_adapter(ADAPTER)
        for parameter in trained:
            parameter.requires_grad_(False)
        try:
            yield
        finally:
            model.set_adapter(self.policy_adapter)
            for parameter in trained:
                parameter.requires_grad_(True)

    def values(self, policy: nn.Module, rows: CriticRows) -> torch.Tensor:
        # Unwrapped: DDP would wait for the gradients of the policy's parameters, which are frozen in here.
        model = self.accelerator.unwrap_model(policy)
        with self.model.record(model) as states, self.accelerator.autocast():
            _forward_of_states(model, rows)
        return rows.values(self.head, states.hidden)

    def local_parameters(self) -> dict[str, nn.Parameter]:
        return {**super().local_parameters(), **self.adapter}

    @contextmanager
    def hidden_from(self, policy: nn.Module) -> Iterator[None]:
        model = self.accelerator.unwrap_model(policy)
        config = model.peft_config.pop(ADAPTER)
        try:
            yield
        finally:
            model.peft_config[ADAPTER] = config


def _forward_of_states(policy: nn.Module, rows: CriticRows) -> None:
    """A forward for its hidden states: logits of one token only. It goes through the whole model because FSDP2 and ZeRO-3
    gather parameters at the modules that they wrapped."""
    policy(**rows.model_inputs(), logits_to_keep=1)


def kind_of_critic(args: GptOssPPOConfig, has_adapters: bool) -> str:
    """`"separate"`, `"shared"` or `"lora"`.

    Raises:
        ValueError: `"lora"` for a policy without adapters.
    """
    if args.critic is None:
        return "lora" if has_adapters else "separate"
    if args.critic == "lora" and not has_adapters:
        raise ValueError(
            "critic='lora' is a second adapter on the frozen base of the policy, but the policy has no adapter. Pass a "
            "peft_config (or a PeftModel), or use critic='separate' or 'shared'."
        )
    return args.critic


def load_backbone(args: GptOssPPOConfig, model: "str | PreTrainedModel | PeftModel") -> SeparateCritic:
    """A critic of its own, from where the configuration says or from the weights the policy starts from.

    Args:
        args ([`GptOssPPOConfig`]): `critic_model_name_or_path`, `model_init_kwargs`, dropout and checkpointing.
        model (`str`, [`~transformers.PreTrainedModel`] or `PeftModel`): the policy, as it was given to the trainer.

    Raises:
        ValueError: a `PeftModel` or a model in the parts of ZeRO-3 without `critic_model_name_or_path`, or a head of another
            size.
    """
    source = args.critic_model_name_or_path or (model if isinstance(model, str) else None)
    if source is not None:
        kwargs = model_init_kwargs(source, args.model_init_kwargs, args.trust_remote_code) or {}
        kwargs.setdefault("dtype", torch.float32)  # as TRL loads a policy
        if not isinstance(model, str):
            kwargs = {**_kwargs_like(model), **(args.model_init_kwargs or {})}
        backbone = AutoModel.from_pretrained(source, trust_remote_code=args.trust_remote_code, **kwargs)
    elif is_peft_model(model):
        raise ValueError(
            "critic='separate' cannot be copied from a PeftModel, whose modules hold its adapters. Set "
            "critic_model_name_or_path, or use critic='lora' or 'shared'."
        )
    elif any(parameter.numel() == 0 for parameter in model.get_decoder().parameters()):
        raise ValueError(
            "critic='separate' cannot be copied from a model whose weights ZeRO-3 has taken apart, which it does with models "
            "that are loaded after the training arguments. Pass the model's name or path instead of the model, or set "
            "critic_model_name_or_path."
        )
    else:
        backbone = copy.deepcopy(model.get_decoder())
    backbone.requires_grad_(True)
    critic = SeparateCritic(backbone)
    head = None if args.critic_model_name_or_path is None else Path(args.critic_model_name_or_path) / HEAD_FILE
    if head is not None and head.is_file():
        critic.head.load_state_dict(load_file(head))
    if args.disable_dropout:
        disable_dropout_in_model(backbone)
    if args.activation_checkpointing:
        backbone.activation_checkpointing_enable(activation_checkpointing_kwargs=args.activation_checkpointing_kwargs)
    return critic


def _kwargs_like(model: "PreTrainedModel | PeftModel") -> dict[str, Any]:
    base = model.get_base_model() if is_peft_model(model) else model
    text = base.config.get_text_config()
    return {
        "dtype": base.dtype,
        "attn_implementation": text._attn_implementation,
        "experts_implementation": text._experts_implementation,
    }


def place_backbone(args: GptOssPPOConfig, critic: SeparateCritic, accelerator: Accelerator, sharded: bool) -> None:
    """The guards and options of the policy's experts, and the device, before anything shards the backbone."""
    check_model(critic.backbone)
    prepare_experts(args, critic.backbone, None, accelerator.device)
    if args.activation_offloading:
        CheckpointOffload(critic.backbone)
    critic.head.to(accelerator.device)
    if not sharded:
        critic.backbone.to(accelerator.device)
