"""The backend inside a node: kernels that publish rows in memory which the other ranks read over NVLink.

csrc/intranode does the work, docs/protocol.md has the rules. Every call is one kernel on the buffer's own stream; only
a plan is two, and the host waits for the row counts of the first. Calls without a host wait cannot raise at once: they
fill their outputs with NaN, and `take_faults` says why.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from contextlib import suppress
from typing import NoReturn

import torch
from torch import Tensor

from moe_ep._native.arguments import address, dtype_name
from moe_ep.backends.base import DispatchPlan, DispatchRequest
from moe_ep.backends.combine_rounds import ONE_ROUND, rows_to_make_room_for
from moe_ep.backends.device_faults import GO
from moe_ep.backends.header import DTYPES, NUM_MATCH_WORDS, OK, OPERATIONS, Header, dtype_number, status_of
from moe_ep.backends.node_calls import NodeCalls
from moe_ep.backends.node_header import pack
from moe_ep.backends.node_low_latency import NodeLowLatency
from moe_ep.backends.node_low_latency_memory import IpcLowLatencyMemory
from moe_ep.backends.node_route import Route, route_of
from moe_ep.backends.node_rows import Load, aligned, kind_of, round_up
from moe_ep.backends.plan_tensors import PlanTensors
from moe_ep.errors import EPTimeoutError
from moe_ep.handle import LAYOUTS, DispatchHandle, Layout
from moe_ep.ordered_sum import accumulation_dtype
from moe_ep.placement import ExpertPlacement

_NUMBER_OF = {operation: number for number, operation in enumerate(OPERATIONS)}
_CACHED_DISPATCH = _NUMBER_OF["cached dispatch"]


class IntranodeBackend(NodeCalls):
    """See `moe_ep.backends.base.Backend`.

    Args:
        group: the EP group, or None for a single rank. Its ranks reach each other's GPU memory
            (`moe_ep.backends.node_memory.why_unavailable`).
        timeout_secs: limit of every wait.
        num_bytes: what the two slots of the segment hold at first, together.
    """

    name = "intranode"

    @functools.cached_property
    def low_latency(self) -> NodeLowLatency:
        rows = IpcLowLatencyMemory(self._memory, self._kernels)
        return NodeLowLatency(self._memory, rows, self._faults, self._device, self._stream)

    # -- dispatch ---------------------------------------------------------------------------------------------------

    def plan(self, request: DispatchRequest) -> DispatchPlan:
        tensors = self._tensors_of(request)
        try:
            self._lay_out(request, tensors)
        finally:
            self._join((tensors,))
        return tensors.plan(tensors.handle(joins=request.grad_enabled), self._exchange)

    def plan_and_dispatch(
        self, request: DispatchRequest, scales: Tensor | None
    ) -> tuple[DispatchPlan, Tensor, Tensor | None]:
        # Between the host's wait for the counts and the rows' launch the device may idle. So what can be made before
        # that wait is, and what is for the caller alone comes behind that launch, which joins the streams for all.
        tensors = self._tensors_of(request)
        load = Load(request.x, scales, self._memory)
        try:
            self._lay_out(request, tensors)
            rows, row_scales = self._move_along(tensors.route, load, tensors)
        except BaseException:
            self._join((tensors,))
            raise
        return tensors.plan(tensors.handle(joins=request.grad_enabled), self._exchange), rows, row_scales

    def _tensors_of(self, request: DispatchRequest) -> PlanTensors:
        if request.x.device != self._device:
            self._refuse_device("dispatch", request.x)
        self._check_experts(request.placement)
        if request.max_rows is None:
            self._must_not_capture("dispatch")
        return PlanTensors(self._kernels, request, self.ranks, self.rank)

    def _lay_out(self, request: DispatchRequest, tensors: PlanTensors) -> None:
        """Starts both kernels of a plan, and makes its route; the caller has to `_join`."""
        header = _plan_header(request, tensors.published_bytes)
        if request.max_rows is None:
            self._lay_out_counted(request, tensors, header)
        else:
            tensors.allocate()
            self._start_plan(tensors, header, 0)

    def _lay_out_counted(self, request: DispatchRequest, tensors: PlanTensors, header: bytes) -> None:
        """Both kernels of a plan, and the host's wait for the first.

        The second has as much room as is likely to be enough, and is started again where it was not.
        """
        self.settle()
        tensors.expect()
        while True:
            question = next(self._questions)
            uid = self._start_plan(tensors, header, question)
            verdict, _, _, _, counts = self._ask("dispatch", question, request)
            if verdict == GO:
                break
            self._grow()
        if tensors.settle(counts):
            return
        try:
            tensors.allocate()
            launch = self._exchange.plan_fill
            self._launch("dispatch", None, launch, self.num_sms, tensors.native, tensors.output, header)
        except Exception:  # the peers wait for the end of a call that they hold for made
            self._launch("dispatch", (), self._exchange.done_only, header)
            raise
        tensors.make_route(uid)

    def _start_plan(self, tensors: PlanTensors, header: bytes, question: int) -> int:
        """The uid of the handle, the same on all ranks."""
        self._num_calls += 1
        uid = self._memory.fingerprint + self._num_calls
        plan, native, output = self._exchange.plan, tensors.native, tensors.output
        if output is not None:
            tensors.make_route(uid)
        self._launch("dispatch", None, plan, self.num_sms, native, output, header, NUM_MATCH_WORDS, question)
        return uid

    def open_dispatch(self, handle: DispatchHandle, x: Tensor) -> None:
        """No exchange: the header travels with the rows."""
        if x.device != self._device:
            self._refuse_device("dispatch", x)

    def exchange_counts(self, num_tokens_per_expert: Tensor, placement: ExpertPlacement) -> list[int]:
        counts = self.all_reduce(num_tokens_per_expert.to(self._device, torch.int64, copy=True))  # it sums in place
        torch.cuda.current_stream(self._device).wait_stream(self._stream)  # read below, also where the call is async
        mine = torch.tensor(placement.experts_of(self.rank), dtype=torch.int64, device=self._device)
        wanted = [int(count) for count in counts[mine].tolist()]
        if faults := self.take_faults():  # the sum was not made, and the host has waited for it
            raise RuntimeError(" ".join(faults))
        return wanted

    def dispatch(self, handle: DispatchHandle, x: Tensor) -> Tensor:
        return self._move_along(route_of(handle, self._kernels), Load(x, None, self._memory))[0]

    def dispatch_scaled(self, handle: DispatchHandle, x: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
        received, received_scales = self._move_along(route_of(handle, self._kernels), Load(x, scales, self._memory))
        assert received_scales is not None
        return received, received_scales

    def _move_along(self, route: Route, load: Load, plan: PlanTensors | None = None) -> tuple[Tensor, Tensor | None]:
        """Rows and their scales along a plan; one that has just been started is joined with them."""
        rows, scales = load.outs(route.num_rows)
        self._make_room(route, rows_to_make_room_for(route.staging), load.row_bytes)
        self._num_calls += 1
        self._launch(
            "cached dispatch",
            (load, rows, scales, route, plan),
            self._exchange.move,
            self.num_sms,
            route.native,
            _CACHED_DISPATCH,
            *load.said,
            load.native(rows, scales),
            load.kind.name,
            0,
            0,
            0,
        )
        return load.as_given(rows, scales)

    def dispatch_backward(
        self, handle: DispatchHandle, grad_rows: Tensor, grad_row_weights: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None]:
        grad_x = grad_weights = None
        if handle.x_needs_grad:
            grad_x = self._sum_home("dispatch backward", handle, grad_rows, None, False, ())
        if handle.weights_need_grad and grad_row_weights is not None:
            grad_weights = self._numbers_home("dispatch backward", handle, grad_row_weights, sums=False)
        return grad_x, grad_weights

    # -- combine ----------------------------------------------------------------------------------------------------

    def open_combine(
        self, handle: DispatchHandle, rows: Tensor, weights: Tensor | None, exact: bool, needs_grad: bool
    ) -> bool:
        """Nobody waits for the others' wishes here: all ranks join the backward where gradients are enabled."""
        if rows.device != self._device:
            self._refuse_device("combine", rows)
        return torch.is_grad_enabled()

    def combine(
        self,
        handle: DispatchHandle,
        rows: Tensor,
        weights: Tensor | None,
        exact: bool,
        bias: Sequence[Tensor] = (),
    ) -> Tensor:
        return self._sum_home("combine", handle, rows, weights, exact, bias)

    def _sum_home(
        self,
        operation: str,
        handle: DispatchHandle,
        rows: Tensor,
        weights: Tensor | None,
        exact: bool,
        bias: Sequence[Tensor],
    ) -> Tensor:
        route, given, kind = route_of(handle, self._kernels), rows.shape[1], kind_of(rows.dtype)
        rows = aligned(rows).contiguous()
        biases = [aligned(tensor).contiguous() for tensor in bias] if bias else []
        weights_number = -1
        if weights is not None:
            weights_number = kind_of(weights.dtype).number
            weights = _as_factors(weights, rows.dtype)
        row_bytes = rows.shape[1] * rows.element_size()
        rounds, geometries, offsets = ONE_ROUND, None, (0, 0)
        if exact:
            own_bytes, offsets = _exact_parts(route, row_bytes)
            self._make_exact_room(route, row_bytes, handle.num_experts * handle.alignment)
        else:
            self._make_room(route, rows_to_make_room_for(route.staging), row_bytes)
            rounds, geometries = self._rounds(route, row_bytes)
            own_bytes = rounds.need_rows * row_bytes
        y = rows.new_empty(route.num_tokens, rows.shape[1])
        self._num_calls += 1
        self._launch(
            operation,
            (rows, weights, y, biases, route, geometries),
            self._exchange.combine,
            self.num_sms,
            route.native,
            _NUMBER_OF[operation],
            given,
            kind.number,
            own_bytes,
            self._memory.places_of((rows,)) if route.is_compact else (),
            rows.data_ptr(),
            row_bytes,
            y.data_ptr(),
            kind.poison,
            kind.name,
            biases[0].data_ptr() if biases else 0,
            biases[1].data_ptr() if len(biases) > 1 else 0,
            0 if weights is None else weights.data_ptr(),
            weights is not None,
            weights_number,
            exact,
            *offsets,
            rounds.number,
            rounds.slot_rows,
            address(geometries),
        )
        return y[:, :given] if given != y.shape[1] else y

    def sum_weights(self, handle: DispatchHandle, weights: Tensor) -> Tensor:
        return self._numbers_home("combine", handle, weights, sums=True)

    def _numbers_home(self, operation: str, handle: DispatchHandle, numbers: Tensor, sums: bool) -> Tensor:
        """[S, K] or [R] numbers -> [T, K]."""
        route = route_of(handle, self._kernels)
        numbers = numbers.contiguous()
        num_compact = numbers.shape[0] if route.is_compact else route.num_compact
        row_bytes = route.num_topk * numbers.element_size()
        most_rows = max(route.staging.most, route.staging.most_compact)  # the own rows lie there too
        self._make_room(route, most_rows, row_bytes)
        out = numbers.new_empty(route.num_tokens, route.num_topk)
        kind = kind_of(numbers.dtype)
        self._num_calls += 1
        self._launch(
            operation,
            (numbers, out, route),
            self._exchange.numbers_home,
            self.num_sms,
            route.native,
            _NUMBER_OF[operation],
            kind.number,
            num_compact * row_bytes,
            numbers.data_ptr(),
            num_compact,
            sums,
            out.data_ptr(),
            kind.name,
        )
        return out

    def combine_backward(
        self, handle: DispatchHandle, grad_y: Tensor, rows: Tensor | None, weights: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        route, factors = route_of(handle, self._kernels), _as_factors(weights, grad_y.dtype)
        load = Load(grad_y, None, self._memory if factors is None else None)  # their products are what travels
        made_rows = grad_weights = None
        if rows is not None and factors is not None:
            made_rows, grad_weights = aligned(rows).contiguous(), torch.empty_like(factors)
        grad_rows, _ = load.outs(route.num_rows)
        self._make_room(route, rows_to_make_room_for(route.staging), load.row_bytes)
        self._num_calls += 1
        self._launch(
            "combine backward",
            (load, grad_rows, made_rows, factors, grad_weights, route),
            self._exchange.move,
            self.num_sms,
            route.native,
            _NUMBER_OF["combine backward"],
            *load.said,
            load.native(grad_rows, None),
            load.kind.name,
            address(factors),
            address(made_rows),
            address(grad_weights),
        )
        if grad_weights is not None and weights is not None:
            grad_weights = grad_weights.to(weights.dtype)
        return load.as_given(grad_rows, None)[0], grad_weights

    # -- the group --------------------------------------------------------------------------------------------------

    def all_reduce(self, tensor: Tensor) -> Tensor:
        is_small = tensor.dtype in (torch.bool, torch.uint8, torch.int8, torch.int16)
        numbers = tensor.to(self._device, torch.int64 if is_small else tensor.dtype).contiguous()
        own_bytes = numbers.numel() * numbers.element_size()
        header = Header(
            operation=OPERATIONS.index("all_reduce"), hidden=tensor.numel(), dtype=dtype_number(tensor.dtype)
        )
        # All ranks sum tensors of one size, so all need room alike.
        self._grow_together(header, own_bytes)
        out = numbers if numbers.data_ptr() == tensor.data_ptr() else torch.empty_like(numbers)
        self._num_calls += 1
        question = self._question_for_later()
        self._launch(
            "all_reduce",
            (numbers, out),
            self._exchange.all_reduce,
            self.num_sms,
            pack(header, OK, own_bytes),
            NUM_MATCH_WORDS,
            question,
            numbers.data_ptr(),
            out.data_ptr(),
            numbers.numel(),
            dtype_name(numbers.dtype),
        )
        self._settle_later("all_reduce", question)
        return tensor if out.data_ptr() == tensor.data_ptr() else tensor.copy_(out.view(tensor.shape))

    def refuse(self, operation: str, error: Exception, num_parts: int = 1) -> NoReturn:
        # Inside a capture nothing runs that could tell the others; their replays will find this rank missing.
        if isinstance(error, EPTimeoutError) or self._closed or torch.cuda.is_current_stream_capturing():
            raise error
        self._unsettled = None  # what the caller gets is this error
        try:
            self._refuse_part(operation, error)
        except EPTimeoutError:
            raise
        except Exception:
            # Others have started the further parts, which are calls of their own; unless they wait for room.
            for _ in range(num_parts - 1 if self._faults.some_go_on_with(operation) else 0):
                with suppress(RuntimeError, TypeError, ValueError):
                    self._refuse_part(operation, error)
            raise

    def _refuse_part(self, operation: str, error: Exception) -> NoReturn:
        question = self._send_header(Header(operation=OPERATIONS.index(operation)), status_of(error), 0)
        self._faults.await_answer(operation, question, self._host_limit_secs)
        self._faults.refused(operation, error, self._join_rows)

    def take_faults(self) -> list[str]:
        return self._faults.take()

    def reset(self) -> None:
        if self._uses_low_latency:  # whose kernels run on the caller's streams
            torch.cuda.synchronize(self._device)
            self.low_latency.clear()
        super().reset()
        if self._uses_low_latency:
            self.low_latency.reset()

    def close(self) -> None:
        if self._uses_low_latency and not self._closed:
            self.low_latency.close()
        super().close()

    @property
    def _uses_low_latency(self) -> bool:
        return "low_latency" in self.__dict__

    @property
    def members(self) -> tuple[int, ...]:
        return tuple(range(len(self.ranks)))

    def shrink(self, note: int) -> dict[int, int]:
        raise EPTimeoutError(
            "the intranode backend does not go on without a rank of its node; where all live, call reset() on each."
        )

    def _refuse_device(self, operation: str, rows: Tensor) -> NoReturn:
        error = ValueError(
            f"the rows are on {rows.device}, but this buffer's kernels run on {self._device}; move them there, or use "
            "backend='torch'."
        )
        self.refuse(operation, error)

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        with torch.cuda.device(self._device):
            return self._memory.empty(shape, dtype)

    def _check_experts(self, placement: ExpertPlacement) -> None:
        """All ranks refuse alike what one of them cannot count."""
        most, limit = placement.most_local, self._kernels.max_local_experts
        if most > limit:
            error = ValueError(
                f"expert_placement gives a rank {most} experts; the intranode backend counts at most {limit}. Use more "
                "ranks, or backend='torch'."
            )
            self.refuse("dispatch", error)

    def _make_exact_room(self, route: Route, row_bytes: int, most_padding: int) -> None:
        staging = route.staging
        most_bytes = staging.most * row_bytes
        if staging.most_compact:  # no rank has more pairs than slots in the tokens it receives
            most_rows = staging.most_compact * route.num_topk + most_padding
            most_bytes = max(most_bytes, most_rows * (row_bytes + 12) + 1024)
        self._grow_for(route, row_bytes, most_bytes)


def _plan_header(request: DispatchRequest, published_bytes: int) -> bytes:
    weights, placement = request.topk_weights, request.placement
    return _packed_plan_header(
        request.x.shape[1],
        *request.topk_idx.shape,
        placement.num_experts,
        request.x.dtype,
        None if weights is None else weights.dtype,
        request.layout,
        request.alignment,
        placement.fingerprint,
        request.grad_enabled,
        request.x_needs_grad,
        request.weights_need_grad,
        published_bytes,
        request.max_rows is not None,
    )


@functools.lru_cache(maxsize=64)
def _packed_plan_header(
    hidden: int,
    num_tokens: int,
    num_topk: int,
    num_experts: int,
    dtype: torch.dtype,
    weights_dtype: torch.dtype | None,
    layout: Layout,
    alignment: int,
    placement: int,
    grad_enabled: bool,
    x_needs_grad: bool,
    weights_need_grad: bool,
    published_bytes: int,
    goes_on: bool,
) -> bytes:
    header = Header(
        operation=_NUMBER_OF["dispatch"],
        hidden=hidden,
        num_topk=num_topk,
        num_experts=num_experts,
        dtype=DTYPES.index(dtype),
        weights_dtype=-1 if weights_dtype is None else DTYPES.index(weights_dtype),
        layout=LAYOUTS.index(layout),
        alignment=alignment,
        placement=placement,
        grad_enabled=grad_enabled,
        x_needs_grad=x_needs_grad,
        weights_need_grad=weights_need_grad,
        num_tokens=num_tokens,
    )
    return pack(header, OK, published_bytes, goes_on=goes_on)


def _exact_parts(route: Route, row_bytes: int) -> tuple[int, tuple[int, int]]:
    """Bytes that an exact combine puts into the slot, and where the places of the pairs and the weights begin in it."""
    pairs_at = round_up(route.num_rows * row_bytes)
    weights_at = pairs_at + round_up(route.num_compact * route.num_topk * 4)
    return weights_at + route.num_rows * 8, (pairs_at, weights_at)


def _as_factors(weights: Tensor | None, rows_dtype: torch.dtype) -> Tensor | None:
    """[R] weights in the dtype of the sums, which the kernels multiply in."""
    return None if weights is None else weights.to(accumulation_dtype(rows_dtype)).contiguous()
