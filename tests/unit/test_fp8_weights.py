"""Weights are cast once for as long as they hold the same values, however they are changed. Case F07."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import moe_ep
from moe_ep.config import FP8Config, MoEConfig, RouterConfig

FIRST_AND_DOWN = 2  # casts a layer makes when its weights are new


def fp8_layer(recipe: str = "blockwise") -> moe_ep.MoELayer:
    torch.manual_seed(0)
    fp8 = FP8Config.model_validate({"recipe": recipe, "gemm": "plain"})
    router = RouterConfig(topk=2)
    return moe_ep.MoELayer(
        MoEConfig(hidden_size=128, ffn_hidden_size=64, num_experts=4, router=router, init_std=0.1, fp8=fp8)
    )


@pytest.fixture
def casts(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the weights that were cast, in order."""
    made: list[str] = []

    def watched(original: Callable[..., object]) -> Callable[..., object]:
        def weights(self: object, name: str, weight: Tensor, *, columns: bool) -> object:
            made.append(name if columns else f"{name}, rows alone")
            return original(self, name, weight, columns=columns)

        return weights

    from moe_ep.layers.fp8 import recipe as fp8_recipe

    for kind in (fp8_recipe.Blockwise, fp8_recipe.PerTensor):
        monkeypatch.setattr(kind, "weights", watched(kind.weights))
    return made


def _by_data(experts: nn.Module) -> None:
    for parameter in experts.parameters():
        parameter.data.mul_(2)


def _by_an_optimizer(experts: nn.Module) -> None:
    optimizer = torch.optim.SGD(experts.parameters(), lr=1.0, foreach=True)
    for parameter in experts.parameters():
        parameter.grad = -parameter.detach()
    optimizer.step()
    optimizer.zero_grad()


def _by_loading(experts: nn.Module) -> None:
    experts.load_state_dict({name: 2 * weight for name, weight in experts.state_dict().items()})


def _by_assigning(experts: nn.Module) -> None:
    experts.load_state_dict({name: 2 * weight for name, weight in experts.state_dict().items()}, assign=True)


