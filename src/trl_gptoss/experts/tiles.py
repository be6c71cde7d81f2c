"""What the grouped kernels share: which rows a tile covers (on the device), and launch decisions (on the host).

Shape legend: M sorted rows, E experts. Rows of expert e are `offsets[e]:offsets[e + 1]`; row tiles are numbered through
all experts, so a kernel finds its expert from `offsets` and the host never waits for the token counts.
"""

import functools

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from .tuning import TileConfig, cdiv

PAD = 64  # rows per padded block of an expert; a multiple of every contraction step of `grouped_wgrad`


@triton.jit
def expert_tiles(offsets_ptr, E, E_POW2: tl.constexpr, BM: tl.constexpr):
    """Running number of row tiles per expert (E_POW2,) and the total."""
    expert = tl.arange(0, E_POW2)
    begin = tl.load(offsets_ptr + expert, mask=expert < E, other=0)
    end = tl.load(offsets_ptr + expert + 1, mask=expert < E, other=0)
    tiles = (end - begin + BM - 1) // BM
    return tl.cumsum(tiles, axis=0), tl.sum(tiles, axis=0)


@triton.jit
def locate_tile(offsets_ptr, running, tile, BM: tl.constexpr):
    """Expert, first row and end row (of the expert) of row tile `tile`."""
    done = running <= tile
    expert = tl.sum(done.to(tl.int32), axis=0)
    first = tl.max(tl.where(done, running, 0), axis=0)
    begin = tl.load(offsets_ptr + expert) + (tile - first) * BM
    return expert, begin, tl.load(offsets_ptr + expert + 1)


@triton.jit
def place_tile(offsets_ptr, running, tile, column_tiles, NARROW: tl.constexpr, BM: tl.constexpr, GROUP: tl.constexpr):
    """Expert, its first and end row, row tile within the expert and column tile of tile `tile` of a product.

    All tiles of an expert come one after another, so that its matrix is read from memory once. Its row tiles are cut into
    equal groups of at most `GROUP`, which share a column before the next column starts. With `NARROW` an expert's narrow
    tiles come behind the others, `column_tiles` as their column. `running` counts row tiles, with `NARROW` all tiles.
    """
    per_row = 1 if NARROW else column_tiles
    done = running * per_row <= tile
    expert = tl.sum(done.to(tl.int32), axis=0)
    rest = tile - tl.max(tl.where(done, running, 0), axis=0) * per_row
    start = tl.load(offsets_ptr + expert)
    end = tl.load(offsets_ptr + expert + 1)
    row_tiles = tl.cdiv(end - start, BM)
    if NARROW and rest >= row_tiles * column_tiles:
        tile_m = rest - row_tiles * column_tiles
        tile_n = column_tiles
    else:
        group = tl.cdiv(row_tiles, tl.cdiv(row_tiles, GROUP))
        first = rest // (group * column_tiles) * group
        inside = rest % (group * column_tiles)
        group = min(row_tiles - first, group)
        tile_m = first + inside % group
        tile_n = inside // group
    return expert, start, end, tile_m, tile_n


@functools.cache
def processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2


def programs(config: TileConfig, tiles: int, device: torch.device) -> int:
    return max(1, min(tiles, processors(device) * config.programs))


def narrow_columns(columns: int, bn: int) -> int:
    """Columns of the narrow tile for what tiles of `bn` leave over: a quarter or half of `bn`, 0 for no such tile."""
    left = columns % bn
    return next((width for width in (bn // 4, bn // 2) if 0 < left <= width), 0)


def precision(dtype: torch.dtype) -> str:
    return "ieee" if dtype == torch.float32 else "tf32"


@functools.cache
def _has_tma(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] >= 9


def can_describe(matrix: torch.Tensor) -> bool:
    """TMA wants a 16-byte aligned base and row pitch, and pays only from Hopper on."""
    return (
        _has_tma(matrix.device)
        and matrix.data_ptr() % 16 == 0
        and matrix.stride(0) * matrix.element_size() % 16 == 0
        and matrix.stride(1) == 1
    )


def ragged_descriptor(matrix: torch.Tensor, rows: int, columns: int) -> TensorDescriptor:
    """Descriptor for `triton.tools.ragged_tma`, with tiles of (rows, columns) that end where an expert's rows end.

    Equal to its `create_ragged_descriptor`, which takes 13 us on the host; this takes 1.6.
    """
    pitch = matrix.stride(0)
    shape = [0x7FFF0000, 0x7FFF0000, 2**30, matrix.shape[1]]
    return TensorDescriptor(matrix, shape, [2**34 - pitch, pitch, pitch, 1], [1, 1, rows, columns])


def padded_rows(rows: int, experts: int) -> int:
    """Upper bound of the row count when every expert is filled up to a multiple of `PAD`."""
    return (cdiv(rows, PAD) + min(experts, rows)) * PAD
