"""The two hops cut into rounds of bounded size, and the second hop as calls between the ranks of one node.

A round is a range of `round_tokens` source tokens, C, on every rank. In each, a rank of a rail holds at most N * F rows
that came from the other nodes, in its inbox: row `node * F + i` is the i-th that came from `node`. To the ranks of its
node these are tokens of its own, and the exchange of a round is an ordinary one between P ranks with N * F tokens each,
most of which go nowhere. F is C, or less where it is known that fewer rows of a range go to any node. Rows from the own
node take no hop: they are one more such exchange, of the rank's T tokens.
Together, these calls write every row of the dispatch once.

Letters: T tokens, K slots, N nodes, P ranks a node, R rows handed out, S compact rows, D arrived rows, as in `two_hop`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from moe_ep.backends.two_hop import Departures, TwoHopRoute
from moe_ep.handle import DispatchHandle
from moe_ep.topology import Topology


@dataclass(frozen=True, eq=False)
class Flows:
    """Rows between this rank and the others of its rail, by (node, round); csrc/internode/rail.h reads them.

    Attributes:
        first: [N * rounds + 1] int32, the row at which each begins, ascending in (node, round).
        counts: [N, rounds] int32.
        place: [rows] int64, place of every row in its flow.
    """

    first: Tensor
    counts: Tensor
    place: Tensor


@dataclass(frozen=True, eq=False)
class Rounds:
    """One dispatch, or one combine backwards, in rounds.

    Attributes:
        round_tokens, flow_rows: C and F.
        out: flows of the departures, in the order of `TwoHopRoute.departures.token`.
        back: flows of the arrivals.
        token_place: [T, N] int32, place of an own token in its flow to a node, -1 where it does not go.
        own: the call of the rows that stay in their node, whose tokens are this rank's.
        calls: one for each round, whose tokens are rows of this rank's inbox; none of them pads.
    """

    round_tokens: int
    flow_rows: int
    out: Flows
    back: Flows
    token_place: Tensor
    own: DispatchHandle
    calls: tuple[DispatchHandle, ...]


# Rows by destination rank of the node, counts to each and from each -> rows by source. Collective over the node.
Within = Callable[[Tensor, Sequence[int], Sequence[int]], Tensor]


def rounds_of(
    handle: DispatchHandle,
    route: TwoHopRoute,
    topology: Topology,
    round_tokens: int,
    within: Within,
    flow_rows: int | None = None,
) -> Rounds:
    """Cuts a dispatch into rounds. Collective over the node; all ranks of the group give the same numbers.

    Args:
        handle: the dispatch.
        route: its way.
        topology: of the group.
        round_tokens: C.
        within: carries rows between the ranks of the node.
        flow_rows: F, no fewer than the rows that any rank sends to any node in a round; None for C.
    """
    flow_rows = round_tokens if flow_rows is None else flow_rows
    num_rounds = num_rounds_of(handle.rank_tokens, round_tokens)
    leaving = route.departures
    out = _flows(leaving.token, leaving.counts, round_tokens, num_rounds)
    back = _flows(route.token, route.arrivals, round_tokens, num_rounds)
    token_place = out.first.new_full((handle.num_tokens, topology.num_nodes), -1)
    node_C = torch.repeat_interleave(torch.tensor(leaving.counts, device=leaving.token.device))
    token_place[leaving.token, node_C] = out.place.int()

    own, calls = _calls(handle, route, topology, round_tokens, flow_rows, num_rounds, back, within)
    return Rounds(round_tokens, flow_rows, out, back, token_place, own, calls)


def num_rounds_of(rank_tokens: Sequence[int], round_tokens: int) -> int:
    """As many as the rank with the most tokens needs, made even, so that a call begins with the first slot."""
    needed = max(1, -(-max(rank_tokens) // round_tokens))
    return needed + needed % 2


def most_rows(departures: Departures, own_node: int, round_tokens: int) -> Tensor:
    """[] the rows that this rank sends to any one other node in any round, at most."""
    num_rounds, device = max(1, -(-departures.slot_node.shape[0] // round_tokens)), departures.token.device
    node = torch.repeat_interleave(torch.tensor(departures.counts, device=device))
    flow = node * num_rounds + torch.div(departures.token, round_tokens, rounding_mode="floor")
    counts = torch.bincount(flow, minlength=len(departures.counts) * num_rounds).view(-1, num_rounds)
    counts[own_node] = 0
    return counts.max()


def _flows(token: Tensor, node_counts: Sequence[int], round_tokens: int, num_rounds: int) -> Flows:
    node = torch.repeat_interleave(torch.tensor(node_counts, device=token.device))
    flow = node * num_rounds + torch.div(token, round_tokens, rounding_mode="floor")
    counts = torch.bincount(flow, minlength=len(node_counts) * num_rounds)
    first = torch.cat([counts.new_zeros(1), torch.cumsum(counts, 0)])
    place = torch.arange(token.numel(), device=token.device) - first[flow]
    return Flows(first.int(), counts.view(-1, num_rounds).int(), place)


def _calls(
    handle: DispatchHandle,
    route: TwoHopRoute,
    topology: Topology,
    round_tokens: int,
    flow_rows: int,
    num_rounds: int,
    back: Flows,
    within: Within,
) -> tuple[DispatchHandle, tuple[DispatchHandle, ...]]:
    """The call of the own node, and those of the rounds. Call number `num_rounds` is the own node's here."""
    node, num_peers = topology.node_of(handle.rank), topology.ranks_per_node
    device = route.token.device
    node_D = torch.repeat_interleave(torch.tensor(route.arrivals, device=device))
    is_own_D = node_D == node
    call_D = torch.where(is_own_D, num_rounds, torch.div(route.token, round_tokens, rounding_mode="floor"))
    held_D = torch.where(is_own_D, route.token, node_D * flow_rows + back.place)  # number among the call's tokens

    relayed = torch.stack([call_D, held_D], dim=1).index_select(0, route.relay_row)  # ascending in (peer, arrived row)
    came = within(relayed, route.relay_sends, route.relay_recvs)  # as `rail_order` has them
    peer = torch.repeat_interleave(torch.tensor(route.relay_sends, device=device))
    counts = torch.bincount(relayed[:, 0] * num_peers + peer, minlength=(num_rounds + 1) * num_peers)
    one_each = [1] * num_peers
    tables = within(counts.repeat(num_peers, 1), one_each, one_each).view(num_peers, num_rounds + 1, num_peers)

    own_tokens = tuple(handle.rank_tokens[rank] for rank in topology.ranks_of(node))
    inbox_tokens = (topology.num_nodes * flow_rows,) * num_peers
    handles = []
    for call in range(num_rounds + 1):
        here, sent = (came[:, 0] == call).nonzero()[:, 0], relayed[relayed[:, 0] == call, 1]
        made = _call_handle(handle, topology, tables[:, call], sent, came[here, 1], route.rail_order[here])
        tokens = own_tokens if call == num_rounds else inbox_tokens
        handles.append(replace(made, num_tokens=tokens[made.rank], rank_tokens=tokens))
    return handles[-1], tuple(handles[:-1])


