"""The low-latency mode of `Buffer` under DeepEP V1's names, arguments and return orders; not differentiable.

Two forms with the same results. Where the backend has kernels for them (`moe_ep.low_latency.node`), nothing waits on
the host. The portable form is here, which says what the results are and not how fast they come: the rows of a call
travel before it returns, and a hook only writes them to where the caller sees them. Row orders and sums are those of
`moe_ep.dispatch` with layout "expert_major" and of `moe_ep.combine` with `exact=True`.

Letters: T tokens of this rank, H hidden, K slots a token, E experts, L of them local, W ranks, M the most tokens of a
rank, N = W * M places an expert, R rows received, B = H / 128 scales a row.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import NoReturn, TypeVar

import torch
from torch import Tensor

from moe_ep.backends.base import Backend, DispatchPlan
from moe_ep.checks import check_handle, check_int, check_origin
from moe_ep.deep_ep_v1.config import low_latency_rdma_size_hint
from moe_ep.event import EventHandle, EventOverlap
from moe_ep.handle import DispatchHandle
from moe_ep.low_latency.checks import (
    CALLS,
    check_alike,
    check_async,
    check_combine,
    check_stats,
    low_latency_request,
    row_format_of,
    slot_weights,
    without_experts,
)
from moe_ep.low_latency.layout import (
    AS_GIVEN,
    LowLatencyHandle,
    NodeRouting,
    empty_scales,
    encode,
    places_of,
    put_rows,
    without_ranks,
)
from moe_ep.low_latency.node import NodeCall, combine_on_node, dispatch_on_node
from moe_ep.low_latency.state import LowLatencyState, ReceiveHook
from moe_ep.low_latency.survivors import among_the_living
from moe_ep.placement import ExpertPlacement

T = TypeVar("T")
Hook = Callable[[], None]
Received = Tensor | tuple[Tensor, Tensor]  # rows [L, N, H], or FP8 rows with their scales


class LowLatency(ABC):
    """`low_latency_dispatch`, `low_latency_combine` and what belongs to them in DeepEP V1's Buffer."""

    _low_latency: LowLatencyState

    @property
    @abstractmethod
    def backend(self) -> Backend: ...

    @property
    @abstractmethod
    def rank(self) -> int: ...

    @property
    @abstractmethod
    def group_size(self) -> int: ...

    @abstractmethod
    def placement(self, num_experts: int) -> ExpertPlacement: ...

    @abstractmethod
    def check(self) -> None: ...

    @abstractmethod
    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor: ...

    # -- dispatch ---------------------------------------------------------------------------------------------------

    def low_latency_dispatch(
        self,
        x: Tensor,
        topk_idx: Tensor,
        num_max_dispatch_tokens_per_rank: int,
        num_experts: int,
        cumulative_local_expert_recv_stats: Tensor | None = None,
        dispatch_wait_recv_cost_stats: Tensor | None = None,
        use_fp8: bool = True,
        round_scale: bool = False,
        use_ue8m0: bool = False,
        async_finish: bool = False,
        return_recv_hook: bool = False,
    ) -> tuple[Received, Tensor, LowLatencyHandle, EventOverlap, Hook | None]:
        """Sends every token to each of its experts, into fixed places. Collective over the buffer's group.

        A rank may send one expert at most M rows; that is more than T only if a token names an expert twice.

        Where the backend has kernels (intranode, and internode with another hop than "torch") nothing waits on the
        host, so ids cannot be refused at once: a bad id counts as -1 and rows above M are not sent, the sums of their
        tokens are NaN, and `check()` or the next call says so. Places without a row keep what memory held, results are
        unwritten until the hook runs, and a call that needs the place of the result two calls before it is refused
        while that one's hook has not run. If ranks disagree, or one refuses, all counts are 0, and `check()` says why.
        The first call of a size makes room and meets the other ranks; it cannot be captured. A call may fill its GPU,
        and waits for the other ranks: calls of two buffers on one GPU follow each other, on one stream, say. A rank
        that the others have left out leaves them out in turn when its own limit has passed;
        `low_latency_query_mask_buffer` shows it.

        Args:
            x: [T, H] bfloat16, any strides, T <= M. Without FP8 also float16 and float32.
            topk_idx: [T, K] int64 or int32, global expert ids, -1 for an unused slot. K in 1..64.
            num_max_dispatch_tokens_per_rank: M, the same on every rank; it sizes the result.
            num_experts: E.
            cumulative_local_expert_recv_stats: [L] int32, to which the rows of each local expert are added, or None.
            dispatch_wait_recv_cost_stats: [W] int64, to which microseconds of waiting are added, or None. This form
                waits for all peers at once, so every peer that takes part is charged the same; this rank itself is not.
            use_fp8: cast the rows to e4m3 with one scale per 128 elements, as `moe_ep.fp8` does, before they travel.
                H must be a multiple of 128.
            round_scale: round the scales up to powers of two. Without effect if not use_fp8.
            use_ue8m0: hand the scales out as exponent bytes, four to an int32; needs round_scale, and H a multiple of
                512. Without effect if not use_fp8.
            async_finish: return an event instead of ordering the current stream; not together with return_recv_hook.
            return_recv_hook: the results are zero, and scales 1, until the returned hook is called. At most two results
                may wait so. `reset()` and `close()` lose them. A call in a CUDA graph has its hook in one, and none
                waits while a graph is replayed: the host sees no replay, which would wait for the place of the result.

        Returns:
            recv: rows [L, N, H], an expert's packed from place 0 on in ascending (source rank, source token, slot), the
                places behind them zero. With FP8 a pair: rows as float8_e4m3fn, and scales [L, N, B] float32 or
                [L, N, B / 4] int32, stored so that the N of an expert are contiguous; 1 in the places without a row.
            recv_count: [L] int32, rows of each local expert.
            handle: for `low_latency_combine`; unpacks as src_info, layout_range, M, H, E.
            event: `EventOverlap`, with an event if async_finish.
            hook: completes the receive; None without return_recv_hook.

        Raises:
            TypeError, ValueError: a dtype, shape, id or number that cannot be served: on every rank, naming the rank.
            RuntimeError: a third result in flight, on every rank.
            ConfigError: the ranks disagree on M, the FP8 settings, H, K, E, dtype, placement or the order of calls.
            EPTimeoutError: a rank did not come within the buffer's `timeout_secs`; with enable_shrink the others go on
                without it instead, and only a rank that was left out gets this.
        """
        backend, state, call, num_max = self.backend, self._low_latency, CALLS[0], num_max_dispatch_tokens_per_rank
        if backend.low_latency is not None:
            stats = cumulative_local_expert_recv_stats, dispatch_wait_recv_cost_stats
            how = NodeCall(backend.low_latency, state, self.check, async_finish, return_recv_hook)
            fp8 = use_fp8, round_scale, use_ue8m0
            return dispatch_on_node(how, x, topk_idx, num_max, lambda: self.placement(num_experts), stats, fp8)
        try:
            self.check()
            state.check_room(call)
            check_async(async_finish, return_recv_hook)
            row_format = row_format_of(use_fp8, round_scale, use_ue8m0)
            request = low_latency_request(x, topk_idx, num_max, self.placement(num_experts), row_format)
            num_local = len(request.placement.experts_of(self.rank))
            check_stats(cumulative_local_expert_recv_stats, "cumulative_local_expert_recv_stats", num_local, "int32")
            check_stats(dispatch_wait_recv_cost_stats, "dispatch_wait_recv_cost_stats", self.group_size, "int64")
        except (TypeError, ValueError, RuntimeError) as error:
            self._refuse("dispatch", error)
        sent, sent_scales = encode(request.x, row_format)

        def exchange() -> tuple[list[int], DispatchPlan, Tensor, Tensor | None]:
            closed = self._agree(0, num_max, row_format, x.device)
            plan = backend.plan(replace(request, topk_idx=without_experts(topk_idx, request.placement, closed)))
            rows_RH = backend.dispatch(plan.handle, sent)
            return closed, plan, rows_RH, None if sent_scales is None else backend.dispatch(plan.handle, sent_scales)

        began = time.monotonic()
        closed, plan, rows_RH, scales_RB = self._among_the_living(exchange)
        self._charge(dispatch_wait_recv_cost_stats, time.monotonic() - began, closed)

        num_places, hidden = self.group_size * num_max, x.shape[1]
        places = places_of(plan.handle, plan.row_idx, plan.expert_counts, num_places)
        dtype = x.dtype if row_format == AS_GIVEN else torch.float8_e4m3fn
        recv = torch.zeros(num_local, num_places, hidden, dtype=dtype, device=x.device)
        scales = empty_scales(num_local, num_places, hidden, row_format, x.device)
        recv_count = torch.zeros_like(plan.expert_counts)
        handle = LowLatencyHandle(
            src_info=torch.zeros_like(places.src_info),
            layout_range=torch.zeros_like(places.layout_range),
            num_max_dispatch_tokens_per_rank=num_max,
            hidden=hidden,
            num_experts=num_experts,
            routing=plan.handle,
            row_slot=places.row_slot,
            topk_idx=topk_idx.clone(),
            dtype=x.dtype,
        )

        def write() -> None:
            put_rows(recv, places.row_slot, rows_RH)
            if scales_RB is not None:
                put_rows(scales, places.row_slot, scales_RB)
            recv_count.copy_(plan.expert_counts)
            handle.src_info.copy_(places.src_info)
            handle.layout_range.copy_(places.layout_range)
            if cumulative_local_expert_recv_stats is not None:
                cumulative_local_expert_recv_stats.add_(plan.expert_counts)

        event, hook = self._finish(call, write, handle, async_finish, return_recv_hook)
        return (recv if row_format == AS_GIVEN else (recv, scales)), recv_count, handle, event, hook

    # -- combine ----------------------------------------------------------------------------------------------------

    def low_latency_combine(
        self,
        x: Tensor,
        topk_idx: Tensor,
        topk_weights: Tensor,
        handle: LowLatencyHandle,
        use_logfmt: bool = False,
        zero_copy: bool = False,
        async_finish: bool = False,
        return_recv_hook: bool = False,
        out: Tensor | None = None,
        combine_wait_recv_cost_stats: Tensor | None = None,
    ) -> tuple[Tensor, EventOverlap, Hook | None]:
        """Brings the experts' rows home and adds them up, times their weights. Collective over the buffer's group.

        y[t] = sum over the slots k of weight[t, k] * row[t, k], in float32, in ascending k, each product rounded before
        it is added, the sum rounded once to the dtype of the rows. Unused slots and those of masked ranks are left out,
        whatever their weight; a token without any other is exactly 0.

        Args:
            x: [L, N, H] bfloat16, float16 or float32, rows in the places where dispatch put them; the others are not
                read.
            topk_idx: [T, K], the ids that the dispatch was given.
            topk_weights: [T, K] float32; float16 and bfloat16 are cast.
            handle: of the dispatch, whose hook has run.
            use_logfmt: DeepEP's 10-bit rows; refused, this version does not have them.
            zero_copy: read the tensor that `get_next_low_latency_combine_buffer` gave instead of x.
            async_finish, return_recv_hook: as in `low_latency_dispatch`.
            out: [T, H] in the dtype of x, any strides, into which the result is written; None for a new tensor.
            combine_wait_recv_cost_stats: [W] int64, as `dispatch_wait_recv_cost_stats` of the dispatch.

        Returns:
            The sums [T, H] in the dtype of x (`out` if given); the event; the hook, or None without return_recv_hook.

        Raises:
            TypeError, ValueError: an argument that does not fit, on every rank, naming the rank.
            RuntimeError: a third result in flight, a dispatch whose hook has not run, or zero_copy without a combine
                buffer, on every rank.
            ConfigError: the ranks combine different dispatches, or disagree on the dtype.
            EPTimeoutError: a rank did not come within the buffer's `timeout_secs`; with enable_shrink the others go on
                without it instead, and only a rank that was left out gets this.
        """
        backend, state, call = self.backend, self._low_latency, CALLS[1]
        if backend.low_latency is not None:
            how = NodeCall(backend.low_latency, state, self.check, async_finish, return_recv_hook)
            stats, checks = combine_wait_recv_cost_stats, (self._check_handle, self._combine_source)
            return combine_on_node(how, x, topk_idx, topk_weights, handle, use_logfmt, zero_copy, out, stats, *checks)
        try:
            self.check()
            state.check_room(call)
            check_async(async_finish, return_recv_hook)
            self._check_handle(handle)
            check_combine(handle, x, topk_idx, out, use_logfmt)
            source = self._combine_source(x.detach(), zero_copy)
            weights = slot_weights(topk_weights, topk_idx)
            check_stats(combine_wait_recv_cost_stats, "combine_wait_recv_cost_stats", self.group_size, "int64")
        except (TypeError, ValueError, RuntimeError) as error:
            self._refuse("combine", error)
        rows_RH = source.reshape(-1, handle.hidden).index_select(0, handle.row_slot)

        def exchange() -> tuple[list[int], Tensor]:
            closed = self._agree(1, handle.num_max_dispatch_tokens_per_rank, AS_GIVEN, x.device)
            assert isinstance(handle.routing, DispatchHandle)
            routing = without_ranks(handle.routing, closed)
            backend.open_combine(routing, rows_RH, weights, exact=True, needs_grad=False)
            # The weights are known at home only, the sum is one of weighted rows: they follow the tokens' way first.
            weights_RK = backend.dispatch(routing, weights)
            slot_R = torch.remainder(routing.row_pair, routing.num_topk)
            row_weights = weights_RK.gather(1, slot_R.unsqueeze(1))[:, 0]
            return closed, backend.combine(routing, rows_RH, row_weights, exact=True)

        began = time.monotonic()
        closed, sums_TH = self._among_the_living(exchange)
        self._charge(combine_wait_recv_cost_stats, time.monotonic() - began, closed)
        if zero_copy:
            state.combine_buffer = None
        combined = torch.zeros_like(sums_TH) if out is None else out

        def write() -> None:
            combined.copy_(sums_TH)

        event, hook = self._finish(call, write, None, async_finish, return_recv_hook)
        return combined, event, hook

    def get_next_low_latency_combine_buffer(self, handle: LowLatencyHandle) -> Tensor:
        """The tensor [L, N, H] that the next `low_latency_combine` with `zero_copy=True` reads. Local.

        bfloat16 after an FP8 dispatch, the dtype of the rows otherwise; zeros at first, or unwritten where kernels
        serve, which read every tensor where it lies. Until it is read, calls with
        handles of the same shape give the same tensor.

        Raises:
            TypeError, ValueError: a handle that does not fit this buffer.
        """
        self._check_handle(handle)
        state, device = self._low_latency, handle.src_info.device
        held = state.combine_buffer
        if held is None or (held.shape, held.dtype, held.device) != (handle.shape, handle.dtype, device):
            make = torch.zeros if self.backend.low_latency is None else torch.empty
            state.combine_buffer = held = make(handle.shape, dtype=handle.dtype, device=device)
        return held

    # -- buffer and mask --------------------------------------------------------------------------------------------

    def clean_low_latency_buffer(self, num_max_dispatch_tokens_per_rank: int, hidden: int, num_experts: int) -> None:
        """Checks its arguments; normal and low-latency calls may follow each other without any cleaning here.

        Args:
            num_max_dispatch_tokens_per_rank, hidden, num_experts: M, H and E of the calls that follow.

        Raises:
            TypeError, ValueError: a number below 1, or another number of experts than `expert_placement` places.
        """
        low_latency_rdma_size_hint(num_max_dispatch_tokens_per_rank, hidden, self.group_size, num_experts)
        self.placement(num_experts)

    def low_latency_update_mask_buffer(self, rank_to_mask: int, mask: bool = False) -> None:
        """Leaves a rank of the group out of the low-latency calls that follow, or (`mask=False`) takes it in again.

        Local: call it on every rank. Rows travel between two ranks only if neither has masked the other; a slot whose
        expert lies behind such a pair counts as unused, in dispatch and in combine, without renormalising weights. A
        masked rank still takes part in the calls.

        Args:
            rank_to_mask: place in the group.
            mask: True leaves it out.

        Raises:
            RuntimeError: the buffer was not constructed with enable_shrink=True.
            ValueError: no rank of the group.
        """
        self._low_latency.check_shrink("low_latency_update_mask_buffer")
        check_int(rank_to_mask, "rank_to_mask")
        if not 0 <= rank_to_mask < self.group_size:
            raise ValueError(f"rank_to_mask is {rank_to_mask}; the group has the ranks 0..{self.group_size - 1}.")
        if self.backend.low_latency is not None:
            self.backend.low_latency.set_masked(rank_to_mask, mask)
            return
        masked = self._low_latency.masked
        (masked.add if mask else masked.discard)(rank_to_mask)

    def low_latency_query_mask_buffer(self, mask_status: Tensor) -> None:
        """Writes 1 for each rank that is left out and 0 for the others into `mask_status`, [W] int32.

        Raises:
            RuntimeError: the buffer was not constructed with enable_shrink=True.
            TypeError, ValueError: another dtype or shape.
        """
        self._low_latency.check_shrink("low_latency_query_mask_buffer")
        check_stats(mask_status, "mask_status", self.group_size, "int32")
        if self.backend.low_latency is not None:
            mask_status.copy_(self.backend.low_latency.mask != 0)
            return
        left_out = self._left_out()
        mask_status.copy_(torch.tensor([rank in left_out for rank in range(self.group_size)]))

    def low_latency_clean_mask_buffer(self) -> None:
        """Takes every masked rank in again; one that did not come in time stays out until `reset()`. Local.

        Raises:
            RuntimeError: the buffer was not constructed with enable_shrink=True.
        """
        self._low_latency.check_shrink("low_latency_clean_mask_buffer")
        self._low_latency.masked.clear()
        if self.backend.low_latency is not None:
            self.backend.low_latency.unmask_all()

    @staticmethod
    def get_low_latency_rdma_size_hint(
        num_max_dispatch_tokens_per_rank: int, hidden: int, num_ranks: int, num_experts: int
    ) -> int:
        """Bytes of DeepEP V1's low-latency heap; see `moe_ep.deep_ep_v1.config.low_latency_rdma_size_hint`.

        Buffers of this package grow with need; the number limits nothing. The arguments are M, H, W
        (`num_max_dispatch_tokens_per_rank`, `hidden`, `num_ranks`) and E (`num_experts`).
        """
        return low_latency_rdma_size_hint(num_max_dispatch_tokens_per_rank, hidden, num_ranks, num_experts)

    # -- parts ------------------------------------------------------------------------------------------------------

    def _agree(self, call: int, num_max: int, row_format: int, device: torch.device) -> list[int]:
        """Compares this call with those of the other ranks; returns the ranks with which no rows are exchanged."""
        left_out, members = self._left_out(), self.backend.members
        own = [call, num_max, row_format, *(int(rank in left_out) for rank in range(self.group_size))]
        table = torch.zeros(self.group_size, len(own), dtype=torch.int64, device=device)
        table[self.rank] = torch.tensor(own)
        of_ranks = self.backend.all_reduce(table).tolist()
        check_alike(call, of_ranks, members)
        mask = [row[3:] for row in of_ranks]
        return [peer for peer in range(self.group_size) if mask[self.rank][peer] or mask[peer][self.rank]]

    def _left_out(self) -> set[int]:
        """The ranks that this one leaves out: masked, or lost."""
        return self._low_latency.masked | (set(range(self.group_size)) - set(self.backend.members))

    def _refuse(self, operation: str, error: Exception) -> NoReturn:
        self._among_the_living(lambda: self.backend.refuse(operation, error))
        raise error

    def _among_the_living(self, exchange: Callable[[], T]) -> T:
        """Runs the exchange of one call, without the ranks that are lost meanwhile where they may be left out."""
        state = self._low_latency
        if not state.enable_shrink:
            return exchange()
        state.num_calls += 1
        return among_the_living(self.backend, exchange, state.num_calls, self.empty((1,), torch.float32).zero_())

    def _charge(self, stats: Tensor | None, waited_secs: float, closed: Collection[int]) -> None:
        if stats is not None:
            peers = [rank for rank in range(self.group_size) if rank != self.rank and rank not in closed]
            stats[peers] += round(waited_secs * 1e6)

    def _finish(
        self,
        call: str,
        write: Callable[[], None],
        handle: LowLatencyHandle | None,
        async_finish: bool,
        return_recv_hook: bool,
    ) -> tuple[EventOverlap, Hook | None]:
        """The event and the hook of a call whose results `write` completes, now or in the hook."""
        if return_recv_hook:
            hook = ReceiveHook(call, write, handle)
            self._low_latency.hooks.append(hook)
            return EventOverlap(), hook
        write()
        return EventOverlap(EventHandle() if async_finish else None), None

    def _check_handle(self, handle: LowLatencyHandle) -> None:
        if not isinstance(handle, LowLatencyHandle):
            raise TypeError(f"handle is {type(handle).__name__}; give the handle that low_latency_dispatch returned.")
        origin = self.backend.ranks, self.backend.rank, self.placement
        if isinstance(handle.routing, NodeRouting) != (self.backend.low_latency is not None):
            raise ValueError(
                f"the handle was made by another kind of backend than {self.backend.name!r}, which this buffer runs "
                "on; combine with the buffer of the dispatch."
            )
        if isinstance(handle.routing, NodeRouting):
            check_origin(handle.routing, *origin)
        else:
            check_handle(handle.routing, *origin)
        if any(hook.handle is handle for hook in self._low_latency.in_flight()):
            raise RuntimeError("the hook of the dispatch that made this handle has not run; call it first.")
        if handle in self._low_latency.lost:
            raise RuntimeError(
                "the rows of the dispatch that made this handle were in flight when Buffer.reset() was called, and are "
                "lost; dispatch again."
            )

    def _combine_source(self, x: Tensor, zero_copy: bool) -> Tensor:
        """The tensor from which combine reads."""
        held = self._low_latency.combine_buffer
        if not zero_copy:
            return x
        if held is None:
            raise RuntimeError(
                "zero_copy=True was given, but no combine buffer waits; before each such combine, call "
                "get_next_low_latency_combine_buffer(handle) and write the rows into what it returns."
            )
        if (held.shape, held.dtype) != (x.shape, x.dtype):
            raise ValueError(
                f"x is {x.dtype} {list(x.shape)}, but the combine buffer is {held.dtype} {list(held.shape)}; with "
                "zero_copy=True both must be alike: ask for the buffer with the handle that is combined."
            )
        return held
