"""The FP8 casts of the experts in one kernel, bit for bit beside the formula on the CPU."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from moe_ep import _native
from moe_ep.fp8 import quantize_1x128
from moe_ep.fp8.blocks import (
    cast_rows,
    cast_swiglu,
    cast_swiglu_grad,
    cast_weights,
    kernel_serves,
    pack_scales,
    transpose_rows,
)
from moe_ep.fp8.matrix import Fp8Matrices, RowRanges
from moe_ep.layers.activations import activate, activation_grad
from tests.helpers.compare import assert_same_bits

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(_native.load() is None, reason="needs moe_ep._C, which this install was made without"),
]

SIZES = (16, 0, 144, 1040, 48)
CPU, GPU = torch.device("cpu"), torch.device("cuda")
MODES = pytest.mark.parametrize("power_of_two", [True, False])
KERNEL_DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])


def rows_of(width: int, dtype: torch.dtype) -> Tensor:
    """Wild rows among ordinary ones: zeros, tiny and large values, a NaN and an infinity."""
    x = torch.randn(sum(SIZES), width, generator=torch.Generator().manual_seed(width))
    x[3], x[5] = 0, x[5] * 1e-30
    x[20, width - 1], x[40, 0], x[41] = float("nan"), float("inf"), x[41] * 2**20
    return x.to(dtype)


def assert_same(ours: Fp8Matrices, theirs: Fp8Matrices, what: str) -> None:
    assert len(ours) == len(theirs)
    for expert, (mine, expected) in enumerate(zip(ours, theirs, strict=True)):
        assert mine.scaling == expected.scaling
        assert_same_bits(mine.data.view(torch.uint8), expected.data.view(torch.uint8), f"{what} of expert {expert}")
        assert_same_bits(mine.scales, expected.scales, f"scales of {what} of expert {expert}")


@MODES
@KERNEL_DTYPES
@pytest.mark.parametrize("width", [16, 128, 192, 2048])
def test_rows_and_their_transpose_have_the_bits_of_the_formula(
    width: int, dtype: torch.dtype, power_of_two: bool
) -> None:
    x, ranges = rows_of(width, dtype), RowRanges(SIZES, GPU)
    assert kernel_serves(x.cuda(), ranges)
    for rows, columns in ((True, False), (False, True), (True, True)):
        ours = cast_rows(x.cuda(), ranges, power_of_two, rows=rows, columns=columns)
        theirs = cast_rows(x, RowRanges(SIZES, CPU), power_of_two, rows=rows, columns=columns)
        assert_same(ours.rows, theirs.rows, "rows")
        assert_same(ours.columns, theirs.columns, "columns")


@MODES
@pytest.mark.parametrize("width", [192, 7168])
def test_received_rows_are_laid_out_and_transposed_like_the_formula(width: int, power_of_two: bool) -> None:
    codes, scales = quantize_1x128(rows_of(width, torch.bfloat16), power_of_two)
    on_cpu, on_gpu = RowRanges(SIZES, CPU), RowRanges(SIZES, GPU)
    packed, expected = pack_scales(scales.cuda(), on_gpu), pack_scales(scales, on_cpu)
    assert_same_bits(packed, expected, "packed scales")
    ours = transpose_rows(codes.cuda(), packed, on_gpu, power_of_two)
    assert_same(ours, transpose_rows(codes, expected, on_cpu, power_of_two), "columns")


@MODES
@KERNEL_DTYPES
@pytest.mark.parametrize(("outputs", "inputs"), [(128, 128), (208, 192), (4096, 1024)])
def test_weights_have_the_bits_of_the_formula(
    outputs: int, inputs: int, dtype: torch.dtype, power_of_two: bool
) -> None:
    weight = torch.randn(3, outputs, inputs, generator=torch.Generator().manual_seed(0)).to(dtype)
    weight[1] = 0
    ours, theirs = (cast_weights(given, power_of_two, columns=True) for given in (weight.cuda(), weight))
    assert_same(ours.rows, theirs.rows, "weights")
    assert_same(ours.columns, theirs.columns, "transposed weights")
    alone = cast_weights(weight.cuda(), power_of_two, columns=False)
    assert_same(alone.rows, theirs.rows, "weights without their transpose")
    assert not alone.columns


@KERNEL_DTYPES
def test_swiglu_is_cast_without_being_written(dtype: torch.dtype) -> None:
    """The bits of the SwiGLU kernel followed by the cast, but for the exponential's last place."""
    ranges = RowRanges(SIZES, GPU)
    projected = torch.randn(sum(SIZES), 2 * 192, generator=torch.Generator().manual_seed(1)).to(dtype).cuda()
    ours = cast_swiglu(projected, ranges, True, rows=True, columns=True)
    theirs = cast_rows(activate(projected, "swiglu"), ranges, True, rows=True, columns=True)
    for mine, expected in zip((*ours.rows, *ours.columns), (*theirs.rows, *theirs.columns), strict=True):
        differing = (mine.data.view(torch.uint8) != expected.data.view(torch.uint8)).float().mean()
        assert not mine.data.numel() or float(differing) < 1e-3
    for rows in (True, False):  # as forward and as backward ask for it: the same inner
        alone = cast_swiglu(projected, ranges, True, rows=rows, columns=not rows)
        assert_same(alone.rows if rows else alone.columns, ours.rows if rows else ours.columns, "either alone")


