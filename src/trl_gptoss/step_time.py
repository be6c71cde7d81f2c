"""Seconds of one train step on H200 GPUs, from the arithmetic to be done and measured rates. A prediction, not a promise.

Forward and backward of one micro-batch per GPU: generation, rewards, tools and the optimizer are not in it. The rates are
those of one H200; another GPU is scaled by its matrix rate. Communication is left out but for the all-to-all of sequence
parallelism: FSDP's gathers overlap with computation as long as a micro-batch has several thousand tokens per GPU.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from .memory import ModelShape, TrainSetup

# FLOP/s reached on one H200 (useful operations only)
ATTENTION_FORWARD, ATTENTION_BACKWARD = 575e12, 494e12  # kernels/sink_fa3/benchmarks/full_h200.csv, 32768x1
EXPERTS = {  # benchmarks/experts/h200.csv, E=32, 32768 tokens: forward, backward with frozen and with trained experts
    "gptoss_fused": (598e12, 483e12, 537e12),
    "grouped_mm": (357e12, 235e12, 280e12),
}
DENSE = 650e12  # projections and head
# seconds per token and layer, memory bound
WINDOW_FORWARD, WINDOW_BACKWARD = 6.7e-9, 15e-9  # kernels/sink_fa3/benchmarks/window_h200.csv, 32768 tokens
# norms, rotary embedding, residuals and fp32 adapters of one pass: what the other parts leave of the 24 layers in
# benchmarks/experts/body_h200.csv
ELEMENTWISE, ELEMENTWISE_FUSED = 0.31e-6, 0.18e-6
ALL_TO_ALL = 293e9  # bytes per second and GPU, two H200 over NVLink: benchmarks/multi_gpu/collectives_h200.csv has 294


@dataclass(kw_only=True, slots=True, frozen=True)
class StepTime:
    """Seconds per GPU of one forward and backward.

    Args:
        attention (`float`): Attention kernels.
        experts (`float`): Experts, router included.
        dense (`float`): Projections.
        elementwise (`float`): Norms, rotary embedding, residuals.
        head (`float`): Language-model head with its log-probabilities.
        exchange (`float`): All-to-all of sequence parallelism.
    """

    attention: float
    experts: float
    dense: float
    elementwise: float
    head: float
    exchange: float

    @property
    def total(self) -> float:
        return self.attention + self.experts + self.dense + self.elementwise + self.head + self.exchange


def predict_step_time(
    shape: ModelShape, setup: TrainSetup, lengths: Sequence[int] | None = None, speed: float = 1.0
) -> StepTime:
    """Time of forward and backward of one micro-batch.

    Args:
        shape (`ModelShape`): The model; every second layer is taken to have a window of 128.
        setup (`TrainSetup`): The settings.
        lengths (`Sequence[int]`, *optional*): Lengths of the packed sequences, summing to `setup.tokens`; one sequence
            if not given.
        speed (`float`, *optional*, defaults to 1.0): Matrix rate of the GPU over that of an H200.

    Raises:
        `ValueError`: The lengths do not sum to the tokens.
    """
    lengths = [setup.tokens] if lengths is None else lengths
    if sum(lengths) != setup.tokens:
        raise ValueError(f"The lengths sum to {sum(lengths)}; expected setup.tokens = {setup.tokens}.")
    T, layers, sp = setup.local_tokens, shape.num_layers, setup.sequence_parallel_size
    forwards = 2 if setup.activation_checkpointing else 1
    trained = setup.method == "full"
    full_layers = layers // 2
    scores = 4 * shape.attention_width * sum(n * n / 2 for n in lengths) / sp
    attention = full_layers * scores * (forwards / ATTENTION_FORWARD + 2.5 / ATTENTION_BACKWARD)
    attention += (layers - full_layers) * T * (forwards * WINDOW_FORWARD + WINDOW_BACKWARD)
    forward, frozen, with_weights = EXPERTS[setup.experts_implementation]
    operations = 2 * T * shape.top_k * 3 * shape.hidden_size * shape.intermediate_size
    runs = forwards
    if (
        setup.experts_implementation == "gptoss_fused"
    ):  # the first product, two thirds, once more: by checkpoint or tile
        runs = 1 + (2 / 3 if setup.activation_checkpointing or setup.experts_token_chunk else 0)
    experts = runs / forward + (2 / with_weights if trained else 1 / frozen)
    dense = 2 * T * shape.hidden_size * 2 * (shape.attention_width + shape.kv_width)
    head = 2 * T * shape.hidden_size * shape.vocab_size * (1 + 1 + (2 if trained else 1)) / DENSE
    each = ELEMENTWISE_FUSED if setup.fused_elementwise else ELEMENTWISE
    sent = 2 * T * 2 * (shape.attention_width + shape.kv_width) * (1 - 1 / sp)
    return StepTime(
        attention=attention / speed,
        experts=layers * operations * experts / speed,
        dense=layers * dense * (forwards + (2 if trained else 1)) / DENSE / speed,
        elementwise=layers * T * each * (forwards + 1) / speed,
        head=head / speed,
        exchange=layers * sent * (forwards + 1) / ALL_TO_ALL,
    )
