"""The shared expert: an ordinary MLP with ordinary parameters."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from moe_ep.config import MoEConfig, RouterConfig
from moe_ep.errors import ConfigError
from moe_ep.layers.shared_experts import SharedExperts, SharedRun


def make_config(activation: Any = "swiglu", width: int | None = 3) -> MoEConfig:
    return MoEConfig(
        hidden_size=4,
        ffn_hidden_size=2,
        num_experts=2,
        activation=activation,
        shared_ffn_hidden_size=width,
        init_std=0.5,
        router=RouterConfig(topk=1),
    )


@pytest.mark.parametrize(("activation", "first_name"), [("swiglu", "gate_up"), ("gelu", "up")])
def test_agrees_with_a_plain_formula(activation: str, first_name: str) -> None:
    torch.manual_seed(0)
    shared = SharedExperts(make_config(activation))
    state = shared.state_dict()
    assert sorted(state) == sorted(["down.weight", f"{first_name}.weight"])
    x = torch.randn(5, 4)
    out = shared(x)
    for row in range(5):
        projected = [sum(a * b for a, b in zip(x[row].tolist(), w, strict=True)) for w in state[f"{first_name}.weight"]]
        if activation == "gelu":
            inner = [value * 0.5 * (1 + math.erf(value / math.sqrt(2))) for value in projected]
        else:
            inner = [g / (1 + math.exp(-g)) * u for g, u in zip(projected[:3], projected[3:], strict=True)]
        expected = [float(sum(a * b for a, b in zip(inner, w, strict=True))) for w in state["down.weight"]]
        torch.testing.assert_close(out[row], torch.tensor(expected), rtol=1e-5, atol=1e-6)


def test_parameters_are_ordinary_data_parallel_ones() -> None:
    assert all(getattr(parameter, "allreduce", True) for parameter in SharedExperts(make_config()).parameters())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_autocast_keeps_the_dtype_of_the_tokens(dtype: torch.dtype) -> None:
    """Case N02."""
    shared = SharedExperts(make_config())
    x = torch.randn(3, 4).to(dtype).requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        out = shared(x)
    out.sum().backward()
    assert out.dtype == dtype
    assert x.grad is not None
    assert x.grad.dtype == dtype
    assert shared.down.weight.grad is not None
    assert shared.down.weight.grad.dtype == torch.float32


def test_no_tokens_give_zero_gradients() -> None:
    """Case E01, the shared expert's part."""
    shared = SharedExperts(make_config())
    out = shared(torch.zeros(0, 4))
    assert out.shape == (0, 4)
    out.sum().backward()
    assert all(parameter.grad is not None and (parameter.grad == 0).all() for parameter in shared.parameters())


def test_a_configuration_without_shared_expert_is_refused() -> None:
    with pytest.raises(ConfigError, match="shared_ffn_hidden_size is None"):
        SharedExperts(make_config(width=None))


class Adapter(nn.Module):
    """Around a linear, with its weight to be seen."""

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base, self.weight = base, base.weight

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.base(x) + 1
        return out


@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("name", ["gate_up", "down"])
def test_what_is_put_around_a_projection_takes_part(name: str, apart: bool) -> None:
    """Also where halves run beside exchanges."""
    shared, x = SharedExperts(make_config()), torch.randn(5, 4)
    plain = SharedRun(shared, x, apart).result()
    calls: list[int] = []
    hook = shared.get_submodule(name).register_forward_hook(lambda *_: calls.append(1))
    assert torch.equal(SharedRun(shared, x, apart).result(), plain)
    assert calls == [1]
    hook.remove()
    setattr(shared, name, Adapter(shared.get_submodule(name)))
    adapted = SharedRun(shared, x, apart).result()
    assert not torch.equal(adapted, plain)
    if name == "down":
        assert torch.equal(adapted, plain + 1)
