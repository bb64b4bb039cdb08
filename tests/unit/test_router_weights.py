"""The routing weights and their gradients."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable

import pytest
import torch

from moe_ep.layers.router import TopKRouter
from tests.unit.router_helpers import (
    assert_close,
    logit_router,
    make_config,
    set_bias,
    sigmoid_logits,
)


def test_bias_chooses_but_does_not_weigh() -> None:
    """Case G02: weights from the unbiased scores; gradients reach the chosen logits only, never the bias."""
    router = logit_router(4, topk=2, score_function="sigmoid", normalize=True, expert_bias=True)
    set_bias(router, [0.0, -0.5, 0.65, 0.0])
    logits = torch.tensor([[2.197225, 1.386294, -1.386294, -2.197225]], requires_grad=True)
    ids, weights = router(logits)
    assert ids.tolist() == [[0, 2]]
    assert_close(weights, [[0.818182, 0.181818]])
    (weights * torch.tensor([[1.0, 3.0]])).sum().backward()
    assert logits.grad is not None
    assert (logits.grad[0, [0, 2]] != 0).all()
    assert (logits.grad[0, [1, 3]] == 0).all()
    assert [name for name, _ in router.named_parameters()] == ["weight"]
    assert router.expert_bias is not None
    assert not router.expert_bias.requires_grad


@pytest.mark.parametrize(
    ("normalize", "scaling_factor", "expected"),
    [
        (True, 2.5, [[1.666667, 0.833333]]),
        (False, 2.5, [[1.5, 0.75]]),
        (True, 1.0, [[0.666667, 0.333333]]),
        (False, 1.0, [[0.6, 0.3]]),
    ],
)
def test_scaling_factor_is_applied_once_whether_or_not_weights_are_normalised(
    normalize: bool, scaling_factor: float, expected: list[list[float]]
) -> None:
    """Case G06."""
    router = logit_router(4, topk=2, score_function="sigmoid", normalize=normalize, scaling_factor=scaling_factor)
    ids, weights = router(sigmoid_logits([0.6, 0.3, 0.1, 0.05]))
    assert ids.tolist() == [[0, 1]]
    assert_close(weights, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_scores_that_underflow_stay_finite(dtype: torch.dtype) -> None:
    """Case G11: all logits -200, so every sigmoid is 0; the weights are 0 and no gradient is NaN."""
    router = TopKRouter(make_config(4, hidden_size=2, topk=2, score_function="sigmoid", normalize=True)).to(dtype)
    with torch.no_grad():
        router.weight.fill_(-50.0)
    x = torch.full((3, 2), 2.0, dtype=dtype, requires_grad=True)
    ids, weights = router(x)
    assert ids.tolist() == [[0, 1]] * 3
    assert weights.dtype == torch.float32
    assert (weights == 0).all()
    (weights * torch.tensor([1.0, 2.0])).sum().backward()
    assert x.grad is not None
    assert router.weight.grad is not None
    assert x.grad.isfinite().all()
    assert router.weight.grad.isfinite().all()


@pytest.mark.parametrize(
    ("options", "setting"),
    [
        ({"normalize": True, "score_function": "sigmoid", "scaling_factor": 2.5}, "router.normalize"),
        ({"pre_softmax": False, "scaling_factor": 2.5}, "router.pre_softmax"),
    ],
)
def test_constant_weights_are_announced_once_at_construction(options: dict[str, object], setting: str) -> None:
    """Case W07."""
    with pytest.warns(UserWarning, match=r"router\.topk = 1") as caught:
        router = logit_router(4, topk=1, **options)
    assert len(caught) == 1
    assert setting in str(caught[0].message)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(2):
            _, weights = router(torch.tensor([[0.3, -0.2, 0.9, 0.0]]))
    assert_close(weights, [[2.5]])


def test_top1_without_normalising_trains_the_router() -> None:
    """Case W07, the setting that works: no warning, a gradient that is not zero."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        router = logit_router(4, topk=1)
    _, weights = router(torch.tensor([[0.3, -0.2, 0.9, 0.0]]))
    weights.sum().backward()
    assert router.weight.grad is not None
    assert router.weight.grad.abs().max() > 0


def plain_weights(logits: list[float], chosen: list[int], options: dict[str, object]) -> list[float]:
    """Oracle in Python floats (float64): the weights of the chosen experts of one token."""
    if options.get("score_function") == "sigmoid":
        weights = [1.0 / (1.0 + math.exp(-logits[expert])) for expert in chosen]
    else:
        over = logits if options.get("pre_softmax", True) else [logits[expert] for expert in chosen]
        total = sum(math.exp(value) for value in over)
        weights = [math.exp(logits[expert]) / total for expert in chosen]
    if options.get("normalize"):
        total = sum(weights)
        weights = [weight / total for weight in weights]
    return [weight * float(str(options.get("scaling_factor", 1.0))) for weight in weights]


def central_difference(function: Callable[[list[float]], float], point: list[float]) -> list[float]:
    step = 1e-5
    slopes = []
    for index in range(len(point)):
        up, down = list(point), list(point)
        up[index] += step
        down[index] -= step
        slopes.append((function(up) - function(down)) / (2 * step))
    return slopes


@pytest.mark.parametrize("score_function", ["softmax", "sigmoid"])
@pytest.mark.parametrize("pre_softmax", [True, False])
@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("groups", [{}, {"num_groups": 3, "group_topk": 2}])
def test_weights_and_gradients_agree_with_finite_differences_of_a_plain_formula(
    score_function: str, pre_softmax: bool, normalize: bool, groups: dict[str, int]
) -> None:
    options: dict[str, object] = {
        "score_function": score_function,
        "pre_softmax": pre_softmax,
        "normalize": normalize,
        "scaling_factor": 1.7,
    }
    torch.manual_seed(0)
    router = TopKRouter(make_config(6, hidden_size=5, topk=3, **options, **groups))
    torch.nn.init.normal_(router.weight)
    x = torch.randn(4, 5, requires_grad=True)
    pull = torch.randn(4, 3)
    ids, weights = router(x)
    (weights * pull).sum().backward()
    assert x.grad is not None
    assert router.weight.grad is not None
    weight_rows, x_rows, pulls = router.weight.tolist(), x.tolist(), pull.tolist()
    expected_dw = torch.zeros(6, 5)
    for token, chosen in enumerate(ids.tolist()):
        logits = [sum(a * b for a, b in zip(x_rows[token], row, strict=True)) for row in weight_rows]
        assert_close(weights[token], plain_weights(logits, chosen, options), 1e-5)

        def loss(point: list[float], chosen: list[int] = chosen, token: int = token) -> float:
            values = plain_weights(point, chosen, options)
            return sum(a * b for a, b in zip(values, pulls[token], strict=True))

        slopes = torch.tensor(central_difference(loss, logits))
        assert_close(x.grad[token], slopes @ torch.tensor(weight_rows), 1e-4)
        expected_dw += slopes[:, None] * torch.tensor(x_rows[token])
    assert_close(router.weight.grad, expected_dw, 1e-4)
