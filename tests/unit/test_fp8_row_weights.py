"""Experts in FP8 weigh their rows between the two projections, on the plain products. Cases F01 and F02.

Letters: R rows, H hidden, F ffn width, L experts.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import moe_ep
from moe_ep.config import FP8Config, MoEConfig, RouterConfig
from moe_ep.layers.experts import GroupedExperts
from tests.helpers.compare import assert_same_bits
from tests.helpers.fp8_oracle import relative_error, swiglu_moe

HIDDEN, FFN = 256, 192
SIZES = (16, 0, 144, 32)
PADDING = slice(150, 160)  # the last rows of expert 2: zeros, of weight 0
NAMES = ("y", "dx", "dw", "gate_up", "down")


def config(activation: str = "swiglu", **fp8: Any) -> MoEConfig:
    return MoEConfig.model_validate(
        {
            **{"hidden_size": HIDDEN, "ffn_hidden_size": FFN, "num_experts": len(SIZES), "activation": activation},
            **{"router": RouterConfig(topk=2), "init_std": 0.05},
            "fp8": FP8Config.model_validate({"recipe": "blockwise", "gemm": "plain", **fp8}),
        }
    )


def experts_in_fp8(dtype: torch.dtype, device: str, **settings: Any) -> GroupedExperts:
    torch.manual_seed(0)
    return GroupedExperts(config(**settings), range(len(SIZES))).to(dtype).to(device)


def rows_and_weights(dtype: torch.dtype, device: str, largest: float) -> tuple[Tensor, Tensor, Tensor]:
    """x and dy [R, H], weights [R]: among ordinary ones 0, negative ones and `largest`."""
    g = torch.Generator().manual_seed(5)
    x, dy = (torch.randn(sum(SIZES), HIDDEN, generator=g).to(dtype) for _ in range(2))
    weights = torch.rand(sum(SIZES), generator=g) + 0.1
    weights[1], weights[3], weights[40:50] = 0, -0.7, -weights[40:50]
    weights[20] = largest
    x[PADDING], dy[PADDING], weights[PADDING] = 0, 0, 0
    return x.to(device).requires_grad_(), dy.to(device), weights.to(device).requires_grad_()


def weighed(dtype: torch.dtype, device: str, largest: float, **settings: Any) -> dict[str, Tensor]:
    """One forward and backward of the experts."""
    experts = experts_in_fp8(dtype, device, **settings)
    x, dy, weights = rows_and_weights(dtype, device, largest)
    y = experts(x, SIZES, row_weights_R=weights)
    y.backward(dy)
    found = {"y": y.detach(), "dx": x.grad, "dw": weights.grad}
    found |= {name: parameter.grad for name, parameter in experts.named_parameters()}
    return found  # type: ignore[return-value]


def expected_of(dtype: torch.dtype, largest: float) -> dict[str, Tensor]:
    """In float64, of the same quantised inputs: every row a token with one slot."""
    experts = experts_in_fp8(dtype, "cpu")
    x, dy, weights = rows_and_weights(dtype, "cpu", largest)
    idx = torch.repeat_interleave(torch.tensor(SIZES)).unsqueeze(1)
    leaves = [
        t.detach().double().requires_grad_() for t in (x, weights, experts.get_parameter("gate_up"), experts.down)
    ]
    y = swiglu_moe(leaves[0], idx, leaves[1].unsqueeze(1), leaves[2], leaves[3])
    y.backward(dy.double())
    return dict(zip(NAMES, (y.detach(), *(leaf.grad for leaf in leaves)), strict=True))  # type: ignore[arg-type]


def check_weighed(
    found: dict[str, Tensor], dtype: torch.dtype, largest: float, forward: float, backward: float
) -> None:
    """Rows are compared at the size that they would have with weight 1, so that the largest hides none."""
    expected = expected_of(dtype, largest)
    _, _, weights = rows_and_weights(dtype, "cpu", largest)
    counts = (weights != 0).nonzero()[:, 0]
    of_rows = {
        name: relative_error(
            found[name].cpu().double()[counts] / weights.detach()[counts, None],
            expected[name][counts] / weights.detach()[counts, None],
        )
        for name in ("y", "dx")
    }
    errors = of_rows | {"dw": relative_error(found["dw"], expected["dw"])}
    for name in ("gate_up", "down"):
        errors[name] = max(map(relative_error, found[name], expected[name]))
        assert not bool(found[name][1].any())  # an expert without rows
    assert errors["y"] <= forward, errors
    assert max(errors.values()) <= backward, errors
    assert found["dw"].dtype == torch.float32
    for name in ("y", "dx"):
        assert not bool(found[name][[1, *range(160)[PADDING]]].any()), name  # weight 0
    assert not bool(found["dw"][PADDING].any())
    assert bool(found["dw"][1] != 0)


@pytest.mark.parametrize("wgrad", ["fp8", "bf16"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_count_times_their_weight_whatever_it_is(dtype: torch.dtype, wgrad: str) -> None:  # case F01, F02
    found = weighed(dtype, "cpu", 2.0**40, wgrad=wgrad)
    check_weighed(found, dtype, 2.0**40, forward=2e-2, backward=5e-2)


@pytest.mark.parametrize("recipe", ["current", "delayed"])
def test_recipes_with_one_scale_weigh_too(recipe: str) -> None:
    found = weighed(torch.bfloat16, "cpu", 2.0, recipe=recipe)
    check_weighed(found, torch.bfloat16, 2.0, forward=1e-1, backward=1.2e-1)


@pytest.mark.parametrize("wgrad", ["fp8", "bf16"])
@pytest.mark.parametrize("activation", ["swiglu", "gelu"])
def test_powers_of_two_give_inside_what_they_give_outside_exactly(activation: str, wgrad: str) -> None:
    """Blocks with scales that are powers of two have the same codes then."""
    experts = experts_in_fp8(torch.float32, "cpu", activation=activation, wgrad=wgrad)
    x, dy, _ = rows_and_weights(torch.float32, "cpu", 1.0)
    weights = -(2.0 ** (torch.arange(len(x)) % 7 - 3)).requires_grad_()
    inside = experts(x, SIZES, row_weights_R=weights)
    dx, dw = torch.autograd.grad(inside, (x, weights), dy)
    outside = experts(x, SIZES) * weights.unsqueeze(1)
    expected_dx, expected_dw = torch.autograd.grad(outside, (x, weights), dy)
    torch.testing.assert_close(inside, outside, rtol=0, atol=0)
    torch.testing.assert_close(dx, expected_dx, rtol=0, atol=0)
    assert relative_error(dw, expected_dw) <= 5e-2


def one_at_a_time(dtype: torch.dtype, device: str, largest: float, **settings: Any) -> dict[str, Tensor]:
    """The gradients of `weighed`, where nothing but the one wants its gradient."""
    experts = experts_in_fp8(dtype, device, **settings)
    x, dy, weights = rows_and_weights(dtype, device, largest)
    leaves = dict(zip(NAMES[1:], (x, weights, experts.get_parameter("gate_up"), experts.down), strict=True))
    found = {}
    for name, leaf in leaves.items():
        for other in leaves.values():
            other.requires_grad_(other is leaf)
        (found[name],) = torch.autograd.grad(experts(x, SIZES, row_weights_R=weights), leaf, dy)
    return found


@pytest.mark.parametrize("wgrad", ["fp8", "bf16"])
@pytest.mark.parametrize("recipe", ["blockwise", "current"])
def test_every_gradient_comes_alone_too(recipe: str, wgrad: str) -> None:
    whole = weighed(torch.float32, "cpu", 2.0, recipe=recipe, wgrad=wgrad)
    for name, alone in one_at_a_time(torch.float32, "cpu", 2.0, recipe=recipe, wgrad=wgrad).items():
        assert_same_bits(alone, whole[name], name)


def test_no_rows_and_no_experts_leave_the_weights_a_gradient() -> None:
    for ids in ((0, 1), ()):
        experts = GroupedExperts(config(), ids)
        x, weights = torch.zeros(0, HIDDEN, requires_grad=True), torch.zeros(0, requires_grad=True)
        experts(x, (0,) * len(ids), row_weights_R=weights).sum().backward()
        assert weights.grad is not None
        assert weights.grad.shape == (0,)
        assert all(parameter.grad is not None and not bool(parameter.grad.any()) for parameter in experts.parameters())


def test_weights_that_do_not_fit_are_refused() -> None:
    experts, x = experts_in_fp8(torch.float32, "cpu"), torch.zeros(sum(SIZES), HIDDEN)
    with pytest.raises(ValueError, match=r"row_weights_R has shape \[3\], but there are 192 rows"):
        experts(x, SIZES, row_weights_R=torch.ones(3))
    with pytest.raises(ValueError, match=r"row_weights_R is torch.float64, but FP8 experts weigh in float32"):
        experts(x, SIZES, row_weights_R=torch.ones(len(x), dtype=torch.float64))


def test_the_layer_keeps_no_results_of_its_experts() -> None:
    torch.manual_seed(0)
    layer = moe_ep.MoELayer(config())
    kept: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        y = layer(torch.randn(24, HIDDEN))
    num_rows = int(layer.routing_stats()["rows"])
    shapes = [tuple(tensor.shape) for tensor in kept if tensor.dtype == torch.float32]
    assert (num_rows, 2 * FFN) in shapes  # what SwiGLU is computed from again
    assert (num_rows, HIDDEN) not in shapes
    y.sum().backward()
    assert layer.router.weight.grad is not None
    assert bool(layer.router.weight.grad.any())
