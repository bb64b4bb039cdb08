"""The normal mode of `Buffer` under DeepEP V1's names, arguments and return orders; not differentiable.

It stands on the same backend calls as `moe_ep.dispatch` and `moe_ep.combine`: plan, rows, sums.

Letters: T tokens of this rank, H hidden, K slots a token, E experts, L of them local, W ranks, S rows received.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

from moe_ep.backends.base import Backend, DispatchRequest
from moe_ep.checks import (
    ROW_DTYPES,
    as_weights,
    check_combine,
    check_handle,
    check_int,
    check_padding,
    check_rows,
    check_tensor,
    check_topk,
    raise_faults,
)
from moe_ep.deep_ep_v1.config import Config, recommended_combine_config, recommended_dispatch_config
from moe_ep.deep_ep_v1.layout_counts import counted_layout, serves
from moe_ep.event import EventHandle, EventOverlap
from moe_ep.handle import DispatchHandle
from moe_ep.layout import find_bad_id, send_layout
from moe_ep.placement import ExpertPlacement

RANKS_PER_NODE = 8  # what DeepEP V1 takes for a node
Rows = Tensor | tuple[Tensor, Tensor]  # [T, H], or FP8 rows [T, H] with scales [T, n]


class NormalMode(ABC):
    """`get_dispatch_layout`, `dispatch` and `combine` of DeepEP V1's Buffer."""

    _default_num_sms: ClassVar[int]

    @property
    @abstractmethod
    def backend(self) -> Backend: ...

    @property
    @abstractmethod
    def num_sms(self) -> int: ...

    @property
    @abstractmethod
    def num_channels(self) -> int: ...

    @abstractmethod
    def placement(self, num_experts: int) -> ExpertPlacement: ...

    # -- layout -----------------------------------------------------------------------------------------------------

    def get_dispatch_layout(
        self,
        topk_idx: Tensor,
        num_experts: int,
        previous_event: EventOverlap | EventHandle | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[Tensor, Tensor | None, Tensor, Tensor, EventOverlap]:
        """Counts where the tokens go. Local, no exchange.

        Args:
            topk_idx: [T, K] int64 or int32, global expert ids, -1 for an unused slot.
            num_experts: E.
            previous_event: the call's work starts after it.
            async_finish: return an event instead of ordering the current stream.
            allocate_on_comm_stream: needs previous_event and async_finish; without effect here.

        Returns:
            num_tokens_per_rank int32 [W]; num_tokens_per_rdma_rank int32 [nodes of 8 ranks], None within one node;
            num_tokens_per_expert int32 [E], slots; is_token_in_rank bool [T, W]; the event.

        Raises:
            TypeError, ValueError: a dtype or shape; on the CPU also an id outside [-1, E). On CUDA, where nobody waits,
                such an id counts as -1, and the dispatch raises.
        """
        _wait_for(previous_event, async_finish, allocate_on_comm_stream)
        check_tensor(topk_idx, "topk_idx")
        check_topk(topk_idx, topk_idx, None)
        placement = self.placement(num_experts)
        world = placement.world_size
        if serves(topk_idx):
            per_rank, per_expert, in_rank_TW = counted_layout(topk_idx, placement, self.num_sms)
        else:
            per_rank, per_expert, in_rank_TW = _layout(topk_idx, placement)
        per_node = None
        if world > RANKS_PER_NODE:
            nodes = torch.split(in_rank_TW, RANKS_PER_NODE, dim=1)
            per_node = torch.stack([node.any(dim=1).sum() for node in nodes]).int()
        done = EventOverlap(EventHandle() if async_finish else None)
        return per_rank, per_node, per_expert, in_rank_TW, done

    # -- dispatch ---------------------------------------------------------------------------------------------------

    def dispatch(
        self,
        x: Rows,
        handle: DispatchHandle | None = None,
        num_tokens_per_rank: Tensor | None = None,
        num_tokens_per_rdma_rank: Tensor | None = None,
        is_token_in_rank: Tensor | None = None,
        num_tokens_per_expert: Tensor | None = None,
        topk_idx: Tensor | None = None,
        topk_weights: Tensor | None = None,
        expert_alignment: int = 1,
        num_worst_tokens: int = 0,
        config: Config | None = None,
        previous_event: EventOverlap | EventHandle | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[Rows, Tensor | None, Tensor | None, list[int] | None, DispatchHandle | None, EventOverlap]:
        """Sends each token once to every rank of its experts. Collective; for gradients use `moe_ep.dispatch`.

        Args:
            x: [T, H] in a row dtype, or (FP8 rows [T, H], scales [T, n] float32 or int32); any strides.
            handle: of an earlier dispatch with the same routing: sends new rows along it, without a count exchange;
                topk_idx and topk_weights must be None then.
            num_tokens_per_rank, num_tokens_per_rdma_rank, is_token_in_rank, num_tokens_per_expert: as
                `get_dispatch_layout` returned them; needed without a handle (the second may be None).
            topk_idx, topk_weights: [T, K] ids and float32 weights that travel along; both or neither.
            expert_alignment: the reported counts of each expert are rounded up to it; rows are not padded.
            num_worst_tokens: a fixed number of rows to hand out, without a host wait; needs topk_idx. Rows behind the
                last are zero, their scales 1.
            config: its number of SMs is the budget of this call; its chunk sizes have no meaning here.
            previous_event, async_finish, allocate_on_comm_stream: as in `get_dispatch_layout`.

        Returns:
            recv_x [S, H] (or rows and scales [S, n]), ascending in (source rank, source token); recv_topk_idx [S, K],
            local ids or -1; recv_topk_weights [S, K], 0 where the id is -1; L reported counts (empty with
            num_worst_tokens); the handle; the event. With a handle given, items 2 to 5 are None.

        Raises:
            TypeError, ValueError, ConfigError, EPTimeoutError: as `moe_ep.dispatch`, on every rank.
        """
        backend = self.backend
        if handle is None and not num_worst_tokens:
            backend.settle()
        try:
            if previous_event is not None or allocate_on_comm_stream:
                _wait_for(previous_event, async_finish, allocate_on_comm_stream)
            if faults := backend.take_faults():
                raise_faults(faults)
            rows, scales = _split(x)
            if handle is not None:
                self._check_cached(backend, handle, rows, topk_idx, topk_weights)
            else:
                layout = (num_tokens_per_rank, is_token_in_rank, num_tokens_per_expert)
                request = self._request(rows, layout, topk_idx, topk_weights, expert_alignment, num_worst_tokens)
        except (TypeError, ValueError, RuntimeError) as error:
            backend.refuse("dispatch", error)
        if config is not None:
            backend.num_sms = max(1, config.num_sms)
        backend.joins_stream = not async_finish
        try:
            if handle is not None:
                backend.open_dispatch(handle, rows)
                moved = (
                    backend.dispatch(handle, rows) if scales is None else backend.dispatch_scaled(handle, rows, scales)
                )
                return moved, None, None, None, None, _end(backend, async_finish)
            plan, recv_rows, recv_scales = backend.plan_and_dispatch(request, scales)
            received = recv_rows if recv_scales is None else (recv_rows, recv_scales)
            if topk_idx is not None:
                counts = plan.tokens_per_expert or []
                return received, plan.row_idx, plan.row_weights, counts, plan.handle, _end(backend, async_finish)
            assert num_tokens_per_expert is not None
            counts = backend.exchange_counts(num_tokens_per_expert, request.placement)
            counts = [-(-count // expert_alignment) * expert_alignment for count in counts]
            return received, None, None, counts, plan.handle, _end(backend, async_finish)
        finally:
            backend.joins_stream = True

    def _request(
        self,
        rows: Tensor,
        layout: Sequence[Tensor | None],
        topk_idx: Tensor | None,
        topk_weights: Tensor | None,
        expert_alignment: int,
        num_worst_tokens: int,
    ) -> DispatchRequest:
        per_rank, in_rank_TW, per_expert = layout
        if per_rank is None or in_rank_TW is None or per_expert is None:
            raise ValueError(
                "dispatch was given neither a handle nor num_tokens_per_rank, is_token_in_rank and "
                "num_tokens_per_expert; call get_dispatch_layout first and pass what it returns."
            )
        if (topk_idx is None) != (topk_weights is None):
            raise ValueError("topk_idx and topk_weights belong together; give both or neither.")
        check_int(expert_alignment, "expert_alignment")
        check_int(num_worst_tokens, "num_worst_tokens")
        if expert_alignment < 1 or num_worst_tokens < 0:
            raise ValueError(
                f"expert_alignment is {expert_alignment} and num_worst_tokens {num_worst_tokens}; they must be at "
                "least 1 and 0."
            )
        placement = self.placement(per_expert.numel())
        check_padding(expert_alignment, placement)
        if topk_idx is None:
            if num_worst_tokens:
                raise ValueError("num_worst_tokens needs topk_idx and topk_weights; give them, or leave it 0.")
            topk_idx = _one_expert_a_rank(in_rank_TW, placement, rows)
        else:
            check_topk(rows, topk_idx, topk_weights)
        if topk_weights is not None:
            topk_weights = as_weights(topk_weights.detach(), torch.float32, "topk_weights")
        return DispatchRequest(
            x=rows,
            topk_idx=topk_idx,
            topk_weights=topk_weights,
            placement=placement,
            layout="compact",
            alignment=expert_alignment,
            max_rows=num_worst_tokens or None,
            num_channels=self.num_channels,
            x_needs_grad=False,
            weights_need_grad=False,
        )

    def _check_cached(
        self,
        backend: Backend,
        handle: DispatchHandle,
        rows: Tensor,
        topk_idx: Tensor | None,
        topk_weights: Tensor | None,
    ) -> None:
        self._check_compact(backend, handle)
        if topk_idx is not None or topk_weights is not None:
            raise ValueError("dispatch was given a handle and topk_idx or topk_weights; a handle holds the routing.")
        if rows.device != handle.send_token.device:
            _check_device(rows, handle.send_token.device, "x")
        if rows.shape[0] != handle.num_tokens:
            raise ValueError(
                f"x has {rows.shape[0]} rows, but the handle was made for {handle.num_tokens} tokens; give as many."
            )

    def _check_compact(self, backend: Backend, handle: DispatchHandle) -> None:
        check_handle(handle, backend.ranks, backend.rank, self.placement)
        if handle.layout != "compact":
            raise ValueError(
                f"the handle has layout {handle.layout!r}; Buffer.dispatch and Buffer.combine work on compact rows. "
                "Use moe_ep.combine for it."
            )

    # -- combine ----------------------------------------------------------------------------------------------------

    def combine(
        self,
        x: Tensor,
        handle: DispatchHandle,
        topk_weights: Tensor | None = None,
        bias: Tensor | tuple[Tensor, Tensor] | None = None,
        config: Config | None = None,
        previous_event: EventOverlap | EventHandle | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[Tensor, Tensor | None, EventOverlap]:
        """Brings rows home and adds them up; never multiplies. Collective; for gradients use `moe_ep.combine`.

        Sums are in float32 (float64 for float64 rows): bias_0, bias_1, then the ranks ascending, rounded once.

        Args:
            x: [S, H], as many rows as the dispatch gave, in a row dtype.
            handle: of that dispatch.
            topk_weights: [S, K] float32 that are summed alongside over the ranks, or None. Slots that are not local
                must hold 0, as `dispatch` returned them.
            bias: one or two tensors [T, H] in the dtype of x, or None.
            config, previous_event, async_finish, allocate_on_comm_stream: as in `dispatch`.

        Returns:
            combined_x [T, H]; combined_topk_weights [T, K] float32 or None; the event.

        Raises:
            TypeError, ValueError, ConfigError, EPTimeoutError: as `moe_ep.combine`, on every rank.
        """
        backend = self.backend
        try:
            if previous_event is not None or allocate_on_comm_stream:
                _wait_for(previous_event, async_finish, allocate_on_comm_stream)
            if faults := backend.take_faults():
                raise_faults(faults)
            self._check_compact(backend, handle)
            check_combine(handle, x, None, exact=False)
            biases = () if bias is None else _biases(bias, x, handle)
            x = x.detach() if x.requires_grad else x
            weights = None if topk_weights is None else _row_weights(topk_weights, handle)
        except (TypeError, ValueError, RuntimeError) as error:
            backend.refuse("combine", error, num_parts=1 if topk_weights is None else 2)
        if config is not None:
            backend.num_sms = max(1, config.num_sms)
        backend.joins_stream = not async_finish
        try:
            backend.open_combine(handle, x, weights, exact=False, needs_grad=False)
            combined = backend.combine(handle, x, None, exact=False, bias=biases)
            summed = None if weights is None else backend.sum_weights(handle, weights)
            return combined, summed, _end(backend, async_finish)
        finally:
            backend.joins_stream = True

    # -- recommendations --------------------------------------------------------------------------------------------

    @classmethod
    def get_dispatch_config(cls, num_ranks: int) -> Config:
        """DeepEP V1's recommended `Config` for dispatch over `num_ranks` ranks, with the class-wide number of SMs."""
        return recommended_dispatch_config(num_ranks, cls._default_num_sms)

    @classmethod
    def get_combine_config(cls, num_ranks: int) -> Config:
        """DeepEP V1's recommended `Config` for combine over `num_ranks` ranks, with the class-wide number of SMs."""
        return recommended_combine_config(num_ranks, cls._default_num_sms)

    @staticmethod
    def capture() -> EventOverlap:
        """An event that marks what the current stream has been given so far."""
        return EventOverlap(EventHandle())


def _wait_for(previous: EventOverlap | EventHandle | None, async_finish: bool, allocate_on_comm_stream: bool) -> None:
    """Makes the current stream wait for the previous event.

    Raises:
        ValueError: allocate_on_comm_stream without a previous event and async_finish.
    """
    if allocate_on_comm_stream and (previous is None or not async_finish):
        raise ValueError(
            "allocate_on_comm_stream=True was given without previous_event and async_finish=True; give both, or leave "
            "it out."
        )
    if previous is not None and not (isinstance(previous, EventOverlap) and previous.event is None):
        previous.current_stream_wait()


def _end(backend: Backend, async_finish: bool) -> EventOverlap:
    """What marks the end of the calls that were made; without `async_finish` the current stream waits for it."""
    return EventOverlap(EventHandle(backend.stream) if async_finish else None)


def _layout(topk_idx: Tensor, placement: ExpertPlacement) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens per rank [W] int32, slots per expert [E] int32, and which token goes where [T, W] bool."""
    num_experts = placement.num_experts
    bad = find_bad_id(topk_idx, num_experts)
    if bad is not None:
        raise ValueError(f"topk_idx[{bad[0]}, {bad[1]}] is {bad[2]}; an id must lie in [-1, {num_experts}).")
    slot_rank = send_layout(topk_idx, placement).slot_rank
    in_rank_TW = torch.stack([(slot_rank == rank).any(dim=1) for rank in range(placement.world_size)], dim=1)
    used = topk_idx[topk_idx >= 0].long()
    per_expert = torch.bincount(used, minlength=num_experts).int()
    return in_rank_TW.sum(dim=0).int(), per_expert, in_rank_TW


def _split(x: Rows) -> tuple[Tensor, Tensor | None]:
    """Rows and scales of what `Buffer.dispatch` takes as x, checked."""
    if not isinstance(x, tuple):
        check_rows(x, "x")
        return x.detach() if x.requires_grad else x, None
    if len(x) != 2:
        raise ValueError(f"x is a tuple of {len(x)}; give (FP8 rows, scales).")
    rows, scales = x
    check_tensor(rows, "x[0]")
    check_tensor(scales, "x[1]")
    if rows.element_size() != 1 or rows.dtype == torch.bool or rows.dim() != 2:
        raise TypeError(f"x[0] is {rows.dtype} of shape {list(rows.shape)}; FP8 rows are [T, H] in a one-byte dtype.")
    if scales.dtype not in (torch.float32, torch.int32) or scales.dim() != 2 or scales.shape[0] != rows.shape[0]:
        raise TypeError(
            f"x[1] is {scales.dtype} of shape {list(scales.shape)}; scales are float32 or int32 [T, n] with "
            f"T = {rows.shape[0]}."
        )
    _check_device(scales, rows.device, "x[1]")
    return rows.detach(), scales.detach()


def _check_device(tensor: Tensor, device: torch.device, name: str) -> None:
    if tensor.device != device:
        raise ValueError(f"{name} is on {tensor.device}; it must be on {device}, where the rest of the call is.")


def _one_expert_a_rank(in_rank_TW: Tensor, placement: ExpertPlacement, rows: Tensor) -> Tensor:
    """[T, W] ids that route as `is_token_in_rank` says: the first expert of each rank, or -1."""
    check_tensor(in_rank_TW, "is_token_in_rank")
    if in_rank_TW.dtype != torch.bool or in_rank_TW.shape != (rows.shape[0], placement.world_size):
        raise ValueError(
            f"is_token_in_rank is {in_rank_TW.dtype} of shape {list(in_rank_TW.shape)}; it must be bool "
            f"[{rows.shape[0]}, {placement.world_size}], a row for each of x."
        )
    _check_device(in_rank_TW, rows.device, "is_token_in_rank")
    first = [(placement.experts_of(rank) or (-1,))[0] for rank in range(placement.world_size)]
    empty = [rank for rank, expert in enumerate(first) if expert < 0]
    if empty and bool(in_rank_TW[:, empty].any()):
        raise ValueError(f"is_token_in_rank sends tokens to rank {empty[0]}, which owns no expert.")
    ids = torch.tensor(first, device=in_rank_TW.device)
    return torch.where(in_rank_TW, ids, -1)


def _biases(bias: Tensor | tuple[Tensor, Tensor], x: Tensor, handle: DispatchHandle) -> tuple[Tensor, ...]:
    biases = bias if isinstance(bias, tuple) else (bias,)
    for tensor in biases:
        check_tensor(tensor, "bias")
        _check_device(tensor, x.device, "bias")
        if tensor.shape != (handle.num_tokens, x.shape[1]) or tensor.dtype != x.dtype:
            raise ValueError(
                f"bias is {tensor.dtype} of shape {list(tensor.shape)}; it must be {x.dtype} "
                f"[{handle.num_tokens}, {x.shape[1]}]."
            )
    return tuple(tensor.detach() for tensor in biases)


def _row_weights(weights: Tensor, handle: DispatchHandle) -> Tensor:
    check_tensor(weights, "topk_weights")
    _check_device(weights, handle.send_token.device, "topk_weights")
    if weights.dtype not in ROW_DTYPES or weights.shape != (handle.num_rows, handle.num_topk):
        raise ValueError(
            f"topk_weights is {weights.dtype} of shape {list(weights.shape)}; it must be float32 "
            f"[{handle.num_rows}, {handle.num_topk}]."
        )
    return weights.detach().float()
