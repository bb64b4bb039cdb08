"""The tensors of a plan that the kernels make, and the handle out of them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from moe_ep._native_exchange import ExchangeKernels, NativeExchange
from moe_ep.backends.base import DispatchPlan, DispatchRequest
from moe_ep.handle import DispatchHandle


@dataclass(frozen=True)
class Known:
    """Counts that the host has waited for."""

    num_compact_rows: int
    num_rows: int
    x_needs_grad: bool
    weights_need_grad: bool
    rank_tokens: tuple[int, ...]
    rank_rows: tuple[int, ...]
    recv_pairs: tuple[int, ...]
    expert_counts: list[int]


class PlanTensors:
    """Inputs, scratch and outputs of one plan; csrc/intranode_plan.h names them. It holds them all."""

    def __init__(self, kernels: ExchangeKernels, request: DispatchRequest, ranks: tuple[int, ...], rank: int) -> None:
        self._request, self._ranks, self._rank = request, ranks, rank
        ids, weights, world = request.topk_idx, request.topk_weights, len(ranks)
        device, (num_tokens, num_topk) = ids.device, ids.shape
        self._owner, self._local = request.placement.kernel_tables(device)
        self._num_local = len(request.placement.experts_of(rank))
        columns = self._num_local + world
        self._chunk_counts = torch.empty(world * kernels.max_chunks * columns, dtype=torch.int32, device=device)
        self._geometry = torch.empty(kernels.geometry_length(world, self._num_local), dtype=torch.int32, device=device)
        self._expert_counts = torch.empty(self._num_local, dtype=torch.int32, device=device)
        self._expert_offsets = torch.empty(self._num_local + 1, dtype=torch.int32, device=device)
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
        _, _, num_compact, num_rows, _, _, x_needs_grad, weights_need_grad = exchange.answer()
        tokens, rows, pairs, experts = exchange.counts(len(self._ranks), self._num_local)
        return Known(num_compact, num_rows, bool(x_needs_grad), bool(weights_need_grad), tokens, rows, pairs, experts)

    def allocate(self, num_rows: int | None, known: Known | None) -> None:
        """Outputs for `num_rows` rows; without `known` counts there is room for as many compact rows."""
        assert num_rows is not None
        request, ids, self._known = self._request, self._request.topk_idx, known
        (num_tokens, num_topk), world = ids.shape, len(self._ranks)
        self._num_rows = num_rows
        self._capacity = num_rows if known is None else known.num_compact_rows
        expert_major = request.layout == "expert_major"
        shape = (num_rows,) if expert_major else (num_rows, num_topk)

        def empty(*sizes: int, dtype: torch.dtype) -> Tensor:
            return torch.empty(sizes, dtype=dtype, device=ids.device)

        self._row_idx = empty(*shape, dtype=ids.dtype)
        weights = request.topk_weights
        self._row_weights = None if weights is None else empty(*shape, dtype=weights.dtype)
        self._recv_token = empty(self._capacity, dtype=torch.int32)
        self._pair_row = empty(self._capacity if expert_major else 0, num_topk, dtype=torch.int32)
        self._row_pair = empty(num_rows if expert_major else 0, dtype=torch.int64)
        self._token_row = empty(num_tokens, world, dtype=torch.int32)
        self._slot_rank = empty(num_tokens, num_topk, dtype=torch.int64)
        num_sent = 0 if known is None else sum(self._sent(known))
        self._send_token = empty(num_sent, dtype=torch.int64)

    def _sent(self, known: Known) -> tuple[int, ...]:
        world = len(self._ranks)
        return known.rank_rows[self._rank * world : (self._rank + 1) * world]

    def fill_arguments(self) -> dict[str, int]:
        """Arguments of plan_fill."""
        return {
            "capacity": self._capacity,
            "num_rows": self._num_rows,
            "row_idx": self._row_idx.data_ptr(),
            "row_weights": 0 if self._row_weights is None else self._row_weights.data_ptr(),
            "recv_token": self._recv_token.data_ptr(),
            "pair_row": self._pair_row.data_ptr(),
            "row_pair": self._row_pair.data_ptr(),
            "token_row": self._token_row.data_ptr(),
            "slot_rank": self._slot_rank.data_ptr(),
            "send_token": 0 if self._known is None else self._send_token.data_ptr(),
        }

    def handle(self, request: DispatchRequest, uid: int, joins: bool) -> DispatchHandle:
        """The routing; `joins`: all ranks join the backward, because nobody knows what the others want."""
        known, world = self._known, len(self._ranks)
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
        counts = None if self._known is None else self._known.expert_counts
        step = self._request.alignment
        return DispatchPlan(
            handle=handle,
            row_idx=self._row_idx,
            row_weights=self._row_weights,
            tokens_per_expert=None if counts is None else [-(-count // step) * step for count in counts],
            real_tokens_per_expert=counts,
            expert_counts=self._expert_counts,
            expert_offsets=self._expert_offsets,
        )
