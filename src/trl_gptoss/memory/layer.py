"""Bytes that the modules of one layer, and the heads, save in forward and work with in backward.

Legend: T tokens of a micro-batch on one GPU, H hidden size, A = heads * head_dim, KV = KV heads * head_dim, k experts per
token, I intermediate size of an expert, V vocabulary. All sizes in bytes, activations in bfloat16.
"""

from .setup import TrainSetup
from .shape import FLOAT, HALF, ModelShape

_COLUMN_BLOCK = 1024  # columns of a product that gptoss_fused holds at a time
_HEAD_TOKENS, _HEAD_COLUMNS = 4096, 32768  # tile of TRL's fused head
_HIDDEN_ALIVE = 3  # (T, H) each, while the experts run backward: gradient, gradient of the input, recomputed output
_NORM_TEMPORARIES = 5  # fp32 (T, H) inside the backward of transformers' RMSNorm


def layer_modules(shape: ModelShape, setup: TrainSetup) -> list[tuple[str, float, float]]:
    """(name, bytes saved by forward, bytes at work in backward) of a layer's modules in forward order."""
    T, H, A, KV = setup.local_tokens, shape.hidden_size, shape.attention_width, shape.kv_width
    full = setup.method == "full"
    rows = 2 * FLOAT * shape.num_heads
    if setup.fused_elementwise:
        norm_saved, norm_work = (0, HALF * H), 2 * HALF * H  # the first norm's input is the checkpoint
    else:
        saved = FLOAT * H * (2 if full else 1)
        norm_saved, norm_work = (saved, saved), (_NORM_TEMPORARIES * FLOAT + HALF) * H
    qkv = HALF * H * (1 if full else 3)  # PEFT casts the input once for every adapter
    out = 0 if full else HALF * A
    attention = HALF * (2 * A + 2 * KV) + FLOAT * shape.num_heads
    attention_work = (HALF + FLOAT + HALF) * A + 2 * HALF * KV + rows
    # q, k, v, out and their gradients travel in buffers of their own
    exchange = 2 * HALF * (A + KV) if setup.sequence_parallel_size > 1 else 0
    experts_saved, experts_work = _experts(shape, setup)
    return [
        ("first norm", norm_saved[0] * T, norm_work * T),
        ("q, k, v projections", qkv * T, HALF * (2 * A + 2 * H) * T),
        ("attention", attention * T, (attention_work + exchange) * T),
        ("output projection", out * T, (HALF * 2 * A + HALF * H) * T),
        ("second norm", norm_saved[1] * T, norm_work * T),
        ("experts", experts_saved, experts_work),
    ]


def _experts(shape: ModelShape, setup: TrainSetup) -> tuple[float, float]:
    """Bytes the experts save and bytes they work with, in backward."""
    T, H, I, k = setup.local_tokens, shape.hidden_size, shape.intermediate_size, shape.top_k  # noqa: E741
    full = setup.method == "full"
    hidden = HALF * H * T
    if setup.experts_implementation == "grouped_mm":
        unit = HALF * k * I * T
        saved, at_work = (10, 2) if full else (7, 5 if setup.activation_checkpointing else 3)
        return saved * unit + hidden, at_work * unit + _HIDDEN_ALIVE * hidden
    block = HALF * k * min(_COLUMN_BLOCK, H)
    product, activated = HALF * k * 2 * I, HALF * k * I
    gradients = shape.expert_parameters * HALF if full else 0  # of one layer, before they are added up
    if not setup.experts_token_chunk or setup.experts_token_chunk >= T:
        if setup.activation_checkpointing and not full:
            # recomputation ends before the second product; the block of columns comes when the activations are gone
            return product * T + hidden, activated * T + (_HIDDEN_ALIVE - 1) * hidden
        at_work = max(activated * T + gradients / 3, gradients) + block * T  # the first product's gradient comes last
        return product * T + hidden, at_work + _HIDDEN_ALIVE * hidden
    sums = 3 * gradients  # fp32 sums beside the rounded result
    at_work = (product + activated + block) * setup.experts_token_chunk
    return hidden, at_work + sums + (_HIDDEN_ALIVE + 1) * hidden


def head_bytes(shape: ModelShape, setup: TrainSetup) -> float:
    """Backward of the head: final norm's input, hidden states, their fp32 gradient, tiles of logits."""
    T, H, V = setup.local_tokens, shape.hidden_size, shape.vocab_size
    full = setup.method == "full"
    norm = _final_norm(shape, setup)
    if setup.critic == "shared":  # the value head's float32 copy of the hidden states and its gradient
        norm += 2 * FLOAT * H
    weight_gradient = shape.embedding_parameters * (FLOAT + HALF) if full else 0
    if not setup.fused_head:
        logits = (3 * FLOAT + HALF) * V  # fp32 copy, its log-softmax and gradient, and the product itself
        return (norm + logits) * T + (shape.embedding_parameters * HALF if full else 0)
    tile = HALF * min(T, _HEAD_TOKENS) * min(V, _HEAD_COLUMNS)
    return (norm + HALF * 3 * H + FLOAT * H) * T + tile + weight_gradient


def value_head_bytes(shape: ModelShape, setup: TrainSetup) -> float:
    """Backward of a critic's own forward: final norm's input, hidden states, their float32 copy and its gradient."""
    return (_final_norm(shape, setup) + (HALF + 2 * FLOAT) * shape.hidden_size) * setup.local_tokens


def _final_norm(shape: ModelShape, setup: TrainSetup) -> float:
    """Bytes a token that the final norm saves."""
    if setup.fused_elementwise:
        return HALF * shape.hidden_size
    return FLOAT * shape.hidden_size * (2 if setup.method == "full" else 1)
