"""FP8 matrices in the one form that FP8 tensor cores of Hopper read: the reduction dimension is the last one.

A product is out[n, m] = b[n, k] @ a[m, k].T, whatever it is for, so the gradients' operands are stored transposed. The
scales are float32 and multiply the data; they are laid out as Transformer Engine's GEMM expects them:

    "rows"    one scale a 1x128 block:    [ceil(K / 128), round_up(N, 4)], transposed, so that a block's scales of
              neighbouring rows are neighbours
    "tiles"   one scale a 128x128 block:  [ceil(N / 128), round_up(ceil(K / 128), 4)]
    "tensor"  one scale for all:          [1]

Letters: N rows of a matrix, K its reduction dimension, B = ceil(K / 128); L experts, R rows of all experts, O and I
outputs and inputs of a weight, T tokens.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal, overload

import torch
from torch import Tensor

from moe_ep.fp8.cast import BLOCK_ELEMS, num_blocks

Scaling = Literal["rows", "tiles", "tensor"]
FP8_DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2)
SCALE_ROWS = 4  # the scales of a block are padded to a multiple of this many rows


def round_up(value: int, multiple: int) -> int:
    """The next multiple at or above `value`."""
    return -(-value // multiple) * multiple


@dataclass(frozen=True, eq=False)
class Fp8Matrix:
    """One operand of a product.

    Attributes:
        data: [N, K] float8_e4m3fn or float8_e5m2, contiguous.
        scales: float32, contiguous, laid out as the module's docstring says.
        scaling: what one scale is for.
    """

    data: Tensor
    scales: Tensor
    scaling: Scaling

    def dequantize(self) -> Tensor:
        """[N, K] float32, every element times its scale."""
        num_rows, width = self.data.shape
        if self.scaling == "tensor":
            return self.data.float() * self.scales
        if self.scaling == "rows":
            scales_NB = self.scales[:, :num_rows].t()
        else:
            scales_NB = self.scales[:, : num_blocks(width)].repeat_interleave(BLOCK_ELEMS, dim=0)[:num_rows]
        return self.data.float() * scales_NB.repeat_interleave(BLOCK_ELEMS, dim=1)[:, :width]


class Fp8Matrices(Sequence[Fp8Matrix]):
    """One matrix an expert, all of one dtype and scaling.

    A layer makes ten of these a step, of dozens of experts each. So they are lists of plain tensors, cut out of what a
    cast wrote in one call of `split`; an `Fp8Matrix` is made when one is asked for.

    Attributes:
        codes: [N, K] uint8 each, contiguous: the bytes of the FP8 elements.
        scales: float32 each, as `Fp8Matrix` has them.
        dtype: float8_e4m3fn or float8_e5m2.
        scaling: what one scale is for.
        memo: what a GEMM wants to remember of them, since weights come again; nothing else changes.
    """

    __slots__ = ("codes", "dtype", "memo", "scales", "scaling")

    def __init__(self, codes: Sequence[Tensor], scales: Sequence[Tensor], dtype: torch.dtype, scaling: Scaling) -> None:
        self.codes, self.scales, self.dtype, self.scaling = codes, scales, dtype, scaling
        self.memo: Any = None

    def __len__(self) -> int:
        return len(self.codes)

    @overload
    def __getitem__(self, at: int) -> Fp8Matrix: ...

    @overload
    def __getitem__(self, at: slice) -> Fp8Matrices: ...

    def __getitem__(self, at: int | slice) -> Fp8Matrix | Fp8Matrices:
        if isinstance(at, slice):
            return Fp8Matrices(self.codes[at], self.scales[at], self.dtype, self.scaling)
        return Fp8Matrix(self.codes[at].view(self.dtype), self.scales[at], self.scaling)


def row_scales(scales_NB: Tensor) -> Tensor:
    """[N, B] scales as the GEMM reads them: [B, round_up(N, 4)], padding 1."""
    num_rows, blocks = scales_NB.shape
    out = scales_NB.new_ones(blocks, round_up(num_rows, SCALE_ROWS))
    out[:, :num_rows] = scales_NB.t()
    return out


@dataclass(frozen=True)
class RowRanges:
    """The rows of each local expert in a tensor of all rows: expert after expert.

    Attributes:
        sizes: rows of each expert, padding included.
        device: where the rows are.
    """

    sizes: tuple[int, ...]
    device: torch.device
    begins: tuple[int, ...] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "begins", tuple(itertools.accumulate(self.sizes, initial=0))[:-1])

    @property
    def num_rows(self) -> int:
        """R."""
        return sum(self.sizes)

    @property
    def slices(self) -> list[slice]:
        """Where each expert's rows are."""
        return [slice(begin, begin + size) for begin, size in zip(self.begins, self.sizes, strict=True)]

    def split(self, rows_RK: Tensor) -> tuple[Tensor, ...]:
        """The rows of each expert; views."""
        return rows_RK.split_with_sizes(self.sizes)

    @cached_property
    def offsets(self) -> Tensor:
        """[L + 1] int32 on the device, where each expert's rows begin, and their end."""
        offsets = torch.tensor([*self.begins, self.num_rows], dtype=torch.int32, device="cpu")
        return offsets.pin_memory().to(self.device, non_blocking=True) if self.device.type == "cuda" else offsets

    @cached_property
    def tiles(self) -> Tensor:
        """[tiles, 4] int32 on the device, one tile for up to 128 rows of one expert, as csrc/fp8/tiles.h reads them.

        First row of the tile, its rows, first row of the expert, rows of the expert.
        """
        sizes = torch.tensor(self.sizes, dtype=torch.int64, device="cpu")
        counts = (sizes + (BLOCK_ELEMS - 1)) // BLOCK_ELEMS
        expert = torch.repeat_interleave(counts)
        size, begin = sizes[expert], (sizes.cumsum(0) - sizes)[expert]
        in_expert = torch.arange(len(expert), device="cpu") - (counts.cumsum(0) - counts)[expert]
        row = begin + BLOCK_ELEMS * in_expert
        num_rows = (begin + size - row).clamp(max=BLOCK_ELEMS)
        tiles = torch.stack([row, num_rows, begin, size], dim=1).to(torch.int32)
        return tiles.pin_memory().to(self.device, non_blocking=True) if self.device.type == "cuda" else tiles


