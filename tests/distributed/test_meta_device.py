"""A layer that is built without memory (on the meta device) and filled from a state dict is like any other."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import moe_ep
from moe_ep.config import EPConfig, MoEConfig, RouterConfig
from moe_ep.layers.wrap import keep_exchange_contexts
from tests.helpers.compare import assert_same_bits
from tests.helpers.ranks import Pools
from tests.helpers.scale_experts import leave_nans_behind


def _filled(group: dist.ProcessGroup) -> None:
    rank = dist.get_rank(group)
    router = RouterConfig(topk=2, score_function="sigmoid", expert_bias=True)
    config = MoEConfig(hidden_size=8, ffn_hidden_size=4, num_experts=4, router=router, ep=EPConfig(timeout_secs=30))
    plain = moe_ep.MoELayer(config, group)
    with torch.device("meta"):
        layer = moe_ep.MoELayer(config, group)
    assert all(tensor.is_meta for tensor in layer.state_dict().values())
    leave_nans_behind()
    layer.to_empty(device="cpu")
    assert all(value.device.type == "cpu" for value in layer.routing_stats().values())
    layer.load_state_dict(plain.state_dict())
    x = torch.randn(5 + rank, 8, generator=torch.Generator().manual_seed(rank))

    def step(made: moe_ep.MoELayer, watched: bool) -> dict[str, Tensor]:
        made.zero_grad()
        y = checkpoint(made, x, use_reentrant=False, context_fn=keep_exchange_contexts) if watched else made(x)
        y.square().sum().backward()
        grads = {name: p.grad for name, p in made.named_parameters() if p.grad is not None}
        counts = {"counts": made.router.tokens_per_expert.clone()}
        made.update_expert_bias()
        return {"y": y.detach(), **grads, **counts, **made.routing_stats(), **dict(made.named_buffers())}

    for watched in (False, True):
        expected = {name: tensor.clone() for name, tensor in step(plain, watched).items()}
        for name, tensor in step(layer, watched).items():
            assert_same_bits(tensor, expected[name], name)
    for made in (plain, layer):
        made.buffer.close()


@pytest.mark.parametrize("world", [1, 2])
def test_a_layer_built_on_the_meta_device_computes_as_any_other(ranks: Pools, world: int) -> None:
    ranks.run(_filled, world)
