"""Two hops meet the contract: rows, orders and gradients bit for bit, sums by node; every crossing is counted."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist

import moe_ep
from moe_ep.backends.internode import InternodeBackend
from moe_ep.config import MoEConfig, RouterConfig
from moe_ep.errors import ConfigError
from tests.distributed.conformance import check_routing
from tests.helpers.compare import assert_same_bits
from tests.helpers.ranks import Pools
from tests.helpers.routing import ROUTINGS, TOKEN_COUNTS, make_inputs

HIDDEN, NUM_TOPK = 8, 4
# (nodes, ranks a node); the processes of eight ranks take long on few cores.
SHAPES = [(1, 1), (1, 2), (2, 1), (3, 1), (1, 4), (2, 2), (4, 1)]
LARGE_SHAPES = [(2, 4), (4, 2)]
slow_shapes = [pytest.param(*shape, marks=pytest.mark.slow(ci=True)) for shape in LARGE_SHAPES]
shapes = pytest.mark.parametrize(("num_nodes", "ranks_per_node"), SHAPES + slow_shapes)


def _every_routing(group: dist.ProcessGroup, ranks_per_node: int, layout: str, dtype: torch.dtype, exact: bool) -> int:
    num_checks = 0
    for routing, tokens in itertools.product(ROUTINGS, TOKEN_COUNTS):
        check_routing(group, "internode", layout, dtype, routing, tokens, 4, exact=exact, ranks_per_node=ranks_per_node)
        num_checks += 1
    return num_checks


@shapes
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("layout", ["compact", "expert_major"])
def test_rows_sums_and_gradients_are_those_of_the_loops(
    ranks: Pools, layout: str, dtype: torch.dtype, num_nodes: int, ranks_per_node: int
) -> None:
    world, args = num_nodes * ranks_per_node, (ranks_per_node, layout, dtype, False)
    assert ranks.run(_every_routing, world, *args, timeout_secs=120) == [len(ROUTINGS) * len(TOKEN_COUNTS)] * world


@shapes
def test_exact_sums_do_not_know_of_nodes(ranks: Pools, num_nodes: int, ranks_per_node: int) -> None:
    world, args = num_nodes * ranks_per_node, (ranks_per_node, "expert_major", torch.bfloat16, True)
    assert ranks.run(_every_routing, world, *args, timeout_secs=120) == [len(ROUTINGS) * len(TOKEN_COUNTS)] * world


def _both_ways(
    group: dist.ProcessGroup, buffer: moe_ep.Buffer, inputs: list[Any], exact: bool = False
) -> dict[str, torch.Tensor]:
    """A dispatch, its combine and their gradients, of values that no sum holds without rounding."""
    x, idx, weights = (tensor.clone() for tensor in inputs[dist.get_rank(group)])
    x.requires_grad_()
    weights.requires_grad_()
    num_experts = 2 * dist.get_world_size(group)
    out = moe_ep.dispatch(buffer, x, idx, weights, num_experts=num_experts, layout="expert_major", alignment=4)
    y = moe_ep.combine(buffer, out.x * 1.1, out.handle, out.topk_weights, exact=exact)
    (y * torch.linspace(-1, 1, HIDDEN, dtype=y.dtype)).sum().backward()
    assert x.grad is not None
    assert weights.grad is not None
    return {"rows": out.x.detach(), "y": y.detach(), "dx": x.grad, "dw": weights.grad}


def _as_torch_does(group: dist.ProcessGroup, ranks_per_node: int, one_rank_a_node: bool, exact: bool) -> list[str]:
    """The names of what differs between the two backends, bit for bit."""
    world = dist.get_world_size(group)
    inputs = make_inputs("random", "ragged", world, HIDDEN, NUM_TOPK, 2 * world, torch.bfloat16)
    if one_rank_a_node:  # experts of the first rank of each node only
        for _, idx, _ in inputs:
            idx.copy_(torch.where(idx // 2 % ranks_per_node == 0, idx, -1))
    with (
        moe_ep.Buffer(group, backend="torch", timeout_secs=20) as one,
        moe_ep.Buffer(group, backend="internode", ranks_per_node=ranks_per_node, timeout_secs=20) as two,
    ):
        assert two.backend_name == "internode"
        expected, actual = _both_ways(group, one, inputs, exact), _both_ways(group, two, inputs, exact)
    return [name for name in expected if not torch.equal(expected[name], actual[name])]


@pytest.mark.parametrize(("ranks_per_node", "one_rank_a_node"), [(1, False), (4, False), (2, True)])
def test_sums_are_those_of_one_hop_where_no_node_adds_up(
    ranks: Pools, ranks_per_node: int, one_rank_a_node: bool
) -> None:
    assert ranks.run(_as_torch_does, 4, ranks_per_node, one_rank_a_node, False) == [[]] * 4


def test_what_is_not_summed_over_ranks_never_differs(ranks: Pools) -> None:
    """Rows and dw are equal bit for bit also where nodes add up; y is where its sum is exact."""
    differing = ranks.run(_as_torch_does, 4, 2, False, True)
    assert {name for names in differing for name in names} <= {"dx"}


def _crossings(group: dist.ProcessGroup, ranks_per_node: int, routing: str) -> None:
    """Bytes of each call, against the distinct (token, other node) pairs of the ids."""
    world, rank = dist.get_world_size(group), dist.get_rank(group)
    inputs = make_inputs(routing, "ragged", world, HIDDEN, NUM_TOPK, 2 * world, torch.bfloat16)
    pairs = [  # (home, node) for every token and every node but its own that one of its experts is on
        (home, node)
        for home, (_, idx, _) in enumerate(inputs)
        for named in idx.tolist()
        for node in {expert // 2 // ranks_per_node for expert in named if expert >= 0}
        if node != home // ranks_per_node
    ]
    leaving = sum(home == rank for home, _ in pairs)
    rail, here = rank % ranks_per_node, rank // ranks_per_node
    coming = sum(home % ranks_per_node == rail and node == here for home, node in pairs)
    x, idx, weights = inputs[rank]
    with moe_ep.Buffer(group, backend="internode", ranks_per_node=ranks_per_node, timeout_secs=20) as buffer:
        backend = buffer.backend
        assert isinstance(backend, InternodeBackend)
        counts = backend.crossings

        def crossed(num_rows: int, row_bytes: int) -> None:
            assert (counts.num_rows, counts.num_bytes) == (num_rows, num_rows * row_bytes)
            counts.num_rows = counts.num_bytes = 0

        layout = buffer.get_dispatch_layout(idx, 2 * world)
        handle = buffer.dispatch(
            x,
            num_tokens_per_rank=layout[0],
            is_token_in_rank=layout[3],
            num_tokens_per_expert=layout[2],
            topk_idx=idx,
            topk_weights=weights,
        )[4]
        id_bytes, row_bytes = 4 * (1 + 2 * NUM_TOPK), 2 * HIDDEN
        assert (counts.num_rows, counts.num_bytes) == (2 * leaving, leaving * (id_bytes + row_bytes))
        counts.num_rows = counts.num_bytes = 0
        assert handle is not None
        rows = buffer.dispatch(x, handle=handle)[0]
        crossed(leaving, row_bytes)
        assert isinstance(rows, torch.Tensor)
        buffer.combine(rows, handle)
        crossed(coming, row_bytes)


@shapes
@pytest.mark.parametrize("routing", ["random", "holes", "duplicates", "all_to_last", "all_unused"])
def test_bytes_between_nodes_are_the_distinct_pairs_of_token_and_node(
    ranks: Pools, routing: str, num_nodes: int, ranks_per_node: int
) -> None:
    ranks.run(_crossings, num_nodes * ranks_per_node, ranks_per_node, routing)


def _limited_to_a_node(group: dist.ProcessGroup, ranks_per_node: int) -> int:
    """Rows that cross where the router keeps one group of experts, a group being a node."""
    world, rank = dist.get_world_size(group), dist.get_rank(group)
    g = torch.Generator().manual_seed(rank)
    num_experts, num_nodes = 4 * world, world // ranks_per_node
    settings = {"topk": 3, "num_groups": num_nodes, "group_topk": 1}
    config = MoEConfig(hidden_size=HIDDEN, ffn_hidden_size=8, num_experts=num_experts, router=RouterConfig(**settings))
    idx, weights = moe_ep.TopKRouter(config)(torch.randn(40, HIDDEN, generator=g))
    with moe_ep.Buffer(group, backend="internode", ranks_per_node=ranks_per_node, timeout_secs=20) as buffer:
        moe_ep.dispatch(buffer, torch.ones(40, HIDDEN), idx, weights.detach(), num_experts=num_experts)
        backend = buffer.backend
        assert isinstance(backend, InternodeBackend)
        return backend.crossings.num_rows


def test_group_limited_routing_bounds_the_crossings(ranks: Pools) -> None:
    # Ids, then rows: twice at most one other node for each of 40 tokens.
    assert all(num_rows <= 2 * 40 for num_rows in ranks.run(_limited_to_a_node, 4, 1))


def _along_foreign_handles(group: dist.ProcessGroup, ranks_per_node: int) -> None:
    """Handles of another backend, of another size of nodes, and copies of one's own on one rank only."""
    world, rank = dist.get_world_size(group), dist.get_rank(group)
    x, idx, _ = make_inputs("holes", "ragged", world, HIDDEN, NUM_TOPK, 2 * world, torch.float64)[rank]

    def handle_of(buffer: moe_ep.Buffer) -> moe_ep.DispatchHandle:
        out = moe_ep.dispatch(buffer, x, idx, None, num_experts=2 * world, layout="compact")
        assert isinstance(out.handle, moe_ep.DispatchHandle)
        return out.handle

    with (
        moe_ep.Buffer(group, backend="torch", timeout_secs=20) as one,
        moe_ep.Buffer(group, backend="internode", ranks_per_node=ranks_per_node, timeout_secs=20) as two,
        moe_ep.Buffer(group, backend="internode", ranks_per_node=1, timeout_secs=20) as flat,
    ):
        own = handle_of(two)
        expected = one.dispatch(x, handle=handle_of(one))[0]
        for handle in (own, copy.copy(own) if rank == 0 else own, handle_of(one), handle_of(flat)):
            rows = two.dispatch(x, handle=handle)[0]
            assert isinstance(rows, torch.Tensor)
            assert isinstance(expected, torch.Tensor)
            assert_same_bits(rows, expected, "rows")
            two.combine(rows, handle)


