"""Where rows go that travel in two hops: along the rail into each node, then to the ranks there.

Letters: T tokens of this rank, K slots a token, N nodes, P ranks a node; C rows that leave this rank, one for each
(node, token); D rows that arrive at this rank from its rail, which it relays; S compact rows that this rank receives in
the end. The own node is a node like the others.

Example: 2 nodes of 2 ranks, a token of rank 0 with experts on ranks 1, 2 and 3. It leaves twice: to rank 0 (its own
node) and to rank 2 (the same rail in the other). Rank 0 relays it to rank 1, rank 2 keeps a copy and relays it to 3.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from moe_ep.handle import DispatchHandle
from moe_ep.ordered_sum import OrderedSum
from moe_ep.topology import Topology


@dataclass(frozen=True, eq=False)
class Departures:
    """What leaves a rank along its rail.

    Attributes:
        slot_node: [T, K] node of the expert in each slot, -1 for none.
        token: [C] source token of every row, ascending in (node, token).
        counts: N row counts.
    """

    slot_node: Tensor
    token: Tensor
    counts: tuple[int, ...]


def departures_of(slot_rank_TK: Tensor, topology: Topology) -> Departures:
    """From the rank of the expert in each slot, -1 for none."""
    node_TK = torch.div(slot_rank_TK, topology.ranks_per_node, rounding_mode="floor")
    goes_NT = torch.stack([(node_TK == node).any(dim=1) for node in range(topology.num_nodes)])
    return Departures(node_TK, goes_NT.nonzero()[:, 1].clone(), tuple(goes_NT.sum(dim=1).tolist()))


@dataclass(frozen=True, eq=False)
class TwoHopRoute:
    """One rank's part in both hops of a dispatch; a combine takes them backwards.

    Attributes:
        departures: of the first hop.
        arrivals: N counts of the D rows that come along the rail, by the node that they come from.
        token: [D] source token of these.
        slot_rank: [D, K] rank of the expert in each slot of these, -1 where it is not in this node.
        relay_row: arrived row of every row of the second hop, ascending in (rank of this node, arrived row).
        relay_sends, relay_recvs: P counts of the second hop, to and from the ranks of this node.
        rail_order: [S] the compact rows as the second hop brings them: by rail, and inside it by node.
    """

    departures: Departures
    arrivals: tuple[int, ...]
    token: Tensor
    slot_rank: Tensor
    relay_row: Tensor
    relay_sends: tuple[int, ...]
    relay_recvs: tuple[int, ...]
    rail_order: Tensor

    @cached_property
    def compact_order(self) -> Tensor:
        """[S] the inverse of `rail_order`."""
        return torch.argsort(self.rail_order)

    @cached_property
    def node_sum(self) -> OrderedSum:
        """Sums what the ranks of this node have for each arrived row, ranks ascending."""
        src = torch.arange(self.relay_row.numel(), device=self.relay_row.device)
        return OrderedSum.from_terms(self.relay_row, src, sum(self.arrivals))

    @cached_property
    def home_sum(self) -> OrderedSum:
        """Sums what the nodes have for each own token, nodes ascending."""
        token = self.departures.token
        src = torch.arange(token.numel(), device=token.device)
        return OrderedSum.from_terms(token, src, self.departures.slot_node.shape[0])


def route_between(
    handle: DispatchHandle,
    topology: Topology,
    departures: Departures,
    arrivals: Sequence[int],
    token_D: Tensor,
    slot_rank_DK: Tensor,
) -> TwoHopRoute:
    """The route of a dispatch, from what came along the rail.

    Args:
        handle: of which the ranks and the counts are known.
        topology: of the group.
        departures: of this rank.
        arrivals: N counts of the rows that came.
        token_D: their source tokens.
        slot_rank_DK: rank of the expert in each of their slots; ranks of other nodes do not count.
    """
    peers = topology.ranks_of(topology.node_of(handle.rank))
    goes_PD = torch.stack([(slot_rank_DK == peer).any(dim=1) for peer in peers])
    in_node = (slot_rank_DK >= peers.start) & (slot_rank_DK < peers.stop)
    return TwoHopRoute(
        departures=departures,
        arrivals=tuple(arrivals),
        token=token_D.long(),
        slot_rank=slot_rank_DK.masked_fill(~in_node, -1),
        relay_row=goes_PD.nonzero()[:, 1].clone(),
        relay_sends=tuple(goes_PD.sum(dim=1).tolist()),
        relay_recvs=rail_sums(handle.recv_counts, topology),
        rail_order=rail_order(handle.recv_counts, topology, slot_rank_DK.device),
    )


def rail_order(counts: Sequence[int], topology: Topology, device: torch.device) -> Tensor:
    """Rows of all ranks, `counts` of each in rank order, with the rails outside and the nodes inside."""
    of_rank = torch.split(torch.arange(sum(counts), device=device), list(counts))
    rails, nodes = range(topology.ranks_per_node), range(topology.num_nodes)
    return torch.cat([of_rank[topology.rank_at(node, rail)] for rail in rails for node in nodes])


def rail_sums(counts: Sequence[int], topology: Topology) -> tuple[int, ...]:
    """W counts by rank, added up over the nodes: P counts by rail."""
    return tuple(sum(counts[rail :: topology.ranks_per_node]) for rail in range(topology.ranks_per_node))
