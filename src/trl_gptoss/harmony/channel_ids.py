"""Which channel every sampled token belongs to, for metrics per channel.

ids    <|channel|> analysis <|message|> hm <|end|> <|start|> assistant <|channel|> final <|message|> 4 <|return|>
id          0         0          0       0    0       2         2          2         2        2      2     2
"""

from collections.abc import Sequence
from itertools import groupby

from transformers import PreTrainedTokenizerBase

from .header import CHANNELS
from .parser import parse

CHANNEL_NAMES: tuple[str, ...] = tuple(CHANNELS)
NO_CHANNEL = -1


def channel_ids(ids: Sequence[int], mask: Sequence[int], tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Index into `CHANNEL_NAMES` of every token of one completion.

    Args:
        ids (`Sequence[int]`): (T,) ids after the prompt.
        mask (`Sequence[int]`): (T,) nonzero on sampled ids; each run of them is one turn of the policy.
        tokenizer (`PreTrainedTokenizerBase`): a Harmony tokenizer.

    Returns:
        `list[int]`: (T,) with -1 where nothing was sampled, or where what was sampled names no channel.
    """
    channels = [NO_CHANNEL] * len(ids)
    for sampled, run in groupby(range(len(ids)), key=lambda i: bool(mask[i])):
        if not sampled:
            continue
        turn = list(run)
        for message in parse([ids[i] for i in turn], tokenizer).messages:
            if message.role == "assistant" and message.channel in CHANNELS:
                begin, end = message.span
                channels[turn[0] + begin : turn[0] + end] = [CHANNEL_NAMES.index(message.channel)] * (end - begin)
    return channels
