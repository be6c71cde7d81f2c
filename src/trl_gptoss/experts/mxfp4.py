"""MXFP4 in PyTorch: 32 values share a power of two, each is a 4-bit float; CPU and GPU, in chunks of bounded memory.

The format is the OCP Microscaling (MX) v1.0 one that openai/gpt-oss is shipped in. A value is `element * 2^(scale - 127)`:
`element` is E2M1 (sign, then 0, 0.5, 1, 1.5, 2, 3, 4 or 6), `scale` one byte (E8M0) for 32 neighbours of the last
dimension. Example, one block whose largest magnitude is 3.9 (only four of its 32 values are shown):

    values      0.26   -3.9   0.9   -0.0
    scale byte  126                          floor(log2 3.9) - 2 = -1, so 2^-1
    scaled      0.52   -7.8   1.8   -0.0     values / 2^-1
    codes       0b0001 0b1111 0b0100 0b1000  nearest of the grid; -7.8 is beyond 6 and saturates
    bytes       0xF1, 0x84                   the first value of a pair is the low nibble
    decoded     0.25   -3.0   1.0   -0.0

Shapes: N rows, K = 32 G values in a row; weights may have dimensions before N (the experts).
"""

import itertools
from collections.abc import Iterator
from typing import Literal

import torch

BLOCK_SIZE = 32
ScaleRule = Literal["best", "floor"]

_GRID = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
# Half way between neighbours of the grid, and whether the upper one has the even code, which is where a tie goes.
_MIDPOINTS = ((0.25, False), (0.75, True), (1.25, False), (1.75, True), (2.5, False), (3.5, True), (5.0, False))

# Values of one chunk. Its temporaries take about 45 bytes per value, 90 MiB; smaller chunks are no faster on a CPU.
_CHUNK = 2**21