def test_a_handle_fits_any_backend_and_any_size_of_nodes(ranks: Pools) -> None:
    ranks.run(_along_foreign_handles, 4, 2)


def _refused(group: dist.ProcessGroup, backend: str, ranks_per_node: int) -> str:
    try:
        moe_ep.Buffer(group, backend=backend, ranks_per_node=ranks_per_node, timeout_secs=20)
    except ConfigError as error:
        return str(error)
    return ""


def test_nodes_that_do_not_come_out_even_are_refused_on_every_rank(ranks: Pools) -> None:
    sentences = ranks.run(_refused, 4, "internode", 3)
    assert len(set(sentences)) == 1
    assert "ranks_per_node is 3, but the EP group has 4 ranks" in sentences[0]


def test_other_backends_know_no_nodes(ranks: Pools) -> None:
    assert "backend is 'torch', which knows no nodes" in ranks.run(_refused, 2, "torch", 1)[0]


def _other_calls(group: dist.ProcessGroup, backend: str, ranks_per_node: int | None) -> list[torch.Tensor]:
    """FP8 rows with scales, summed weights, a fixed number of rows, low latency."""
    world, rank = dist.get_world_size(group), dist.get_rank(group)
    x, idx, weights = make_inputs("holes", "ragged", world, 128, NUM_TOPK, 2 * world, torch.bfloat16)[rank]
    with moe_ep.Buffer(group, backend=backend, ranks_per_node=ranks_per_node, timeout_secs=20) as buffer:
        per_rank, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(idx, 2 * world)
        layout = {"num_tokens_per_rank": per_rank, "is_token_in_rank": in_rank, "num_tokens_per_expert": per_expert}
        data, scales = x.to(torch.float8_e4m3fn), torch.rand(x.shape[0], 1) + rank
        (rows, row_scales), _, row_weights, _, handle, _ = buffer.dispatch(
            (data, scales), topk_idx=idx, topk_weights=weights, **layout
        )
        assert handle is not None
        _, home_weights, _ = buffer.combine(rows.bfloat16(), handle, topk_weights=row_weights)
        fixed = moe_ep.dispatch(buffer, x, idx, weights, num_experts=2 * world, max_rows=64, layout="expert_major")
        received, counts, ll_handle, _, _ = buffer.low_latency_dispatch(x, idx, 8, 2 * world, use_fp8=False)
        assert isinstance(received, torch.Tensor)
        y, _, _ = buffer.low_latency_combine(received, idx, weights, ll_handle)
        results = [rows.float(), row_scales, home_weights, fixed.x, fixed.topk_weights, counts, y]
    return [tensor for tensor in results if tensor is not None]


@pytest.mark.parametrize(("world", "ranks_per_node"), [(2, 1), (3, 1), (4, 2)])
def test_every_other_call_gives_what_one_hop_gives(ranks: Pools, world: int, ranks_per_node: int) -> None:
    one = ranks.run(_other_calls, world, "torch", None)
    two = ranks.run(_other_calls, world, "internode", ranks_per_node)
    for expected, actual in zip(one, two, strict=True):
        assert len(expected) == 7
        for number, (theirs, ours) in enumerate(zip(expected, actual, strict=True)):
            assert_same_bits(ours, theirs, f"result {number}")
