"""The backend between nodes on `torch.distributed`: rows cross once for each (token, node), then go round in the node.

It is what the kernels between nodes are tested against, and what runs where there are none: gloo on CPU, NCCL on CUDA.
Everything but the ways of the rows is the portable backend's. A dispatch is a hop along the rail and an exchange in the
node; a combine goes back: the ranks' sums are added up at the rail rank of their node, and the nodes' sums at home.

Sums. A rank's sum over its experts is rounded to the dtype of the rows, a node's sum over its ranks (ascending) is
rounded again, the own node's too, and the sum over the nodes (ascending) once more. So results are equal, bit for bit,
to those of the other backends wherever a token has no two ranks in one node beside ranks in another node or a bias:
with one node, or with one rank a node, always. `exact` sums are always equal, and so is whatever is not summed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from moe_ep.backends.base import DispatchRequest
from moe_ep.backends.header import Header
from moe_ep.backends.rows import pack_ids, pairs_by, slots_of, unpack_ids
from moe_ep.backends.torch_dist import TorchDistBackend
from moe_ep.backends.two_hop import TwoHopRoute, departures_of, rail_order, rail_sums, route_between
from moe_ep.errors import EPTimeoutError
from moe_ep.handle import DispatchHandle
from moe_ep.layout import SendLayout, rows_for_peers, send_layout
from moe_ep.topology import Topology


@dataclass
class Crossings:
    """What this rank has sent to other nodes so far.

    Attributes:
        num_rows: rows, one for each (token, node); ids and the rows of an `exact` sum count as well.
        num_bytes: of them.
    """

    num_rows: int = 0
    num_bytes: int = 0


class InternodeBackend(TorchDistBackend):
    """See `moe_ep.backends.base.Backend`.

    Args:
        group: the EP group, or None for a single rank.
        timeout_secs: limit of every wait.
        topology: the nodes.
        on_host: the collectives go through the host, whatever `group` carries.

    Attributes:
        topology: the nodes.
        crossings: counts what this rank sends to other nodes.
        hop: what carries rows between nodes.
    """

    name = "internode"
    hop = "torch"

    def __init__(
        self, group: dist.ProcessGroup | None, timeout_secs: float, topology: Topology, on_host: bool = False
    ) -> None:
        self.topology = topology
        super().__init__(group, timeout_secs, on_host)
        self.crossings = Crossings()
        self._node, self._rail = self.topology.node_of(self.rank), self.topology.rail_of(self.rank)
        self._route_name = f"{self.name}/{self.topology.ranks_per_node}"

    def shrink(self, note: int) -> dict[int, int]:
        raise EPTimeoutError(
            "the internode backend does not go on without a rank: it may be the one that relays for the others. Where "
            "all live, call reset() on every one."
        )

    # -- routes -----------------------------------------------------------------------------------------------------

    def _exchange_ids(
        self, handle: DispatchHandle, layout: SendLayout, ids_TK: Tensor, request: DispatchRequest
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        departures = departures_of(layout.slot_rank, self.topology)
        arrivals = self._arrivals(departures.counts)
        dtype = None if request.topk_weights is None else request.topk_weights.dtype
        token, counts = departures.token, departures.counts
        leaving = SendLayout(departures.slot_node, ids_TK.long(), token, counts)
        words = pack_ids(token, *rows_for_peers(leaving, request.topk_weights))
        token_D, ids_DK, weights_DK = unpack_ids(self._hop(words, counts, arrivals, "dispatch"), handle.num_topk, dtype)

        relays = send_layout(ids_DK, request.placement)
        route = route_between(handle, self.topology, departures, arrivals, token_D, relays.slot_rank)
        handle.prepared[self._route_name] = route
        words = pack_ids(token_D[relays.send_token], *rows_for_peers(relays, weights_DK))
        came = self._within(words, route.relay_sends, route.relay_recvs, "dispatch")
        return unpack_ids(came.index_select(0, route.compact_order), handle.num_topk, dtype)

    def _lacks_route(self, handle: DispatchHandle) -> bool:
        return self._route_name not in handle.prepared

    def _open(
        self,
        operation: str,
        handle: DispatchHandle,
        rows: Tensor,
        weights: Tensor | None = None,
        exact: bool = False,
        needs_grad: bool = False,
    ) -> list[Header]:
        """As everywhere; where a rank's copy of the handle knows no route, all work theirs out anew."""
        headers = super()._open(operation, handle, rows, weights, exact, needs_grad)
        if any(peer.lacks_route for peer in headers):
            with self._agreement.committed(operation):
                self._make_route(handle, operation)
        return headers

    def _make_route(self, handle: DispatchHandle, operation: str) -> None:
        """Works it out of the handle alone, in one hop that carries slot ranks. Collective."""
        departures = departures_of(handle.slot_rank, self.topology)
        arrivals = self._arrivals(departures.counts)
        words = pack_ids(departures.token, handle.slot_rank.index_select(0, departures.token), None)
        arrived = self._hop(words, departures.counts, arrivals, operation)
        token_D, slot_rank_DK, _ = unpack_ids(arrived, handle.num_topk, None)
        route = route_between(handle, self.topology, departures, arrivals, token_D, slot_rank_DK)
        handle.prepared[self._route_name] = route

    def _route(self, handle: DispatchHandle) -> TwoHopRoute:
        route: TwoHopRoute = handle.prepared[self._route_name]
        return route

    # -- the ways of rows -------------------------------------------------------------------------------------------

    def _scatter_rows(self, handle: DispatchHandle, x: Tensor) -> Tensor:
        route = self._route(handle)
        leaving = x.index_select(0, route.departures.token)
        arrived = self._hop(leaving, route.departures.counts, route.arrivals, "dispatch")
        relayed = arrived.index_select(0, route.relay_row)
        came = self._within(relayed, route.relay_sends, route.relay_recvs, "dispatch")
        return came.index_select(0, route.compact_order)

    def _add_home(self, handle: DispatchHandle, x_SH: Tensor, what: str, bias: Sequence[Tensor] = ()) -> Tensor:
        route = self._route(handle)
        sums_DH = route.node_sum(self._to_rails(route, x_SH, what))
        return route.home_sum(self._hop(sums_DH, route.arrivals, route.departures.counts, what), bias=bias)

    def _slots_home(self, handle: DispatchHandle, values_SK: Tensor, what: str) -> Tensor:
        route = self._route(handle)
        first = self.topology.rank_at(self._node, 0)
        came = self._to_rails(route, values_SK, what)
        values_DK = slots_of(came, route.relay_row, route.slot_rank, route.relay_sends, first)
        leaving = route.departures
        values_CK = self._hop(values_DK, route.arrivals, leaving.counts, what)
        return slots_of(values_CK, leaving.token, leaving.slot_node, leaving.counts)

    def _pairs_home(self, handle: DispatchHandle, rows: Tensor) -> tuple[Tensor, Tensor]:
        route, topology = self._route(handle), self.topology
        relays = pairs_by(route.slot_rank, topology.ranks_of(self._node))  # (rank of the node, arrived row, slot)
        num_relayed = torch.bincount(relays[:, 0], minlength=topology.ranks_per_node).tolist()
        by_rail = rows.index_select(0, rail_order(handle.recv_pairs, topology, rows.device))
        came = self._within(by_rail, rail_sums(handle.recv_pairs, topology), num_relayed, "combine")

        node_D = torch.repeat_interleave(torch.tensor(route.arrivals, device=rows.device))
        num_out = torch.bincount(node_D[relays[:, 1]], minlength=topology.num_nodes).tolist()
        slots = pairs_by(route.departures.slot_node, range(topology.num_nodes))
        num_home = torch.bincount(slots[:, 0], minlength=topology.num_nodes).tolist()
        in_slot_order = torch.argsort(relays[:, 1] * handle.num_topk + relays[:, 2])
        return self._hop(came.index_select(0, in_slot_order), num_out, num_home, "combine"), slots

    def _to_rails(self, route: TwoHopRoute, rows_S: Tensor, what: str) -> Tensor:
        """[S, ...] compact rows -> what the ranks of this node have for the rows that this one relays."""
        return self._within(rows_S.index_select(0, route.rail_order), route.relay_recvs, route.relay_sends, what)

    # -- the two hops -----------------------------------------------------------------------------------------------

    def _arrivals(self, counts: Sequence[int]) -> tuple[int, ...]:
        """N counts of the rows that leave along the rail -> those that come."""
        if self._group is None:
            return tuple(counts)
        table = torch.zeros(len(self.ranks), 1, dtype=torch.int64)
        table[self._rail :: self.topology.ranks_per_node, 0] = torch.tensor(counts)
        received = self._group.all_to_all_host(table, "dispatch")
        return tuple(received[self._rail :: self.topology.ranks_per_node, 0].tolist())

    def _hop(self, rows: Tensor, num_out: Sequence[int], num_in: Sequence[int], what: str) -> Tensor:
        """Rows by destination node -> rows by source node, between the ranks of a rail."""
        if self._group is None:
            return rows
        num_crossing = sum(num_out) - num_out[self._node]
        self.crossings.num_rows += num_crossing
        self.crossings.num_bytes += num_crossing * rows[:1].numel() * rows.element_size()
        topology, rail = self.topology, self._rail
        nodes = range(topology.num_nodes)
        sends, recvs = [0] * len(self.ranks), [0] * len(self.ranks)
        for node in nodes:
            sends[topology.rank_at(node, rail)], recvs[topology.rank_at(node, rail)] = num_out[node], num_in[node]
        return self._group.all_to_all(rows, what, sends, recvs)

    def _within(self, rows: Tensor, num_out: Sequence[int], num_in: Sequence[int], what: str) -> Tensor:
        """Rows by destination -> rows by source, between the ranks of a node."""
        if self._group is None:
            return rows
        before = [0] * self.topology.rank_at(self._node, 0)
        behind = [0] * (len(self.ranks) - self.topology.rank_at(self._node + 1, 0))
        return self._group.all_to_all(rows, what, [*before, *num_out, *behind], [*before, *num_in, *behind])
