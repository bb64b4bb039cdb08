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


def native_rows(rows: Tensor, out: Tensor, is_scales: bool) -> tuple[int, int, int, int, int, int]:
    """`Rows` of csrc/intranode_move.h: rows [T, n] that are sent, [R, n] that come. Padding is 0, in scales 1."""
    size, kind = rows.element_size(), kind_of(rows.dtype)
    padding = kind.unit if is_scales else 0
    return rows.data_ptr(), rows.stride(0) * size, rows.shape[1] * size, out.data_ptr(), kind.poison, padding
