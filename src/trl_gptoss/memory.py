"""Peak GPU memory of one train step, part by part, out of the model's shape and the settings alone.

Pure arithmetic: nothing is allocated, no GPU and no transformers needed. The peak of a step with activation checkpointing is

    weights + gradients + optimizer states
    + checkpoints: the input of every layer
    + the one layer that is being differentiated: what its modules saved, less those already differentiated, plus the
      temporary memory of the module at work
    + nothing else, because the fused head works in tiles.

Which module is the worst depends on the settings, so all of them are computed and the largest counts. The bytes a module
saves were counted on the running model (`benchmarks/memory/simulate.py`); the test of this file compares both.

Legend: T tokens of a micro-batch on one GPU, H hidden size, A = heads * head_dim, KV = KV heads * head_dim, k experts per
token, I intermediate size of an expert, V vocabulary. All sizes in bytes, activations in bfloat16.
"""

from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal

GIB = 2**30
_HALF, _FLOAT = 2, 4
_COLUMN_BLOCK = 1024  # columns of a product that gptoss_fused holds at a time
_HEAD_TOKENS, _HEAD_COLUMNS = 4096, 32768  # tile of TRL's fused head
_HIDDEN_ALIVE = 3  # (T, H) each, while the experts run backward: gradient, gradient of the input, recomputed output
_NORM_TEMPORARIES = 5  # fp32 (T, H) inside the backward of transformers' RMSNorm


