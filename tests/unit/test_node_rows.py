"""Rows as the kernels inside a node take them: multiples of 16 bytes, begun at one, equal in value."""

from __future__ import annotations

import struct
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from moe_ep._native.arguments import address, dtype_name
from moe_ep.backends.header import dtype_number
from moe_ep.backends.node_rows import POISON, Load, aligned, round_up
from moe_ep.fp8 import UNIT_SCALE

ROW_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
BYTE_DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2, torch.uint8, torch.int8)
DTYPES = (*ROW_DTYPES, *BYTE_DTYPES, torch.int32)
WIDTHS = (1, 2, 3, 7, 8, 16, 17, 56, 64)


def make_rows(num_tokens: int, width: int, dtype: torch.dtype) -> Tensor:
    """Every byte pattern that the dtype has, NaN too: rows travel as bits."""
    generator = torch.Generator().manual_seed(1 + width)
    size = (num_tokens, width * dtype.itemsize)
    return torch.randint(0, 256, size, dtype=torch.uint8, generator=generator).view(dtype)


def assert_ready(rows: Tensor, given: Tensor) -> None:
    size = given.element_size()
    assert rows.dtype == given.dtype
    assert rows.shape[0] == given.shape[0]
    assert rows.shape[1] * size % 16 == 0
    assert 0 <= (rows.shape[1] - given.shape[1]) * size < 16
    if rows.shape[0]:
        assert rows.stride(1) == 1
        assert rows.stride(0) * size % 16 == 0
        assert rows.data_ptr() % 16 == 0
    bits = rows.contiguous().view(torch.uint8)
    split = given.shape[1] * size
    assert torch.equal(bits[:, :split], given.contiguous().view(torch.uint8))
    assert not bits[:, split:].any(), "what fills a row up is zero"


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_name)
def test_rows_of_any_width_become_multiples_of_16_bytes_and_keep_their_bits(dtype: torch.dtype) -> None:
    for width in WIDTHS:
        for num_tokens in (0, 1, 5):
            given = make_rows(num_tokens, width, dtype)
            assert_ready(aligned(given), given)


STRIDED: dict[str, Callable[[Tensor], Tensor]] = {
    "every other row": lambda rows: rows[::2],
    "every other column": lambda rows: rows[:, ::2],
    "columns from the second on": lambda rows: rows[:, 1:],
    "columns up to the last": lambda rows: rows[:, :-1],
    "transposed": lambda rows: rows.t(),
    "rows from the second on": lambda rows: rows[1:],
    "one row, again and again": lambda rows: rows[:1].expand(6, rows.shape[1]),
    "one column, again and again": lambda rows: rows[:, :1].expand(rows.shape[0], 16),
}


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_name)
@pytest.mark.parametrize("name", STRIDED)
def test_rows_with_any_strides_and_any_start_are_taken(dtype: torch.dtype, name: str) -> None:
    for width in (3, 16, 33):
        given = STRIDED[name](make_rows(6, width, dtype))
        assert_ready(aligned(given), given)


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_name)
def test_rows_that_begin_beside_16_bytes_are_copied(dtype: torch.dtype) -> None:
    flat = make_rows(1, 4 * 16 + 1, dtype)[0]
    given = flat[1:].view(4, 16)
    assert given.data_ptr() % 16 != 0
    rows = aligned(given)
    assert_ready(rows, given)
    assert rows.data_ptr() != given.data_ptr()


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_name)
def test_rows_that_are_ready_are_not_copied(dtype: torch.dtype) -> None:
    given = make_rows(6, 64, dtype)
    ready = [given, given[::2], given[1:], given[:, 16:48], given[:1].expand(6, 64), given[:0]]
    for rows in ready:
        assert aligned(rows) is rows


def test_addresses_and_strides_are_those_of_the_rows_in_bytes() -> None:
    rows = torch.zeros(8, 64, dtype=torch.bfloat16)[::2, 8:40]
    load = Load(rows, None, None)
    out, _ = load.outs(3)
    assert load.native(out, None) == [(rows.data_ptr(), 256, 64, out.data_ptr(), POISON[torch.bfloat16], 0)]
    assert (load.said, load.row_bytes) == ((32, dtype_number(torch.bfloat16), 4 * 64, ()), 64)


def repeated(pattern: int, dtype: torch.dtype) -> Tensor:
    """The eight bytes of a pattern, read as the dtype."""
    return torch.frombuffer(bytearray(struct.pack("<Q", pattern)), dtype=torch.uint8).view(dtype)


@pytest.mark.parametrize("dtype", POISON, ids=dtype_name)
def test_rows_that_are_given_up_are_nan(dtype: torch.dtype) -> None:
    values = repeated(POISON[dtype], dtype)
    if dtype.is_floating_point:
        assert values.to(torch.float64).isnan().all()
    else:  # FP8 travels as bytes too
        assert values.view(torch.float8_e4m3fn).to(torch.float32).isnan().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.int32], ids=dtype_name)
def test_scales_of_padding_rows_are_one_and_those_of_rows_given_up_are_no_scale(dtype: torch.dtype) -> None:
    scales = torch.ones(2, 4, dtype=dtype)
    (*_, padding_of_rows), (*_, poison, padding) = Load(scales, scales, None).native(scales, scales)
    assert (repeated(padding, dtype) == UNIT_SCALE[dtype]).all()
    assert padding_of_rows == 0
    bad = repeated(poison, dtype)
    assert bad.isnan().all() if dtype.is_floating_point else (bad == -1).all()


def test_patterns_fit_the_unsigned_words_of_the_kernels() -> None:
    for dtype in (*POISON, torch.int32, torch.int64):
        rows = torch.zeros(1, 16, dtype=dtype)
        for *_, poison, padding in Load(rows, rows, None).native(rows, rows):
            assert 0 <= poison < 2**64
            assert 0 <= padding < 2**64


def test_parts_of_a_slot_begin_at_256_bytes() -> None:
    assert [round_up(num_bytes) for num_bytes in (0, 1, 255, 256, 257)] == [0, 256, 256, 256, 512]


def test_no_tensor_is_the_null_pointer() -> None:
    tensor = torch.zeros(2)
    assert (address(None), address(tensor)) == (0, tensor.data_ptr())
    assert (dtype_name(torch.float8_e4m3fn), dtype_name(torch.bfloat16)) == ("float8_e4m3fn", "bfloat16")
