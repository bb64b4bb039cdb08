"""The portable backend: the whole contract on `torch.distributed` collectives, or on none when W = 1.

gloo on CPU, NCCL on CUDA. It is the semantic reference of the other backends: plain tensor operations, one all-to-all
for the headers, one for ids and weights, one for the rows. Rows cross once per (token, rank), as in every backend;
`expert_major` is a gather at the destination, and its adjoint the ordered sum of `moe_ep.ordered_sum`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from moe_ep.backends.agreement import Agreement
from moe_ep.backends.base import DispatchPlan, DispatchRequest
from moe_ep.backends.header import DTYPES, OPERATIONS, Header
from moe_ep.backends.node_low_latency import NodeLowLatency
from moe_ep.backends.plan import checked_ids, finish_plan
from moe_ep.backends.private_group import PrivateGroup
from moe_ep.backends.rows import pack_ids, pairs_by, poison, resize, slots_of, take, unpack_ids
from moe_ep.fp8 import UNIT_SCALE
from moe_ep.handle import LAYOUTS, DispatchHandle
from moe_ep.layout import (
    SendLayout,
    routing_fingerprint,
    rows_for_peers,
    send_layout,
)
from moe_ep.ordered_sum import OrderedSum, accumulation_dtype
from moe_ep.placement import ExpertPlacement, fingerprint_of


class TorchDistBackend:
    """See `moe_ep.backends.base.Backend`.

    Args:
        group: the EP group, or None for a single rank.
        timeout_secs: limit of every wait.
        on_host: the collectives go through the host, whatever `group` carries.
    """

    name = "torch"

    def __init__(self, group: dist.ProcessGroup | None, timeout_secs: float, on_host: bool = False) -> None:
        alone = group is None or dist.get_world_size(group) == 1
        self._group = None if alone or group is None else PrivateGroup(group, timeout_secs, on_host)
        if self._group is not None:
            self.ranks, self.rank = self._group.ranks, self._group.rank
        else:
            self.ranks, self.rank = (0 if group is None else dist.get_rank(),), 0
        self._agreement = Agreement(self._group)
        self._faults: list[str] = []
        self.num_sms = 0
        self.joins_stream = True

    @property
    def stream(self) -> None:
        """Calls run on the current stream."""
        return None

    @property
    def low_latency(self) -> NodeLowLatency | None:
        """No kernels of its own."""
        return None

    # -- dispatch ---------------------------------------------------------------------------------------------------

    def plan(self, request: DispatchRequest) -> DispatchPlan:
        ids_TK, refusal = checked_ids(request, self._faults)
        layout = send_layout(ids_TK, request.placement)
        header = Header(
            operation=OPERATIONS.index("dispatch"),
            hidden=request.x.shape[1],
            num_topk=ids_TK.shape[1],
            num_experts=request.placement.num_experts,
            dtype=DTYPES.index(request.x.dtype),
            weights_dtype=-1 if request.topk_weights is None else DTYPES.index(request.topk_weights.dtype),
            layout=LAYOUTS.index(request.layout),
            alignment=request.alignment,
            grad_enabled=request.grad_enabled,
            placement=request.placement.fingerprint,
            x_needs_grad=request.x_needs_grad,
            weights_need_grad=request.weights_need_grad,
            routing=routing_fingerprint(ids_TK),
            num_tokens=ids_TK.shape[0],
            row_counts=layout.send_counts,
        )
        headers = self._agreement.exchange(header, refusal or self._agreement.refusal_of(layout.send_counts))
        handle = DispatchHandle(
            ranks=self.ranks,
            rank=self.rank,
            uid=fingerprint_of(*[peer.routing for peer in headers]),
            placement=request.placement.fingerprint,
            layout=request.layout,
            num_tokens=ids_TK.shape[0],
            num_topk=ids_TK.shape[1],
            num_experts=request.placement.num_experts,
            num_rows=0,
            alignment=request.alignment,
            x_needs_grad=any(peer.x_needs_grad for peer in headers),
            weights_need_grad=any(peer.weights_need_grad for peer in headers),
            overflowed=False,
            send_counts=layout.send_counts,
            recv_counts=tuple(peer.row_counts[self.rank] for peer in headers),
            recv_pairs=(),
            rank_tokens=tuple(peer.num_tokens for peer in headers),
            rank_rows=tuple(count for peer in headers for count in peer.row_counts),
            num_channels=request.num_channels,
            slot_rank=layout.slot_rank,
            send_token=layout.send_token,
            recv_token=layout.send_token.int(),
            row_pair=layout.send_token.new_empty(0),
            geometry=layout.send_token.new_empty(0, dtype=torch.int32),
            token_row=layout.send_token.new_empty(0, dtype=torch.int32),
            pair_row=layout.send_token.new_empty(0, dtype=torch.int32),
        )
        with self._agreement.committed("dispatch"):
            recv_token, idx_SK, weights_SK = self._exchange_ids(handle, layout, ids_TK, request)
            plan = finish_plan(replace(handle, recv_token=recv_token), request, idx_SK, weights_SK, self._faults)
        plan.handle.prepared.update(handle.prepared)
        return plan

    def plan_and_dispatch(
        self, request: DispatchRequest, scales: Tensor | None
    ) -> tuple[DispatchPlan, Tensor, Tensor | None]:
        plan = self.plan(request)
        if scales is None:
            return plan, self.dispatch(plan.handle, request.x), None
        return plan, *self.dispatch_scaled(plan.handle, request.x, scales)

    def _exchange_ids(
        self, handle: DispatchHandle, layout: SendLayout, ids_TK: Tensor, request: DispatchRequest
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Of the compact rows received, in one exchange: source tokens [S] int32, local ids and weights [S, K]."""
        ids_SK, weights_SK = rows_for_peers(layout, request.topk_weights)
        words = pack_ids(layout.send_token, ids_SK, weights_SK)
        dtype = None if weights_SK is None else weights_SK.dtype
        return unpack_ids(self._scatter(handle, words, "dispatch"), handle.num_topk, dtype)

    def open_dispatch(self, handle: DispatchHandle, x: Tensor) -> None:
        self._open("cached dispatch", handle, x)

    def exchange_counts(self, num_tokens_per_expert: Tensor, placement: ExpertPlacement) -> list[int]:
        with self._agreement.committed("dispatch"):
            counts = num_tokens_per_expert.long().clone()
            if self._group is not None:
                self._group.all_reduce(counts, "dispatch")
            return [int(counts[expert]) for expert in placement.experts_of(self.rank)]

    def dispatch(self, handle: DispatchHandle, x: Tensor) -> Tensor:
        with self._agreement.committed("dispatch"):
            return self._rows_of(handle, x)

    def dispatch_scaled(self, handle: DispatchHandle, x: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
        with self._agreement.committed("dispatch"):
            return self._rows_of(handle, x), self._rows_of(handle, scales, UNIT_SCALE[scales.dtype])

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> None:
        """Nothing is read in place here."""
        return

    def _rows_of(self, handle: DispatchHandle, x: Tensor, padding: float = 0) -> Tensor:
        """[T, H] at the sources -> [R, H] here, as the layout wants them."""
        if x.element_size() == 1 and x.dtype != torch.uint8:  # FP8: torch copies such bytes, but fills none
            return self._rows_of(handle, x.view(torch.uint8)).view(x.dtype)
        if handle.overflowed:
            self._scatter_rows(handle, x)
            return x.new_full((handle.num_rows, x.shape[1]), poison(x.dtype))
        x_SH = self._scatter_rows(handle, x)
        if handle.layout == "compact":
            return resize(x_SH, handle.num_rows, padding)
        return take(x_SH, torch.div(handle.row_pair, handle.num_topk, rounding_mode="floor"), padding)

    def dispatch_backward(
        self, handle: DispatchHandle, grad_rows: Tensor, grad_row_weights: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None]:
        if not (handle.x_needs_grad or handle.weights_need_grad):
            return None, None
        self._open("dispatch backward", handle, grad_rows)
        grad_x = grad_weights = None
        with self._agreement.committed("dispatch backward"):
            if handle.x_needs_grad:
                grad_x = self._sum_home(handle, grad_rows, None, "dispatch backward")
            if handle.weights_need_grad and grad_row_weights is not None:
                grad_weights = self._gather_weights(handle, grad_row_weights)
        return grad_x, grad_weights

    def _gather_weights(self, handle: DispatchHandle, grad_row_weights: Tensor) -> Tensor:
        """Brings the weights' gradients back to the slots that they belong to: one term a slot, so no sum."""
        num_topk = handle.num_topk
        if handle.overflowed:
            grad_SK = grad_row_weights.new_full((handle.num_compact_rows, num_topk), float("nan"))
        elif handle.layout == "compact":
            grad_SK = grad_row_weights[: handle.num_compact_rows]
        else:
            grad_SK = grad_row_weights.new_zeros(handle.num_compact_rows * num_topk)
            grad_SK[handle.row_pair[handle.real_rows]] = grad_row_weights[handle.real_rows]
            grad_SK = grad_SK.view(-1, num_topk)
        return self._slots_home(handle, grad_SK, "dispatch backward")

    # -- combine ----------------------------------------------------------------------------------------------------

    def open_combine(
        self, handle: DispatchHandle, rows: Tensor, weights: Tensor | None, exact: bool, needs_grad: bool
    ) -> bool:
        headers = self._open("combine", handle, rows, weights, exact, needs_grad)
        return any(peer.x_needs_grad for peer in headers)

    def combine(
        self,
        handle: DispatchHandle,
        rows: Tensor,
        weights: Tensor | None,
        exact: bool,
        bias: Sequence[Tensor] = (),
    ) -> Tensor:
        with self._agreement.committed("combine"):
            if exact:
                return self._combine_exact(handle, rows, weights, bias)
            return self._sum_home(handle, rows, weights, "combine", bias)

    def sum_weights(self, handle: DispatchHandle, weights: Tensor) -> Tensor:
        with self._agreement.committed("combine"):
            return self._add_home(handle, weights[: handle.num_compact_rows], "combine")

    def _sum_home(
        self,
        handle: DispatchHandle,
        rows: Tensor,
        weights: Tensor | None,
        what: str,
        bias: Sequence[Tensor] = (),
    ) -> Tensor:
        """Adds up the rows of each (token, rank) here, brings the sums home and adds them in rank order."""
        if handle.overflowed:
            x_SH = rows.new_full((handle.num_compact_rows, rows.shape[1]), float("nan"))
        elif handle.layout == "compact":
            x_SH = rows[: handle.num_compact_rows]
        else:
            x_SH = handle.local_sum(rows, weights)
        return self._add_home(handle, x_SH, what, bias)

    def _combine_exact(
        self, handle: DispatchHandle, rows: Tensor, weights: Tensor | None, bias: Sequence[Tensor]
    ) -> Tensor:
        """Brings every (token, slot) row home unreduced and adds in slot order, so that W cannot show."""
        if handle.overflowed:
            send = rows.new_full((sum(handle.recv_pairs), rows.shape[1]), float("nan"))
            scale = None if weights is None else weights.new_full((sum(handle.recv_pairs),), float("nan"))
        else:
            row_of_pair = handle.real_rows[torch.argsort(handle.row_pair[handle.real_rows])]
            send = rows.index_select(0, row_of_pair)
            scale = None if weights is None else weights.index_select(0, row_of_pair)
        came, slots = self._pairs_home(handle, send)
        scale = None if scale is None else self._pairs_home(handle, scale)[0]
        in_slot_order = torch.argsort(slots[:, 1] * handle.num_topk + slots[:, 2])
        return OrderedSum.from_terms(slots[in_slot_order, 1], in_slot_order, handle.num_tokens)(came, scale, bias)

    def combine_backward(
        self, handle: DispatchHandle, grad_y: Tensor, rows: Tensor | None, weights: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        self._open("combine backward", handle, grad_y)
        with self._agreement.committed("combine backward"):
            grad_RH = self._rows_of(handle, grad_y)
        if weights is None:
            return grad_RH, None
        wide = accumulation_dtype(grad_RH.dtype)
        grad_weights = None
        if rows is not None:
            products = grad_RH.to(wide) * rows.to(wide)
            grad_weights = products.sum(dim=1).to(weights.dtype)
        return grad_RH.to(wide).mul_(weights.to(wide).unsqueeze(1)).to(grad_RH.dtype), grad_weights

    # -- the group --------------------------------------------------------------------------------------------------

    def all_reduce(self, tensor: Tensor) -> Tensor:
        header = Header(
            operation=OPERATIONS.index("all_reduce"),
            hidden=tensor.numel(),
            dtype=DTYPES.index(tensor.dtype) if tensor.dtype in DTYPES else len(DTYPES) + tensor.element_size(),
        )
        self._agreement.exchange(header, None)
        return tensor if self._group is None else self._group.all_reduce(tensor, "all_reduce")

    def refuse(self, operation: str, error: Exception, num_parts: int = 1) -> NoReturn:
        """The other ranks wait for the headers of the first part, and come to no other."""
        self._agreement.exchange(Header(operation=OPERATIONS.index(operation)), error)
        raise error

    def settle(self) -> None:
        """Nothing: a sum waits for its verdict."""

    def take_faults(self) -> list[str]:
        faults, self._faults = self._faults, []
        return faults

    def reset(self) -> None:
        self._faults = []
        if self._group is not None:
            self._group.reopen()

    @property
    def members(self) -> tuple[int, ...]:
        return (0,) if self._group is None else self._group.members

    def shrink(self, note: int) -> dict[int, int]:
        return {0: note} if self._group is None else self._group.shrink(note)

    def close(self) -> None:
        if self._group is not None:
            self._group.close()

    def _open(
        self,
        operation: str,
        handle: DispatchHandle,
        rows: Tensor,
        weights: Tensor | None = None,
        exact: bool = False,
        needs_grad: bool = False,
    ) -> list[Header]:
        """Headers of an exchange that follows a handle."""
        header = Header(
            operation=OPERATIONS.index(operation),
            handle=handle.uid,
            hidden=rows.shape[1],
            num_topk=handle.num_topk,
            num_experts=handle.num_experts,
            dtype=DTYPES.index(rows.dtype),
            weights_dtype=-1 if weights is None else DTYPES.index(weights.dtype),
            layout=LAYOUTS.index(handle.layout),
            alignment=handle.alignment,
            exact=exact,
            placement=handle.placement,
            x_needs_grad=needs_grad,
            lacks_route=self._lacks_route(handle),
        )
        return self._agreement.exchange(header, self._agreement.refusal_of(handle.send_counts, handle.recv_counts))

    def _lacks_route(self, handle: DispatchHandle) -> bool:
        """A handle says all that one hop has to know."""
        return False

    # -- the ways of rows between the ranks ---------------------------------------------------------------------------

    def _scatter_rows(self, handle: DispatchHandle, x: Tensor) -> Tensor:
        """[T, H] at the sources -> [S, H] compact rows here."""
        return self._scatter(handle, x.index_select(0, handle.send_token), "dispatch")

    def _add_home(self, handle: DispatchHandle, x_SH: Tensor, what: str, bias: Sequence[Tensor] = ()) -> Tensor:
        """[S, H] sums of the ranks -> [T, H] sums over the ranks, behind the tensors of `bias`."""
        return handle.home_sum(self._gather(handle, x_SH, what), bias=bias)

    def _slots_home(self, handle: DispatchHandle, values_SK: Tensor, what: str) -> Tensor:
        """[S, K] -> [T, K]: of each slot the value that its rank has, 0 where there is none."""
        came_SK = self._gather(handle, values_SK, what)
        return slots_of(came_SK, handle.send_token, handle.slot_rank, handle.send_counts)

    def _pairs_home(self, handle: DispatchHandle, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Rows of every (compact row, slot) -> those of the own (token, slot) pairs, and (sender, token, slot) of each.

        Both ascend: in (compact row, slot), and in (sender, token, slot).
        """
        world = len(self.ranks)
        slots = pairs_by(handle.slot_rank, range(world))
        if self._group is None:
            return rows, slots
        home = torch.bincount(slots[:, 0], minlength=world).tolist()
        return self._group.all_to_all(rows, "combine", handle.recv_pairs, home), slots

    def _scatter(self, handle: DispatchHandle, rows: Tensor, what: str) -> Tensor:
        if self._group is None:
            return rows
        return self._group.all_to_all(rows, what, handle.send_counts, handle.recv_counts)

    def _gather(self, handle: DispatchHandle, rows: Tensor, what: str) -> Tensor:
        if self._group is None:
            return rows
        return self._group.all_to_all(rows, what, handle.recv_counts, handle.send_counts)
