"""Which micro-batches are on-policy, from three settings.

One generation batch is used for `steps_per_generation * num_iterations` micro-batches; the optimizer steps every
`gradient_accumulation_steps` micro-batches. Every micro-batch before the first optimizer step after the generation is
on-policy: the weights are those that sampled it. With 4 slices, 1 iteration and an optimizer step every 3 micro-batches:

    micro-batch      0  1  2 | 3   4  5 | 6  7   8 | 9 ...
    slice            0  1  2 | 3   0  1 | 2  3   0 | 1
    generation       ^             ^             ^
    on-policy        y  y  y | n   y  y | n  n   y | n
"""

import math


def is_always_on_policy(gradient_accumulation_steps: int, steps_per_generation: int, num_iterations: int) -> bool:
    """Whether no optimizer step falls inside a generation batch."""
    return gradient_accumulation_steps % (steps_per_generation * num_iterations) == 0


def check_on_policy_schedule(gradient_accumulation_steps: int, steps_per_generation: int, num_iterations: int) -> None:
    """Raise unless every optimizer step is on-policy.

    Raises:
        ValueError: says which settings to change.
    """
    if is_always_on_policy(gradient_accumulation_steps, steps_per_generation, num_iterations):
        return
    used = steps_per_generation * num_iterations
    raise ValueError(
        f"on_policy='force', but a generation batch is used for steps_per_generation * num_iterations = "
        f"{steps_per_generation} * {num_iterations} = {used} micro-batches and the optimizer steps every "
        f"gradient_accumulation_steps = {gradient_accumulation_steps} micro-batches, so that some optimizer steps come "
        f"after the weights have changed. Set gradient_accumulation_steps to a multiple of {used} (for example "
        f"{math.lcm(gradient_accumulation_steps, used)}), or num_iterations=1 and steps_per_generation to a divisor of "
        f"{gradient_accumulation_steps}, or on_policy='auto'."
    )
