"""Rounds of bounded size and calls inside a node give, together, what the two hops give at once, bit for bit.

The kernels are played by collectives: a rail's inbox and outbox as tensors, a call in a node as an exchange along its
handle.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import moe_ep
from moe_ep.backends.internode import InternodeBackend
from moe_ep.backends.rounds import Rounds, rounds_of
from moe_ep.handle import DispatchHandle
from moe_ep.ordered_sum import OrderedSum
from tests.helpers.compare import assert_same_bits
from tests.helpers.ranks import Pools
from tests.helpers.routing import make_inputs

HIDDEN, NUM_TOPK = 8, 3


class Played:
    """A backend with the steps of the kernels."""

    def __init__(self, backend: InternodeBackend, handle: DispatchHandle, round_tokens: int) -> None:
        self.backend, self.topology = backend, backend.topology
        self.handle, route = handle, backend._route(handle)
        self.rounds: Rounds = rounds_of(handle, route, self.topology, round_tokens, self._within)
        self.leaving = route.departures.token
        self.num_rounds = len(self.rounds.calls)

    def _within(self, rows: Tensor, num_out: list[int], num_in: list[int]) -> Tensor:
        return self.backend._within(rows, num_out, num_in, "dispatch")

    def _held(self, rows: Tensor, counts: Tensor) -> Tensor:
        """What came from the nodes in a round, as it lies in an inbox: NaN where nothing came."""
        inbox = rows.new_full((self.topology.num_nodes * self.rounds.round_tokens, rows.shape[1]), float("nan"))
        for node, came in enumerate(torch.split(rows, counts.tolist())):
            inbox[node * self.rounds.round_tokens :][: len(came)] = came
        return inbox

    def _flow(self, first: Tensor, number: int) -> list[range]:
        """Rows to each node in a round."""
        starts = first.tolist()
        return [
            range(starts[node * self.num_rounds + number], starts[node * self.num_rounds + number + 1])
            for node in range(self.topology.num_nodes)
        ]

    def dispatch(self, x: Tensor) -> Tensor:
        out = x.new_zeros(self.handle.num_rows, x.shape[1])
        written = torch.zeros(self.handle.num_rows, dtype=torch.int64)
        self._move(self.rounds.own, x, out, written)
        for number, call in enumerate(self.rounds.calls):
            rows = [self.leaving[list(flow)] for flow in self._flow(self.rounds.out.first, number)]
            num_in = self.rounds.back.counts[:, number]
            came = self.backend._hop(x[torch.cat(rows)], [len(row) for row in rows], num_in.tolist(), "dispatch")
            self._move(call, self._held(came, num_in), out, written)
        assert bool((written <= 1).all())
        return out

    def _move(self, call: DispatchHandle, x: Tensor, out: Tensor, written: Tensor) -> None:
        """A dispatch in the node: only the rows of the call are written."""
        assert x.shape[0] == call.num_tokens
        came = self._within(x[call.send_token], list(call.send_counts), list(call.recv_counts))
        out[call.real_rows] = came[torch.div(call.row_pair[call.real_rows], call.num_topk, rounding_mode="floor")]
        written[call.real_rows] += 1

    def combine(self, rows: Tensor) -> Tensor:
        own_sum = self._reduce(self.rounds.own, rows)
        y = torch.empty(self.handle.num_tokens, rows.shape[1], dtype=rows.dtype)
        place_TN, size = self.rounds.token_place, self.rounds.round_tokens
        node = self.topology.node_of(self.handle.rank) if self.topology.num_nodes > 1 else 0
        for number, call in enumerate(self.rounds.calls):
            outbox = self._reduce(call, rows)
            flows = self._flow(self.rounds.back.first, number)
            leaving = [outbox[peer * size :][: len(flow)] for peer, flow in enumerate(flows)]
            num_in = self.rounds.out.counts[:, number]
            came = self.backend._hop(torch.cat(leaving), [len(flow) for flow in flows], num_in.tolist(), "combine")
            inbox = self._held(came, num_in)
            for token in range(number * size, min((number + 1) * size, len(y))):
                terms = [
                    own_sum[token] if peer == node else inbox[peer * size + place]
                    for peer, place in enumerate(place_TN[token].tolist())
                    if place >= 0
                ]
                total = torch.zeros(rows.shape[1])
                for number_of_term, term in enumerate(terms):
                    total = term.float() if number_of_term == 0 else total + term.float()
                y[token] = total.to(y.dtype)
        return y

    def _reduce(self, call: DispatchHandle, rows: Tensor) -> Tensor:
        """A combine in the node: [tokens of the call, H], 0 where nothing comes."""
        back = self._within(call.local_sum(rows), list(call.recv_counts), list(call.send_counts))
        home = OrderedSum.from_terms(call.send_token, torch.arange(len(back)), call.num_tokens)
        return home(back)


def _as_two_hops_do(group: dist.ProcessGroup, ranks_per_node: int, layout: str, routing: str, round_tokens: int) -> int:
    world, rank = dist.get_world_size(group), dist.get_rank(group)
    x, idx, _ = make_inputs(routing, "ragged", world, HIDDEN, NUM_TOPK, 2 * world, torch.bfloat16)[rank]
    with moe_ep.Buffer(group, backend="internode", ranks_per_node=ranks_per_node, timeout_secs=20) as buffer:
        backend = buffer.backend
        assert isinstance(backend, InternodeBackend)
        out = moe_ep.dispatch(buffer, x, idx, None, num_experts=2 * world, layout=layout, alignment=4)
        assert isinstance(out.handle, DispatchHandle)
        played = Played(backend, out.handle, round_tokens)
        assert_same_bits(played.dispatch(x), out.x, "rows")
        g = torch.Generator().manual_seed(rank)
        rows = torch.randn(out.x.shape, generator=g).bfloat16()
        assert_same_bits(played.combine(rows), moe_ep.combine(buffer, rows, out.handle), "y")
    return played.num_rounds


@pytest.mark.parametrize(("num_nodes", "ranks_per_node"), [(1, 2), (2, 1), (2, 2), (3, 1), (4, 1)])
@pytest.mark.parametrize(("routing", "layout"), [("random", "compact"), ("holes", "expert_major")])
@pytest.mark.parametrize("round_tokens", [2, 3, 64])
def test_rounds_write_every_row_once_and_sum_as_two_hops_do(
    ranks: Pools, num_nodes: int, ranks_per_node: int, routing: str, layout: str, round_tokens: int
) -> None:
    world = num_nodes * ranks_per_node
    num_rounds = ranks.run(_as_two_hops_do, world, ranks_per_node, layout, routing, round_tokens)
    assert len(set(num_rounds)) == 1
    assert num_rounds[0] % 2 == 0


@pytest.mark.parametrize("routing", ["all_to_last", "all_unused", "duplicates"])
def test_rounds_of_odd_routings(ranks: Pools, routing: str) -> None:
    for layout in ("compact", "expert_major"):
        ranks.run(_as_two_hops_do, 4, 2, layout, routing, 2)
