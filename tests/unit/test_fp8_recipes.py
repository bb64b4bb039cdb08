"""Recipes with one scale a tensor: what a scale follows, and what it may not hide."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from moe_ep.fp8.matrix import RowRanges
from moe_ep.layers.fp8.recipe import PerTensor
from tests.helpers.compare import assert_same_bits
from tests.helpers.fp8_oracle import relative_error
from tests.unit.test_fp8_weights import fp8_layer

RANGES = RowRanges((2,), torch.device("cpu"))


def _alone(largest: Tensor) -> Tensor:
    return largest


def _tokens(size: float = 1.0) -> Tensor:
    return size * torch.randn(64, 128, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("recipe", ["blockwise", "current", "delayed"])
def test_recompute_gives_the_gradients_of_the_first_forward(recipe: str, use_reentrant: bool) -> None:  # case F07
    """Tokens that are larger than those before, so that a history moves at the first forward."""
    grads = []
    for recomputes in (False, True):
        layer, x = fp8_layer(recipe), _tokens(3.0).requires_grad_()
        layer(_tokens())
        y = checkpoint(layer, x, use_reentrant=use_reentrant) if recomputes else layer(x)
        y.square().sum().backward()
        grads.append({"x": x.grad, **{name: parameter.grad for name, parameter in layer.named_parameters()}})
    for name, expected in grads[0].items():
        assert_same_bits(grads[1][name], expected, name)  # type: ignore[arg-type]


def test_weights_that_were_loaded_are_not_cut_off_at_the_largest_before() -> None:  # case F07
    layer, x = fp8_layer("delayed"), _tokens()
    with torch.no_grad():
        before = layer(x)
        state = layer.experts.state_dict()
        layer.experts.load_state_dict({key: 4 * w if key.endswith("down") else w for key, w in state.items()})
        assert torch.equal(layer(x), 4 * before)  # scales are powers of two: exact


def test_a_delayed_scale_is_that_of_the_largest_call() -> None:
    recipe = PerTensor(delayed=True, power_of_two=False)
    for size, largest in ((1.0, 1.0), (3.0, 3.0), (2.0, 3.0)):
        data, scale = recipe.payload(torch.full((2, 4), size), _alone)
        assert scale.item() == pytest.approx(largest / 448)
        assert relative_error(data.float() * scale, torch.full((2, 4), size)) <= 2**-4


def test_ranks_that_remember_different_calls_send_with_one_scale() -> None:
    """The receiver multiplies all rows with its own scale, so that must be the sender's."""
    ranks = [PerTensor(delayed=True, power_of_two=False) for _ in range(2)]
    ranks[0].payload(torch.full((2, 4), 5.0), _alone)  # rank 0 alone
    asked: list[Tensor] = []
    for rank in ranks:
        rank.payload(torch.ones(2, 4), lambda largest: asked.append(largest) or largest)  # type: ignore[func-returns-value]
    of_all = torch.stack(asked).max()
    scales = [rank.payload(torch.ones(2, 4), lambda largest: torch.maximum(largest, of_all))[1] for rank in ranks]
    assert_same_bits(scales[1], scales[0], "scale")
    assert scales[0].item() == pytest.approx(5 / 448)


@pytest.mark.parametrize("name", ["inner", "grad_out"])
def test_an_infinity_is_not_hidden_behind_the_largest_number(name: str) -> None:
    """Whoever scales losses, or looks for NaN, must see an overflow; the other elements are as without it."""
    x = torch.tensor([[1.0, float("inf"), 0.5], [float("-inf"), -1.0, float("nan")]])
    (matrix,) = PerTensor(delayed=False, power_of_two=True).cast(name, x, RANGES, rows=True, columns=False).rows
    assert torch.equal(matrix.dequantize().isfinite(), x.isfinite())
    assert matrix.dequantize()[x.isfinite()].tolist() == [1.0, 0.5, -1.0]
