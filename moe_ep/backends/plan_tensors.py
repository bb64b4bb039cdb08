"""The tensors of a plan that the kernels make, and the handle out of them."""

from __future__ import annotations

from contextlib import suppress
from typing import NamedTuple

import torch
from torch import Tensor

from moe_ep._native_exchange import ExchangeKernels, NativeExchange
from moe_ep.backends.base import DispatchPlan, DispatchRequest
from moe_ep.handle import DispatchHandle


class Known(NamedTuple):
    """What the host has waited for: the number of the call, and counts."""

    epoch: int
    num_compact_rows: int
    num_rows: int
    x_needs_grad: bool
    weights_need_grad: bool
    rank_tokens: tuple[int, ...]
    rank_rows: tuple[int, ...]
    recv_pairs: tuple[int, ...]
    expert_counts: list[int]
    padded_counts: list[int]


class PlanTensors:
    """Inputs, scratch and outputs of one plan; csrc/intranode_plan.h names them. It holds them all."""

    def __init__(self, kernels: ExchangeKernels, request: DispatchRequest, ranks: tuple[int, ...], rank: int) -> None:
        self._request, self._ranks, self._rank = request, ranks, rank
        ids, weights, world = request.topk_idx, request.topk_weights, len(ranks)
        num_tokens, num_topk = ids.shape
        self._owner, self._local = request.placement.kernel_tables(ids.device)
        self._num_local = len(request.placement.experts_of(rank))
        columns = self._num_local + world
        num_chunks, int32 = world * kernels.max_chunks, torch.int32
        self._chunk_counts = ids.new_empty(num_chunks, columns, dtype=int32)
        self._geometry = ids.new_empty(kernels.geometry_length(world, self._num_local), dtype=int32)
        self._expert_counts = ids.new_empty(self._num_local, dtype=int32)
        self._expert_offsets = ids.new_empty(self._num_local + 1, dtype=int32)
        self._token_row: Tensor | None = None
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
            num_experts=request.placement.num_experts,
            num_local=self._num_local,
            owner=self._owner.data_ptr(),
            local_idx=self._local.data_ptr(),
            alignment=request.alignment,
            expert_major=request.layout == "expert_major",
            max_rows=-1 if request.max_rows is None else request.max_rows,
            chunk_counts=self._chunk_counts.data_ptr(),
            geometry=self._geometry.data_ptr(),
            expert_counts=self._expert_counts.data_ptr(),
            expert_offsets=self._expert_offsets.data_ptr(),
        )

    def read(self, exchange: NativeExchange) -> Known:
        """The counts of the plan that was answered last."""
        _, epoch, num_compact, num_rows, _, _, x_needs_grad, weights_need_grad = exchange.answer()
        counts = exchange.counts(len(self._ranks), self._num_local, self._request.alignment)
        return Known(epoch, num_compact, num_rows, bool(x_needs_grad), bool(weights_need_grad), *counts)

    def allocate_ahead(self) -> None:
        """The outputs that no count decides, while the device counts. Where that fails, `allocate` tries again."""
        with suppress(torch.OutOfMemoryError):
            self._allocate_by_token()

    def allocate(self, num_rows: int | None, known: Known | None) -> None:
        """Outputs for `num_rows` rows; without `known` counts there is room for as many compact rows."""
        assert num_rows is not None
        if self._token_row is None:
            self._allocate_by_token()
        request, ids, self._known = self._request, self._request.topk_idx, known
        num_topk = ids.shape[1]
        self._num_rows = num_rows
        self._capacity = num_rows if known is None else known.num_compact_rows
        self._recv_token = ids.new_empty(self._capacity, dtype=torch.int32)
        num_sent = 0 if known is None else sum(self._sent(known))
        self._send_token = ids.new_empty(num_sent, dtype=torch.int64)
        weights = request.topk_weights
        if request.layout == "expert_major":
            self._row_idx = ids.new_empty(num_rows)
            self._row_weights = None if weights is None else weights.new_empty(num_rows)
            self._pair_row = ids.new_empty(self._capacity, num_topk, dtype=torch.int32)
            self._row_pair = ids.new_empty(num_rows, dtype=torch.int64)
        else:
            self._row_idx = ids.new_empty(num_rows, num_topk)
            self._row_weights = None if weights is None else weights.new_empty(num_rows, num_topk)

    def _allocate_by_token(self) -> None:
        ids = self._request.topk_idx
        num_tokens, num_topk = ids.shape
        self._slot_rank = ids.new_empty(num_tokens, num_topk, dtype=torch.int64)
        if self._request.layout == "compact":
            self._pair_row = ids.new_empty(0, num_topk, dtype=torch.int32)
            self._row_pair = ids.new_empty(0, dtype=torch.int64)
        self._token_row = ids.new_empty(num_tokens, len(self._ranks), dtype=torch.int32)

    def _sent(self, known: Known) -> tuple[int, ...]:
        world = len(self._ranks)
        return known.rank_rows[self._rank * world : (self._rank + 1) * world]

    def fill_arguments(self) -> tuple[int, int, int, int, int, int, int, int, int, int]:
        """The last arguments of plan_fill."""
        assert self._token_row is not None
        return (
            self._capacity,
            self._num_rows,
            self._row_idx.data_ptr(),
            0 if self._row_weights is None else self._row_weights.data_ptr(),
            self._recv_token.data_ptr(),
            self._pair_row.data_ptr(),
            self._row_pair.data_ptr(),
            self._token_row.data_ptr(),
            self._slot_rank.data_ptr(),
            0 if self._known is None else self._send_token.data_ptr(),
        )

    def handle(self, request: DispatchRequest, uid: int, joins: bool) -> DispatchHandle:
        """The routing; `joins`: all ranks join the backward, because nobody knows what the others want."""
        known, world = self._known, len(self._ranks)
        assert self._token_row is not None
        unknown = (-1,) * world
        return DispatchHandle(
            ranks=self._ranks,
            rank=self._rank,
            uid=uid,
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
            send_counts=unknown if known is None else self._sent(known),
            recv_counts=unknown if known is None else known.rank_rows[self._rank :: world],
            recv_pairs=unknown if known is None else known.recv_pairs,
            rank_tokens=unknown if known is None else known.rank_tokens,
            rank_rows=(-1,) * (world * world) if known is None else known.rank_rows,
            num_channels=request.num_channels,
            slot_rank=self._slot_rank,
            send_token=self._send_token,
            recv_token=self._recv_token,
            row_pair=self._row_pair,
            geometry=self._geometry,
            token_row=self._token_row,
            pair_row=self._pair_row,
        )

    def plan(self, handle: DispatchHandle) -> DispatchPlan:
        known = self._known
        return DispatchPlan(
            handle=handle,
            row_idx=self._row_idx,
            row_weights=self._row_weights,
            tokens_per_expert=None if known is None else known.padded_counts,
            real_tokens_per_expert=None if known is None else known.expert_counts,
            expert_counts=self._expert_counts,
            expert_offsets=self._expert_offsets,
        )