@pytest.mark.parametrize("recipe", ["blockwise", "current"])
@pytest.mark.parametrize("change", [_by_data, _by_an_optimizer, _by_loading, _by_assigning])
def test_changed_weights_are_those_of_the_next_forward(
    change: Callable[[nn.Module], None], recipe: str, casts: list[str]
) -> None:
    layer = fp8_layer(recipe)
    up = layer.experts.get_parameter("gate_up")
    x = torch.randn(6, 128, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        before, kept = layer(x), up.clone()
        change(layer.experts)
        layer.experts.get_parameter("gate_up").copy_(kept)  # SwiGLU is not linear in these
        assert torch.equal(layer(x), 2 * before)  # scales are powers of two: exact
    assert len(casts) >= 2 * FIRST_AND_DOWN - 1


def test_micro_batches_of_a_step_share_one_cast_also_under_recompute(casts: list[str]) -> None:
    layer = fp8_layer()
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    x = torch.randn(6, 128, generator=torch.Generator().manual_seed(1)).requires_grad_()
    checkpoint(layer, x[:3], use_reentrant=False).sum().backward()
    checkpoint(layer, x[3:], use_reentrant=False).sum().backward()
    assert casts == ["first", "down"]
    summed = {name: parameter.grad for name, parameter in layer.named_parameters()}
    layer.zero_grad()
    for part in (x[:3], x[3:]):
        layer(part).sum().backward()
    assert casts == ["first", "down"]
    for name, parameter in layer.named_parameters():
        torch.testing.assert_close(summed[name], parameter.grad, rtol=1e-5, atol=1e-6)
    optimizer.step()
    layer(x).sum().backward()
    assert casts == ["first", "down"] * 2


ROWS_ALONE = ["first, rows alone", "down, rows alone"]


@pytest.mark.parametrize("recipe", ["blockwise", "current"])
def test_without_gradients_the_weights_are_not_cast_for_a_backward(recipe: str, casts: list[str]) -> None:
    """Half the time and memory of an evaluation; a step behind it, of the same weights, casts both."""
    layer = fp8_layer(recipe)
    x = torch.randn(6, 128, generator=torch.Generator().manual_seed(1)).requires_grad_()
    with torch.no_grad():
        evaluated = [layer(x) for _ in range(2)]
    assert casts == ROWS_ALONE
    assert layer.experts.fp8 is not None
    assert [len(cast.columns) for _, cast in layer.experts.fp8._cast._kept.values()] == [0, 0]
    y = layer(x)
    y.sum().backward()
    assert casts == [*ROWS_ALONE, "first", "down"]
    assert torch.equal(evaluated[0], evaluated[1])
    assert torch.equal(evaluated[0], y)
    with torch.no_grad():
        layer(x)
    assert len(casts) == 4, "what a step left serves the next evaluation"


def test_frozen_experts_are_cast_for_the_gradient_of_their_rows_alone(casts: list[str]) -> None:
    layer = fp8_layer()
    layer.experts.requires_grad_(False)
    rows = torch.randn(64, 128, generator=torch.Generator().manual_seed(1))
    layer.experts(rows, [16] * 4)
    assert casts == ROWS_ALONE
    layer.experts(rows.requires_grad_(), [16] * 4).sum().backward()
    assert casts == [*ROWS_ALONE, "first", "down"]
    assert rows.grad is not None


def test_gradients_of_experts_alone_want_no_transposed_first_weights(casts: list[str]) -> None:
    layer = fp8_layer()
    layer.experts(torch.randn(64, 128, generator=torch.Generator().manual_seed(1)), [16] * 4).sum().backward()
    assert casts == ["first, rows alone", "down"]
    assert all(parameter.grad is not None for parameter in layer.experts.parameters())


def test_recompute_that_runs_forward_without_gradients_first_has_those_of_a_plain_step(casts: list[str]) -> None:
    layer = fp8_layer()
    x = torch.randn(6, 128, generator=torch.Generator().manual_seed(1)).requires_grad_()
    checkpoint(layer, x, use_reentrant=True).sum().backward()
    recomputed, x.grad = x.grad, None
    layer(x).sum().backward()
    assert torch.equal(recomputed, x.grad)  # type: ignore[arg-type]
    assert casts == [*ROWS_ALONE, "first", "down"]


def test_a_step_between_forward_and_backward_does_not_reach_the_backward() -> None:
    """As with any saved tensor: the gradient is that of the weights of the forward."""
    layer = fp8_layer()
    x = torch.randn(6, 128, generator=torch.Generator().manual_seed(1)).requires_grad_()
    layer(x).sum().backward()
    expected, x.grad = x.grad, None
    y = layer(x)
    with torch.no_grad():
        layer.experts.down.data.zero_()
        layer(x)
    y.sum().backward()
    assert torch.equal(x.grad, expected)  # type: ignore[arg-type]


def test_a_look_ahead_of_a_dispatch_that_was_refused_says_nothing_later() -> None:
    layer = fp8_layer()
    x, rows = torch.randn(6, 128), torch.randn(64, 128, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        before = layer.experts(rows, [16] * 4)
        layer.buffer.close()
        with pytest.raises(RuntimeError, match="closed"):
            layer(x)
        assert layer.experts.fp8 is not None
        assert layer.experts.fp8._marks  # it had looked
        layer.experts.down.mul_(2)
        assert torch.equal(layer.experts(rows, [16] * 4), 2 * before)


@pytest.mark.parametrize("made_in_it", [False, True])
def test_inference_mode_runs_and_sees_changes(made_in_it: bool) -> None:
    layer = None if made_in_it else fp8_layer()
    with torch.inference_mode():
        layer = layer or fp8_layer()
        x = torch.randn(6, 128, generator=torch.Generator().manual_seed(1))
        before = layer(x)
        layer.experts.down.mul_(2)
        assert torch.equal(layer(x), 2 * before)


def test_a_write_that_nothing_sees_is_told_by_hand(casts: list[str]) -> None:
    layer = fp8_layer()
    layer(torch.zeros(1, 128, requires_grad=True))
    assert layer.experts.fp8 is not None
    layer.experts.fp8.forget_weights()
    layer(torch.zeros(1, 128, requires_grad=True))
    assert casts == ["first", "down"] * 2


def test_a_copied_or_pickled_cache_begins_empty(casts: list[str]) -> None:
    layer = fp8_layer()
    layer(torch.zeros(1, 128))
    twin = copy.deepcopy(layer)
    assert twin.experts.fp8 is not layer.experts.fp8
    twin(torch.zeros(1, 128))
    assert len(casts) == 2 * FIRST_AND_DOWN
    experts = pickle.loads(pickle.dumps(layer.experts))
    assert experts.fp8.gemm.name == "plain"
