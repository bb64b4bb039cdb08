"""A handle as the calls inside a node need it: worked out once, and kept with the handle.

Staging, by rank: in a dispatch a slot holds the T rows of its rank, in a combine the compact rows for the peers, where
numbers travel the own ones too, in an exact combine all rows handed out.
"""

from __future__ import annotations

from moe_ep._native_exchange import ExchangeKernels, NativeRoute
from moe_ep.backends.header import NUM_MATCH_WORDS, Header
from moe_ep.backends.kernel_view import kernel_view
from moe_ep.backends.node_header import pack
from moe_ep.handle import LAYOUTS, DispatchHandle

_NAME = "intranode"


class Route:
    """What does not change between the calls along a handle.

    Attributes:
        native: for csrc: the words of the header that all its calls share, sizes, addresses.
        tensors: what the addresses belong to.
        num_rows, num_tokens, num_topk: R, T, K.
        is_compact: whether the rows handed out are the compact ones.
        num_compact: S, or as many as there is room for, where only the device knows S.
        num_for_peers: compact rows that a combine puts into this rank's slot.
        most_staged: rows of a dispatch or combine in the slot that holds the most of all ranks; 0 where only the
            device knows.
        most_compact: the same for the compact rows of a rank.
        most_exact: the same for the rows of an exact combine.
    """

    def __init__(self, handle: DispatchHandle, kernels: ExchangeKernels) -> None:
        world, rank = len(handle.ranks), handle.rank
        no_experts = kernels.geometry_length(world, 0)
        if handle.geometry.numel():
            num_local = (handle.geometry.numel() - no_experts) // 2  # read off the length
        else:
            num_local = handle.num_experts  # any number will do where the view has to be made
            handle = kernel_view(handle, kernels, num_local)
        self.num_rows, self.num_tokens, self.num_topk = handle.num_rows, handle.num_tokens, handle.num_topk
        self.is_compact = handle.layout == "compact"
        if handle.is_known:
            received = [sum(handle.rank_rows[peer::world]) for peer in range(world)]
            for_peers = [received[peer] - handle.rank_rows[peer * world + peer] for peer in range(world)]
            self.num_compact, self.num_for_peers = received[rank], for_peers[rank]
            self.most_staged = max(*for_peers, *handle.rank_tokens)
            self.most_compact = max(received)
            # No rank has more pairs than slots in the tokens it receives.
            self.most_exact = self.most_compact * handle.num_topk + handle.num_experts * handle.alignment
        else:
            self.num_compact = self.num_for_peers = handle.recv_token.shape[0]
            self.most_staged = self.most_compact = self.most_exact = 0
        self.tensors = (handle.recv_token, handle.pair_row, handle.token_row, handle.slot_rank, handle.geometry)
        self.native: NativeRoute = kernels.Route(
            header=pack(
                Header(
                    handle=handle.uid,
                    num_topk=handle.num_topk,
                    num_experts=handle.num_experts,
                    layout=LAYOUTS.index(handle.layout),
                    alignment=handle.alignment,
                    placement=handle.placement,
                )
            ),
            num_match=NUM_MATCH_WORDS,
            num_tokens=handle.num_tokens,
            num_rows=handle.num_rows,
            num_compact_rows=self.num_compact,
            num_topk=handle.num_topk,
            num_local=num_local,
            expert_major=not self.is_compact,
            recv_token=handle.recv_token.data_ptr(),
            pair_row=handle.pair_row.data_ptr(),
            token_row=handle.token_row.data_ptr(),
            slot_rank=handle.slot_rank.data_ptr(),
            geometry=handle.geometry.data_ptr(),
        )


def route_of(handle: DispatchHandle, kernels: ExchangeKernels) -> Route:
    """The route of a handle. The host waits where it has to be made of another backend's handle."""
    route: Route | None = handle.prepared.get(_NAME)
    if route is None:
        route = handle.prepared[_NAME] = Route(handle, kernels)
    return route
