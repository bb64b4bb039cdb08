"""How low-latency rows and scales are cast, packed and put into their places, on one process and by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

import moe_ep
from moe_ep.fp8 import quantize_1x128
from moe_ep.low_latency.layout import (
    FP8,
    FP8_ROUNDED,
    FP8_UE8M0,
    empty_scales,
    encode,
    pack_ue8m0,
    places_of,
    put_rows,
)
from tests.helpers.compare import assert_same_bits

IDX = torch.zeros(3, 1, dtype=torch.int64)


def test_exponent_bytes_are_packed_with_the_first_scale_lowest() -> None:
    # The example of pack_ue8m0, and the ends of the range: 2^-126 has byte 1, 2^127 byte 254.
    scales = torch.tensor([[1.0, 2.0, 4.0, 0.5], [2.0**-126, 2.0**127, 2.0**-126, 2.0**-126]])
    assert [word & 0xFFFFFFFF for word in pack_ue8m0(scales)[:, 0].tolist()] == [0x7E81807F, 0x0101FE01]


def test_packed_scales_give_the_rounded_scales_back() -> None:
    g = torch.Generator().manual_seed(0)
    x = torch.randn(6, 1024, generator=g).bfloat16() * torch.logspace(-30, 30, 6).unsqueeze(1).bfloat16()
    codes, words = encode(x, FP8_UE8M0)
    rounded_codes, rounded = encode(x, FP8_ROUNDED)
    assert words is not None
    assert rounded is not None
    assert words.shape == (6, 2)
    for token in range(6):
        for block in range(8):
            byte = (int(words[token, block // 4]) >> (8 * (block % 4))) & 0xFF
            assert 2.0 ** (byte - 127) == float(rounded[token, block])
    assert_same_bits(codes, rounded_codes, "codes")


@pytest.mark.parametrize(("row_format", "rounds"), [(FP8, False), (FP8_ROUNDED, True)])
def test_rows_are_cast_as_the_fp8_reference_casts_them(row_format: int, rounds: bool) -> None:
    x = torch.randn(5, 256, generator=torch.Generator().manual_seed(1)).bfloat16()
    codes, scales = encode(x, row_format)
    expected_codes, expected_scales = quantize_1x128(x, power_of_two=rounds)
    assert scales is not None
    assert_same_bits(codes.view(torch.float8_e4m3fn), expected_codes, "codes")
    assert_same_bits(scales, expected_scales, "scales")


UNIT = {torch.float32: 1.0, torch.int32: 0x7F7F7F7F}  # exponent byte 127 in each of four


# case F06
@pytest.mark.parametrize(("row_format", "num_scales", "dtype"), [(FP8, 8, torch.float32), (FP8_UE8M0, 2, torch.int32)])
def test_scales_are_1_and_keep_the_places_of_an_expert_contiguous(
    row_format: int, num_scales: int, dtype: torch.dtype
) -> None:
    scales = empty_scales(2, 6, 1024, row_format, torch.device("cpu"))
    assert scales.shape == (2, 6, num_scales)
    assert scales.stride() == (6 * num_scales, 1, 6)
    assert scales.dtype == dtype
    assert bool((scales == UNIT[dtype]).all())


def test_rows_land_in_their_places_through_any_strides() -> None:
    rows, row_slot = torch.arange(1, 7, dtype=torch.float32).view(3, 2), torch.tensor([0, 4, 5])
    plain, turned = torch.zeros(2, 4, 2), torch.zeros(2, 2, 4).transpose(1, 2)
    for out in (plain, turned):
        put_rows(out, row_slot, rows)
        assert out.tolist() == [[[1, 2], [0, 0], [0, 0], [0, 0]], [[3, 4], [5, 6], [0, 0], [0, 0]]]


# case F01 (a block of zeros, tiny values, a NaN), F05 (no rows), F06 (scales of empty places)
@pytest.mark.parametrize("use_ue8m0", [False, True])
def test_zeros_tiny_values_and_no_tokens_at_all_stay_harmless(use_ue8m0: bool) -> None:
    x = torch.zeros(3, 512, dtype=torch.bfloat16)
    x[1] = 1e-38
    x[2, 0] = float("nan")
    buffer = moe_ep.Buffer()
    for tokens in (3, 0):
        idx = torch.zeros(tokens, 1, dtype=torch.int64)
        received, count, handle, _, _ = buffer.low_latency_dispatch(
            x[:tokens], idx, 4, 2, round_scale=use_ue8m0, use_ue8m0=use_ue8m0
        )
        rows, scales = received
        assert count.tolist() == [tokens, 0]
        assert rows.shape == (2, 4, 512)
        assert not bool(rows[:, tokens:].view(torch.uint8).any())
        assert bool((scales[:, tokens:] == UNIT[scales.dtype]).all())
        assert not bool(rows[0, :1].float().any())
        assert int(rows.float().isnan().sum()) == (1 if tokens else 0)
        combined, _, _ = buffer.low_latency_combine(
            torch.zeros(2, 4, 512).bfloat16(), idx, torch.ones(tokens, 1), handle
        )
        assert combined.shape == (tokens, 512)


def test_the_example_of_the_layout_page_is_what_comes_out() -> None:
    """Rank 1's side: tokens 0 and 1 of rank 0 and token 1 of rank 1 for its only expert, N = 4."""
    buffer = moe_ep.Buffer()
    _, _, handle, _, _ = buffer.low_latency_dispatch(torch.ones(3, 1).bfloat16(), IDX, 4, 1, use_fp8=False)
    routing = replace(
        handle.routing, ranks=(0, 1), rank=1, recv_counts=(2, 1), recv_token=torch.tensor([0, 1, 1], dtype=torch.int32)
    )
    places = places_of(routing, torch.zeros(3, dtype=torch.int64), torch.tensor([3]), 4)
    assert places.row_slot.tolist() == [0, 1, 2]
    assert places.src_info.tolist() == [[0, 1, 1, -1]]
    assert places.layout_range.tolist() == [[2, 1 + (2 << 32)]]


def test_a_handle_unpacks_as_deep_eps_tuple() -> None:
    buffer = moe_ep.Buffer()
    _, _, handle, _, _ = buffer.low_latency_dispatch(torch.ones(3, 1).bfloat16(), IDX, 4, 1, use_fp8=False)
    src_info, layout_range, num_max, hidden, num_experts = handle
    assert isinstance(src_info, Tensor)
    assert isinstance(layout_range, Tensor)
    assert src_info.tolist() == [[0, 1, 2, -1]]
    assert layout_range.tolist() == [[3]]
    assert (num_max, hidden, num_experts) == (4, 1, 1)
    assert (len(handle), handle[2]) == (5, 4)
