"""The portable backend: the whole contract on `torch.distributed` collectives, or on none when W = 1.

gloo on CPU, NCCL on CUDA. It is the semantic reference of the other backends: plain tensor operations, one all-to-all
for the headers, one for ids and weights, one for the rows. Rows cross once per (token, rank), as in every backend;
`expert_major` is a gather at the destination, and its adjoint the ordered sum of `moe_ep.ordered_sum`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from moe_ep.backends.base import DispatchPlan, DispatchRequest
from moe_ep.backends.header import DTYPES, ERRORS, OK, OPERATIONS, Header, disagreement, status_of
from moe_ep.backends.private_group import PrivateGroup
from moe_ep.errors import ConfigError, EPTimeoutError
from moe_ep.handle import LAYOUTS, DispatchHandle
from moe_ep.layout import (
    SendLayout,
    expert_layout,
    find_bad_id,
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
    """

    name = "torch"

    def __init__(self, group: dist.ProcessGroup | None, timeout_secs: float) -> None:
        alone = group is None or dist.get_world_size(group) == 1
        self._group = None if alone or group is None else PrivateGroup(group, timeout_secs)
        if self._group is not None:
            self.ranks, self.rank = self._group.ranks, self._group.rank
        else:
            self.ranks, self.rank = (0 if group is None else dist.get_rank(),), 0
        self._faults: list[str] = []

    # -- dispatch ---------------------------------------------------------------------------------------------------

    def plan(self, request: DispatchRequest) -> DispatchPlan:
        ids_TK, refusal = self._checked_ids(request)
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
            placement=request.placement.fingerprint,
            x_needs_grad=request.x_needs_grad,
            weights_need_grad=request.weights_need_grad,
            routing=routing_fingerprint(ids_TK),
            num_tokens=ids_TK.shape[0],
            row_counts=layout.send_counts,
        )
        headers = self._exchange_headers(header, refusal)
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
        )
        with self._committed("dispatch"):
            recv_token, idx_SK, weights_SK = self._exchange_ids(handle, layout, request.topk_weights)
            return self._finish_plan(replace(handle, recv_token=recv_token), request, idx_SK, weights_SK)

    def _checked_ids(self, request: DispatchRequest) -> tuple[Tensor, Exception | None]:
        """The ids, with the bad ones turned to -1, and the error to raise for them."""
        ids, num_experts = request.topk_idx, request.placement.num_experts
        bad = find_bad_id(ids, num_experts)
        if bad is None:
            return ids, None
        token, slot, value = bad
        sentence = (
            f"topk_idx[{token}, {slot}] is {value}; an id must lie in [-1, {num_experts}) "
            f"(num_experts = {num_experts}, -1 = no expert). Check the router that made it."
        )
        ids = ids.masked_fill((ids < -1) | (ids >= num_experts), -1)
        if request.max_rows is None:
            return ids, ValueError(sentence)
        self._faults.append(sentence)
        return ids, None

    def _exchange_ids(
        self, handle: DispatchHandle, layout: SendLayout, weights_TK: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Of the compact rows received, in one exchange: source tokens [S] int32, local ids and weights [S, K]."""
        ids_SK, weights_SK = rows_for_peers(layout, weights_TK)
        if self._group is None:
            return layout.send_token.int(), ids_SK, weights_SK
        words = [layout.send_token.int().unsqueeze(1), ids_SK.int()]
        if weights_SK is not None:
            words.append(weights_SK.view(torch.int32))
        received = self._scatter(handle, torch.cat(words, dim=1), "dispatch")
        past_ids = 1 + handle.num_topk
        if weights_SK is not None:
            own_memory = received[:, past_ids:].clone(memory_format=torch.contiguous_format)
            weights_SK = own_memory.view(weights_SK.dtype)
        return received[:, 0].clone(), received[:, 1:past_ids].long(), weights_SK

    def _finish_plan(
        self, handle: DispatchHandle, request: DispatchRequest, idx_SK: Tensor, weights_SK: Tensor | None
    ) -> DispatchPlan:
        """Lays out the rows that are handed out, and their ids and weights."""
        num_local = len(request.placement.experts_of(self.rank))
        experts = expert_layout(idx_SK, num_local, request.alignment)
        expert_major = request.layout == "expert_major"
        row_idx, row_weights, row_pair = idx_SK, weights_SK, handle.row_pair
        if expert_major:
            row_pair = experts.row_pair
            row_idx = _take(idx_SK.reshape(-1), row_pair, -1)
            row_weights = None if weights_SK is None else _take(weights_SK.reshape(-1), row_pair, 0)
        num_rows, overflowed = row_idx.shape[0], False
        if request.max_rows is not None:
            overflowed = num_rows > request.max_rows
            if overflowed:
                self._faults.append(
                    f"dispatch received {num_rows} rows on EP rank {self.rank}, max_rows is {request.max_rows}; its "
                    f"outputs are NaN. Give max_rows of at least {num_rows}, or leave it out."
                )
            num_rows = request.max_rows
            row_idx = _resize(row_idx, num_rows, -1)
            row_pair = _resize(row_pair, num_rows, -1) if expert_major else row_pair
            if row_weights is not None:
                row_weights = _resize(row_weights, num_rows, 0)
                if overflowed:
                    row_weights = torch.full_like(row_weights, float("nan"))
        offsets = torch.zeros(num_local + 1, dtype=torch.int32, device=idx_SK.device)
        offsets[1:] = torch.cumsum(experts.padded_counts, 0)
        pairs = tuple(int((ids >= 0).sum()) for ids in torch.split(idx_SK, list(handle.recv_counts)))
        handle = replace(handle, num_rows=num_rows, overflowed=overflowed, row_pair=row_pair, recv_pairs=pairs)
        waits = request.max_rows is None
        return DispatchPlan(
            handle=handle,
            row_idx=row_idx.to(request.topk_idx.dtype),
            row_weights=row_weights,
            tokens_per_expert=experts.padded_counts.tolist() if waits else None,
            real_tokens_per_expert=experts.real_counts.tolist() if waits else None,
            expert_counts=experts.real_counts.int(),
            expert_offsets=offsets,
        )

    def open_dispatch(self, handle: DispatchHandle, x: Tensor) -> None:
        self._open("cached dispatch", handle, x)

    def exchange_counts(self, num_tokens_per_expert: Tensor, placement: ExpertPlacement) -> list[int]:
        with self._committed("dispatch"):
            counts = num_tokens_per_expert.long().clone()
            if self._group is not None:
                self._group.all_reduce(counts, "dispatch")
            return [int(counts[expert]) for expert in placement.experts_of(self.rank)]

    def dispatch(self, handle: DispatchHandle, x: Tensor) -> Tensor:
        with self._committed("dispatch"):
            return self._rows_of(handle, x)

    def _rows_of(self, handle: DispatchHandle, x: Tensor) -> Tensor:
        """[T, H] at the sources -> [R, H] here, as the layout wants them."""
        if handle.overflowed:
            self._scatter_rows(handle, x)
            return x.new_full((handle.num_rows, x.shape[1]), _poison(x.dtype))
        x_SH = self._scatter_rows(handle, x)
        if handle.layout == "compact":
            return _resize(x_SH, handle.num_rows, 0)
        return _take(x_SH, torch.div(handle.row_pair, handle.num_topk, rounding_mode="floor"), 0)

    def dispatch_backward(
        self, handle: DispatchHandle, grad_rows: Tensor, grad_row_weights: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None]:
        if not (handle.x_needs_grad or handle.weights_need_grad):
            return None, None
        self._open("dispatch backward", handle, grad_rows)
        grad_x = grad_weights = None
        with self._committed("dispatch backward"):
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
        back_SK = self._gather(handle, grad_SK, "dispatch backward")
        rank_S = torch.repeat_interleave(torch.tensor(handle.send_counts, device=back_SK.device))
        mine_SK = handle.slot_rank.index_select(0, handle.send_token) == rank_S.unsqueeze(1)
        grad_TK = back_SK.new_zeros(handle.num_tokens, num_topk)
        row, slot = mine_SK.nonzero(as_tuple=True)
        grad_TK[handle.send_token[row], slot] = back_SK[row, slot]
        return grad_TK

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
        with self._committed("combine"):
            if exact:
                return self._combine_exact(handle, rows, weights, bias)
            return self._sum_home(handle, rows, weights, "combine", bias)

    def sum_weights(self, handle: DispatchHandle, weights: Tensor) -> Tensor:
        with self._committed("combine"):
            return handle.home_sum(self._gather(handle, weights[: handle.num_compact_rows], "combine"))

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
        return handle.home_sum(self._gather(handle, x_SH, what), bias=bias)

    def _combine_exact(
        self, handle: DispatchHandle, rows: Tensor, weights: Tensor | None, bias: Sequence[Tensor]
    ) -> Tensor:
        """Brings every (token, slot) row home unreduced and adds in slot order, so that W cannot show."""
        ranks_W = torch.arange(len(self.ranks), device=rows.device)
        slots = (handle.slot_rank.unsqueeze(0) == ranks_W.view(-1, 1, 1)).nonzero()  # (rank, token, slot), ascending
        home = torch.bincount(slots[:, 0], minlength=len(self.ranks)).tolist()
        if handle.overflowed:
            send = rows.new_full((sum(handle.recv_pairs), rows.shape[1]), float("nan"))
            scale = None if weights is None else weights.new_full((sum(handle.recv_pairs),), float("nan"))
        else:
            row_of_pair = handle.real_rows[torch.argsort(handle.row_pair[handle.real_rows])]
            send = rows.index_select(0, row_of_pair)
            scale = None if weights is None else weights.index_select(0, row_of_pair)
        if self._group is not None:
            send = self._group.all_to_all(send, "combine", handle.recv_pairs, home)
            scale = None if scale is None else self._group.all_to_all(scale, "combine", handle.recv_pairs, home)
        in_slot_order = torch.argsort(slots[:, 1] * handle.num_topk + slots[:, 2])
        return OrderedSum.from_terms(slots[in_slot_order, 1], in_slot_order, handle.num_tokens)(send, scale, bias)

    def combine_backward(
        self, handle: DispatchHandle, grad_y: Tensor, rows: Tensor | None, weights: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        self._open("combine backward", handle, grad_y)
        with self._committed("combine backward"):
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
        self._exchange_headers(header, None)
        return tensor if self._group is None else self._group.all_reduce(tensor, "all_reduce")

    def refuse(self, operation: str, error: Exception) -> NoReturn:
        self._exchange_headers(Header(operation=OPERATIONS.index(operation)), error)
        raise error

    def take_faults(self) -> list[str]:
        faults, self._faults = self._faults, []
        return faults

    def reset(self) -> None:
        self._faults = []
        if self._group is not None:
            self._group.reopen()

    def close(self) -> None:
        if self._group is not None:
            self._group.close()

    @contextmanager
    def _committed(self, operation: str) -> Iterator[None]:
        """Past the headers the other ranks count on this one: if it fails now, the group carries nothing more."""
        try:
            yield
        except Exception as error:
            if self._group is not None and not isinstance(error, EPTimeoutError):
                self._group.break_off(f"{operation} failed on this rank after the ranks had agreed on it: {error}")
            raise

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
        )
        return self._exchange_headers(header, None)

    def _exchange_headers(self, header: Header, refusal: Exception | None) -> list[Header]:
        """All ranks' headers, or the same error on all ranks. `refusal` is this rank's own reason to refuse."""
        header = replace(header, row_counts=header.row_counts or (0,) * len(self.ranks))
        if self._group is None:
            if refusal is not None:
                raise refusal
            return [header]
        operation = OPERATIONS[header.operation]
        status = OK if refusal is None else status_of(refusal)
        header = replace(header, status=status, generation=self._group.generation)
        headers = Header.read(self._group.all_to_all_host(header.for_peers(), operation))
        refusing = [rank for rank, peer in enumerate(headers) if peer.status != OK]
        if refusing:
            texts = self._group.exchange_text("" if refusal is None else str(refusal), operation)
            rank = refusing[0]
            kind = ERRORS[headers[rank].status] or RuntimeError
            raise kind(f"EP rank {rank} refused {operation}: {texts[rank]}") from refusal
        sentence = disagreement(headers)
        if sentence is not None:
            raise ConfigError(f"{operation}: {sentence}")
        return headers

    def _scatter_rows(self, handle: DispatchHandle, x: Tensor) -> Tensor:
        """[T, H] at the sources -> [S, H] compact rows here."""
        return self._scatter(handle, x.index_select(0, handle.send_token), "dispatch")

    def _scatter(self, handle: DispatchHandle, rows: Tensor, what: str) -> Tensor:
        if self._group is None:
            return rows
        return self._group.all_to_all(rows, what, handle.send_counts, handle.recv_counts)

    def _gather(self, handle: DispatchHandle, rows: Tensor, what: str) -> Tensor:
        if self._group is None:
            return rows
        return self._group.all_to_all(rows, what, handle.recv_counts, handle.send_counts)


def _take(source: Tensor, index_R: Tensor, fill: float) -> Tensor:
    """Rows `source[index_R]`; where the index is negative, `fill`."""
    if source.shape[0] == 0:
        return source.new_full((index_R.shape[0], *source.shape[1:]), fill)
    taken = source.index_select(0, index_R.clamp(min=0))
    return taken.index_fill_(0, (index_R < 0).nonzero()[:, 0], fill)


def _resize(rows: Tensor, num_rows: int, fill: float) -> Tensor:
    """The first `num_rows` rows, with rows of `fill` behind them where there are fewer."""
    if rows.shape[0] >= num_rows:
        return rows[:num_rows]
    return torch.cat([rows, rows.new_full((num_rows - rows.shape[0], *rows.shape[1:]), fill)])


def _poison(dtype: torch.dtype) -> float:
    """What fills the rows of a call that received too many: NaN, the e4m3 NaN for bytes, -1 for other integers."""
    if dtype.is_floating_point:
        return float("nan")
    return 0x7F if dtype in (torch.uint8, torch.int8) else -1
