"""The FP8 casts of the experts in one kernel, bit for bit beside the formula on the CPU."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from moe_ep import _native
from moe_ep.fp8 import quantize_1x128
from moe_ep.fp8.blocks import (
    Fp8Cast,
    cast_rows,
    cast_swiglu,
    cast_swiglu_grad,
    cast_weights,
    kernel_serves,
    pack_scales,
    transpose_rows,
)
from moe_ep.fp8.matrix import Fp8Matrices, RowRanges
from moe_ep.layers.activations import activate, activation_grad, weighted_activate
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


WEIGHTS = pytest.mark.parametrize("weighs", [True, False])


def weights_of(weighs: bool) -> Tensor | None:
    """0, negative and huge ones among ordinary ones."""
    weights = torch.rand(sum(SIZES), generator=torch.Generator().manual_seed(2)) + 0.1
    weights[::7], weights[::5], weights[9::64] = 0, -weights[::5], 2.0**40
    return weights.cuda() if weighs else None


def assert_nearly_same(ours: Fp8Cast, theirs: Fp8Cast) -> None:
    for mine, expected in zip((*ours.rows, *ours.columns), (*theirs.rows, *theirs.columns), strict=True):
        differing = (mine.data.view(torch.uint8) != expected.data.view(torch.uint8)).float().mean()
        assert not mine.data.numel() or float(differing) < 1e-3


@WEIGHTS
@KERNEL_DTYPES
def test_swiglu_is_cast_without_being_written(dtype: torch.dtype, weighs: bool) -> None:
    """The bits of the SwiGLU kernel followed by the cast, but for the exponential's last place."""
    ranges, weights = RowRanges(SIZES, GPU), weights_of(weighs)
    projected = torch.randn(sum(SIZES), 2 * 192, generator=torch.Generator().manual_seed(1)).to(dtype).cuda()
    ours = cast_swiglu(projected, weights, ranges, True, rows=True, columns=True)
    assert_nearly_same(
        ours, cast_rows(weighted_activate(projected, weights, "swiglu"), ranges, True, rows=True, columns=True)
    )
    for rows in (True, False):  # as forward and as backward ask for it: the same inner
        alone = cast_swiglu(projected, weights, ranges, True, rows=rows, columns=not rows)
        assert_same(alone.rows if rows else alone.columns, ours.rows if rows else ours.columns, "either alone")


@WEIGHTS
@KERNEL_DTYPES
def test_the_gradient_of_swiglu_without_a_graph_is_that_of_autograd(dtype: torch.dtype, weighs: bool) -> None:
    projected, grad = (rows_of(width, dtype).cuda() for width in (2 * 192, 192))
    weights = weights_of(weighs)
    leaves = [tensor.clone().requires_grad_() for tensor in (projected, weights) if tensor is not None]
    weighted_activate(leaves[0], leaves[1] if weighs else None, "swiglu").backward(grad)
    for ours, leaf in zip(activation_grad(projected, weights, grad, "swiglu"), leaves, strict=False):
        assert ours is not None
        assert leaf.grad is not None
        assert_same_bits(ours, leaf.grad, "gradient")


@WEIGHTS
@KERNEL_DTYPES
@pytest.mark.parametrize("ffn", [16, 192, 2048])  # halves that share a block, and others
def test_the_gradient_of_swiglu_is_cast_without_being_written(dtype: torch.dtype, ffn: int, weighs: bool) -> None:
    """The bits of the gradient's kernel followed by the cast, but for a product's last place."""
    ranges, weights = RowRanges(SIZES, GPU), weights_of(weighs)
    projected = torch.randn(sum(SIZES), 2 * ffn, generator=torch.Generator().manual_seed(1)).to(dtype).cuda()
    grad = rows_of(ffn, dtype).cuda()
    assert kernel_serves(projected, ranges, halves=True)
    written, _ = activation_grad(projected, weights, grad, "swiglu")
    for rows, columns in ((True, True), (True, False), (False, True)):
        ours, grad_weights = cast_swiglu_grad(projected, weights, grad, ranges, True, rows=rows, columns=columns)
        assert (len(ours.rows), len(ours.columns)) == (rows * len(SIZES), columns * len(SIZES))
        assert_nearly_same(ours, cast_rows(written, ranges, True, rows=rows, columns=columns))
        assert (grad_weights is not None) == weighs


@KERNEL_DTYPES
@pytest.mark.parametrize("ffn", [16, 48, 192, 2048])
def test_the_gradient_of_the_weights_is_the_sum_over_the_row_always_in_one_order(dtype: torch.dtype, ffn: int) -> None:
    """Against float64; a row of NaN or infinity spoils its own weight alone, a row of zeros gives exactly 0."""
    ranges, weights = RowRanges(SIZES, GPU), weights_of(True)
    projected = torch.randn(sum(SIZES), 2 * ffn, generator=torch.Generator().manual_seed(1)).to(dtype).cuda()
    grad = rows_of(ffn, dtype).cuda()
    projected[13], grad[13] = 0, 0  # padding
    products = grad.double() * activate(projected.double(), "swiglu")
    is_finite = products.isfinite().all(dim=1)
    for rows, columns in ((True, True), (True, False), (False, True)):
        found, again = (
            cast_swiglu_grad(projected, weights, grad, ranges, True, rows=rows, columns=columns)[1] for _ in range(2)
        )
        assert found is not None
        assert again is not None
        assert found.dtype == torch.float32
        assert_same_bits(again, found, "weights' gradient")
        error = (found.double() - products.sum(dim=1)).abs()[is_finite]
        assert bool((error <= 3e-5 * products.abs().sum(dim=1)[is_finite] + 1e-30).all())
        assert torch.equal(found.isfinite(), is_finite)
        assert float(found[13]) == float(found[3]) == 0.0


def test_a_gradient_that_nobody_asks_for_launches_nothing() -> None:
    """Rows and columns of neither: the experts and what is before them are frozen."""
    ranges = RowRanges(SIZES, GPU)
    cast = cast_rows(rows_of(64, torch.bfloat16).cuda(), ranges, True, rows=False, columns=False)
    torch.cuda.synchronize()
    assert not cast.rows
    assert not cast.columns


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
