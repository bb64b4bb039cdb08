"""The rounds of a handle as the kernels take them: flows of the rail and routes in the node, on the device.

Letters as in `moe_ep.backends.rounds`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from moe_ep._native_exchange import ExchangeKernels
from moe_ep.backends.kernel_view import kernel_view
from moe_ep.backends.node_route import Route, RouteTensors, shared_header, staging_of
from moe_ep.backends.rounds import Flows, Rounds
from moe_ep.backends.two_hop import TwoHopRoute
from moe_ep.handle import DispatchHandle

_ALIGN = 4  # int32 numbers, so that every tensor begins at a multiple of 16 bytes


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
class RailRoutes:
    """One rank's part in the rounds of a dispatch, and of a combine, which takes the other way.

    Attributes:
        two_hop: what it was made from.
        round_tokens: C.
        num_rounds: of a call on the rail, even.
        token: [departures] int32, source tokens.
        token_place: [T, N] int32, as `Rounds` has it.
        outward, homeward: the flows of a dispatch and of a combine.
        own: the call of the rows that stay in their node. It pads.
        calls: of the rounds that some rank has tokens for; none of them pads.
    """

    two_hop: TwoHopRoute
    round_tokens: int
    num_rounds: int
    token: Tensor
    token_place: Tensor
    outward: RailFlows
    homeward: RailFlows
    own: Route
    calls: tuple[Route, ...]


def rail_routes(
    handle: DispatchHandle,
    two_hop: TwoHopRoute,
    rounds: Rounds,
    node: int,
    kernels: ExchangeKernels,
    device: torch.device,
) -> RailRoutes:
    """Makes them of a handle on the host; one copy takes all numbers to the device.

    Args:
        handle: the whole dispatch.
        two_hop: its route.
        rounds: its rounds.
        node: of this rank.
        kernels: what reads them.
        device: where to.
    """
    num_active = -(-max(handle.rank_tokens) // rounds.round_tokens) if rounds.token_place.shape[1] > 1 else 0
    if handle.layout == "compact":
        is_padding = torch.arange(handle.num_rows) >= handle.num_compact_rows
    else:
        is_padding = handle.row_pair < 0
    own = kernel_view(rounds.own, kernels, handle.num_experts, is_padding)
    calls = [kernel_view(call, kernels, 1, torch.zeros_like(is_padding)) for call in rounds.calls[:num_active]]
    flows = (rounds.out.first, rounds.out.counts, rounds.back.first, rounds.back.counts)
    shared = [two_hop.departures.token.int(), rounds.token_place, *flows]
    views = [(view.recv_token, view.pair_row, view.token_row, view.geometry) for view in (own, *calls)]
    token, token_place, *on_device = _to_device([*shared, *(tensor for view in views for tensor in view)], device)
    first_out, num_out, first_back, num_back, *of_calls = on_device
    routes = [
        _route(view, handle, kernels, of_calls[4 * number : 4 * number + 4], 1 if number else handle.num_experts)
        for number, view in enumerate((own, *calls))
    ]
    return RailRoutes(
        two_hop,
        rounds.round_tokens,
        len(rounds.calls),
        token,
        token_place,
        RailFlows(first_out, num_back, _crossing(rounds.out, node)),
        RailFlows(first_back, num_out, _crossing(rounds.back, node)),
        routes[0],
        tuple(routes[1:]),
    )


def _crossing(flows: Flows, node: int) -> int:
    return int(flows.counts.sum() - flows.counts[node].sum())


def _route(
    view: DispatchHandle, handle: DispatchHandle, kernels: ExchangeKernels, tensors: Sequence[Tensor], num_local: int
) -> Route:
    recv_token, pair_row, token_row, geometry = tensors
    return Route(
        kernels,
        shared_header(view.num_topk, handle.num_experts, view.layout, handle.alignment, handle.placement),
        handle.uid,
        RouteTensors(recv_token, pair_row, token_row, token_row.new_empty(0, view.num_topk).long(), geometry),
        view.num_topk,
        num_local,
        view.num_rows,
        False,
        staging_of(view.rank_tokens, view.rank_rows, view.rank),
    )


def _to_device(tensors: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """int32 tensors, as views of one."""
    sizes = [-(-tensor.numel() // _ALIGN) * _ALIGN for tensor in tensors]
    places = [0, *accumulate(sizes)]
    whole = torch.zeros(places[-1] + _ALIGN, dtype=torch.int32)
    for tensor, place in zip(tensors, places, strict=False):
        whole[place : place + tensor.numel()] = tensor.reshape(-1)
    copied = whole.to(device)
    return [
        copied[place : place + tensor.numel()].view(tensor.shape)
        for tensor, place in zip(tensors, places, strict=False)
    ]
