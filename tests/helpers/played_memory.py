"""Memory of this process as kernels that are played on the CPU see it: by addresses."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from moe_ep.ordered_sum import accumulation_dtype

NAMES = {str(dtype).removeprefix("torch."): dtype for dtype in (torch.bfloat16, torch.float16, torch.float32)}
NAMES["float64"] = torch.float64


def memory_at(address: int, num_bytes: int) -> Tensor:
    """[num_bytes] uint8 over memory of this process."""
    if num_bytes == 0:
        return torch.empty(0, dtype=torch.uint8)
    assert address, "a kernel was given no address"
    return torch.frombuffer((ctypes.c_ubyte * num_bytes).from_address(address), dtype=torch.uint8)


def numbers_at(address: int, count: int, dtype: torch.dtype = torch.int32) -> Tensor:
    return memory_at(address, count * dtype.itemsize).view(dtype)


def rows_at(address: int, num_rows: int, stride: int, row_bytes: int) -> Tensor:
    """[num_rows, row_bytes] uint8."""
    if num_rows == 0 or row_bytes == 0:
        return torch.empty(num_rows, row_bytes, dtype=torch.uint8)
    flat = memory_at(address, (num_rows - 1) * stride + row_bytes)
    return flat.as_strided((num_rows, row_bytes), (stride, 1))


def ordered_sum(terms: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    wide = accumulation_dtype(dtype)
    total = terms[0].to(wide)
    for term in terms[1:]:
        total = total + term.to(wide)
    return total.to(dtype)


def fill_rows(address: int, num_rows: int, row_bytes: int, word: int) -> None:
    rows_at(address, num_rows, row_bytes, row_bytes)[:] = pattern_of(word, row_bytes)


def pattern_of(word: int, num_bytes: int) -> Tensor:
    return torch.frombuffer(bytearray(word.to_bytes(8, "little") * (num_bytes // 8)), dtype=torch.uint8)