def _call_handle(
    handle: DispatchHandle,
    topology: Topology,
    rank_rows_PP: Tensor,
    send_token: Tensor,
    recv_token: Tensor,
    compact_row: Tensor,
) -> DispatchHandle:
    """A dispatch between the ranks of the node, into the rows of `handle`.

    Args:
        handle: the whole dispatch.
        topology: of the group.
        rank_rows_PP: compact rows of the call from each rank to each.
        send_token: what this rank sends, numbers among its tokens, ascending in (rank, token).
        recv_token: of the compact rows of the call.
        compact_row: their numbers among those of `handle`.
    """
    own = topology.rail_of(handle.rank)
    rows = rank_rows_PP.tolist()
    in_call = torch.full((handle.num_compact_rows,), -1, dtype=torch.int64, device=compact_row.device)
    in_call[compact_row] = torch.arange(compact_row.numel(), device=compact_row.device)
    if handle.layout == "compact":  # one slot a row: any row may then lie anywhere
        num_topk, row_pair = 1, in_call.new_full((handle.num_rows,), -1)
        kept = min(handle.num_rows, handle.num_compact_rows)
        row_pair[:kept] = in_call[:kept]
    else:
        num_topk, row_pair = handle.num_topk, in_call.new_full((handle.num_rows,), -1)
        pairs = handle.row_pair[handle.real_rows]
        local = in_call[torch.div(pairs, num_topk, rounding_mode="floor")]
        row_pair[handle.real_rows] = torch.where(local < 0, -1, local * num_topk + pairs % num_topk)
    ranks = topology.ranks_of(topology.node_of(handle.rank))
    return replace(
        handle,
        ranks=tuple(handle.ranks[rank] for rank in ranks),
        rank=own,
        layout="expert_major",
        num_topk=num_topk,
        send_counts=tuple(rows[own]),
        recv_counts=tuple(row[own] for row in rows),
        recv_pairs=(),
        rank_rows=tuple(count for row in rows for count in row),
        slot_rank=handle.slot_rank[:0, :num_topk],
        send_token=send_token,
        recv_token=recv_token.int(),
        row_pair=row_pair,
        geometry=handle.geometry[:0],
        token_row=handle.token_row[:0],
        pair_row=handle.pair_row[:0],
    )
