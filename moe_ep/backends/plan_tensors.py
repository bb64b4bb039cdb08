"""The tensors of a plan that the kernels make, and the route and the handle out of them."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from moe_ep._native_exchange import ExchangeKernels, NativeExchange
from moe_ep.backends.base import DispatchPlan, DispatchRequest
from moe_ep.backends.node_route import NAME, Route, RouteTensors, shared_header, staging_of
from moe_ep.handle import DispatchHandle


class Known(NamedTuple):
    """Counts that the host has waited for."""

    num_compact_rows: int
    num_rows: int
    x_needs_grad: bool
    weights_need_grad: bool
    rank_tokens: tuple[int, ...]
    rank_rows: tuple[int, ...]
    recv_pairs: tuple[int, ...]


class RowTensors(NamedTuple):
    """What the second kernel writes for each row that leaves or arrives; see `DispatchHandle`."""

    send_token: Tensor
    recv_token: Tensor
    pair_row: Tensor
    row_pair: Tensor
    row_idx: Tensor
    row_weights: Tensor | None


class PlanTensors:
    """Inputs, scratch and outputs of one plan; csrc/intranode_plan.h names them. It holds them all.

    Behind the host's wait for the counts every allocation keeps the device waiting. What no count decides is there
    from the start. Of what they do decide, `expect` makes as much as even routing and a quarter more need, before the
    device counts; it is cut to size when the rows are on their way. Where more comes, `allocate` has to make it.
    """

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
        self._known: Known | None = None
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

    def read(self, exchange: NativeExchange) -> Known:
        """What the next kernel has to know of the plan that was answered last."""
        _, _, num_compact, num_rows, _, _, x_needs_grad, weights_need_grad = exchange.answer()
        counts = exchange.counts(len(self._ranks))
        return Known(num_compact, num_rows, bool(x_needs_grad), bool(weights_need_grad), *counts)

    def expect(self) -> bool:
        """Outputs for as many rows as are likely to come; whether there is memory for them.

        That there is none is no error yet: fewer may come, and the others wait for this rank.
        """
        num_tokens, num_topk = self._request.topk_idx.shape
        world = len(self._ranks)
        num_rows = num_compact = int(1.25 * num_tokens * world * (1 - (1 - 1 / world) ** num_topk))
        if not self._is_compact:
            num_rows = int(1.25 * num_tokens * num_topk) + self._num_local * (self._request.alignment - 1)
        self._num_compact, self._num_rows = num_compact, num_rows
        try:  # a token goes to each rank once at most
            self._rows = self._row_tensors(num_tokens * min(world, num_topk), num_compact, num_rows)
        except torch.OutOfMemoryError:
            return False
        return True

    def settle(self, known: Known) -> bool:
        """Takes the counts; whether what `expect` made holds that many rows."""
        is_enough = known.num_compact_rows <= self._num_compact and known.num_rows <= self._num_rows
        self._known, self._num_compact, self._num_rows = known, known.num_compact_rows, known.num_rows
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
        self._rows = self._row_tensors(sum(self._sent), self._num_compact, self._num_rows)

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
        return self._known.rank_rows[self._rank * world : (self._rank + 1) * world]

    def fill_arguments(self) -> tuple[bool, int, int, int, int, int, int, int, int, int, int]:
        """The last arguments of plan_fill."""
        rows, waits = self._rows, self._request.max_rows is None
        return (
            waits and self._known is None,
            self._num_compact,
            self._num_rows,
            rows.row_idx.data_ptr(),
            0 if rows.row_weights is None else rows.row_weights.data_ptr(),
            rows.recv_token.data_ptr(),
            rows.pair_row.data_ptr(),
            rows.row_pair.data_ptr(),
            self._token_row.data_ptr(),
            self._slot_rank.data_ptr(),
            rows.send_token.data_ptr() if waits else 0,
        )

    def route(self, uid: int) -> Route:
        """All that the rows need to travel."""
        known, rows = self._known, self._rows
        return Route(
            self._kernels,
            self._shared_header,
            uid,
            RouteTensors(rows.recv_token, rows.pair_row, self._token_row, self._slot_rank, self._geometry),
            self._request.topk_idx.shape[1],
            self._num_local,
            self._num_rows,
            self._num_compact,
            self._is_compact,
            None if known is None else staging_of(known.rank_tokens, known.rank_rows, self._rank),
        )

    def handle(self, route: Route, joins: bool) -> DispatchHandle:
        """The routing; `joins`: all ranks join the backward, because nobody knows what the others want."""
        self._cut_to_size()
        request, known, world = self._request, self._known, len(self._ranks)
        unknown = (-1,) * world
        handle = DispatchHandle(
            ranks=self._ranks,
            rank=self._rank,
            uid=route.uid,
            placement=request.placement.fingerprint,
            layout=request.layout,
            num_tokens=request.topk_idx.shape[0],
            num_topk=request.topk_idx.shape[1],
            num_experts=request.placement.num_experts,
            num_rows=self._num_rows,
            alignment=request.alignment,
            x_needs_grad=joins if known is None else known.x_needs_grad,
            weights_need_grad=(joins and request.topk_weights is not None)
            if known is None
            else known.weights_need_grad,
            overflowed=False,
            send_counts=unknown if known is None else self._sent,
            recv_counts=unknown if known is None else known.rank_rows[self._rank :: world],
            recv_pairs=unknown if known is None else known.recv_pairs,
            rank_tokens=unknown if known is None else known.rank_tokens,
            rank_rows=(-1,) * (world * world) if known is None else known.rank_rows,
            num_channels=request.num_channels,
            slot_rank=self._slot_rank,
            send_token=self._rows.send_token,
            recv_token=self._rows.recv_token,
            row_pair=self._rows.row_pair,
            geometry=self._geometry,
            token_row=self._token_row,
            pair_row=self._rows.pair_row,
        )
        handle.prepared[NAME] = route
        return handle

    def plan(self, handle: DispatchHandle, exchange: NativeExchange) -> DispatchPlan:
        """What the caller gets. No other plan has been begun on `exchange` since `read`."""
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
