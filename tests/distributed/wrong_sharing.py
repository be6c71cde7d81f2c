"""Ways to get sequence parallelism wrong that raise no error: each takes the place of the right code for one optimizer step.

Run by `sharing.py`, as cells named `wrong,<name>`.
"""

import contextlib

import torch

from trl_gptoss.attention import interface
from trl_gptoss.parallelism import sequence, ulysses
from trl_gptoss.trainers import packed_forward, padding_free


def first_sinks(self, sinks, heads):
    return sinks[:heads]


def tiled_keys(self, x_1HSD):
    x_SHD, size = x_1HSD[0].transpose(0, 1), self.group.size
    if x_SHD.shape[1] < size:
        x_SHD = x_SHD.repeat(1, size // x_SHD.shape[1], 1)
    return x_SHD.unflatten(1, (size, -1))


def local_positions(packed, group=None, right=packed_forward.model_inputs):
    inputs = right(packed, group)
    inputs["position_ids"] = torch.arange(inputs["input_ids"].shape[1]).unsqueeze(0)
    return inputs


def one_document(packed, group=None, right=packed_forward.model_inputs):
    inputs, total = right(packed, group), packed.input_ids.shape[1]
    ends = torch.tensor([0, total], dtype=torch.int32)
    return {**inputs, "cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "max_length_q": total, "max_length_k": total}


def no_window(*args, right=interface.attend, **kwargs):
    return right(*args, **{**kwargs, "window": None})


def labels_shifted_in_the_shard(x, group, dim=-1, right=packed_forward.shard_tokens):
    """The last token of a share has no successor there."""
    own = right(x, group, dim)
    if bool((x == -100).any()):
        own = own.clone()
        own[..., -1] = -100
    return own


class mean_of_own_tokens(torch.autograd.Function):
    """Each rank divides by the tokens that it holds, instead of all by those of the batch."""

    @staticmethod
    def forward(ctx, x_XS, group):
        ctx.sequence = group
        return sequence._GatherTokens.forward(ctx, x_XS, group)

    @staticmethod
    def backward(ctx, grad):
        own = sequence.shard_tokens(grad, ctx.sequence)
        return own * (grad != 0).sum() / (ctx.sequence.size * (own != 0).sum().clamp(min=1)), None


class summed_gradient(torch.autograd.Function):
    """What `torch.distributed.nn.all_gather` does: the members' copies of one gradient are added up."""

    @staticmethod
    def forward(ctx, x_XS, group):
        return sequence._GatherTokens.forward(ctx, x_XS, group)

    @staticmethod
    def backward(ctx, grad):
        return sequence.shard_tokens(grad, ctx.sequence) * ctx.sequence.size, None


def every_turn_counts_as_the_whole(self, batch, rows, count):
    return 1.0


VARIANTS = {
    "first_sinks": (ulysses.HeadExchange, "_own_sinks", first_sinks),
    "tiled_keys": (ulysses.HeadExchange, "_by_rank", tiled_keys),
    "local_positions": (packed_forward, "model_inputs", local_positions),
    "one_document": (packed_forward, "model_inputs", one_document),
    "no_window": (interface, "attend", no_window),
    "labels_shifted_in_the_shard": (packed_forward, "shard_tokens", labels_shifted_in_the_shard),
    "mean_of_own_tokens": (packed_forward, "gather_tokens", mean_of_own_tokens.apply),
    "summed_gradient": (packed_forward, "gather_tokens", summed_gradient.apply),
    "every_turn_counts_as_the_whole": (
        padding_free.PaddingFreeMixin,
        "_share_of_loss",
        every_turn_counts_as_the_whole,
    ),
}


@contextlib.contextmanager
def wrong(name):
    owner, attribute, value = VARIANTS[name]
    right = getattr(owner, attribute)
    setattr(owner, attribute, value)
    try:
        yield
    finally:
        setattr(owner, attribute, right)
