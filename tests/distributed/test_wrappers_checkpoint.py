"""Activation checkpointing: which ways of it communicate again, and that none changes a gradient or a count."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from torch.utils.flop_counter import FlopCounterMode

import moe_ep
from moe_ep.autograd import ops
from moe_ep.config import EPConfig, MoEConfig, RouterConfig
from moe_ep.layers.wrap import keep_exchange, keep_exchange_contexts
from tests.distributed.test_layer import all_tokens, layer_config
from tests.helpers.compare import assert_same_bits
from tests.helpers.ranks import Pools
from tests.helpers.scale_experts import device_of

EXCHANGES = ("plan_and_dispatch", "open_combine", "combine", "dispatch_backward", "combine_backward", "all_reduce")


def _own_policy(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """What a caller writes who keeps matrix products too."""
    if operation is torch.ops.aten.mm.default:
        return CheckpointPolicy.MUST_SAVE
    return keep_exchange(context, operation, *args, **kwargs)


RUNS: dict[str, Callable[[Callable[[Tensor], Tensor], Tensor], Tensor]] = {
    "none": lambda layer, x: layer(x),
    "experts": lambda layer, x: layer(x),
    "reentrant": lambda layer, x: checkpoint(layer, x, use_reentrant=True),
    "plain": lambda layer, x: checkpoint(layer, x, use_reentrant=False),
    "selective": lambda layer, x: checkpoint(layer, x, use_reentrant=False, context_fn=keep_exchange_contexts),
    "own policy": lambda layer, x: checkpoint(
        layer, x, use_reentrant=False, context_fn=lambda: create_selective_checkpoint_contexts(_own_policy)
    ),
}
MODES = tuple(RUNS)


def prepare(layer: moe_ep.MoELayer, mode: str) -> None:
    """The plain way to recompute the experts alone: a checkpoint around that module."""
    if mode == "experts":
        layer.experts = checkpoint_wrapper(layer.experts)


def count_exchanges(buffer: moe_ep.Buffer) -> Counter[str]:
    """Counts the backend's exchanges from now on, by name."""
    counts: Counter[str] = Counter()

    def counted(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            counts[name] += 1
            return method(*args, **kwargs)

        return call

    for name in EXCHANGES:
        setattr(buffer.backend, name, counted(name, getattr(buffer.backend, name)))
    return counts


def one_step(
    group: dist.ProcessGroup, mode: str, backend: str = "auto"
) -> tuple[dict[str, Tensor], dict[str, int], int]:
    """y and all gradients, exchanges, and how often the experts ran."""
    world, rank = dist.get_world_size(group), dist.get_rank(group)
    torch.manual_seed(0)
    ep = EPConfig(timeout_secs=20, backend=backend)
    layer = moe_ep.MoELayer(layer_config(ep=ep), group).to(device_of(backend), torch.float64)
    names = list(layer.state_dict())
    runs: list[int] = []
    layer.experts.register_forward_pre_hook(lambda *_: runs.append(1))
    prepare(layer, mode)
    assert list(layer.state_dict()) == names
    counts = count_exchanges(layer.buffer)
    x = all_tokens(world)[rank].to(device_of(backend), copy=True).requires_grad_()
    y = RUNS[mode](layer, x)
    ((rank + 1) * y.square().sum()).backward()
    assert x.grad is not None
    results = {"y": y.detach(), "x": x.grad}
    for name, parameter in layer.named_parameters():
        assert parameter.grad is not None, name
        results[name.replace("_checkpoint_wrapped_module.", "")] = parameter.grad
    layer.buffer.close()
    return results, dict(counts), len(runs)


@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize("mode", MODES)
def test_recompute_communicates_only_where_the_whole_layer_is_recomputed(
    ranks: Pools, mode: str, world: int
) -> None:  # case A06
    assert_exchanges(ranks, mode, world)


def assert_exchanges(ranks: Pools, mode: str, world: int, backend: str = "auto") -> None:
    """Exchanges, runs of the experts and every bit, against a step without recompute."""
    times = 2 if mode in ("plain", "reentrant") else 1
    expected = {name: 1 if "backward" in name else times for name in EXCHANGES if name != "all_reduce"}
    if mode == "plain" and backend == "intranode":
        # The shared expert has run while the rows travelled, so nothing behind combine is kept: PyTorch stops there.
        expected |= {"open_combine": 1, "combine": 1}
    plain = ranks.run(one_step, world, "none", backend)
    recomputed = ranks.run(one_step, world, mode, backend)
    for (results, counts, num_runs), (unchanged, _, _) in zip(recomputed, plain, strict=True):
        assert counts == expected
        assert num_runs == (1 if mode == "none" else 2)
        for name, tensor in unchanged.items():
            assert_same_bits(results[name], tensor, name)


def functional(group: dist.ProcessGroup, backend: str = "auto") -> None:
    """A layer that a caller wrote from the functions, with the counts of the group beside it."""
    rank = dist.get_rank(group)
    buffer, device = moe_ep.Buffer(group, backend=backend, timeout_secs=20), device_of(backend)
    g = torch.Generator().manual_seed(rank)
    x, weights = torch.randn(3 + rank, 8, generator=g).to(device), torch.rand(3 + rank, 2, generator=g).to(device)
    idx = torch.randint(0, 4, (3 + rank, 2), generator=g).to(device)
    runs: list[int] = []

    def layer(x: Tensor, weights: Tensor) -> Tensor:
        runs.append(1)
        total = ops.all_reduce(buffer, torch.tensor([len(x)], device=device))
        out = moe_ep.dispatch(buffer, x, idx, weights, num_experts=4)
        return moe_ep.combine(buffer, out.x.tanh(), out.handle, out.topk_weights) * total

    counts = count_exchanges(buffer)
    results = []
    for options in ({}, {"use_reentrant": False, "context_fn": keep_exchange_contexts}):
        counts.clear()
        leaves = [tensor.clone().requires_grad_() for tensor in (x, weights)]
        y = checkpoint(layer, *leaves, **options) if options else layer(*leaves)
        y.square().sum().backward()
        assert dict(counts) == dict.fromkeys(EXCHANGES, 1)
        results.append((y.detach(), *(leaf.grad for leaf in leaves)))
    assert len(runs) == 3  # once plainly; forward and recompute
    for plain, kept in zip(*results, strict=True):
        assert_same_bits(kept, plain, "selective checkpointing")
    buffer.close()


@pytest.mark.parametrize("world", [1, 2])
def test_selective_checkpointing_keeps_a_functional_exchange(ranks: Pools, world: int) -> None:  # case A06
    ranks.run(functional, world)


def counted_tokens(
    group: dist.ProcessGroup, mode: str, frozen: str, backend: str = "auto"
) -> tuple[list[int], list[float]]:
    """Four tokens over the ranks: all to expert 0, two to expert 1, one each to experts 2 and 3."""
    world, rank = dist.get_world_size(group), dist.get_rank(group)
    router = RouterConfig(topk=2, score_function="sigmoid", expert_bias=True, bias_update_rate=0.5)
    config = MoEConfig(
        hidden_size=4, ffn_hidden_size=2, num_experts=4, router=router, ep=EPConfig(timeout_secs=20, backend=backend)
    )
    layer = moe_ep.MoELayer(config, group).to(device_of(backend))
    with torch.no_grad():
        layer.router.weight.copy_(torch.tensor([[2.0, 2, 2, 2], [1, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 1]]))
    prepare(layer, mode)
    if frozen == "router and x":
        layer.router.weight.requires_grad_(False)
    if frozen == "layer and x":
        layer.requires_grad_(False)
    device = device_of(backend)
    x = torch.eye(4, device=device)[rank * 4 // world : (rank + 1) * 4 // world].requires_grad_(not frozen)
    behind = torch.ones(4, requires_grad=True, device=device)
    RUNS[mode](lambda x: layer(x) * behind, x).sum().backward()
    counts = layer.buffer.all_reduce(layer.router.tokens_per_expert.clone()).tolist()
    layer.update_expert_bias()
    assert layer.router.expert_bias is not None
    bias = layer.router.expert_bias.tolist()
    layer.buffer.close()
    return counts, bias


COUNTED = ([4, 2, 1, 1], [-0.5, 0.0, 0.5, 0.5])


@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize("mode", MODES)
def test_recompute_counts_every_token_once(ranks: Pools, mode: str, world: int) -> None:  # case B01
    assert ranks.run(counted_tokens, world, mode, "") == [COUNTED] * world


@pytest.mark.parametrize("frozen", ["router and x", "layer and x"])
@pytest.mark.parametrize("mode", [mode for mode in MODES if mode != "reentrant"])  # that one needs an x with a gradient
def test_recompute_counts_once_where_the_router_needs_no_gradient(ranks: Pools, mode: str, frozen: str) -> None:
    """Case B01: the count hangs on the graph all the same."""
    assert ranks.run(counted_tokens, 2, mode, frozen) == [COUNTED] * 2


def under_a_flop_counter(group: dist.ProcessGroup, backend: str = "auto") -> None:
    """A dispatch mode around eager calls, as selective checkpointing and counters are."""
    rank, device = dist.get_rank(group), device_of(backend)
    results = []
    with moe_ep.Buffer(group, backend=backend, timeout_secs=20) as buffer:
        for watched in (False, True):
            g = torch.Generator().manual_seed(rank)
            x = torch.randn(3 + rank, 8, generator=g).to(device).requires_grad_()
            weights = torch.rand(3 + rank, 2, generator=g).to(device).requires_grad_()
            idx = torch.randint(0, 4, (3 + rank, 2), generator=g).to(device)
            with FlopCounterMode(display=False) if watched else torch.enable_grad():
                out = moe_ep.dispatch(buffer, x, idx, weights, num_experts=4, alignment=4)
                assert out.tokens_per_expert is not None
                assert sum(out.tokens_per_expert) == len(out.x)
                y = moe_ep.combine(buffer, out.x.tanh(), out.handle, out.topk_weights)
            y.square().sum().backward()
            results.append((y.detach(), x.grad, weights.grad, out.tokens_per_expert, out.real_tokens_per_expert))
    for plain, watched_too in zip(*results, strict=True):
        assert torch.equal(plain, watched_too) if isinstance(plain, Tensor) else plain == watched_too


@pytest.mark.parametrize("world", [1, 2])
def test_an_exchange_that_is_watched_gives_the_same_bits(ranks: Pools, world: int) -> None:
    ranks.run(under_a_flop_counter, world)
