"""What the calls along one handle inside a node share: worked out once, and kept with the handle."""

from __future__ import annotations

import functools
from typing import NamedTuple

from torch import Tensor

from moe_ep._native.exchange import ExchangeKernels, NativeRoute
from moe_ep.backends.header import NUM_MATCH_WORDS, Header
from moe_ep.backends.kernel_view import kernel_view
from moe_ep.backends.node_header import pack
from moe_ep.handle import LAYOUTS, DispatchHandle, Layout

NAME = "intranode"  # under which a handle keeps its route


class Staging(NamedTuple):
    """Rows that lie in the slots of the ranks.

    A dispatch puts the T rows of its rank into a slot, a combine the compact rows for the peers; numbers that go home
    lie there with the rank's own.

    Attributes:
        for_peers: compact rows for the peers, on this rank.
        most: of a combine in one round, or a move if that is more, on the rank that has the most.
        most_compact: compact rows on the rank that has the most.
        rank_tokens: T of every rank; empty where only the device knows.
    """

    for_peers: int
    most: int
    most_compact: int
    rank_tokens: tuple[int, ...]

    @property
    def most_tokens(self) -> int:
        """T on the rank that has the most."""
        return max(self.rank_tokens, default=0)


def staging_of(rank_tokens: tuple[int, ...], rank_rows: tuple[int, ...], rank: int) -> Staging:
    """From T of every rank, and the compact rows from rank i to rank j at [i * W + j]."""
    world, own, most, most_compact = len(rank_tokens), 0, 0, 0
    for peer, num_tokens in enumerate(rank_tokens):
        compact = sum(rank_rows[peer::world])
        for_peers = compact - rank_rows[peer * world + peer]
        if peer == rank:
            own = for_peers
        most = max(most, for_peers, num_tokens)
        most_compact = max(most_compact, compact)
    return Staging(own, most, most_compact, rank_tokens)


class RouteTensors(NamedTuple):
    """As `DispatchHandle` has them."""

    recv_token: Tensor
    pair_row: Tensor
    token_row: Tensor
    slot_rank: Tensor
    geometry: Tensor


class Route:
    """The calls' share.

    Attributes:
        native: for csrc.
        uid: of the handle.
        tensors: what `native` has the addresses of.
        num_tokens, num_topk, num_rows, num_compact: T, K, R, S (or as many as there is room for).
        is_compact: the layout.
        staging: 0 rows at most, where only the device knows the counts: such calls make no room.
    """

    def __init__(
        self,
        kernels: ExchangeKernels,
        header: bytes,
        uid: int,
        tensors: RouteTensors,
        num_topk: int,
        num_local: int,
        num_rows: int,
        num_compact: int,
        is_compact: bool,
        staging: Staging | None,
    ) -> None:
        recv_token, pair_row, token_row, slot_rank, geometry = tensors
        self.uid, self.tensors = uid, tensors
        self.num_tokens, self.num_topk, self.num_rows = token_row.shape[0], num_topk, num_rows
        self.num_compact, self.is_compact = num_compact, is_compact
        self.staging = Staging(self.num_compact, 0, 0, ()) if staging is None else staging
        self.native: NativeRoute = kernels.Route(
            header=header,
            num_match=NUM_MATCH_WORDS,
            uid=uid,
            num_tokens=self.num_tokens,
            num_rows=num_rows,
            num_compact_rows=num_compact,
            num_topk=num_topk,
            num_local=num_local,
            expert_major=not is_compact,
            recv_token=recv_token.data_ptr(),
            pair_row=pair_row.data_ptr(),
            token_row=token_row.data_ptr(),
            slot_rank=slot_rank.data_ptr(),
            geometry=geometry.data_ptr(),
        )

    def set_counts(self, num_rows: int, num_compact: int, staging: Staging) -> None:
        """Of a route that was made before they were known, with tensors that hold as many rows or more."""
        self.num_rows, self.num_compact, self.staging = num_rows, num_compact, staging
        self.native.set_rows(num_rows, num_compact)


@functools.lru_cache(maxsize=64)
def shared_header(num_topk: int, num_experts: int, layout: Layout, alignment: int, placement: int) -> bytes:
    """The header that calls along a handle begin with; csrc adds the uid and what each of them says besides."""
    header = Header(
        num_topk=num_topk,
        num_experts=num_experts,
        layout=LAYOUTS.index(layout),
        alignment=alignment,
        placement=placement,
    )
    return pack(header)


def route_of(handle: DispatchHandle, kernels: ExchangeKernels) -> Route:
    """The route of a handle. The host waits where it has to be made of another backend's handle."""
    route: Route | None = handle.prepared.get(NAME)
    if route is None:
        route = handle.prepared[NAME] = _made_of(handle, kernels)
    return route


def _made_of(handle: DispatchHandle, kernels: ExchangeKernels) -> Route:
    if handle.geometry.numel():
        num_local = (handle.geometry.numel() - kernels.geometry_length(len(handle.ranks), 0)) // 2
    else:
        num_local = handle.num_experts  # any number will do where the view has to be made
        handle = kernel_view(handle, kernels, num_local)
    return Route(
        kernels,
        shared_header(handle.num_topk, handle.num_experts, handle.layout, handle.alignment, handle.placement),
        handle.uid,
        RouteTensors(handle.recv_token, handle.pair_row, handle.token_row, handle.slot_rank, handle.geometry),
        handle.num_topk,
        num_local,
        handle.num_rows,
        handle.recv_token.shape[0],
        handle.layout == "compact",
        staging_of(handle.rank_tokens, handle.rank_rows, handle.rank) if handle.is_known else None,
    )
