"""FP8 matrices in the layout of the GEMM: where every byte and scale lies; nothing depends on its neighbours."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from moe_ep.fp8 import dequantize_1x128, quantize_1x128
from moe_ep.fp8.blocks import cast_rows, cast_weights, pack_scales, transpose_rows
from moe_ep.fp8.matrix import Fp8Matrix, RowRanges, check_sizes, row_scales, split_columns, split_rows
from tests.helpers.compare import assert_same_bits
from tests.helpers.fp8_oracle import rounded

CPU = torch.device("cpu")
SIZES = (16, 0, 144, 32)
WIDTHS = (128, 192, 2176)  # one block, a short last one, 17


def _x(width: int, num_rows: int = sum(SIZES)) -> Tensor:
    return torch.randn(num_rows, width, generator=torch.Generator().manual_seed(width)).bfloat16()


@pytest.mark.parametrize("width", WIDTHS)
def test_each_expert_has_its_rows_and_a_block_of_scales_of_its_own(width: int) -> None:
    x, ranges = _x(width), RowRanges(SIZES, CPU)
    codes, scales_RB = quantize_1x128(x, power_of_two=True)
    received = split_rows(codes, pack_scales(scales_RB, ranges), ranges)
    cast = cast_rows(x, ranges, power_of_two=True).rows
    for made in (received, cast):
        for matrix, part, size in zip(made, ranges.slices, SIZES, strict=True):
            assert matrix.data.shape == (size, width)
            assert matrix.scales.shape == (-(-width // 128), size)  # 16 divides the sizes: nothing to pad to 4
            assert_same_bits(matrix.data.view(torch.uint8), codes[part].view(torch.uint8), "bytes")
            assert_same_bits(matrix.scales.t().contiguous(), scales_RB[part], "scales")
            if size:
                expected = dequantize_1x128(codes[part], scales_RB[part], torch.float32)
                assert_same_bits(matrix.dequantize(), expected, "values")
    assert received[2].scales.data_ptr() != cast[2].scales.data_ptr()
    assert received[2].data.data_ptr() == codes[16:].data_ptr()  # a view


@pytest.mark.parametrize("num_rows", [1, 3, 5, 8])  # case F04
def test_scales_of_rows_are_padded_to_four_with_ones(num_rows: int) -> None:
    scales = torch.rand(num_rows, 17) + 1
    laid_out = row_scales(scales)
    assert laid_out.shape == (17, -(-num_rows // 4) * 4)
    assert_same_bits(laid_out[:, :num_rows].t().contiguous(), scales, "scales")
    assert bool((laid_out[:, num_rows:] == 1).all())


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("power_of_two", [False, True])
def test_the_transpose_has_blocks_of_128_rows_of_one_expert(width: int, power_of_two: bool) -> None:
    # In float32 no value lies halfway between two codes, where one bit of a scale would decide.
    x, ranges = torch.randn(sum(SIZES), width, generator=torch.Generator().manual_seed(1)), RowRanges(SIZES, CPU)
    columns = cast_rows(x, ranges, power_of_two, rows=False, columns=True).columns
    for matrix, part, size in zip(columns, ranges.slices, SIZES, strict=True):
        assert matrix.data.shape == (width, size)
        assert matrix.scales.shape == (-(-size // 128), width)
        expected = rounded(x[part], 128, 1, power_of_two).t()
        torch.testing.assert_close(matrix.dequantize().double(), expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize("width", WIDTHS)
def test_rows_that_came_as_fp8_lose_nothing_when_they_are_transposed(width: int) -> None:
    """Powers of two as scales: the old values are among the new ones, as long as the blocks are about alike."""
    x, ranges = _x(width), RowRanges(SIZES, CPU)
    codes, scales_RB = quantize_1x128(x, power_of_two=True)
    for matrix, part in zip(
        transpose_rows(codes, pack_scales(scales_RB, ranges), ranges, power_of_two=True), ranges.slices, strict=True
    ):
        values = dequantize_1x128(codes[part], scales_RB[part], torch.float32).t()
        error = (matrix.dequantize() - values).abs()
        assert bool((error <= 2**-10 * matrix.scales.max() if error.numel() else torch.tensor(True)).all())


@pytest.mark.parametrize(("outputs", "inputs"), [(128, 128), (192, 320), (16, 2176)])
@pytest.mark.parametrize("power_of_two", [False, True])
def test_weights_have_one_scale_a_tile_and_so_has_their_transpose(
    outputs: int, inputs: int, power_of_two: bool
) -> None:
    weight = torch.randn(3, outputs, inputs, generator=torch.Generator().manual_seed(0))
    weight[1] = 0
    cast = cast_weights(weight, power_of_two, columns=True)
    plain, transposed = cast.rows, cast.columns
    for expert in range(3):
        expected = rounded(weight[expert], 128, 128, power_of_two)
        torch.testing.assert_close(plain[expert].dequantize().double(), expected, rtol=1e-6, atol=0)
        assert_same_bits(transposed[expert].dequantize(), plain[expert].dequantize().t().contiguous(), "transpose")
        high, wide = -(-outputs // 128), -(-inputs // 128)
        assert plain[expert].scales.shape == (high, -(-wide // 4) * 4)
        assert transposed[expert].scales.shape == (wide, -(-high // 4) * 4)
        for matrix in (plain[expert], transposed[expert]):
            assert bool((matrix.scales > 0).all())  # padding too
            assert bool(matrix.scales.isfinite().all())


def test_zero_rows_and_wild_ones_leave_their_neighbours_alone() -> None:  # case F01
    x = _x(256, 32).float()
    alone = cast_rows(x, RowRanges((32,), CPU), True, rows=True, columns=True)
    x[3], x[5, :128], x[7] = 0.0, 1e-40, 1e-30
    x[9, 200] = float("nan")
    x[11, 0] = float("inf")
    cast = cast_rows(x, RowRanges((32,), CPU), True, rows=True, columns=True)
    for matrix in (*cast.rows, *cast.columns):
        assert bool((matrix.scales >= 2**-126).all())
        assert bool(matrix.scales.isfinite().all())
    values = cast.rows[0].dequantize()
    assert not bool(values[3].any())
    assert bool(values[[0, 1, 2, 4]].isfinite().all())
    assert_same_bits(values[13:], alone.rows[0].dequantize()[13:], "rows behind")
    transposed = cast.columns[0].dequantize()
    assert not bool(transposed[:, 3].any())
    assert bool(transposed[200, 9].isnan())
    assert int(transposed.isnan().sum()) == 2  # the NaN and the infinity


def test_no_rows_at_all_is_an_ordinary_case() -> None:
    for sizes in ((), (0, 0)):
        ranges = RowRanges(sizes, CPU)
        cast = cast_rows(_x(256, 0), ranges, True, rows=True, columns=True)
        assert [matrix.data.shape for matrix in cast.rows] == [(0, 256)] * len(sizes)
        assert [matrix.data.shape for matrix in cast.columns] == [(256, 0)] * len(sizes)
        assert pack_scales(torch.empty(0, 2), ranges).shape == (0,)
        assert ranges.tiles.shape == (0, 4)


def test_the_tiles_walk_over_every_expert_by_128_rows() -> None:
    assert RowRanges((16, 0, 272), CPU).tiles.tolist() == [
        [0, 16, 0, 16],
        [16, 128, 16, 272],
        [144, 128, 16, 272],
        [272, 16, 16, 272],
    ]


def test_flat_columns_are_cut_where_the_kernel_puts_them() -> None:
    ranges = RowRanges((16, 144), CPU)
    data = torch.arange(160 * 32, dtype=torch.uint8)
    first, second = split_columns(data, torch.arange(3.0 * 32), 32, ranges)
    assert (first.data.shape, second.data.shape) == ((32, 16), (32, 144))
    assert (first.scales.shape, second.scales.shape) == ((1, 32), (2, 32))
    assert float(second.scales[0, 0]) == 32


def test_rows_that_are_not_padded_are_refused_with_the_alignment() -> None:  # case F02
    with pytest.raises(ValueError, match=r"holds 15, but .* multiple of 16 rows an expert; dispatch with alignment=16"):
        check_sizes([16, 15], 16)
    check_sizes([0, 16, 32], 16)


def test_dequantising_reads_one_scale_for_all() -> None:
    data = torch.randn(4, 8).to(torch.float8_e5m2)
    assert_same_bits(Fp8Matrix(data, torch.tensor([3.0]), "tensor").dequantize(), data.float() * 3, "values")
