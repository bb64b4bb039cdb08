"""The low-latency calls where kernels serve them: checks that read nothing of the device, launches, hooks.

Letters as in `moe_ep.low_latency.mode`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from moe_ep.backends.node_low_latency import NodeLowLatency
from moe_ep.errors import EPTimeoutError
from moe_ep.event import EventHandle, EventOverlap
from moe_ep.low_latency.checks import (
    CALLS,
    check_async,
    check_combine,
    check_request,
    check_stats,
    row_format_of,
    slot_weights,
)
from moe_ep.low_latency.layout import AS_GIVEN, CallShape, LowLatencyHandle, NodeRouting
from moe_ep.low_latency.state import LowLatencyState, ReceiveHook
from moe_ep.placement import ExpertPlacement

Hook = Callable[[], None]
Dispatched = tuple[Tensor | tuple[Tensor, Tensor], Tensor, LowLatencyHandle, EventOverlap, Hook | None]


@dataclass(frozen=True, eq=False)
class NodeCall:
    """How one call runs.

    Attributes:
        node: the kernels.
        state: of the buffer.
        check: raises the faults of earlier calls.
        async_finish, return_recv_hook: as the caller gave them.
    """

    node: NodeLowLatency
    state: LowLatencyState
    check: Callable[[], None]
    async_finish: bool
    return_recv_hook: bool

    def open(self, call: str) -> None:
        """Refuses what would wait for a hook that has not run, and tells nobody: that would wait for it too."""
        self.state.check_room(call)
        self.state.check_slot(call, self.node.num_calls)
        self.node.enable_shrink = self.state.enable_shrink
        self.node.is_waited_for = bool(self.state.in_flight())

    def refuse(self, call: str, error: Exception) -> None:
        """Tells the other ranks, whose call is given up; they hear of it at their next look."""
        if not isinstance(error, EPTimeoutError):
            self.node.refuse(call)

    def finish(
        self, call: str, receive: Callable[[], None], then: Callable[[], None] | None, handle: LowLatencyHandle | None
    ) -> tuple[EventOverlap, Hook | None]:
        """The event and the hook of a call that has begun; `then` completes what the kernels have written."""

        def complete() -> None:
            receive()
            if then is not None:
                then()

        if self.return_recv_hook:
            hook = ReceiveHook(call, complete, handle, self.node.num_calls - 1)
            self.state.hooks.append(hook)
            return EventOverlap(), hook
        if not self.async_finish:
            if then is not None:
                then()
            return EventOverlap(), None
        if then is not None:
            with torch.cuda.stream(self.node.own_stream):
                then()
        return EventOverlap(EventHandle(self.node.own_stream)), None


def dispatch_on_node(
    how: NodeCall,
    x: Tensor,
    topk_idx: Tensor,
    num_max: int,
    placement: Callable[[], ExpertPlacement],
    stats: tuple[Tensor | None, Tensor | None],
    fp8: tuple[bool, bool, bool],
) -> Dispatched:
    """`low_latency_dispatch`.

    Args:
        stats: cumulative_local_expert_recv_stats, dispatch_wait_recv_cost_stats.
        fp8: use_fp8, round_scale, use_ue8m0.
    """
    call, node = CALLS[0], how.node
    how.open(call)
    try:
        how.check()
        check_async(how.async_finish, how.return_recv_hook)
        request = check_request(x, topk_idx, num_max, placement(), row_format := row_format_of(*fp8))
        node.check_device(x, topk_idx)
        num_local = len(request.placement.experts_of(node.rank))
        for name, tensor, size, dtype in (
            ("cumulative_local_expert_recv_stats", stats[0], num_local, "int32"),
            ("dispatch_wait_recv_cost_stats", stats[1], node.world, "int64"),
        ):
            check_stats(tensor, name, size, dtype, node.device)
        shape = CallShape(x.shape[1], topk_idx.shape[1], num_max, row_format, x.dtype, request.placement)
        node.check(shape)
    except (TypeError, ValueError, RuntimeError) as error:
        how.refuse(call, error)
        raise
    out, pending = node.dispatch(shape, request.x, topk_idx, stats[0], stats[1], how.return_recv_hook, how.async_finish)
    handle = LowLatencyHandle(
        src_info=out.src_info,
        layout_range=out.layout_range,
        num_max_dispatch_tokens_per_rank=num_max,
        hidden=shape.hidden,
        num_experts=request.placement.num_experts,
        routing=out.routing,
        row_slot=torch.empty(0, dtype=torch.int64),
        topk_idx=topk_idx,
        dtype=shape.home_dtype if row_format != AS_GIVEN else x.dtype,
    )
    event, hook = how.finish(call, lambda: node.receive(pending), None, handle)
    received = out.recv if out.scales is None else (out.recv, out.scales)
    return received, out.recv_count, handle, event, hook


def combine_on_node(
    how: NodeCall,
    x: Tensor,
    topk_idx: Tensor,
    topk_weights: Tensor,
    handle: LowLatencyHandle,
    use_logfmt: bool,
    zero_copy: bool,
    out: Tensor | None,
    stats: Tensor | None,
    check_handle: Callable[[LowLatencyHandle], None],
    source_of: Callable[[Tensor, bool], Tensor],
) -> tuple[Tensor, EventOverlap, Hook | None]:
    """`low_latency_combine`; `source_of(x, zero_copy)` is the tensor that is read."""
    call, node = CALLS[1], how.node
    how.open(call)
    try:
        how.check()
        check_async(how.async_finish, how.return_recv_hook)
        check_handle(handle)
        check_combine(handle, x, topk_idx, out, use_logfmt)
        source = source_of(x.detach(), zero_copy)
        weights = slot_weights(topk_weights, topk_idx)
        check_stats(stats, "combine_wait_recv_cost_stats", node.world, "int64", node.device)
        node.check_device(source, weights)
    except (TypeError, ValueError, RuntimeError) as error:
        how.refuse(call, error)
        raise
    routing = handle.routing
    assert isinstance(routing, NodeRouting)
    combined = source.new_empty(routing.num_tokens, handle.hidden) if out is None else out
    fits = combined.is_contiguous() and combined.data_ptr() % 16 == 0
    sums = combined if fits else torch.empty(combined.shape, dtype=combined.dtype, device=combined.device)
    pending = node.combine(routing, source, weights, sums, stats, how.return_recv_hook, how.async_finish)
    if zero_copy:
        how.state.combine_buffer = None

    def copy_out() -> None:
        combined.copy_(sums)

    event, hook = how.finish(call, lambda: node.receive(pending), None if fits else copy_out, None)
    return combined, event, hook