@dataclass(kw_only=True, slots=True, frozen=True)
class ModelShape:
    """What the memory of a GPT-OSS depends on.

    Args:
        hidden_size (`int`): H.
        num_layers (`int`): Decoder layers.
        num_heads (`int`): Query heads.
        num_kv_heads (`int`): Key/value heads.
        head_dim (`int`): Width of a head.
        intermediate_size (`int`): I, width of an expert.
        num_experts (`int`): Experts per layer.
        top_k (`int`): Experts per token.
        vocab_size (`int`): V.
        tied (`bool`, *optional*, defaults to `False`): Input and output embeddings are one parameter.
    """

    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    num_experts: int
    top_k: int
    vocab_size: int
    tied: bool = False

    def __post_init__(self) -> None:
        for item in fields(self):
            value = getattr(self, item.name)
            if item.name != "tied" and (not isinstance(value, int) or value < 1):
                raise ValueError(f"{item.name} is {value!r}; expected a positive integer.")

    @classmethod
    def from_config(cls, config: Any) -> "ModelShape":
        """Read a `GptOssConfig`, or a dict with the same keys (`config.json`)."""
        values = config if isinstance(config, dict) else config.to_dict()
        if values.get("model_type") != "gpt_oss":
            raise ValueError(
                f"The planner knows GPT-OSS; the model_type of this config is {values.get('model_type')!r}."
            )
        return cls(
            hidden_size=values["hidden_size"],
            num_layers=values["num_hidden_layers"],
            num_heads=values["num_attention_heads"],
            num_kv_heads=values["num_key_value_heads"],
            head_dim=values["head_dim"],
            intermediate_size=values["intermediate_size"],
            num_experts=values["num_local_experts"],
            top_k=values["num_experts_per_tok"],
            vocab_size=values["vocab_size"],
            tied=bool(values.get("tie_word_embeddings", False)),
        )

    @property
    def attention_width(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_width(self) -> int:
        return self.num_kv_heads * self.head_dim

    @property
    def expert_parameters(self) -> int:
        """Parameters of the experts of one layer."""
        up = (self.hidden_size + 1) * 2 * self.intermediate_size
        return self.num_experts * (up + (self.intermediate_size + 1) * self.hidden_size)

    @property
    def attention_parameters(self) -> int:
        """Parameters of the attention of one layer, sinks included."""
        h, a, kv = self.hidden_size, self.attention_width, self.kv_width
        return h * (a + 2 * kv) + a + 2 * kv + (a + 1) * h + self.num_heads

    @property
    def layer_parameters(self) -> int:
        router = (self.hidden_size + 1) * self.num_experts
        return self.expert_parameters + self.attention_parameters + router + 2 * self.hidden_size

    @property
    def embedding_parameters(self) -> int:
        """Parameters of one embedding matrix."""
        return self.vocab_size * self.hidden_size

    @property
    def parameters(self) -> int:
        """All parameters: 20.9e9 for gpt-oss-20b."""
        embeddings = self.embedding_parameters * (1 if self.tied else 2)
        return self.num_layers * self.layer_parameters + embeddings + self.hidden_size


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
        experts_implementation (`"gptoss_fused"` or `"grouped_mm"`, *optional*, defaults to `"gptoss_fused"`): Experts.
        experts_token_chunk (`int`, *optional*, defaults to 0): Tokens per tile of the experts, 0 for none.
        fused_elementwise (`bool`, *optional*, defaults to `False`): Norms through liger-kernel.
        fused_head (`bool`, *optional*, defaults to `True`): TRL's fused head; without it all logits are materialised.
        master_weights (`bool`, *optional*, defaults to `False`): Trained parameters in fp32 (full fine-tuning; adapters
            are always fp32).
        optimizer_bytes (`int`, *optional*): Bytes of optimizer state per trained parameter; 2 states of the trained dtype
            if not given (AdamW), 2 for 8-bit AdamW.
        critic (`"none"`, `"separate"`, `"shared"` or `"lora"`, *optional*, defaults to `"none"`): PPO's critic. The separate
            one is a backbone that is trained in full, whatever `method` is; it steps after the policy, so that only the
            larger of the two passes counts.
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
    experts_implementation: Literal["gptoss_fused", "grouped_mm"] = "gptoss_fused"
    experts_token_chunk: int = 0
    fused_elementwise: bool = False
    fused_head: bool = True
    master_weights: bool = False
    optimizer_bytes: int | None = None
    critic: Literal["none", "separate", "shared", "lora"] = "none"
    extra_models: int = 0
    engine_gib: float = 0.0

    def __post_init__(self) -> None:
        _one_of("method", self.method, ("lora", "full"))
        _one_of("sharding", self.sharding, ("none", "fsdp2", "zero3"))
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


@dataclass(kw_only=True, slots=True, frozen=True)
class MemoryPrediction:
    """Bytes per GPU.

    Args:
        parts (`dict[str, int]`): What is alive at the peak.
        worst (`str`): The module at work at the peak.
    """

    parts: dict[str, int] = field(default_factory=dict)
    worst: str = ""

    @property
    def total(self) -> int:
        return sum(self.parts.values())

    @property
    def activations(self) -> int:
        """The part that grows with the tokens."""
        return sum(
            size for name, size in self.parts.items() if name in ("checkpoints", "layer at work", "saved layers")
        )


def predict_memory(shape: ModelShape, setup: TrainSetup) -> MemoryPrediction:
    """Peak memory of a train step (forward and backward of one micro-batch, states of the optimizer present).

    Args:
        shape (`ModelShape`): The model.
        setup (`TrainSetup`): The settings.

    Returns:
        `MemoryPrediction`: Parts and worst moment.
    """
    parts = _states(shape, setup)
    passes = {"": _pass(shape, setup, _head(shape, setup))}
    if setup.critic in ("separate", "lora"):
        of_critic = replace(setup, method="full") if setup.critic == "separate" else setup
        passes["critic: "] = _pass(shape, of_critic, _value_head(shape, of_critic))
    name = max(passes, key=lambda name: sum(passes[name].parts.values()))
    parts |= passes[name].parts
    worst = name + passes[name].worst
    if setup.sharding != "none":
        unsharded = 2 * shape.layer_parameters * _HALF  # the layer at work and the one fetched ahead
        if setup.method == "full":
            unsharded += shape.layer_parameters * (_FLOAT if setup.master_weights else _HALF)
        parts["gathered layers"] = max(unsharded, shape.embedding_parameters * _HALF)
    return MemoryPrediction(parts={name: round(size) for name, size in parts.items() if size}, worst=worst)


def _pass(shape: ModelShape, setup: TrainSetup, head: float) -> MemoryPrediction:
    """Activations of one forward and backward; `head` are the bytes that the head of the model is at work with."""
    hidden = _HALF * shape.hidden_size * setup.local_tokens
    modules = _modules(shape, setup)
    layer = sum(saved for _, saved, _ in modules)
    candidates = {"head": head}
    alive = layer
    for name, saved, working in reversed(modules):
        candidates[name] = alive + working
        alive -= saved
    worst = max(candidates, key=candidates.__getitem__)
    if setup.activation_checkpointing:
        parts = {"checkpoints": shape.num_layers * hidden, "layer at work": candidates[worst]}
    elif worst == "head":
        parts = {"saved layers": shape.num_layers * layer, "layer at work": candidates[worst]}
    else:
        parts = {"saved layers": (shape.num_layers - 1) * layer, "layer at work": max(candidates[worst], layer + head)}
    return MemoryPrediction(parts=parts, worst=worst)


def _states(shape: ModelShape, setup: TrainSetup) -> dict[str, float]:
    weights = shape.parameters * _HALF
    if setup.method == "full":
        width = _FLOAT if setup.master_weights else _HALF
        trained = shape.parameters
        parts = {"weights": trained * width / setup.shards}
    else:
        width, trained = _FLOAT, lora_parameters(shape, setup.lora_rank, setup.lora_experts)
        parts = {"weights": weights / setup.shards, "adapters": trained * width / setup.shards}
    optimizer = 2 * width if setup.optimizer_bytes is None else setup.optimizer_bytes
    parts["gradients"] = trained * width / setup.shards
    parts["optimizer"] = trained * optimizer / setup.shards
    parts["critic"] = _critic_states(shape, setup) / setup.shards
    parts["further models"] = setup.extra_models * weights / setup.shards
    parts["engine"] = setup.engine_gib * GIB
    return parts


def _critic_states(shape: ModelShape, setup: TrainSetup) -> int:
    """Weights, gradients and optimizer of the critic beside its value head, whose few thousand parameters do not count."""
    if setup.critic not in ("separate", "lora"):
        return 0
    if setup.critic == "separate":  # a model without language head
        trained = shape.parameters - (0 if shape.tied else shape.embedding_parameters)
        width = _FLOAT if setup.master_weights else _HALF
    else:
        trained, width = lora_parameters(shape, setup.lora_rank, setup.lora_experts), _FLOAT
    return trained * (2 * width + (2 * width if setup.optimizer_bytes is None else setup.optimizer_bytes))


def lora_parameters(shape: ModelShape, rank: int, experts: bool) -> int:
    """Parameters of LoRA adapters on q, k, v and o, and on the experts if asked."""
    h, a, kv = shape.hidden_size, shape.attention_width, shape.kv_width
    layer = rank * ((h + a) + 2 * (h + kv) + (a + h))
    if experts:
        i = shape.intermediate_size
        layer += rank * shape.num_experts * ((h + 2 * i) + (i + h))
    return layer * shape.num_layers


def _modules(shape: ModelShape, setup: TrainSetup) -> list[tuple[str, float, float]]:
    """(name, bytes saved by forward, bytes at work in backward) of a layer's modules in forward order."""
    T, H, A, KV = setup.local_tokens, shape.hidden_size, shape.attention_width, shape.kv_width
    full = setup.method == "full"
    rows = 2 * _FLOAT * shape.num_heads
    if setup.fused_elementwise:
        norm_saved, norm_work = (0, _HALF * H), 2 * _HALF * H  # the first norm's input is the checkpoint
    else:
        saved = _FLOAT * H * (2 if full else 1)
        norm_saved, norm_work = (saved, saved), (_NORM_TEMPORARIES * _FLOAT + _HALF) * H
    qkv = _HALF * H * (1 if full else 3)  # PEFT casts the input once for every adapter
    out = 0 if full else _HALF * A
    attention = _HALF * (2 * A + 2 * KV) + _FLOAT * shape.num_heads
    attention_work = (_HALF + _FLOAT + _HALF) * A + 2 * _HALF * KV + rows
    # q, k, v, out and their gradients travel in buffers of their own
    exchange = 2 * _HALF * (A + KV) if setup.sequence_parallel_size > 1 else 0
    experts_saved, experts_work = _experts(shape, setup)
    return [
        ("first norm", norm_saved[0] * T, norm_work * T),
        ("q, k, v projections", qkv * T, _HALF * (2 * A + 2 * H) * T),
        ("attention", attention * T, (attention_work + exchange) * T),
        ("output projection", out * T, (_HALF * 2 * A + _HALF * H) * T),
        ("second norm", norm_saved[1] * T, norm_work * T),
        ("experts", experts_saved, experts_work),
    ]


def _experts(shape: ModelShape, setup: TrainSetup) -> tuple[float, float]:
    """Bytes the experts save and bytes they work with, in backward."""
    T, H, I, k = setup.local_tokens, shape.hidden_size, shape.intermediate_size, shape.top_k  # noqa: E741
    full = setup.method == "full"
    hidden = _HALF * H * T
    if setup.experts_implementation == "grouped_mm":
        unit = _HALF * k * I * T
        saved, at_work = (10, 2) if full else (7, 5 if setup.activation_checkpointing else 3)
        return saved * unit + hidden, at_work * unit + _HIDDEN_ALIVE * hidden
    block = _HALF * k * min(_COLUMN_BLOCK, H)
    product, activated = _HALF * k * 2 * I, _HALF * k * I
    gradients = shape.expert_parameters * _HALF if full else 0  # of one layer, before they are added up
    if not setup.experts_token_chunk or setup.experts_token_chunk >= T:
        at_work = max(activated * T + gradients / 3, gradients) + block * T  # the first product's gradient comes last
        return product * T + hidden, at_work + _HIDDEN_ALIVE * hidden
    sums = 3 * gradients  # fp32 sums beside the rounded result
    at_work = (product + activated + block) * setup.experts_token_chunk
    return hidden, at_work + sums + (_HIDDEN_ALIVE + 1) * hidden


def _head(shape: ModelShape, setup: TrainSetup) -> float:
    """Backward of the head: final norm's input, hidden states, their fp32 gradient, tiles of logits."""
    T, H, V = setup.local_tokens, shape.hidden_size, shape.vocab_size
    full = setup.method == "full"
    norm = _final_norm(shape, setup)
    if setup.critic == "shared":  # the value head's float32 copy of the hidden states and its gradient
        norm += 2 * _FLOAT * H
    weight_gradient = shape.embedding_parameters * (_FLOAT + _HALF) if full else 0
    if not setup.fused_head:
        logits = (3 * _FLOAT + _HALF) * V  # fp32 copy, its log-softmax and gradient, and the product itself
        return (norm + logits) * T + (shape.embedding_parameters * _HALF if full else 0)
    tile = _HALF * min(T, _HEAD_TOKENS) * min(V, _HEAD_COLUMNS)
    return (norm + _HALF * 3 * H + _FLOAT * H) * T + tile + weight_gradient


def _value_head(shape: ModelShape, setup: TrainSetup) -> float:
    """Backward of a critic's own forward: final norm's input, hidden states, their float32 copy and its gradient."""
    return (_final_norm(shape, setup) + (_HALF + 2 * _FLOAT) * shape.hidden_size) * setup.local_tokens


def _final_norm(shape: ModelShape, setup: TrainSetup) -> float:
    """Bytes a token that the final norm saves."""
    if setup.fused_elementwise:
        return _HALF * shape.hidden_size
    return _FLOAT * shape.hidden_size * (2 if setup.method == "full" else 1)


def _one_of(name: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ValueError(f"{name} is {value!r}; expected one of {', '.join(map(repr, allowed))}.")
