"""Rows as the kernels inside a node take them: aligned, as addresses, with what fills rows that are given up."""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from torch import Tensor

from moe_ep._native.arguments import dtype_name
from moe_ep._native.exchange import NativeRows
from moe_ep.backends.header import dtype_number
from moe_ep.backends.node_memory import NodeMemory
from moe_ep.fp8 import UNIT_SCALE

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
        x, scales: rows [T, n], and their scales [T, m] where they have some; any strides.
        memory: where peers may find them and read them in place; None where something else is sent.

    Attributes:
        row_bytes: of a row with its scales.
        kind: of the rows.
        said: what `NativeExchange.move` tells the peers: H, dtype, bytes that the rows take, places.
    """

    def __init__(self, x: Tensor, scales: Tensor | None, memory: NodeMemory | None) -> None:
        self._width, rows, kind = x.shape[1], aligned(x), kind_of(x.dtype)
        self._rows, self.kind = rows, kind
        self._scales: Tensor | None = None
        self._bytes = row_bytes = rows.shape[1] * rows.element_size()
        kinds: tuple[Tensor, ...] = (rows,)
        if scales is not None:
            self._scale_width, self._scales = scales.shape[1], aligned(scales)
            kinds = (rows, self._scales)
            row_bytes += self._scales.shape[1] * scales.element_size()
        places = () if memory is None else memory.places_of(kinds)
        self.row_bytes = row_bytes
        self.said = (self._width, kind.number, rows.shape[0] * row_bytes, places)

    def outs(self, num_rows: int) -> tuple[Tensor, Tensor | None]:
        """[R, n] and [R, m] for what comes."""
        rows = self._rows.new_empty(num_rows, self._rows.shape[1])
        return rows, None if self._scales is None else self._scales.new_empty(num_rows, self._scales.shape[1])

    def native(self, rows: Tensor, scales: Tensor | None) -> list[NativeRows]:
        """With those outs. Padding is 0, in scales 1."""
        x, kind = self._rows, self.kind
        native = [(x.data_ptr(), x.stride(0) * x.element_size(), self._bytes, rows.data_ptr(), kind.poison, 0)]
        if self._scales is not None and scales is not None:
            given, kind, size = self._scales, kind_of(scales.dtype), scales.element_size()
            lies = (given.data_ptr(), given.stride(0) * size, given.shape[1] * size)
            native.append((*lies, scales.data_ptr(), kind.poison, kind.unit))
        return native

    def as_given(self, rows: Tensor, scales: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Rows and scales that came, as wide as they were given."""
        if rows.shape[1] != self._width:
            rows = rows[:, : self._width]
        if scales is not None and scales.shape[1] != self._scale_width:
            scales = scales[:, : self._scale_width]
        return rows, scales
