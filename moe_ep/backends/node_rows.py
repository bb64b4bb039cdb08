"""Rows as the kernels inside a node take them: aligned, as addresses, with what fills rows that are given up."""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from torch import Tensor

from moe_ep.backends.header import dtype_number
from moe_ep.fp8 import UNIT_SCALE
from moe_ep.kernel_arguments import dtype_name

# NaN in the dtype, repeated over eight bytes. Bytes are taken for FP8.
POISON = {
    torch.float64: 0x7FF8000000000000,
    torch.float32: 0x7FC000007FC00000,
    torch.bfloat16: 0x7FC07FC07FC07FC0,
    torch.float16: 0x7E007E007E007E00,
    torch.float8_e4m3fn: 0x7F7F7F7F7F7F7F7F,
    torch.float8_e5m2: 0x7F7F7F7F7F7F7F7F,
    torch.uint8: 0x7F7F7F7F7F7F7F7F,
}
_ALL_ONES = 0xFFFFFFFFFFFFFFFF
# The scale 1, repeated over eight bytes.
_UNIT_PATTERN = {torch.float32: 0x3F8000003F800000, torch.int32: int(UNIT_SCALE[torch.int32]) * 0x100000001}
_SAME_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def round_up(num_bytes: int) -> int:
    """To a multiple of 256, at which things begin in a slot."""
    return (num_bytes + 255) // 256 * 256


def aligned(x: Tensor) -> Tensor:
    """The rows such that each is contiguous, begins at a multiple of 16 bytes and is as long: with zeros behind it."""
    size = x.element_size()
    missing = -x.shape[1] * size % 16 // size
    if missing:  # scales of FP8 rows, say
        bits = x.contiguous().view(_SAME_SIZE[size])
        return torch.nn.functional.pad(bits, (0, int(missing))).view(x.dtype)
    if x.shape[0] and (x.stride(1) != 1 or x.stride(0) * size % 16 or x.data_ptr() % 16):
        return x.clone(memory_format=torch.contiguous_format)
    return x


class Kind(NamedTuple):
    """A dtype of rows as headers and kernels know it.

    Attributes:
        number: in a header.
        name: in csrc.
        poison: what fills rows that are given up.
        unit: the scale 1, which fills padding of scales.
    """

    number: int
    name: str
    poison: int
    unit: int


@functools.cache
def kind_of(dtype: torch.dtype) -> Kind:
    return Kind(dtype_number(dtype), dtype_name(dtype), POISON.get(dtype, _ALL_ONES), _UNIT_PATTERN.get(dtype, 0))


class Load:
    """What a dispatch sends, known before it is known where to.

    Args:
        kinds: rows [T, n], and their scales where they have some, `aligned`.
        widths: how wide each was given.
        places: where they lie for peers to read (`NodeMemory.places_of`).

    Attributes:
        num_tokens: T.
        row_bytes: of a row with its scales.
        kind: of the rows.
    """

    def __init__(self, kinds: tuple[Tensor, ...], widths: tuple[int, ...], places: tuple[int, ...]) -> None:
        self._kinds, self.widths, self.places = kinds, widths, places
        self.num_tokens, self.kind = kinds[0].shape[0], kind_of(kinds[0].dtype)
        self._native, self.row_bytes = [], 0
        for number, rows in enumerate(kinds):
            size, kind = rows.element_size(), kind_of(rows.dtype)
            num_bytes = rows.shape[1] * size
            self.row_bytes += num_bytes
            padding = kind.unit if number else 0
            self._native.append((rows.data_ptr(), rows.stride(0) * size, num_bytes, kind.poison, padding))

    def outs(self, num_rows: int) -> list[Tensor]:
        """[R, n] of each kind, for what comes."""
        return [rows.new_empty(num_rows, rows.shape[1]) for rows in self._kinds]

    def native(self, outs: list[Tensor]) -> list[tuple[int, int, int, int, int, int]]:
        """`Rows` of csrc/intranode_move.h. Padding is 0, in scales 1."""
        return [
            (x, stride, num_bytes, out.data_ptr(), poison, padding)
            for (x, stride, num_bytes, poison, padding), out in zip(self._native, outs, strict=True)
        ]

    def as_given(self, outs: list[Tensor]) -> tuple[Tensor, Tensor | None]:
        """Rows and scales that came, as wide as they were given."""
        whole = [out if out.shape[1] == width else out[:, :width] for out, width in zip(outs, self.widths, strict=True)]
        return whole[0], whole[1] if len(whole) > 1 else None
