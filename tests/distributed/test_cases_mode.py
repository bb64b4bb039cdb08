"""Fault cases MODE that need no GPU: determinism over runs, over neighbours, and of routing near ties.

O01 (torch.compile) is in test_wrappers_compile.py.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import moe_ep
from moe_ep.config import EPConfig, MoEConfig, RouterConfig
from moe_ep.layers.wrap import keep_exchange_contexts
from tests.helpers.compare import assert_same_bits
from tests.helpers.ranks import Pools

NUM_RUNS, NUM_PERMUTATIONS, NUM_STEPS = 10, 100, 50


def _runs(group: dist.ProcessGroup) -> None:
    """Ten runs of 512 bfloat16 tokens, 8 of 64 experts each, with two threads a rank."""
    torch.set_num_threads(2)
    router = RouterConfig(topk=8, aux_loss_coef=0.01, z_loss_coef=0.001)
    ep = EPConfig(timeout_secs=60)
    config = MoEConfig(hidden_size=32, ffn_hidden_size=16, num_experts=64, router=router, ep=ep)
    layer = moe_ep.MoELayer(config, group).bfloat16()
    grads: dict[str, Tensor] = {}
    layer.router.register_forward_hook(lambda _, __, out: out[1].register_hook(lambda g: grads.update(dw=g)) and None)
    g = torch.Generator().manual_seed(dist.get_rank(group))
    x = torch.randn(512, 32, generator=g).bfloat16()
    dy = torch.randn(512, 32, generator=g).bfloat16()
    first: dict[str, Tensor] = {}
    for run in range(NUM_RUNS):
        layer.zero_grad()
        leaf = x.clone().requires_grad_()
        y = layer(leaf)
        y.backward(dy)
        assert leaf.grad is not None
        results = {"y": y.detach(), "dx": leaf.grad, **grads, **layer.router.last_losses}
        results |= {name: p.grad.clone() for name, p in layer.named_parameters() if p.grad is not None}
        first = first or results
        assert set(results) == {
            "y",
            "dx",
            "dw",
            "aux_loss",
            "z_loss",
            "router.weight",
            "experts.gate_up",
            "experts.down",
        }
        for name, tensor in results.items():
            assert_same_bits(tensor, first[name], f"{name} of run {run}")
    layer.buffer.close()
    torch.set_num_threads(1)


def test_ten_runs_have_the_same_bits(ranks: Pools) -> None:  # case O03
    ranks.run(_runs, 2)


def _exchange(buffer: moe_ep.Buffer, x: Tensor, idx: Tensor, weights: Tensor) -> Tensor:
    """Scale experts, f_e(v) = (e + 1) / 8 * v: element by element, so no matrix product sees the number of rows."""
    out = moe_ep.dispatch(buffer, x, idx, weights, num_experts=16)
    ids = torch.tensor(buffer.placement(16).experts_of(buffer.rank))
    scale = ((ids + 1) / 8).to(x.dtype)
    rows = scale[out.topk_idx].unsqueeze(1) * out.x
    return moe_ep.combine(buffer, rows, out.handle, out.topk_weights)


def _neighbours(group: dist.ProcessGroup) -> None:
    g = torch.Generator().manual_seed(dist.get_rank(group))
    x = torch.randn(24, 8, generator=g).bfloat16()
    idx = torch.stack([torch.randperm(16, generator=g)[:8] for _ in range(24)])
    weights = torch.rand(24, 8, generator=g)
    with moe_ep.Buffer(group, timeout_secs=60) as buffer:
        y = _exchange(buffer, x, idx, weights)
        for i in range(NUM_PERMUTATIONS):
            order = torch.randperm(24, generator=g)
            if i % 2:
                order = order[:12]  # half of the tokens stay at home
            moved = _exchange(buffer, x[order], idx[order], weights[order])
            assert_same_bits(moved, y[order], f"y of permutation {i}")


@pytest.mark.parametrize("world", [1, 2, 4])
def test_a_token_does_not_depend_on_its_neighbours(ranks: Pools, world: int) -> None:  # case O04
    ranks.run(_neighbours, world)


def _tied_layer(group: dist.ProcessGroup, tie: str) -> tuple[moe_ep.MoELayer, list[list[int]]]:
    """A bfloat16 layer whose logits are equal, all or in pairs, and the row counts that its experts meet."""
    torch.manual_seed(0)
    ep = EPConfig(timeout_secs=60)
    config = MoEConfig(
        hidden_size=16, ffn_hidden_size=8, num_experts=8, init_std=0.3, router=RouterConfig(topk=3), ep=ep
    )
    layer = moe_ep.MoELayer(config, group).bfloat16()
    with torch.no_grad():
        weight = layer.router.weight
        weight.copy_(torch.zeros_like(weight) if tie == "all" else weight[::2].repeat_interleave(2, dim=0))
    counts: list[list[int]] = []
    layer.experts.register_forward_pre_hook(lambda _, args: counts.append(list(args[1])))
    return layer, counts


def _ties(group: dist.ProcessGroup, tie: str, selective: bool) -> None:
    """Fifty steps with and without recompute side by side; the router stays as it is, so that the ties stay."""
    options: dict[str, Any] = {"context_fn": keep_exchange_contexts} if selective else {}
    (plain, _), (recomputing, counts) = _tied_layer(group, tie), _tied_layer(group, tie)
    g = torch.Generator().manual_seed(dist.get_rank(group))
    for step in range(NUM_STEPS):
        x = torch.randn(5 + step % 4, 16, generator=g).bfloat16()
        leaves = [x.clone().requires_grad_() for _ in range(2)]
        counts.clear()
        outputs = [plain(leaves[0]), checkpoint(recomputing, leaves[1], use_reentrant=False, **options)]
        for layer, y in zip((plain, recomputing), outputs, strict=True):
            layer.zero_grad()
            y.float().square().sum().backward()
        forward, again = counts
        assert forward == again, f"step {step}: {forward} rows in forward, {again} in recompute"
        _compare_and_step(plain, recomputing, step)
        assert leaves[0].grad is not None
        assert leaves[1].grad is not None
        assert_same_bits(leaves[1].grad, leaves[0].grad, f"dx of step {step}")
    plain.buffer.close()
    recomputing.buffer.close()


@torch.no_grad()
def _compare_and_step(plain: nn.Module, recomputing: nn.Module, step: int) -> None:
    for (name, ours), theirs in zip(recomputing.named_parameters(), plain.parameters(), strict=True):
        assert ours.grad is not None
        assert theirs.grad is not None
        assert_same_bits(ours.grad, theirs.grad, f"{name} of step {step}")
        if name != "router.weight":
            ours.sub_(ours.grad, alpha=0.01)
            theirs.sub_(theirs.grad, alpha=0.01)


@pytest.mark.parametrize("selective", [False, True])
@pytest.mark.parametrize("tie", ["all", "pairs"])
def test_ties_are_routed_alike_in_recompute(ranks: Pools, tie: str, selective: bool) -> None:  # case O05
    ranks.run(_ties, 2, tie, selective)
