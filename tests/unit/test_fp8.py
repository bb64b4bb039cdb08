"""The cast to FP8 with 1x128 scales, on CPU, against an oracle in numpy and plain Python."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_ep.fp8 import dequantize_1x128, num_blocks, quantize_1x128

BOTH_SCALE_MODES = pytest.mark.parametrize("power_of_two", [False, True])


def e4m3_values() -> list[float]:
    """The 127 finite e4m3 numbers >= 0 by code: 4 exponent bits with bias 7, 3 mantissa bits (OCP OFP8, table 1)."""
    return [(code % 8 / 8 + (code >= 8)) * 2.0 ** (max(code // 8, 1) - 7) for code in range(127)]


def nearest_e4m3_code(value: float) -> int:
    """The code of the nearest e4m3 number, ties to the even code, infinity as NaN."""
    if not math.isfinite(value):
        return 0x7F
    values = e4m3_values()
    best = min(range(127), key=lambda code: (abs(values[code] - abs(value)), code % 2))
    return best | (0x80 if math.copysign(1.0, value) < 0 else 0)


def oracle(row: list[float], power_of_two: bool) -> tuple[list[int], list[float]]:
    """Codes and scales of one row, by loops; float32 through numpy scalars."""
    codes: list[int] = []
    scales: list[float] = []
    for start in range(0, len(row), 128):
        block = [np.float32(value) for value in row[start : start + 128]]
        amax = max((abs(value) for value in block if math.isfinite(value)), default=np.float32(0))
        scale = max(np.float32(amax) / np.float32(448), np.float32(2.0**-126))
        if power_of_two:
            scale = np.float32(2.0 ** math.ceil(math.log2(float(scale))))
        inverse = np.float32(1) / scale
        codes += [nearest_e4m3_code(float(value * inverse)) if math.isfinite(value) else 0x7F for value in block]
        scales.append(float(scale))
    return codes, scales


def blocks_of_constants(num_rows: int, hidden: int) -> torch.Tensor:
    """Block b of row i is the constant 448 * 2^((2i + b) % 40): all codes are alike, only the scales differ."""
    exponents = (2 * torch.arange(num_rows).unsqueeze(1) + torch.arange(hidden) // 128) % 40
    return 448.0 * torch.exp2(exponents.float())


@BOTH_SCALE_MODES
@pytest.mark.parametrize("amax", [0.0, 1e-30, 1e-40, 1.4e-45])
def test_zero_and_tiny_blocks_have_a_finite_scale_and_leave_their_neighbour_alone(
    amax: float, power_of_two: bool
) -> None:
    # case F01
    normal_block = torch.linspace(-3.0, 3.0, 128).unsqueeze(0)
    x_TH = torch.cat([torch.full((1, 128), amax), normal_block], dim=1)
    q_TH, scales_TB = quantize_1x128(x_TH, power_of_two)
    alone_q, alone_scales = quantize_1x128(normal_block, power_of_two)
    back_TH = dequantize_1x128(q_TH, scales_TB, torch.float32)

    assert scales_TB.isfinite().all()
    assert (scales_TB > 0).all()
    assert scales_TB.reciprocal().isfinite().all()
    assert torch.equal(q_TH[:, 128:].view(torch.uint8), alone_q.view(torch.uint8))
    assert torch.equal(scales_TB[:, 1:], alone_scales)
    tiny_block = back_TH[:, :128]
    if amax == 0.0:
        assert torch.equal(tiny_block, torch.zeros_like(tiny_block))
    else:
        assert ((tiny_block >= 0) & (tiny_block <= 1.07 * amax)).all()


def test_a_block_of_1e_30_keeps_its_value() -> None:
    # case F01
    q_TH, scales_TB = quantize_1x128(torch.full((1, 128), 1e-30))
    torch.testing.assert_close(
        dequantize_1x128(q_TH, scales_TB, torch.float32), torch.full((1, 128), 1e-30), atol=0.0, rtol=1e-6
    )


@BOTH_SCALE_MODES
@pytest.mark.parametrize("num_rows", [1, 3, 4, 5])
@pytest.mark.parametrize("hidden", [256, 2176])
def test_every_scale_belongs_to_its_own_row_and_block(hidden: int, num_rows: int, power_of_two: bool) -> None:
    # case F05, and the numbers of F04 (448 * 2^k makes both scale modes exact)
    x_TH = blocks_of_constants(num_rows, hidden)
    q_TH, scales_TB = quantize_1x128(x_TH, power_of_two)
    assert scales_TB.shape == (num_rows, hidden // 128)
    assert (q_TH.view(torch.uint8) == 0x7E).all()
    assert torch.equal(dequantize_1x128(q_TH, scales_TB, torch.float32), x_TH)


def test_scale_rows_with_alignment_padding_are_read_through_their_strides() -> None:
    # case F05: 17 scales = 68 bytes, stored as 80
    x_TH = blocks_of_constants(4, 2176)
    q_TH, scales_TB = quantize_1x128(x_TH)
    stored = torch.full((4, 20), float("nan"))
    stored[:, :17] = scales_TB
    padded_view = stored[:, :17]
    assert not padded_view.is_contiguous()
    assert torch.equal(dequantize_1x128(q_TH, padded_view, torch.float32), x_TH)


@pytest.mark.parametrize("hidden", [1, 7, 127, 129, 200, 2176])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@BOTH_SCALE_MODES
def test_codes_and_scales_equal_the_oracle_bit_for_bit(hidden: int, dtype: torch.dtype, power_of_two: bool) -> None:
    # case F05 (sizes): the last block is shorter where 128 does not divide H
    generator = torch.Generator().manual_seed(hidden)
    spread = torch.exp2(torch.randint(-12, 12, (2, hidden), generator=generator).float())
    x_TH = (torch.randn(2, hidden, generator=generator) * spread).to(dtype)
    q_TH, scales_TB = quantize_1x128(x_TH, power_of_two)
    assert q_TH.is_contiguous()
    assert scales_TB.is_contiguous()
    for token in range(2):
        codes, scales = oracle(x_TH[token].tolist(), power_of_two)
        assert q_TH[token].view(torch.uint8).tolist() == codes
        assert scales_TB[token].tolist() == scales


def test_ties_go_to_the_even_code() -> None:
    values = e4m3_values()
    middles = [(low + high) / 2 for low, high in zip(values[:-1], values[1:], strict=True)]
    # 448 makes the scale 1, so that a middle between two numbers stays one.
    x_TH = torch.tensor([[448.0, 0.0, *middles], [448.0, -0.0, *(-middle for middle in middles)]])
    q_TH, scales_TB = quantize_1x128(x_TH)
    assert (scales_TB == 1.0).all()
    assert q_TH.view(torch.uint8).tolist() == [[nearest_e4m3_code(value) for value in row] for row in x_TH.tolist()]


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@BOTH_SCALE_MODES
def test_a_bad_element_becomes_nan_and_spoils_no_neighbour(bad: float, power_of_two: bool) -> None:
    # case F01: every scale finite
    x_TH = torch.linspace(-5.0, 4.0, 256).unsqueeze(0)
    x_TH[0, 5] = 0.0
    good_q, good_scales = quantize_1x128(x_TH, power_of_two)
    x_TH[0, 5] = bad
    q_TH, scales_TB = quantize_1x128(x_TH, power_of_two)
    back_TH = dequantize_1x128(q_TH, scales_TB)
    assert torch.equal(scales_TB, good_scales)
    assert back_TH.isnan().nonzero().tolist() == [[0, 5]]
    others = torch.arange(256) != 5
    assert torch.equal(q_TH.view(torch.uint8)[0, others], good_q.view(torch.uint8)[0, others])


any_finite = st.floats(width=32, allow_nan=False, allow_infinity=False)
up_to_2_127 = st.floats(min_value=-(2.0**127), max_value=2.0**127, width=32)


@settings(max_examples=200, deadline=None)
@given(row=st.lists(up_to_2_127, min_size=1, max_size=150), power_of_two=st.booleans())
def test_the_round_trip_stays_within_the_written_bound(row: list[float], power_of_two: bool) -> None:
    # case F01: huge and subnormal blocks too
    x_TH = torch.tensor([row], dtype=torch.float32)
    q_TH, scales_TB = quantize_1x128(x_TH, power_of_two)
    back = dequantize_1x128(q_TH, scales_TB, torch.float64)[0]
    scales = scales_TB[0].double().repeat_interleave(128)[: len(row)]
    bound = torch.maximum(x_TH[0].double().abs() / 16, scales / 1024)
    assert ((back - x_TH[0].double()).abs() <= bound * (1 + 1e-6) + 2.0**-149).all()


@settings(max_examples=100, deadline=None)
@given(row=st.lists(any_finite, min_size=1, max_size=130))
def test_every_scale_is_finite_and_power_of_two_mode_rounds_it_up(row: list[float]) -> None:
    # case F01
    x_TH = torch.tensor([row], dtype=torch.float32)
    _, plain = quantize_1x128(x_TH)
    _, rounded = quantize_1x128(x_TH, power_of_two=True)
    assert ((plain >= 2.0**-126) & plain.isfinite()).all()
    mantissa, _ = rounded.frexp()
    assert (mantissa == 0.5).all()
    assert ((rounded >= plain) & (rounded < 2 * plain)).all()


def test_no_rows_give_empty_results_with_the_right_shapes() -> None:
    q_TH, scales_TB = quantize_1x128(torch.empty(0, 300))
    assert q_TH.shape == (0, 300)
    assert scales_TB.shape == (0, 3)
    assert dequantize_1x128(q_TH, scales_TB).shape == (0, 300)


def test_strided_rows_give_the_bits_of_their_copy() -> None:
    # case I06 for rows: views are not read as if packed
    big = torch.randn(6, 600, generator=torch.Generator().manual_seed(0))
    for view in (big[:, ::2], big.t(), big[1:4, 50:350]):
        q_TH, scales_TB = quantize_1x128(view)
        copy_q, copy_scales = quantize_1x128(view.contiguous())
        assert torch.equal(q_TH.view(torch.uint8), copy_q.view(torch.uint8))
        assert torch.equal(scales_TB, copy_scales)


def test_the_results_are_cut_off_from_the_graph() -> None:
    q_TH, scales_TB = quantize_1x128(torch.ones(1, 4, requires_grad=True))
    assert not q_TH.requires_grad
    assert not scales_TB.requires_grad


def test_wrong_input_is_refused_with_a_sentence() -> None:
    with pytest.raises(ValueError, match=r"shape \[4\], but \[T, H\] with H >= 1 is needed"):
        quantize_1x128(torch.ones(4))
    with pytest.raises(ValueError, match=r"shape \[4, 0\]"):
        quantize_1x128(torch.ones(4, 0))
    with pytest.raises(ValueError, match=r"dtype torch\.float64, but bfloat16, float16 and float32"):
        quantize_1x128(torch.ones(2, 4, dtype=torch.float64))
    q_TH, scales_TB = quantize_1x128(torch.ones(2, 300))
    with pytest.raises(ValueError, match=r"scales is \[2, 2\] torch\.float32, but \[2, 3\] float32 is needed"):
        dequantize_1x128(q_TH, scales_TB[:, :2])
    with pytest.raises(ValueError, match=r"\[T, H\] float8_e4m3fn is needed"):
        dequantize_1x128(torch.ones(2, 300), scales_TB)


def test_num_blocks_rounds_up() -> None:
    assert [num_blocks(hidden) for hidden in (1, 127, 128, 129, 2176, 7168)] == [1, 1, 1, 2, 17, 56]
