"""The backend between nodes on kernels: rails over CUDA IPC or NVSHMEM, and the exchange inside a node.

Every call is opened on the device, where all ranks come to one verdict (`moe_ep.backends.node_legs.NodeLegs.open`). A
call along a handle is kernels alone from there on, `moe_ep.backends.two_hop_calls`: one that some rank refuses fills
its outputs with NaN, and `take_faults` says why. What goes on on the host waits for the verdict: who sends what is
worked out as `moe_ep.backends.internode` does it, on the device, by collectives that go through the host, once for a
handle; and the rows of an `exact` combine, which has no kernels here, go through the host as well.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from moe_ep._native import require
from moe_ep.backends.base import DispatchPlan, DispatchRequest
from moe_ep.backends.header import OPERATIONS, Header, dtype_number, status_of
from moe_ep.backends.internode import InternodeBackend
from moe_ep.backends.internode_low_latency import InternodeLowLatency, most_ranks
from moe_ep.backends.node_legs import NodeLegs
from moe_ep.backends.node_low_latency import NodeLowLatency
from moe_ep.backends.node_rows import aligned
from moe_ep.backends.rail_memory import Hop, RailMemory
from moe_ep.backends.rail_routes import RailRoutes, rail_routes
from moe_ep.backends.rounds import most_rows, rounds_of
from moe_ep.backends.rows import resize
from moe_ep.backends.two_hop import TwoHopRoute
from moe_ep.backends.two_hop_calls import TwoHopCalls
from moe_ep.errors import EPTimeoutError
from moe_ep.handle import LAYOUTS, DispatchHandle
from moe_ep.ordered_sum import accumulation_dtype
from moe_ep.topology import Topology

STAGING_BYTES = 256 << 20  # of a rank's rail, whatever the calls need
OVERLAPPING_ROUNDS, MIN_ROUND_TOKENS = 4, 512  # of a call with many tokens
_ROUNDS, _NOT_HERE = "internode/rounds", "internode/not-here"  # under which a handle keeps them


class _Beside(NamedTuple):
    """Weights that are summed behind the rows of a combine, as a part of it: number of their dtype; bytes of a row, or
    of its weights where those are more.
    """

    dtype: int
    widest_bytes: int


class InternodeKernelsBackend(InternodeBackend):
    """See `moe_ep.backends.base.Backend`.

    Args:
        group: the EP group, or None for a single rank. The ranks of a node reach each other's GPU memory
            (`moe_ep.backends.node_memory.why_unavailable`).
        timeout_secs: limit of every wait.
        topology: the nodes.
        hop: what carries rows between nodes.
    """

    def __init__(self, group: dist.ProcessGroup | None, timeout_secs: float, topology: Topology, hop: Hop) -> None:
        super().__init__(group, timeout_secs, topology, on_host=True)
        kernels = require()
        here = topology.ranks_of(self._node)
        self._legs = NodeLegs(group, timeout_secs, range(here.start, here.stop))
        self.rail = None
        if topology.num_nodes > 1 and group is not None:
            self.rail = RailMemory(group, topology, hop, self._legs, kernels, STAGING_BYTES, timeout_secs)
            self._legs.tell_reasons(self.rail)
        self._calls = TwoHopCalls(self._legs, self.rail, kernels)
        self._kernels, self.hop = kernels, str(hop)
        self._beside: _Beside | None = None
        self._low_latency: InternodeLowLatency | None = None
        if len(self.ranks) <= most_ranks(kernels, topology.num_nodes, hop):
            every = (group, topology, hop, kernels, self._legs, self.rail, timeout_secs)
            self._low_latency = InternodeLowLatency(*every)

    @property
    def device(self) -> torch.device:
        """That of the kernels, whichever is current."""
        return self._legs.device

    @property
    def stream(self) -> torch.cuda.Stream:  # type: ignore[override]
        """The stream on which calls end."""
        return self._calls.stream

    @property
    def low_latency(self) -> NodeLowLatency | None:
        """None where the group has more ranks than the kernels take: those go through the host."""
        return None if self._low_latency is None else self._low_latency.calls

    # -- dispatch ---------------------------------------------------------------------------------------------------

    def plan(self, request: DispatchRequest) -> DispatchPlan:
        self._legs.must_not_capture("dispatch")
        self._check_rows("dispatch", request.x)
        self._calls.agree(_header("dispatch"))
        plan = super().plan(request)
        with self._agreement.committed("dispatch"):
            if request.layout == "compact":
                plan.handle.prepared[_NOT_HERE] = plan.row_idx < 0
            # Combine's rows may be wider than FP8 ones: their rounds serve both.
            self._make_rounds(plan.handle, max(_row_bytes(request.x), 2 * request.x.shape[1]))
        return plan

    def open_dispatch(self, handle: DispatchHandle, x: Tensor) -> None:
        """No exchange: the header travels in front of the rows."""
        self._check_rows("cached dispatch", x)

    def dispatch(self, handle: DispatchHandle, x: Tensor) -> Tensor:
        return self._move(handle, "cached dispatch", x)[0]

    def dispatch_scaled(self, handle: DispatchHandle, x: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
        rows, row_scales, _ = self._move(handle, "cached dispatch", x, scales)
        assert row_scales is not None
        return rows, row_scales

    def dispatch_backward(
        self, handle: DispatchHandle, grad_rows: Tensor, grad_row_weights: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None]:
        grad_x = grad_weights = None
        if not handle.weights_need_grad:
            grad_row_weights = None
        widest_bytes, opens = 0, True
        if handle.x_needs_grad:
            self._check_rows("dispatch backward", grad_rows)
            if grad_row_weights is not None:
                widest_bytes, opens = _widest(handle, grad_rows, grad_row_weights), False
            header = _header("dispatch backward", handle, grad_rows)
            grad_x = self._bring_home(handle, header, grad_rows, None, widest_bytes=widest_bytes)
        if grad_row_weights is not None:
            grad_weights = self._gather_weights(handle, grad_row_weights, opens, widest_bytes)
        return grad_x, grad_weights

    def _gather_weights(
        self, handle: DispatchHandle, grad_row_weights: Tensor, opens: bool = True, widest_bytes: int = 0
    ) -> Tensor:
        """Each slot has one term, so a sum of rows of K numbers brings them home; -0 leaves every term as it is."""
        num_topk, wide = handle.num_topk, accumulation_dtype(grad_row_weights.dtype)
        numbers = grad_row_weights.to(wide)
        if handle.layout == "compact":
            if _NOT_HERE not in handle.prepared:
                self._prepare(_header("dispatch backward", handle, numbers), handle, _row_bytes(numbers))
            not_here: Tensor = handle.prepared[_NOT_HERE]
            self._legs.hold_for_graph(not_here)
            terms_RK = numbers.masked_fill(not_here, -0.0)
        else:
            slot_R = (handle.row_pair % num_topk).unsqueeze(1)
            terms_RK = numbers.new_full((handle.num_rows, num_topk), -0.0).scatter_(1, slot_R, numbers.unsqueeze(1))
        header = _header("dispatch backward", handle, terms_RK)
        came_TK = self._bring_home(handle, header, terms_RK, None, (), opens, widest_bytes)
        return came_TK.masked_fill(handle.slot_rank < 0, 0).to(grad_row_weights.dtype)

    # -- combine ----------------------------------------------------------------------------------------------------

    def open_combine(
        self, handle: DispatchHandle, rows: Tensor, weights: Tensor | None, exact: bool, needs_grad: bool
    ) -> bool:
        """Nobody waits for the others' wishes here: all ranks join the backward where gradients are enabled."""
        self._check_rows("combine", rows)
        self._beside = None
        if weights is not None and handle.layout == "compact" and not exact:
            self._beside = _Beside(dtype_number(weights.dtype), _widest(handle, rows, weights))
        return torch.is_grad_enabled()

    def combine(
        self,
        handle: DispatchHandle,
        rows: Tensor,
        weights: Tensor | None,
        exact: bool,
        bias: Sequence[Tensor] = (),
    ) -> Tensor:
        beside, self._beside = self._beside, None
        if not exact:
            header = _header("combine", handle, rows, weights)
            if beside is None:
                return self._bring_home(handle, header, rows, weights, bias)
            header = replace(header, weights_dtype=beside.dtype)
            y = self._bring_home(handle, header, rows, weights, bias, widest_bytes=beside.widest_bytes)
            self._beside = beside
            return y
        self._legs.must_not_capture("an exact combine between nodes")
        self._calls.agree(_header("combine", handle, rows, weights, exact=True))
        super().open_combine(handle, rows, weights, exact, needs_grad=False)  # makes a route where a rank has none
        return super().combine(handle, rows, weights, exact, bias)

    def sum_weights(self, handle: DispatchHandle, weights: Tensor) -> Tensor:
        """Where `open_combine` was told of them, a part of the combine before."""
        beside, self._beside = self._beside, None
        header = _header("combine", handle, weights)
        if beside is None:
            return self._bring_home(handle, header, weights, None)
        return self._bring_home(handle, header, weights, None, (), False, beside.widest_bytes)

    def _bring_home(
        self,
        handle: DispatchHandle,
        header: Header,
        rows: Tensor,
        weights: Tensor | None,
        bias: Sequence[Tensor] = (),
        opens: bool = True,
        widest_bytes: int = 0,
    ) -> Tensor:
        """Both parts of a call of two, of which the second does not open it, give the bytes of the wider rows."""
        routes = self._prepare(header, handle, max(_row_bytes(rows), widest_bytes))
        self._calls.num_sms = self.num_sms
        factors = None if weights is None else weights.to(accumulation_dtype(rows.dtype)).contiguous()
        self._count(routes.homeward.num_crossing, _row_bytes(rows))
        return self._calls.combine(routes, header, rows, factors, bias, self.joins_stream, opens, widest_bytes)

    def combine_backward(
        self, handle: DispatchHandle, grad_y: Tensor, rows: Tensor | None, weights: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        self._check_rows("combine backward", grad_y)
        factors = None if weights is None else weights.to(accumulation_dtype(grad_y.dtype)).contiguous()
        made = None if rows is None else aligned(rows).contiguous()
        grad_rows, _, grad_weights = self._move(handle, "combine backward", grad_y, None, factors, made)
        return grad_rows, None if grad_weights is None or weights is None else grad_weights.to(weights.dtype)

    # -- the group --------------------------------------------------------------------------------------------------

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Through the host, as the plans' collectives."""
        self._legs.must_not_capture("all_reduce between nodes")
        number = dtype_number(tensor.dtype)
        self._calls.agree(Header(operation=OPERATIONS.index("all_reduce"), hidden=tensor.numel(), dtype=number))
        return super().all_reduce(tensor)

    def refuse(self, operation: str, error: Exception, num_parts: int = 1) -> NoReturn:
        """One opening stands for all parts of a call."""
        # Inside a capture nothing runs that could tell the others; their replays will find this rank missing.
        if isinstance(error, EPTimeoutError) or self._legs.is_closed or torch.cuda.is_current_stream_capturing():
            raise error
        self._calls.refuse(_header(operation), status_of(error), error)

    def take_faults(self) -> list[str]:
        try:
            of_calls = [*super().take_faults(), *self._legs.take_faults()]
            return of_calls if self._low_latency is None else [*of_calls, *self._low_latency.take_faults()]
        except EPTimeoutError as error:
            if self._group is not None:
                self._group.break_off(str(error))
            raise

    def reset(self) -> None:
        if self._low_latency is not None:
            self._low_latency.clear()
        self._calls.settle()  # before the ranks meet: what comes later would come into the new generation
        super().reset()
        self._legs.reset()
        if self._low_latency is not None:
            self._low_latency.reset()
        if self.rail is not None and self._group is not None:
            self.rail.begin(f"reset/{self._group.generation}")

    def close(self) -> None:
        super().close()
        if self._low_latency is not None:
            self._low_latency.close()
        self._calls.close()
        self._legs.close()
        if self.rail is not None and self.rail.close(self._calls.stream) and self._low_latency is not None:
            self._low_latency.give_back()

    # -- calls ------------------------------------------------------------------------------------------------------

    @property
    def _flow_bytes(self) -> int:
        """Room of the rail for what goes from one node to another in a round; 0 where there is one node."""
        return 0 if self.rail is None else self.rail.flow_bytes

    def _check_rows(self, operation: str, rows: Tensor) -> None:
        self._legs.raise_if_dead(operation)
        device, limit = self._legs.device, self._flow_bytes
        if rows.device != device:
            error = ValueError(
                f"the rows are on {rows.device}, but this buffer's kernels run on {device}; move them there, or use "
                "hop='torch'."
            )
            self.refuse(operation, error)
        if limit and rows.shape[1] * 8 + 32 > limit:
            error = ValueError(
                f"a row has {_row_bytes(rows)} bytes, but a rail between {self.topology.num_nodes} nodes has room for "
                f"{limit} from each; use fewer nodes, or hop='torch'."
            )
            self.refuse(operation, error)

    def _move(
        self,
        handle: DispatchHandle,
        operation: str,
        x: Tensor,
        scales: Tensor | None = None,
        weights: Tensor | None = None,
        made_rows: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        row_bytes, header = _row_bytes(x) + (0 if scales is None else _row_bytes(scales)), _header(operation, handle, x)
        routes = self._prepare(header, handle, row_bytes)
        self._calls.num_sms = self.num_sms
        self._count(routes.outward.num_crossing, row_bytes)
        return self._calls.move(routes, header, x, scales, weights, made_rows, self.joins_stream)

    def _count(self, num_rows: int, row_bytes: int) -> None:
        self.crossings.num_rows += num_rows
        self.crossings.num_bytes += num_rows * row_bytes

    # -- the way of a handle ------------------------------------------------------------------------------------------

    def _prepare(self, header: Header, handle: DispatchHandle, row_bytes: int) -> RailRoutes:
        """Rounds for rows of so many bytes: of an earlier call if they fit.

        Else new ones, and for a copy of the handle its way as well: an exchange of its own, on the host.
        """
        routes = self._rounds_of(handle, row_bytes)
        if routes is not None:
            return routes
        operation = OPERATIONS[header.operation]
        self._legs.must_not_capture("the first call along a handle")
        self._calls.agree(replace(header, on_host=1))
        with self._agreement.committed(operation):
            if self._route_name not in handle.prepared:
                self._make_route(handle, operation)
            if handle.layout == "compact" and _NOT_HERE not in handle.prepared:
                handle.prepared[_NOT_HERE] = self._not_here(handle)
            return self._make_rounds(handle, row_bytes)

    def _not_here(self, handle: DispatchHandle) -> Tensor:
        """[R, K] of compact rows: the slots whose expert is not on this rank. Collective."""
        route = self._route(handle)
        relayed = route.slot_rank.index_select(0, route.relay_row)
        came_SK = self._within(relayed, route.relay_sends, route.relay_recvs, "dispatch backward")
        mask = came_SK.index_select(0, route.compact_order) != self.rank
        return resize(mask.to(torch.uint8), handle.num_rows, 1).bool()

    def _rounds_of(self, handle: DispatchHandle, row_bytes: int) -> RailRoutes | None:
        limit = self._flow_bytes
        made: list[RailRoutes] = handle.prepared.get(_ROUNDS, [])
        return next((routes for routes in made if not limit or routes.flow_rows * row_bytes <= limit), None)

    def _make_rounds(self, handle: DispatchHandle, row_bytes: int) -> RailRoutes:
        """Collective."""
        two_hop, limit = self._route(handle), self._flow_bytes
        size, rows = max(1, *handle.rank_tokens), None
        if limit:
            size, room = overlapping(max(handle.rank_tokens)), 1 << (limit // row_bytes).bit_length() - 1
            if size > room:
                size, rows = self._longest_round(two_hop, size, room), room
        rounds = rounds_of(handle, two_hop, self.topology, size, partial(self._within, what="dispatch"), rows)
        made = rail_routes(handle, two_hop, rounds, self._node, self._kernels)
        handle.prepared.setdefault(_ROUNDS, []).append(made)
        return made

    def _longest_round(self, two_hop: TwoHopRoute, most: int, room: int) -> int:
        """The most tokens of a round, at most `most`, of which no rank sends more than `room` rows to a node."""
        sizes = [room << step for step in range((most // room).bit_length())]
        counts = [most_rows(two_hop.departures, self._node, size) for size in sizes]
        too_many = (torch.stack(counts) > room).long().cpu()
        if self._group is not None:
            self._group.all_reduce(too_many, "dispatch")
        return max(size for size, num in zip(sizes, too_many.tolist(), strict=True) if not num)


def overlapping(most_tokens: int) -> int:
    """Tokens of a round, a power of two, such that the hops of several rounds of a large call overlap."""
    even = max(MIN_ROUND_TOKENS, -(-most_tokens // OVERLAPPING_ROUNDS))
    return 1 << (even - 1).bit_length()


def _header(
    operation: str,
    handle: DispatchHandle | None = None,
    rows: Tensor | None = None,
    weights: Tensor | None = None,
    exact: bool = False,
) -> Header:
    """Of a call along a handle; or of one that says the rest on the host, or is refused."""
    number = OPERATIONS.index(operation)
    if handle is None or rows is None:
        return Header(operation=number)
    return Header(
        operation=number,
        handle=handle.uid,
        hidden=rows.shape[1],
        num_topk=handle.num_topk,
        num_experts=handle.num_experts,
        dtype=dtype_number(rows.dtype),
        weights_dtype=-1 if weights is None else dtype_number(weights.dtype),
        layout=LAYOUTS.index(handle.layout),
        alignment=handle.alignment,
        exact=exact,
        placement=handle.placement,
    )


def _row_bytes(rows: Tensor) -> int:
    """As they travel: a multiple of 16."""
    return -(-rows.shape[1] * rows.element_size() // 16) * 16


def _widest(handle: DispatchHandle, rows: Tensor, numbers: Tensor) -> int:
    """Bytes of a row, or of K numbers that come home beside it, as they travel."""
    return max(_row_bytes(rows), -(-handle.num_topk * accumulation_dtype(numbers.dtype).itemsize // 16) * 16)
