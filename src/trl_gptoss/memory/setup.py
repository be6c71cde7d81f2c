"""The settings of a run that memory depends on, checked against each other."""

from dataclasses import dataclass
from typing import Literal


@dataclass(kw_only=True, slots=True, frozen=True)
class TrainSetup:
    """The settings of a run that memory depends on.

    Args:
        tokens (`int`): Tokens of one micro-batch of one data-parallel rank, padding included.
        method (`"lora"` or `"full"`, *optional*, defaults to `"lora"`): What is trained.
        lora_rank (`int`, *optional*, defaults to 16): Rank of the adapters.
        lora_experts (`bool`, *optional*, defaults to `False`): Adapters on the experts too.
        num_gpus (`int`, *optional*, defaults to 1): GPUs of the run.
        sequence_parallel_size (`int`, *optional*, defaults to 1): GPUs that share one sequence.
        sharding (`"none"`, `"fsdp2"` or `"zero3"`, *optional*, defaults to `"none"`): How parameters are sharded; `"none"`
            is one GPU or DDP.
        activation_checkpointing (`bool`, *optional*, defaults to `True`): Recompute layers in backward.
        activation_offloading (`bool`, *optional*, defaults to `False`): Checkpoints wait in host memory.
        experts_implementation (`"gptoss_fused"` or `"grouped_mm"`, *optional*, defaults to `"gptoss_fused"`): Experts.
        experts_token_chunk (`int`, *optional*, defaults to 0): Tokens per tile of the experts, 0 for none.
        fused_elementwise (`bool`, *optional*, defaults to `False`): Norms through liger-kernel.
        fused_head (`bool`, *optional*, defaults to `True`): TRL's fused head; without it all logits are materialised.
        master_weights (`bool`, *optional*, defaults to `False`): Trained parameters in fp32 (full fine-tuning; adapters
            are always fp32).
        optimizer (`"adamw"` or `"adamw_8bit"`, *optional*, defaults to `"adamw"`): Two states per trained parameter, in its
            dtype or in 8 bits; the input embedding's stay in fp32 with the latter, as transformers asks bitsandbytes.
        optimizer_bytes (`int`, *optional*): Bytes of optimizer state per trained parameter, for any other optimizer.
        critic (`"none"`, `"separate"`, `"shared"` or `"lora"`, *optional*, defaults to `"none"`): PPO's critic. The separate
            one is a backbone that is trained in full, whatever `method` is; it steps after the policy, so that only the
            larger of the two passes counts.
        accumulates (`bool`, *optional*, defaults to `True`): A micro-batch finds the gradients of an earlier one. `False` is one
            micro-batch per optimizer step, where backward makes the gradients: less in full fine-tuning, by those of the
            embedding and of the layer at work.
        extra_models (`int`, *optional*, defaults to 0): Further copies of the weights: a reference model (not needed
            with LoRA).
        engine_gib (`float`, *optional*, defaults to 0.0): Memory given to a rollout engine on the same GPU, in GiB.
    """

    tokens: int
    method: Literal["lora", "full"] = "lora"
    lora_rank: int = 16
    lora_experts: bool = False
    num_gpus: int = 1
    sequence_parallel_size: int = 1
    sharding: Literal["none", "fsdp2", "zero3"] = "none"
    activation_checkpointing: bool = True
    activation_offloading: bool = False
    experts_implementation: Literal["gptoss_fused", "grouped_mm"] = "gptoss_fused"
    experts_token_chunk: int = 0
    fused_elementwise: bool = False
    fused_head: bool = True
    master_weights: bool = False
    optimizer: Literal["adamw", "adamw_8bit"] = "adamw"
    optimizer_bytes: int | None = None
    critic: Literal["none", "separate", "shared", "lora"] = "none"
    accumulates: bool = True
    extra_models: int = 0
    engine_gib: float = 0.0

    def __post_init__(self) -> None:
        _one_of("method", self.method, ("lora", "full"))
        _one_of("sharding", self.sharding, ("none", "fsdp2", "zero3"))
        _one_of("optimizer", self.optimizer, ("adamw", "adamw_8bit"))
        _one_of("critic", self.critic, ("none", "separate", "shared", "lora"))
        if self.critic == "lora" and self.method == "full":
            raise ValueError("critic 'lora' is a second adapter beside the policy's; it needs method 'lora'.")
        _one_of("experts_implementation", self.experts_implementation, ("gptoss_fused", "grouped_mm"))
        for name in ("tokens", "num_gpus", "sequence_parallel_size", "lora_rank"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; expected at least 1.")
        if self.num_gpus % self.sequence_parallel_size:
            raise ValueError(
                f"sequence_parallel_size {self.sequence_parallel_size} does not divide the {self.num_gpus} GPUs."
            )
        if self.sharding != "none" and self.num_gpus == 1:
            raise ValueError(f"sharding {self.sharding!r} needs more than one GPU.")
        if self.activation_offloading and not self.activation_checkpointing:
            raise ValueError("activation_offloading needs activation_checkpointing.")
        if self.experts_token_chunk and self.experts_implementation != "gptoss_fused":
            raise ValueError("experts_token_chunk needs experts_implementation 'gptoss_fused'.")

    @property
    def shards(self) -> int:
        """Over how many GPUs a parameter is spread."""
        return 1 if self.sharding == "none" else self.num_gpus

    @property
    def local_tokens(self) -> int:
        """T: tokens of a micro-batch on one GPU."""
        return -(-self.tokens // self.sequence_parallel_size)


def _one_of(name: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ValueError(f"{name} is {value!r}; expected one of {', '.join(map(repr, allowed))}.")
