"""The tensors of a plan that the kernels make, and the route and the handle out of them."""

from __future__ import annotations

from contextlib import suppress
from typing import NamedTuple

import torch
from torch import Tensor

from moe_ep._native.arguments import address
from moe_ep._native.exchange import Counts, ExchangeKernels, NativeExchange
from moe_ep.backends.base import DispatchPlan, DispatchRequest
from moe_ep.backends.node_route import NAME, Route, RouteTensors, shared_header, staging_of
from moe_ep.handle import DispatchHandle


class RowTensors(NamedTuple):
    """What the second kernel writes for each row that leaves or arrives; see `DispatchHandle`."""

    send_token: Tensor
    recv_token: Tensor
    pair_row: Tensor
    row_pair: Tensor
    row_idx: Tensor
    row_weights: Tensor | None


class PlanTensors:
    """Inputs, scratch and outputs of one plan; csrc/intranode/plan.h names them. It holds them all.

    Behind the host's wait for the counts every step keeps the device waiting. What no count decides is there from the
    start. Of what they do decide, `expect` makes as much as even routing and a quarter more need, before the device
    counts, and `make_route` what the rows' kernel takes; both are cut to size, the tensors when the rows are on their
    way. Where more comes, `allocate` has to make it.

    Attributes:
        native, output: for csrc; no output before `expect` or `allocate` found the memory for it.
        route: all that the rows need to travel, from `make_route` on.
        published_bytes: what a plan puts into the slot of its rank.
    """

    route: Route

    def __init__(self, kernels: ExchangeKernels, request: DispatchRequest, ranks: tuple[int, ...], rank: int) -> None:
        self._kernels, self._request, self._ranks, self._rank = kernels, request, ranks, rank
        ids, weights, world = request.topk_idx, request.topk_weights, len(ranks)
        placement = request.placement
        num_tokens, num_topk = ids.shape
        self._is_compact = request.layout == "compact"
        self._owner, self._local = placement.kernel_tables(ids.device)
        self._num_local = len(placement.experts_of(rank))
        num_chunks, int32 = world * kernels.max_chunks, torch.int32
        self._chunk_counts = ids.new_empty(num_chunks, self._num_local + world, dtype=int32)
        self._geometry = ids.new_empty(kernels.geometry_length(world, self._num_local), dtype=int32)
        self._expert_counts = ids.new_empty(self._num_local, dtype=int32)
        self._expert_offsets = ids.new_empty(self._num_local + 1, dtype=int32)
        self._slot_rank = ids.new_empty(num_tokens, num_topk, dtype=torch.int64)
        self._token_row = ids.new_empty(num_tokens, world, dtype=int32)
        self._known: Counts | None = None
        self.output: object | None = None
        self._shared_header = shared_header(
            num_topk, placement.num_experts, request.layout, request.alignment, placement.fingerprint
        )
        weight_bytes = 0 if weights is None else weights.element_size()
        self.published_bytes = num_tokens * num_topk * (4 + weight_bytes) + 256
        self.native = kernels.PlanInput(
            ids=ids.data_ptr(),
            id_bytes=ids.element_size(),
            id_stride_token=ids.stride(0),
            id_stride_slot=ids.stride(1),
            weights=0 if weights is None else weights.data_ptr(),
            weight_bytes=weight_bytes,
            weight_stride_token=0 if weights is None else weights.stride(0),
            weight_stride_slot=0 if weights is None else weights.stride(1),
            num_tokens=num_tokens,
            num_topk=num_topk,
            num_experts=placement.num_experts,
            num_local=self._num_local,
            owner=self._owner.data_ptr(),
            local_idx=self._local.data_ptr(),
            alignment=request.alignment,
            expert_major=not self._is_compact,
            max_rows=-1 if request.max_rows is None else request.max_rows,
            chunk_counts=self._chunk_counts.data_ptr(),
            geometry=self._geometry.data_ptr(),
            expert_counts=self._expert_counts.data_ptr(),
            expert_offsets=self._expert_offsets.data_ptr(),
        )

    def expect(self) -> None:
        """Outputs for as many rows as are likely to come, where there is memory for them.

        That there is none is no error yet: fewer may come, and the others wait for this rank.
        """
        num_tokens, num_topk = self._request.topk_idx.shape
        world = len(self._ranks)
        num_rows = num_compact = int(1.25 * num_tokens * world * (1 - (1 - 1 / world) ** num_topk))
        if not self._is_compact:
            num_rows = int(1.25 * num_tokens * num_topk) + self._num_local * (self._request.alignment - 1)
        self._num_compact, self._num_rows = num_compact, num_rows
        with suppress(torch.OutOfMemoryError):
            self._make_rows(num_tokens * min(world, num_topk))  # a token goes to each rank once at most

    def settle(self, counts: Counts) -> bool:
        """Takes the counts; whether what `expect` and `make_route` made holds that many rows."""
        num_compact, num_rows, _, _, rank_tokens, rank_rows, _ = counts
        is_enough = self.output is not None and num_compact <= self._num_compact and num_rows <= self._num_rows
        self._known, self._num_compact, self._num_rows = counts, num_compact, num_rows
        if is_enough:
            self.route.set_counts(num_rows, num_compact, staging_of(rank_tokens, rank_rows, self._rank))
        return is_enough

    def _row_tensors(self, num_sent: int, num_compact: int, num_rows: int) -> RowTensors:
        ids, weights = self._request.topk_idx, self._request.topk_weights
        num_topk = ids.shape[1]
        per_row = (num_rows, num_topk) if self._is_compact else (num_rows,)
        return RowTensors(
            send_token=ids.new_empty(num_sent, dtype=torch.int64),
            recv_token=ids.new_empty(num_compact, dtype=torch.int32),
            pair_row=ids.new_empty(0 if self._is_compact else num_compact, num_topk, dtype=torch.int32),
            row_pair=ids.new_empty(0 if self._is_compact else num_rows, dtype=torch.int64),
            row_idx=ids.new_empty(per_row),
            row_weights=None if weights is None else weights.new_empty(per_row),
        )

    def allocate(self) -> None:
        """Outputs as the counts say; without them for `max_rows` rows, handed out and compact."""
        if self._known is None:
            self._num_compact = self._num_rows = self._request.max_rows or 0
        self._make_rows(sum(self._sent))

    def _make_rows(self, num_sent: int) -> None:
        rows = self._rows = self._row_tensors(num_sent, self._num_compact, self._num_rows)
        waits = self._request.max_rows is None
        self.output = self._kernels.PlanOutput(
            only_if_enough=waits and self._known is None,
            capacity=self._num_compact,
            num_rows=self._num_rows,
            row_idx=rows.row_idx.data_ptr(),
            row_weights=address(rows.row_weights),
            recv_token=rows.recv_token.data_ptr(),
            pair_row=rows.pair_row.data_ptr(),
            row_pair=rows.row_pair.data_ptr(),
            token_row=self._token_row.data_ptr(),
            slot_rank=self._slot_rank.data_ptr(),
            send_token=rows.send_token.data_ptr() if waits else 0,
        )

    def _cut_to_size(self) -> None:
        """In place, so that the addresses stay and no tensor is a view."""
        rows = self._rows
        rows.send_token.resize_(sum(self._sent))
        rows.recv_token.resize_(self._num_compact)
        rows.row_idx.resize_(self._num_rows, *rows.row_idx.shape[1:])
        if rows.row_weights is not None:
            rows.row_weights.resize_(self._num_rows, *rows.row_weights.shape[1:])
        if not self._is_compact:
            rows.pair_row.resize_(self._num_compact, rows.pair_row.shape[1])
            rows.row_pair.resize_(self._num_rows)

    @property
    def _sent(self) -> tuple[int, ...]:
        """Compact rows to each rank, none where counts are unknown."""
        if self._known is None:
            return ()
        world = len(self._ranks)
        return self._known[5][self._rank * world : (self._rank + 1) * world]

    def make_route(self, uid: int) -> None:
        known, rows = self._known, self._rows
        self.route = Route(
            self._kernels,
            self._shared_header,
            uid,
            RouteTensors(rows.recv_token, rows.pair_row, self._token_row, self._slot_rank, self._geometry),
            self._request.topk_idx.shape[1],
            self._num_local,
            self._num_rows,
            self._num_compact,
            self._is_compact,
            None if known is None else staging_of(known[4], known[5], self._rank),
        )

    def handle(self, joins: bool) -> DispatchHandle:
        """The routing; `joins`: all ranks join the backward where nobody knows what the others want."""
        self._cut_to_size()
        request, world = self._request, len(self._ranks)
        x_needs_grad, weights_need_grad = joins, joins and request.topk_weights is not None
        sent = received = recv_pairs = rank_tokens = (-1,) * world
        rank_rows = (-1,) * (world * world)
        if self._known is not None:
            _, _, x_needs_grad, weights_need_grad, rank_tokens, rank_rows, recv_pairs = self._known
            sent, received = self._sent, rank_rows[self._rank :: world]
        handle = DispatchHandle(
            ranks=self._ranks,
            rank=self._rank,
            uid=self.route.uid,
            placement=request.placement.fingerprint,
            layout=request.layout,
            num_tokens=request.topk_idx.shape[0],
            num_topk=request.topk_idx.shape[1],
            num_experts=request.placement.num_experts,
            num_rows=self._num_rows,
            alignment=request.alignment,
            x_needs_grad=x_needs_grad,
            weights_need_grad=weights_need_grad,
            overflowed=False,
            send_counts=sent,
            recv_counts=received,
            recv_pairs=recv_pairs,
            rank_tokens=rank_tokens,
            rank_rows=rank_rows,
            num_channels=request.num_channels,
            slot_rank=self._slot_rank,
            send_token=self._rows.send_token,
            recv_token=self._rows.recv_token,
            row_pair=self._rows.row_pair,
            geometry=self._geometry,
            token_row=self._token_row,
            pair_row=self._rows.pair_row,
        )
        handle.prepared[NAME] = self.route
        return handle

    def plan(self, handle: DispatchHandle, exchange: NativeExchange) -> DispatchPlan:
        """What the caller gets. No other plan has been begun on `exchange` since `settle`."""
        real = padded = None
        if self._known is not None:
            real, padded = exchange.expert_counts(self._num_local, self._request.alignment)
        return DispatchPlan(
            handle=handle,
            row_idx=self._rows.row_idx,
            row_weights=self._rows.row_weights,
            tokens_per_expert=padded,
            real_tokens_per_expert=real,
            expert_counts=self._expert_counts,
            expert_offsets=self._expert_offsets,
        )
