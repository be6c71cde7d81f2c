"""States and activations of a train step added up at its worst moment. All sizes in bytes, activations in bfloat16."""

from dataclasses import dataclass, field, replace

from .layer import head_bytes, layer_modules, value_head_bytes
from .setup import TrainSetup
from .shape import FLOAT, GIB, HALF, ModelShape

_EIGHT_BIT = 2 * (1 + FLOAT / 256)  # two states, each with one fp32 scale for 256 entries (bitsandbytes)
_CHECKPOINTS_ON_GPU = 2  # with activation_offloading: the layer's own and the one fetched ahead


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
        """The part that grows with the tokens, less the gradients that are not there yet."""
        names = ("checkpoints", "layer at work", "saved layers", "gradients to come")
        return sum(self.parts[name] for name in names if name in self.parts)


def predict_memory(shape: ModelShape, setup: TrainSetup) -> MemoryPrediction:
    """Peak memory of a train step (forward and backward of one micro-batch, states of the optimizer present).

    Args:
        shape (`ModelShape`): The model.
        setup (`TrainSetup`): The settings.

    Returns:
        `MemoryPrediction`: Parts and worst moment.
    """
    parts = _states(shape, setup)
    passes = {"": _pass(shape, setup, head_bytes(shape, setup))}
    if setup.critic in ("separate", "lora"):
        of_critic = replace(setup, method="full") if setup.critic == "separate" else setup
        passes["critic: "] = _pass(shape, of_critic, value_head_bytes(shape, of_critic))
        if not setup.accumulates and setup.critic == "separate":  # it comes after the policy
            decoder = shape.num_layers * shape.layer_parameters + _input_embedding(shape)
            passes[""].parts["gradients to come"] -= _to_come(of_critic, decoder)
    name = max(passes, key=lambda name: sum(passes[name].parts.values()))
    parts |= passes[name].parts
    worst = name + passes[name].worst
    if setup.sharding != "none":
        unsharded = 2 * shape.layer_parameters * HALF  # the layer at work and the one fetched ahead
        if setup.method == "full":
            unsharded += shape.layer_parameters * (FLOAT if setup.master_weights else HALF)
        if (
            setup.sharding == "fsdp2"
        ):  # embedding and head are its root unit, which is whole from the first to the last layer
            parts["gathered layers"] = unsharded
            parts["gathered root"] = (shape.embedding_parameters + _input_embedding(shape)) * HALF
        else:
            parts["gathered layers"] = max(unsharded, shape.embedding_parameters * HALF)
    return MemoryPrediction(parts={name: round(size) for name, size in parts.items() if size}, worst=worst)


def _pass(shape: ModelShape, setup: TrainSetup, head: float) -> MemoryPrediction:
    """Activations of one forward and backward; `head` are the bytes that the head of the model is at work with.

    It is the worst of three moments: in the head, in the last layer, and in the first layer. The first is the worst if backward
    makes its gradients on the way (`accumulates=False`): most of them are there then.
    """
    hidden = HALF * shape.hidden_size * setup.local_tokens
    modules = layer_modules(shape, setup)
    alive = layer = sum(saved for _, saved, _ in modules)
    candidates = {}
    for name, saved, working in reversed(modules):
        candidates[name] = alive + working
        alive -= saved
    worst = max(candidates, key=candidates.__getitem__)
    at_work = candidates[worst] + (hidden if setup.critic == "shared" else 0)  # which the value head has read
    count, name, size, own = shape.num_layers, "saved layers", layer, 0
    if setup.activation_checkpointing:
        count = min(count, _CHECKPOINTS_ON_GPU) if setup.activation_offloading else count
        name, size, own = "checkpoints", hidden, 1
    first_layer = shape.layer_parameters + _input_embedding(shape)
    all_layers = first_layer + (shape.num_layers - 1) * shape.layer_parameters
    moments = [
        ("head", count, head, all_layers + shape.embedding_parameters),
        (worst, count - 1 + own, at_work, all_layers),
        (worst, own, at_work, first_layer),
    ]
    predictions = [
        MemoryPrediction(
            parts={name: n * size, "layer at work": work, "gradients to come": -_to_come(setup, left)}, worst=where
        )
        for where, n, work, left in moments
    ]
    return max(predictions, key=lambda prediction: prediction.total)


def _to_come(setup: TrainSetup, parameters: int) -> float:
    """Bytes of the gradients that a pass has still to make when those of so many parameters are left.

    The layer at work counts as left: what it makes is part of its work. Adapters are too small to count.
    """
    if setup.accumulates or setup.method == "lora":
        return 0
    return parameters * (FLOAT if setup.master_weights else HALF) / setup.shards


def _input_embedding(shape: ModelShape) -> int:
    """Parameters of an input embedding of its own; a tied one is the head's."""
    return 0 if shape.tied else shape.embedding_parameters


def _states(shape: ModelShape, setup: TrainSetup) -> dict[str, float]:
    weights = shape.parameters * HALF
    if setup.method == "full":
        width = FLOAT if setup.master_weights else HALF
        trained = shape.parameters
        parts = {"weights": trained * width / setup.shards}
    else:
        width, trained = FLOAT, lora_parameters(shape, setup.lora_rank, setup.lora_experts)
        parts = {"weights": weights / setup.shards, "adapters": trained * width / setup.shards}
    parts["gradients"] = trained * width / setup.shards
    parts["optimizer"] = _optimizer_states(shape, setup, trained, width) / setup.shards
    parts["critic"] = _critic_states(shape, setup) / setup.shards
    parts["further models"] = setup.extra_models * weights / setup.shards
    parts["engine"] = setup.engine_gib * GIB
    return parts


def _critic_states(shape: ModelShape, setup: TrainSetup) -> int:
    """Weights, gradients and optimizer of the critic beside its value head, whose few thousand parameters do not count."""
    if setup.critic not in ("separate", "lora"):
        return 0
    if setup.critic == "separate":  # a model without language head
        trained = shape.parameters - _input_embedding(shape)
        width = FLOAT if setup.master_weights else HALF
    else:
        trained, width = lora_parameters(shape, setup.lora_rank, setup.lora_experts), FLOAT
    embedding = shape.embedding_parameters if setup.critic == "separate" else 0
    return round(trained * 2 * width + _optimizer_states(shape, setup, trained, width, embedding))


def _optimizer_states(
    shape: ModelShape, setup: TrainSetup, trained: int, width: int, embedding: int | None = None
) -> float:
    """Bytes of the states for `trained` parameters of `width` bytes, of which `embedding` are the input embedding's."""
    if setup.optimizer_bytes is not None:
        return trained * setup.optimizer_bytes
    if setup.optimizer == "adamw":
        return trained * 2 * width
    if embedding is None:
        embedding = shape.embedding_parameters if setup.method == "full" else 0
    return (trained - embedding) * _EIGHT_BIT + embedding * 2 * FLOAT


def lora_parameters(shape: ModelShape, rank: int, experts: bool) -> int:
    """Parameters of LoRA adapters on q, k, v and o, and on the experts if asked."""
    h, a, kv = shape.hidden_size, shape.attention_width, shape.kv_width
    layer = rank * ((h + a) + 2 * (h + kv) + (a + h))
    if experts:
        i = shape.intermediate_size
        layer += rank * shape.num_experts * ((h + 2 * i) + (i + h))
    return layer * shape.num_layers