def split_rows(data_RK: Tensor, packed: Tensor, ranges: RowRanges) -> Fp8Matrices:
    """Rows of all experts, with the scales of `pack_scales`, as one matrix an expert; views, no copies."""
    blocks = num_blocks(data_RK.shape[1])
    widths = [round_up(size, SCALE_ROWS) for size in ranges.sizes]
    parts = packed.split_with_sizes([blocks * width for width in widths])
    scales = [part.view(blocks, width) for part, width in zip(parts, widths, strict=True)]
    return Fp8Matrices(ranges.split(data_RK.view(torch.uint8)), scales, data_RK.dtype, "rows")


def split_columns(data: Tensor, scales: Tensor, width: int, ranges: RowRanges) -> Fp8Matrices:
    """The transposed rows of each expert, [width, rows] each, one after the other in flat `data`; views, no copies."""
    blocks = [num_blocks(size) for size in ranges.sizes]
    padded = round_up(width, SCALE_ROWS)
    flats = data.view(torch.uint8).split_with_sizes([width * size for size in ranges.sizes])
    parts = scales.split_with_sizes([count * padded for count in blocks])
    return Fp8Matrices(
        [flat.view(width, size) for flat, size in zip(flats, ranges.sizes, strict=True)],
        [part.view(count, padded) for part, count in zip(parts, blocks, strict=True)],
        data.dtype,
        "rows",
    )


def whole_rows(data_RK: Tensor, scale: Tensor, ranges: RowRanges) -> Fp8Matrices:
    """Rows of all experts that share one scale, as one matrix an expert; views, no copies."""
    return Fp8Matrices(ranges.split(data_RK.view(torch.uint8)), [scale] * len(ranges.sizes), data_RK.dtype, "tensor")


def check_sizes(sizes: Sequence[int], alignment: int) -> None:
    """Every expert's rows are padded to what the GEMM needs.

    Raises:
        ValueError: they are not.
    """
    wrong = [size for size in sizes if size % alignment]
    if wrong:
        raise ValueError(
            f"tokens_per_expert holds {wrong[0]}, but FP8 products take a multiple of {alignment} rows an expert; "
            f"dispatch with alignment={alignment}."
        )
