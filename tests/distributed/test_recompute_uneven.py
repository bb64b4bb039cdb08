"""Recompute of a layer where some ranks hold no expert: every rank repeats the same exchanges in the same order."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

import moe_ep
from moe_ep.config import RouterConfig
from tests.distributed.test_layer import HIDDEN, layer_config
from tests.helpers.compare import assert_same_bits
from tests.helpers.ranks import Pools

NUM_EXPERTS = 2


def _same_gradients(group: dist.ProcessGroup, use_reentrant: bool, num_layers: int) -> int:
    """Number of this rank's experts; raises where a gradient differs from that without recompute."""
    torch.manual_seed(0)
    buffer = moe_ep.Buffer(group, timeout_secs=10)
    config = layer_config(num_experts=NUM_EXPERTS, shared_ffn_hidden_size=None, router=RouterConfig(topk=1))
    layers = [moe_ep.MoELayer(config, group, buffer=buffer).double() for _ in range(num_layers)]
    parameters = [parameter for layer in layers for parameter in layer.parameters()]
    x = torch.randn(5, HIDDEN, dtype=torch.float64, generator=torch.Generator().manual_seed(buffer.rank))

    def run(x: torch.Tensor) -> torch.Tensor:
        for layer in layers:
            x = layer(x)
        return x

    found = []
    for recompute in (False, True):
        leaves = [x.clone().requires_grad_(), *parameters]
        y = checkpoint(run, leaves[0], use_reentrant=use_reentrant) if recompute else run(leaves[0])
        y.square().sum().backward()
        found.append([leaf.grad for leaf in leaves])
        for leaf in leaves:
            leaf.grad = None
    for plain, again in zip(*found, strict=True):
        assert plain is not None
        assert again is not None
        assert_same_bits(again, plain, "gradient")
    buffer.close()
    return len(layers[0].experts.expert_ids)


@pytest.mark.parametrize("num_layers", [1, 2])
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_rank_without_experts_recomputes_with_the_others(
    ranks: Pools, use_reentrant: bool, num_layers: int
) -> None:  # cases E02, P04
    assert sorted(ranks.run(_same_gradients, 3, use_reentrant, num_layers)) == [0, 1, 1]
