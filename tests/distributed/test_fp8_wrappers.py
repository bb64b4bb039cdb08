"""FP8 experts under wrappers, and with other alignments than they need."""

from __future__ import annotations

import math

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import moe_ep
from benchmarks.routing import row_bytes
from moe_ep.config import EPConfig, FP8Config, MoEConfig, RouterConfig
from tests.helpers.compare import assert_same_bits
from tests.helpers.ranks import Pools


def fp8_layer(alignment: int = 1, recipe: str = "blockwise", group: dist.ProcessGroup | None = None) -> moe_ep.MoELayer:
    torch.manual_seed(0)
    return moe_ep.MoELayer(
        MoEConfig(
            hidden_size=128,
            ffn_hidden_size=64,
            num_experts=5,
            router=RouterConfig(topk=2, normalize=True),
            init_std=0.1,
            ep=EPConfig(alignment=alignment),
            fp8=FP8Config.model_validate({"recipe": recipe, "gemm": "plain"}),
        ),
        group,
    )


def tokens() -> Tensor:
    return torch.randn(70, 128, generator=torch.Generator().manual_seed(1)).requires_grad_()


def both_ways(layer: moe_ep.MoELayer) -> dict[str, Tensor]:
    x = tokens()
    y = layer(x)
    y.square().sum().backward()
    found = {"y": y.detach(), "x": x.grad}
    found |= {name: parameter.grad for name, parameter in layer.named_parameters()}
    return found  # type: ignore[return-value]


@pytest.mark.parametrize("recipe", ["blockwise", "current"])
@pytest.mark.parametrize("alignment", [32, 24, 128])
def test_more_padding_changes_nothing(alignment: int, recipe: str) -> None:  # case F02
    expected, layer = both_ways(fp8_layer(recipe=recipe)), fp8_layer(alignment, recipe)
    found = both_ways(layer)
    for name in ("y", "x", "router.weight"):
        assert_same_bits(found[name], expected[name], name)
    for name in ("experts.gate_up", "experts.down"):  # sums over more zeros
        torch.testing.assert_close(found[name], expected[name], rtol=1e-4, atol=1e-5)
    assert int(layer.routing_stats()["rows"]) % math.lcm(alignment, 16) == 0
    assert int(layer.routing_stats()["tokens_per_expert"].sum()) == 2 * 70


def test_a_compiled_layer_has_eagers_bits() -> None:
    expected = both_ways(fp8_layer())
    layer = fp8_layer()
    layer.compile(backend="aot_eager")
    found = both_ways(layer)
    for name, value in expected.items():
        assert_same_bits(found[name], value, name)


def sharded(group: dist.ProcessGroup) -> None:
    """FSDP2 gathers the weights anew for every forward; the experts of a rank are all of them here."""
    mesh = init_device_mesh("cpu", (2,))
    expected, layer = both_ways(fp8_layer()), fp8_layer()
    fully_shard(layer.experts, mesh=mesh)
    for factor in (1.0, 2.0):
        layer.zero_grad()
        found = both_ways(layer)
        if factor == 1.0:
            assert_same_bits(found["y"], expected["y"], "y")
            grad = layer.experts.down.grad.full_tensor()  # type: ignore[union-attr, operator]
            torch.testing.assert_close(grad, expected["experts.down"], rtol=1e-5, atol=1e-6)
        else:
            assert_same_bits(found["y"], 2 * expected["y"], "y of doubled weights")
        with torch.no_grad():
            layer.experts.down.mul_(2)


def test_sharded_weights_are_cast_as_they_are_gathered(ranks: Pools) -> None:
    ranks.run(sharded, 2)


def test_a_row_takes_052_of_the_bytes() -> None:
    assert row_bytes("fp8", 7168) / row_bytes("bfloat16", 7168) == pytest.approx(0.516, abs=1e-3)
