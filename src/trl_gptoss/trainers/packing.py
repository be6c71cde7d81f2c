"""Padding-free batches: the real tokens of all rows one behind the other, in one row of the model.

TRL pads prompts on the left and completions on the right. Of two rows with prompts `a b` and `c`, completions `X` and
`Y Z`

    . a b X .        packed tokens    a  b  X  c  Y  Z
    . . c Y Z        position_ids     0  1  2  0  1  2
                     shift_labels     .  X  .  Y  Z  .      the token that follows, where it is one of the completion
                     cu_seqlens       0        3        6

remain, and the log-probs go back to their padded places. Row lengths are numbers on the host, so that nothing is read from
the device: one copy carries all indices there.

Shape suffixes: B rows, L padded prompt and completion, C padded completion, T packed tokens, N scored tokens.
"""

import math
from dataclasses import dataclass

import numpy as np
import torch

RowLength = tuple[int, int]  # tokens of the prompt, tokens of the completion
IGNORED = -100


@dataclass(frozen=True, kw_only=True, slots=True)
class PackedBatch:
    """Rows without their padding.

    Args:
        input_ids (`torch.Tensor`): int64 (1, T).
        position_ids (`torch.Tensor`): int64 (1, T), from 0 in every document.
        shift_labels (`torch.Tensor`): int64 (1, T), -100 where the next token is not scored.
        cu_seqlens (`torch.Tensor`): int32 (documents + 1,).
        max_length (`int`): Tokens of the longest document.
        index_T (`torch.Tensor`): int64 (T,), where each token stands in the flattened rows; 0 for tokens that only fill up.
        source_N (`torch.Tensor`): int64 (N,), packed positions whose log-prob is wanted.
        target_N (`torch.Tensor`): int64 (N,), where it belongs in (B * C,).
        shape (`tuple[int, int]`): (B, C).
    """

    input_ids: torch.Tensor
    position_ids: torch.Tensor
    shift_labels: torch.Tensor
    cu_seqlens: torch.Tensor
    max_length: int
    index_T: torch.Tensor
    source_N: torch.Tensor
    target_N: torch.Tensor
    shape: tuple[int, int]

    def unpack(self, values_T: torch.Tensor) -> torch.Tensor:
        """Per-token values (T,) at their places in (B, C), 0 everywhere else. Differentiable."""
        flat = values_T.new_zeros(self.shape[0] * self.shape[1])
        return flat.index_copy(0, self.target_N, values_T[self.source_N]).view(self.shape)


def pack(
    input_ids_BL: torch.Tensor, lengths: list[RowLength], completion_width: int, multiple_of: int = 1
) -> PackedBatch:
    """Pack left-padded prompts with right-padded completions.

    Args:
        input_ids_BL (`torch.Tensor`): int64 (B, L), the prompt in the first L - C columns.
        lengths (`list[tuple[int, int]]`): Real tokens of each row's prompt and completion.
        completion_width (`int`): C.
        multiple_of (`int`, *optional*, defaults to 1): Fill up to a multiple with a document of its own that has no labels.

    Raises:
        ValueError: lengths that do not fit the rows, or a completion without a prompt token to predict it from.
    """
    rows, width = input_ids_BL.shape
    prompt_width = width - completion_width
    _check(lengths, rows, prompt_width, completion_width)
    tokens, positions, following, source, target, ends = [], [], [], [], [], [0]
    for row, (prompt, completion) in enumerate(lengths):
        length = prompt + completion
        if length == 0:
            continue
        begin = row * width + prompt_width - prompt
        index = np.arange(begin, begin + length)
        scored = np.full(length, -1)
        scored[prompt - 1 : length - 1] = index[prompt:]
        tokens.append(index)
        positions.append(np.arange(length))
        following.append(scored)
        source.append(np.arange(ends[-1] + prompt - 1, ends[-1] + length - 1))
        target.append(np.arange(row * completion_width, row * completion_width + completion))
        ends.append(ends[-1] + length)
    fill = max(1, math.ceil(ends[-1] / multiple_of)) * multiple_of - ends[-1]
    if fill:
        tokens.append(np.zeros(fill, np.int64))  # any token of the batch
        positions.append(np.arange(fill))
        following.append(np.full(fill, -1))
        ends.append(ends[-1] + fill)
    parts = [np.concatenate(part) for part in (tokens, positions, following)]
    scored = [np.concatenate(part) if part else np.zeros(0, np.int64) for part in (source, target)]
    index_T, position_T, next_T, source_N, target_N, cu_seqlens = _to_device(
        [*parts, *scored, np.array(ends)], input_ids_BL.device
    )
    flat = input_ids_BL.flatten()
    return PackedBatch(
        input_ids=flat[index_T].unsqueeze(0),
        position_ids=position_T.unsqueeze(0),
        shift_labels=torch.where(next_T < 0, IGNORED, flat[next_T.clamp(min=0)]).unsqueeze(0),
        cu_seqlens=cu_seqlens.to(torch.int32),
        max_length=max(b - a for a, b in zip(ends, ends[1:])),
        index_T=index_T,
        source_N=source_N,
        target_N=target_N,
        shape=(rows, completion_width),
    )


def _check(lengths: list[RowLength], rows: int, prompt_width: int, completion_width: int) -> None:
    if len(lengths) != rows:
        raise ValueError(f"pack got {len(lengths)} row lengths for {rows} rows.")
    for row, (prompt, completion) in enumerate(lengths):
        if not (0 <= prompt <= prompt_width and 0 <= completion <= completion_width):
            raise ValueError(
                f"Row {row} is said to have {prompt} prompt and {completion} completion tokens, in {prompt_width} and "
                f"{completion_width} columns."
            )
        if completion and not prompt:
            raise ValueError(
                f"Row {row} has {completion} completion tokens and no prompt token to predict the first from."
            )


def _to_device(arrays: list[np.ndarray], device: torch.device) -> list[torch.Tensor]:
    """One copy for all."""
    joined = torch.from_numpy(np.concatenate(arrays).astype(np.int64))
    if device.type == "cuda":
        joined = joined.pin_memory().to(device, non_blocking=True)
    return list(joined.to(device).split([len(array) for array in arrays]))


def micro_batches(lengths: list[int], max_tokens: int | None) -> list[list[int]]:
    """Divide rows among as few micro-batches as a token budget allows, of sizes as equal as possible.

    The longest row goes first, to the smallest micro-batch so far: 4, 3, 3, 2, 2 tokens with a budget of 7 become
    [4, 3] and [3, 2, 2]. A row that is longer than the budget is a micro-batch of its own.

    Args:
        lengths (`list[int]`): Tokens of each row.
        max_tokens (`int`, *optional*): The budget; without one all rows are one micro-batch.

    Returns:
        `list[list[int]]`: Indices of rows, ascending in every micro-batch; at least one micro-batch, none of them empty
        unless there is no row.
    """
    if max_tokens is None or not lengths:
        return [list(range(len(lengths)))]
    limit = max(max_tokens, max(lengths))
    order = sorted(range(len(lengths)), key=lambda row: (-lengths[row], row))
    count = max(1, math.ceil(sum(lengths) / limit))
    while True:
        loads, bins = [0] * count, [[] for _ in range(count)]
        for row in order:
            smallest = min(range(count), key=lambda i: (loads[i], i))
            loads[smallest] += lengths[row]
            bins[smallest].append(row)
        if max(loads) <= limit:
            return [sorted(rows) for rows in bins if rows]
        count += 1