def quantize_mxfp4(weight: torch.Tensor, *, scale_rule: ScaleRule = "best") -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise along the last dimension, rounding to nearest, ties to even, saturating at 6.

    Values that are on the grid of their block already (whatever MXFP4 scale they came from) come back bit for bit, the
    sign of zero included.

    Args:
        weight (`torch.Tensor` of shape `(..., N, K)`): float16, bfloat16 or float32, any strides (a transposed view is
            fine), K divisible by 32.
        scale_rule (`str`, *optional*, defaults to `"best"`): `"floor"` is the conversion of the OCP specification,
            `2^(floor(log2 amax) - 2)`: amax lands in [4, 8), and what is beyond 6 saturates. `"best"` also tries twice
            that scale, where nothing saturates but the steps are wider, and keeps for each block the one with the smaller
            sum of squared errors (`"floor"` on a tie). Its error is never above that of `"floor"` nor above that of
            rounding the scale up, which is what OpenAI's `downcast_to_mxfp` does.

    Returns:
        `blocks` (uint8, `(..., N, K / 32, 16)`, two codes per byte, the first in the low nibble) and `scales` (uint8,
        `(..., N, K / 32)`, exponents with bias 127; 255 never occurs), on the device of `weight`.

    Raises:
        `TypeError`: another dtype. `ValueError`: fewer than two dimensions, K not divisible by 32, NaN or infinity,
        unknown `scale_rule`, or a meta tensor.
    """
    _check_weight(weight, scale_rule)
    *leading, n_rows, n_columns = weight.shape
    groups = n_columns // BLOCK_SIZE
    blocks = torch.empty(*leading, n_rows, groups, BLOCK_SIZE // 2, dtype=torch.uint8, device=weight.device)
    scales = torch.empty(*leading, n_rows, groups, dtype=torch.uint8, device=weight.device)
    for index in _chunks(weight.shape):
        values = weight[index].detach().to(torch.float32).contiguous().unflatten(-1, (groups, BLOCK_SIZE))
        blocks[index], scales[index] = _quantize_chunk(values, scale_rule)
    return blocks, scales


def dequantize_mxfp4(
    blocks: torch.Tensor, scales: torch.Tensor, *, dtype: torch.dtype = torch.bfloat16
) -> torch.Tensor:
    """The values of MXFP4 blocks; exact in bfloat16 and float32.

    Args:
        blocks (`torch.Tensor` of shape `(..., N, G, 16)`): uint8, see `quantize_mxfp4`.
        scales (`torch.Tensor` of shape `(..., N, G)`): uint8; 255 is the format's NaN and makes its block NaN.
        dtype (`torch.dtype`, *optional*, defaults to `torch.bfloat16`): of the result. float16 rounds and overflows
            beyond 65504.

    Returns:
        `torch.Tensor` of shape `(..., N, 32 * G)` on the device of `blocks`.

    Raises:
        `TypeError`: not uint8. `ValueError`: shapes that do not belong together.
    """
    if blocks.dtype != torch.uint8 or scales.dtype != torch.uint8:
        raise TypeError(f"blocks and scales must be uint8, found {blocks.dtype} and {scales.dtype}")
    if blocks.dim() < 3 or blocks.shape[-1] != BLOCK_SIZE // 2 or blocks.shape[:-1] != scales.shape:
        raise ValueError(
            f"expected blocks (..., N, G, 16) and scales (..., N, G), found {tuple(blocks.shape)} and "
            f"{tuple(scales.shape)}"
        )
    *leading, n_rows, groups, _ = blocks.shape
    grid = torch.tensor([*_GRID, *(-v for v in _GRID)], device=blocks.device)
    byte = torch.arange(256, device=blocks.device)
    pairs = torch.stack((grid[byte & 15], grid[byte >> 4]), dim=-1)
    out = torch.empty(*leading, n_rows, groups * BLOCK_SIZE, dtype=dtype, device=blocks.device)
    for index in _chunks(out.shape):
        elements = pairs[blocks[index].int()].flatten(-2)
        out[index] = (elements * _power_of_two(scales[index]).unsqueeze(-1)).flatten(-2)
    return out


def _check_weight(weight: torch.Tensor, scale_rule: str) -> None:
    if scale_rule not in ("best", "floor"):
        raise ValueError(f"scale_rule must be 'best' or 'floor', found {scale_rule!r}")
    if weight.dtype not in (torch.float16, torch.bfloat16, torch.float32):
        raise TypeError(
            f"MXFP4 quantises float16, bfloat16 and float32, found {weight.dtype}; convert the weight first"
        )
    if weight.is_meta:
        raise ValueError("the weight is on the meta device and has no values; load the model's weights first")
    if weight.dim() < 2 or weight.shape[-1] % BLOCK_SIZE:
        raise ValueError(
            f"expected a weight (..., N, K) with K divisible by {BLOCK_SIZE}, found shape {tuple(weight.shape)}"
        )


def _chunks(shape: torch.Size) -> Iterator[tuple[int | slice, ...]]:
    """Indices that cut a tensor `(..., N, K)` along its leading dimensions and its rows."""
    *leading, n_rows, n_columns = shape
    rows = max(1, _CHUNK // max(1, n_columns))
    for position in itertools.product(*map(range, leading)):
        for start in range(0, n_rows, rows):
            yield *position, slice(start, start + rows)


def _power_of_two(scale_bytes: torch.Tensor) -> torch.Tensor:
    """`2^(byte - 127)` in float32, exact on every device (`exp2` and `pow` are not on CUDA)."""
    return scale_bytes.contiguous().view(torch.float8_e8m0fnu).to(torch.float32)


def _quantize_chunk(values: torch.Tensor, scale_rule: ScaleRule) -> tuple[torch.Tensor, torch.Tensor]:
    """float32 `(..., G, 32)` -> bytes `(..., G, 16)` and scale bytes `(..., G)`."""
    magnitudes = values.abs()
    amax = magnitudes.amax(dim=-1)
    if not bool(torch.isfinite(amax).all()):
        count = int((~torch.isfinite(values)).sum())
        raise ValueError(
            f"found {count} NaN or infinite values in one chunk of the weight; MXFP4 has no code for them"
        )
    # The exponent bits of a float32 are floor(log2) + 127. Below 2^-125 the scale is the smallest there is, 2^-127, which
    # also takes care of zeros and of float32's denormals.
    scales = ((amax.view(torch.int32) >> 23) - 2).clamp(min=0).to(torch.uint8)
    # Dividing by a power of two is exact: 2^(127 - byte) has the byte 254 - byte, which is at least 2.
    magnitudes *= _power_of_two(254 - scales).unsqueeze(-1)
    codes = _encode(magnitudes)
    if scale_rule == "best":
        wide = _encode(magnitudes * 0.5)
        better = _squared_error(magnitudes, wide, 2.0) < _squared_error(magnitudes, codes, 1.0)
        better &= scales < 252  # twice that scale would decode to 4 * 2^126, infinite in float32 and bfloat16
        codes = torch.where(better.unsqueeze(-1), wide, codes)
        scales = scales + better.to(torch.uint8)
    codes |= torch.signbit(values).to(torch.uint8) << 3
    return codes[..., 0::2] | (codes[..., 1::2] << 4), scales


def _encode(scaled: torch.Tensor) -> torch.Tensor:
    """Codes 0 to 7 of non-negative float32 values: how many midpoints are below (a third of `bucketize`'s time)."""
    codes = torch.zeros_like(scaled, dtype=torch.uint8)
    for midpoint, tie_goes_up in _MIDPOINTS:
        codes += scaled >= midpoint if tie_goes_up else scaled > midpoint
    return codes


def _squared_error(scaled: torch.Tensor, codes: torch.Tensor, factor: float) -> torch.Tensor:
    """Sum over a block of `(scaled - factor * grid[codes])^2`, accumulated in float64.

    In float32 the order of the sum, which differs between devices, would decide near ties.
    """
    grid = torch.tensor(_GRID, device=scaled.device) * factor
    decoded = grid.index_select(0, codes.flatten().int()).view_as(scaled)
    return (scaled - decoded).square_().sum(dim=-1, dtype=torch.float64)