@KERNEL_DTYPES
def test_the_gradient_of_swiglu_without_a_graph_is_that_of_autograd(dtype: torch.dtype) -> None:
    projected, grad = (rows_of(width, dtype).cuda() for width in (2 * 192, 192))
    leaf = projected.clone().requires_grad_()
    activate(leaf, "swiglu").backward(grad)
    assert leaf.grad is not None
    assert_same_bits(activation_grad(projected, grad, "swiglu"), leaf.grad, "gradient of the projection")


@KERNEL_DTYPES
@pytest.mark.parametrize("ffn", [16, 192, 2048])  # halves that share a block, and others
def test_the_gradient_of_swiglu_is_cast_without_being_written(dtype: torch.dtype, ffn: int) -> None:
    """The bits of the gradient's kernel followed by the cast, but for a product's last place."""
    ranges = RowRanges(SIZES, GPU)
    projected = torch.randn(sum(SIZES), 2 * ffn, generator=torch.Generator().manual_seed(1)).to(dtype).cuda()
    grad = rows_of(ffn, dtype).cuda()
    assert kernel_serves(projected, ranges, halves=True)
    theirs = cast_rows(activation_grad(projected, grad, "swiglu"), ranges, True, rows=True, columns=True)
    for rows, columns in ((True, True), (True, False), (False, True)):
        ours = cast_swiglu_grad(projected, grad, ranges, True, rows=rows, columns=columns)
        assert (len(ours.rows), len(ours.columns)) == (rows * len(SIZES), columns * len(SIZES))
        expected = (*(theirs.rows if rows else ()), *(theirs.columns if columns else ()))
        for mine, other in zip((*ours.rows, *ours.columns), expected, strict=True):
            differing = (mine.data.view(torch.uint8) != other.data.view(torch.uint8)).float().mean()
            assert not mine.data.numel() or float(differing) < 1e-3


def test_more_rows_than_31_bits_of_elements_are_reached() -> None:
    size, width = 320_000, 7168  # 2.3e9 elements
    ranges = RowRanges((size,), GPU)
    x = torch.zeros(size, width, dtype=torch.bfloat16, device=GPU)
    x[-1] = 1.0
    cast = cast_rows(x, ranges, True, rows=True, columns=True)
    assert float(cast.rows[0].data[-1].float().min()) == float(cast.rows[0].data[-1].float().max()) == 256.0
    assert not bool(cast.rows[0].data[-2].view(torch.uint8).any())
    assert float(cast.columns[0].data[-1, -1].float()) == 256.0
    assert not bool(cast.columns[0].data[:, -2].view(torch.uint8).any())
