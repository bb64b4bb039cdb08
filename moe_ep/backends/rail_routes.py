"""The rounds of a handle as the kernels take them: flows of the rail and routes in the node, on the device.

Letters as in `moe_ep.backends.rounds`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from moe_ep._native.exchange import ExchangeKernels
from moe_ep.backends.kernel_view import kernel_view
from moe_ep.backends.node_route import Route, RouteTensors, shared_header, staging_of
from moe_ep.backends.rounds import Rounds
from moe_ep.backends.two_hop import TwoHopRoute
from moe_ep.handle import DispatchHandle


@dataclass(frozen=True, eq=False)
class RailFlows:
    """What goes one way along the rail.

    Attributes:
        first_out: [N * rounds + 1] int32, for `RailRound`.
        num_in: [N, rounds] int32, for `RailRound`.
        num_crossing: rows that this rank sends to other nodes.
    """

    first_out: Tensor
    num_in: Tensor
    num_crossing: int


@dataclass(frozen=True, eq=False)
class Straight:
    """Rows of a combine that set out from where they lie: one rank a node and compact rows, which have nothing to sum.

    Compact rows ascend in (source rank, source token), and so do arrived rows then.

    Attributes:
        row: [D] int32, the row for each arrived one: its own number.
        token_place: [T, N] int32, as `RailRoutes` has it, but of the own node the row's number.
    """

    row: Tensor
    token_place: Tensor


@dataclass(frozen=True, eq=False)
class RailRoutes:
    """One rank's part in the rounds of a dispatch, and of a combine, which takes the other way.

    Attributes:
        round_tokens, flow_rows: C and F.
        num_rounds: of a call on the rail, even.
        token: [departures] int32, source tokens.
        token_place: [T, N] int32, as `Rounds` has it.
        outward, homeward: the flows of a dispatch and of a combine.
        own: the call of the rows that stay in their node. It pads.
        calls: of the rounds that some rank has tokens for; none of them pads.
        straight: where the rows that this rank hands out are what its node has for each arrived row, or None.
    """

    round_tokens: int
    flow_rows: int
    num_rounds: int
    token: Tensor
    token_place: Tensor
    outward: RailFlows
    homeward: RailFlows
    own: Route
    calls: tuple[Route, ...]
    straight: Straight | None


def rail_routes(
    handle: DispatchHandle,
    two_hop: TwoHopRoute,
    rounds: Rounds,
    node: int,
    kernels: ExchangeKernels,
) -> RailRoutes:
    """Makes them of a handle. The host waits.

    Args:
        handle: the whole dispatch.
        two_hop: its route.
        rounds: its rounds.
        node: of this rank.
        kernels: what reads them.
    """
    num_active = -(-max(handle.rank_tokens) // rounds.round_tokens) if rounds.token_place.shape[1] > 1 else 0
    if handle.layout == "compact":
        is_padding = torch.arange(handle.num_rows, device=two_hop.token.device) >= handle.num_compact_rows
    else:
        is_padding = handle.row_pair < 0
    own = kernel_view(rounds.own, kernels, handle.num_experts, is_padding)
    calls = [kernel_view(call, kernels, 1, torch.zeros_like(is_padding)) for call in rounds.calls[:num_active]]
    return RailRoutes(
        round_tokens=rounds.round_tokens,
        flow_rows=rounds.flow_rows,
        num_rounds=len(rounds.calls),
        token=two_hop.departures.token.int(),
        token_place=rounds.token_place,
        outward=RailFlows(rounds.out.first, rounds.back.counts, _crossing(two_hop.departures.counts, node)),
        homeward=RailFlows(rounds.back.first, rounds.out.counts, _crossing(two_hop.arrivals, node)),
        own=_route(own, handle, kernels, handle.num_experts),
        calls=tuple(_route(call, handle, kernels, 1) for call in calls),
        straight=_straight(handle, two_hop, rounds, node) if len(rounds.own.ranks) == 1 else None,
    )


def _straight(handle: DispatchHandle, two_hop: TwoHopRoute, rounds: Rounds, node: int) -> Straight | None:
    if handle.layout != "compact" or handle.overflowed:
        return None
    row = torch.arange(sum(two_hop.arrivals), dtype=torch.int32, device=two_hop.token.device)
    first = sum(two_hop.arrivals[:node])
    own = slice(first, first + two_hop.arrivals[node])
    token_place = rounds.token_place.clone()
    token_place[two_hop.token[own], node] = row[own]
    return Straight(row, token_place)


def _crossing(counts: Sequence[int], node: int) -> int:
    return sum(counts) - counts[node]


def _route(view: DispatchHandle, handle: DispatchHandle, kernels: ExchangeKernels, num_local: int) -> Route:
    return Route(
        kernels,
        shared_header(view.num_topk, handle.num_experts, view.layout, handle.alignment, handle.placement),
        handle.uid,
        RouteTensors(view.recv_token, view.pair_row, view.token_row, view.slot_rank, view.geometry),
        view.num_topk,
        num_local,
        view.num_rows,
        view.num_compact_rows,
        False,
        staging_of(view.rank_tokens, view.rank_rows, view.rank),
    )
