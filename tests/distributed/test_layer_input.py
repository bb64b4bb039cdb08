"""What one rank hands to the layer wrongly is refused on all ranks, and the next call works."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

import moe_ep
from moe_ep.config import MoEConfig, RouterConfig
from tests.helpers.ranks import Pools


def _layer(group: dist.ProcessGroup | None = None, **router: object) -> moe_ep.MoELayer:
    options = RouterConfig(topk=2, **router)  # type: ignore[arg-type]
    config = MoEConfig(hidden_size=8, ffn_hidden_size=4, num_experts=4, shared_ffn_hidden_size=4, router=options)
    return moe_ep.MoELayer(config, group)


def _refused(group: dist.ProcessGroup) -> None:
    rank = dist.get_rank(group)
    layer = _layer(group)
    x = torch.randn(2, 5, 8)
    wrong = [
        ((torch.zeros(3, 12), None), r"shape \[3, 12\].*hidden_size = 8"),
        ((x.int(), None), "torch.int32"),
        ((x, torch.zeros(5, 2, dtype=torch.bool)), r"padding_mask is .* of shape \[5, 2\]"),
        ((x, torch.zeros(2, 5)), "padding_mask is torch.float32"),
    ]
    for arguments, sentence in wrong:
        with pytest.raises(ValueError, match=f"EP rank 1 refused dispatch: .*{sentence}"):
            layer(*(arguments if rank == 1 else (x, None)))
        assert layer(x).shape == x.shape
    layer.buffer.close()


def test_a_bad_input_on_one_rank_raises_on_all_and_the_layer_goes_on(ranks: Pools) -> None:
    ranks.run(_refused, 2)


def test_padding_that_holds_nan_reaches_no_gradient() -> None:
    layer = _layer()
    x = torch.randn(2, 3, 8)
    x[0, 0] = float("nan")
    mask = torch.zeros(2, 3, dtype=torch.bool)
    mask[0, 0] = True
    layer(x, mask)[~mask].square().sum().backward()
    for name, parameter in layer.named_parameters():
        assert parameter.grad is not None
        assert bool(parameter.grad.isfinite().all()), name


@pytest.mark.parametrize("policy", ["weight", "position"])
def test_float64_tokens_pass_a_capacity_limit(policy: str) -> None:
    layer = _layer(capacity_factor=0.5, drop_policy=policy).double()
    assert layer(torch.randn(6, 8, dtype=torch.float64)).dtype == torch.float64
    assert int(layer.routing_stats()["dropped"]) > 0


def test_a_huge_capacity_factor_drops_nothing() -> None:
    layer = _layer(capacity_factor=1e18)
    layer(torch.randn(16, 8))
    assert int(layer.routing_stats()["dropped"]) == 0


def _other_buffer(group: dist.ProcessGroup) -> None:
    config = MoEConfig(hidden_size=8, ffn_hidden_size=4, num_experts=4, router=RouterConfig(topk=2))
    with pytest.raises(moe_ep.ConfigError, match="the buffer spans 1 ranks, but ep_group has 2"):
        moe_ep.MoELayer(config, group, buffer=moe_ep.Buffer())


def test_a_buffer_over_another_group_is_refused(ranks: Pools) -> None:
    ranks.run(_other_buffer, 2)


def test_a_second_derivative_through_the_layer_meets_the_sentence() -> None:
    layer = _layer()
    x = torch.randn(3, 8, requires_grad=True)
    (gradient,) = torch.autograd.grad(layer(x).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="is not differentiable twice"):
        gradient.square().sum().backward()
