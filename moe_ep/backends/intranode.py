"""The backend inside a node: kernels that publish rows in memory which the other ranks read over NVLink.

csrc/intranode_*.cu do the work, docs/protocol.md has the rules. Every call is one kernel on the buffer's own stream;
only a plan is two, with the host's wait for the row counts between them. Calls without a host wait cannot raise at
once: they fill their outputs with NaN, and `take_faults` says why.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from moe_ep.backends.base import DispatchPlan, DispatchRequest
from moe_ep.backends.device_faults import GO
from moe_ep.backends.header import DTYPES, OK, OPERATIONS, Header, status_of
from moe_ep.backends.kernel_view import kernel_view
from moe_ep.backends.node_calls import DOES_NOT_FIT, NodeCalls
from moe_ep.backends.node_rows import POISON, aligned, native_rows, round_up
from moe_ep.backends.plan_tensors import PlanTensors
from moe_ep.errors import EPTimeoutError
from moe_ep.handle import LAYOUTS, DispatchHandle
from moe_ep.kernel_arguments import address, dtype_name
from moe_ep.ordered_sum import accumulation_dtype
from moe_ep.placement import ExpertPlacement, fingerprint_of


class IntranodeBackend(NodeCalls):
    """See `moe_ep.backends.base.Backend`.

    Args:
        group: the EP group, or None for a single rank. Its ranks reach each other's GPU memory
            (`moe_ep.backends.node_memory.why_unavailable`).
        timeout_secs: limit of every wait.
        num_bytes: what the two slots of the segment hold at first, together.
    """

    name = "intranode"

    def __init__(self, group: dist.ProcessGroup | None, timeout_secs: float, num_bytes: int = 0) -> None:
        super().__init__(group, timeout_secs, num_bytes)
        self._uses_tma = self._kernels.has_bulk_copies()

    # -- dispatch ---------------------------------------------------------------------------------------------------

    def plan(self, request: DispatchRequest) -> DispatchPlan:
        self._check_device("dispatch", request.x)
        waits = request.max_rows is None
        if waits:
            self._must_not_capture("dispatch")
        header = Header(
            operation=OPERATIONS.index("dispatch"),
            hidden=request.x.shape[1],
            num_topk=request.topk_idx.shape[1],
            num_experts=request.placement.num_experts,
            dtype=DTYPES.index(request.x.dtype),
            weights_dtype=-1 if request.topk_weights is None else DTYPES.index(request.topk_weights.dtype),
            layout=LAYOUTS.index(request.layout),
            alignment=request.alignment,
            placement=request.placement.fingerprint,
            grad_enabled=request.grad_enabled,
            x_needs_grad=request.x_needs_grad,
            weights_need_grad=request.weights_need_grad,
            num_tokens=request.topk_idx.shape[0],
        )
        tensors = PlanTensors(self._kernels, request, self.ranks, self.rank)
        need_bytes = tensors.published_bytes
        while True:
            status = OK if need_bytes <= self._exchange.slot_bytes else DOES_NOT_FIT
            packed, num_match = self._pack(header, status, need_bytes)
            question = next(self._questions) if waits else 0
            if not waits:  # before the streams part: PyTorch may fill what is empty (case T01)
                tensors.allocate(request.max_rows, None)
            with self._launching("dispatch", tensors) as stream:
                self._exchange.plan_count(
                    input=tensors.native,
                    header=packed,
                    num_match=num_match,
                    question=question,
                    num_sms=self.num_sms,
                    stream=stream,
                )
                if not waits:
                    self._fill(tensors, packed, num_match, stream)
            if not waits:
                return tensors.plan(self._handle(request, tensors, None))
            verdict = self._ask("dispatch", question, request)
            if verdict == GO:
                break
            self._grow()
        known = tensors.read(self._exchange)
        try:
            tensors.allocate(known.num_rows, known)
            with self._launching("dispatch", tensors) as stream:
                self._fill(tensors, packed, num_match, stream)
        except Exception:  # the peers wait for the end of a call that they hold for made
            with self._launching("dispatch") as stream:
                self._exchange.done_only(header=packed, stream=stream)
            raise
        handle = self._handle(request, tensors, known)
        self._make_room(handle, request.x.shape[1] * request.x.element_size())
        return tensors.plan(handle)

    def _fill(self, tensors: PlanTensors, packed: bytes, num_match: int, stream: int) -> None:
        self._exchange.plan_fill(
            input=tensors.native,
            header=packed,
            num_match=num_match,
            num_sms=self.num_sms,
            stream=stream,
            **tensors.fill_arguments(),
        )

    def _handle(self, request: DispatchRequest, tensors: PlanTensors, known: object) -> DispatchHandle:
        return tensors.handle(
            request,
            # Ranks that make the same calls count them alike; a routing need not be read to be told from another.
            uid=fingerprint_of(self._memory.name, self._memory.generation, self._num_calls),
            joins=request.grad_enabled and known is None,
        )

    def open_dispatch(self, handle: DispatchHandle, x: Tensor) -> None:
        """No exchange: the header travels with the rows."""
        self._check_device("dispatch", x)

    def exchange_counts(self, num_tokens_per_expert: Tensor, placement: ExpertPlacement) -> list[int]:
        counts = self.all_reduce(num_tokens_per_expert.to(self._device, torch.int64, copy=True))  # it sums in place
        torch.cuda.current_stream(self._device).wait_stream(self._stream)  # read below, also where the call is async
        mine = torch.tensor(placement.experts_of(self.rank), dtype=torch.int64, device=self._device)
        wanted = [int(count) for count in counts[mine].tolist()]
        if faults := self.take_faults():  # the sum was not made, and the host has waited for it
            raise RuntimeError(" ".join(faults))
        return wanted

    def dispatch(self, handle: DispatchHandle, x: Tensor) -> Tensor:
        return self._move("cached dispatch", handle, x)[0]

    def dispatch_scaled(self, handle: DispatchHandle, x: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
        rows, received_scales, _ = self._move("cached dispatch", handle, x, scales=scales)
        assert received_scales is not None
        return rows, received_scales

    def _move(
        self,
        operation: str,
        handle: DispatchHandle,
        x: Tensor,
        scales: Tensor | None = None,
        made_rows: Tensor | None = None,
        weights: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Rows along the handle, with their scales; or times `weights`, with the weights' gradient for `made_rows`."""
        handle = self._view(handle)
        given = x.shape[1]
        x = aligned(x)
        kinds = [x] if scales is None else [x, aligned(scales)]
        row_bytes = sum(rows.shape[1] * rows.element_size() for rows in kinds)
        own_bytes = x.shape[0] * row_bytes
        self._make_room(handle, row_bytes)
        places = () if weights is not None else self._memory.places_of(kinds)
        packed, num_match = self._header(operation, handle, given, x.dtype, None, False, own_bytes, places=places)
        outs = [rows.new_empty(handle.num_rows, rows.shape[1]) for rows in kinds]
        grad_weights = None if made_rows is None or weights is None else torch.empty_like(weights)
        kept = (*kinds, *outs, made_rows, weights, grad_weights, *_tensors_of(handle))
        with self._launching(operation, *kept) as stream:
            self._exchange.move(
                header=packed,
                num_match=num_match,
                rows=[
                    native_rows(rows, out, kind == 1) for kind, (rows, out) in enumerate(zip(kinds, outs, strict=True))
                ],
                num_tokens=x.shape[0],
                recv_token=handle.recv_token.data_ptr(),
                pair_row=handle.pair_row.data_ptr(),
                num_topk=handle.num_topk,
                num_local=self._num_local(handle),
                expert_major=handle.layout == "expert_major",
                geometry=handle.geometry.data_ptr(),
                num_rows=handle.num_rows,
                is_registered=bool(places),
                use_tma=self._uses_tma,
                dtype=dtype_name(x.dtype),
                weights=address(weights),
                made_rows=address(made_rows),
                grad_weights=address(grad_weights),
                num_sms=self.num_sms,
                stream=stream,
            )
        rows = outs[0] if given == x.shape[1] else outs[0][:, :given]
        return rows, None if scales is None else outs[1][:, : scales.shape[1]], grad_weights

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
        self._check_device("combine", rows)
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
        handle = self._view(handle)
        given = rows.shape[1]
        rows = aligned(rows).contiguous()
        bias = tuple(aligned(tensor).contiguous() for tensor in bias)
        given_weights = weights
        weights = _as_factors(weights, rows.dtype)
        row_bytes = rows.shape[1] * rows.element_size()
        num_compact = handle.num_compact_rows if handle.is_known else handle.recv_token.shape[0]
        offsets = (0, 0)
        if exact:
            pair_bytes = round_up(num_compact * handle.num_topk * 4)
            first = round_up(handle.num_rows * row_bytes)
            offsets = (first, first + pair_bytes)
            own_bytes = first + pair_bytes + handle.num_rows * 8
        else:
            own_bytes = self._combine_bytes(handle, row_bytes, self.rank)
        self._make_room(handle, row_bytes, exact=exact)
        places = self._memory.places_of([rows]) if handle.layout == "compact" else ()
        packed, num_match = self._header(
            operation, handle, given, rows.dtype, given_weights, exact, own_bytes, offsets, places
        )
        y = rows.new_empty(handle.num_tokens, rows.shape[1])
        with self._launching(operation, rows, weights, y, *bias, *_tensors_of(handle)) as stream:
            self._exchange.combine(
                header=packed,
                num_match=num_match,
                rows=rows.data_ptr(),
                num_rows=handle.num_rows,
                weights=address(weights),
                bias_0=address(bias[0] if bias else None),
                bias_1=address(bias[1] if len(bias) > 1 else None),
                num_tokens=handle.num_tokens,
                row_bytes=row_bytes,
                pair_row=handle.pair_row.data_ptr(),
                token_row=handle.token_row.data_ptr(),
                slot_rank=handle.slot_rank.data_ptr(),
                num_topk=handle.num_topk,
                num_local=self._num_local(handle),
                expert_major=handle.layout == "expert_major",
                num_compact_rows=num_compact,
                geometry=handle.geometry.data_ptr(),
                y=y.data_ptr(),
                poison=POISON[rows.dtype],
                exact=exact,
                is_weighted=weights is not None,
                is_registered=bool(places),
                use_tma=self._uses_tma,
                dtype=dtype_name(rows.dtype),
                num_sms=self.num_sms,
                stream=stream,
            )
        return y[:, :given] if given != y.shape[1] else y

    def sum_weights(self, handle: DispatchHandle, weights: Tensor) -> Tensor:
        return self._numbers_home("combine", handle, weights, sums=True)

    def _numbers_home(self, operation: str, handle: DispatchHandle, numbers: Tensor, sums: bool) -> Tensor:
        """[S, K] or [R] numbers -> [T, K]."""
        handle = self._view(handle)
        numbers = numbers.contiguous()
        expert_major = handle.layout == "expert_major"
        num_compact = handle.pair_row.shape[0] if expert_major else numbers.shape[0]
        own_bytes = num_compact * handle.num_topk * numbers.element_size()
        self._make_room(handle, handle.num_topk * numbers.element_size(), with_own=True)
        packed, num_match = self._header(operation, handle, handle.num_topk, numbers.dtype, None, False, own_bytes)
        out = numbers.new_empty(handle.num_tokens, handle.num_topk)
        with self._launching(operation, numbers, out, *_tensors_of(handle)) as stream:
            self._exchange.numbers_home(
                header=packed,
                num_match=num_match,
                numbers=numbers.data_ptr(),
                pair_row=handle.pair_row.data_ptr() if expert_major else 0,
                token_row=handle.token_row.data_ptr(),
                slot_rank=handle.slot_rank.data_ptr(),
                num_compact_rows=num_compact,
                num_tokens=handle.num_tokens,
                num_topk=handle.num_topk,
                geometry=handle.geometry.data_ptr(),
                sums=sums,
                out=out.data_ptr(),
                dtype=dtype_name(numbers.dtype),
                num_sms=self.num_sms,
                stream=stream,
            )
        return out

    def combine_backward(
        self, handle: DispatchHandle, grad_y: Tensor, rows: Tensor | None, weights: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        rows = None if rows is None else aligned(rows).contiguous()
        factors = _as_factors(weights, grad_y.dtype)
        grad_rows, _, grad_weights = self._move("combine backward", handle, grad_y, None, rows, factors)
        return grad_rows, None if grad_weights is None or weights is None else grad_weights.to(weights.dtype)

    # -- the group --------------------------------------------------------------------------------------------------

    def all_reduce(self, tensor: Tensor) -> Tensor:
        numbers = tensor.to(self._device).contiguous()
        if numbers.dtype in (torch.bool, torch.uint8, torch.int8, torch.int16):
            numbers = numbers.to(torch.int64)
        own_bytes = numbers.numel() * numbers.element_size()
        header = Header(
            operation=OPERATIONS.index("all_reduce"),
            hidden=tensor.numel(),
            dtype=DTYPES.index(tensor.dtype) if tensor.dtype in DTYPES else len(DTYPES) + tensor.element_size(),
        )
        # All ranks sum tensors of one size, so all need room alike.
        self._grow_together(header, own_bytes)
        packed, num_match = self._pack(header, OK, own_bytes)
        out = numbers if numbers.data_ptr() == tensor.data_ptr() else torch.empty_like(numbers)
        with self._launching("all_reduce", numbers, out) as stream:
            self._exchange.all_reduce(
                header=packed,
                num_match=num_match,
                numbers=numbers.data_ptr(),
                out=out.data_ptr(),
                count=numbers.numel(),
                dtype=dtype_name(numbers.dtype),
                num_sms=self.num_sms,
                stream=stream,
            )
        return tensor if out.data_ptr() == tensor.data_ptr() else tensor.copy_(out.view(tensor.shape))

    def refuse(self, operation: str, error: Exception) -> NoReturn:
        # Inside a capture nothing runs that could tell the others; their replays will find this rank missing.
        if isinstance(error, EPTimeoutError) or self._closed or torch.cuda.is_current_stream_capturing():
            raise error
        header = Header(operation=OPERATIONS.index(operation))
        packed, num_match = self._pack(header, status_of(error), 0)
        question = next(self._questions)
        with self._launching(operation) as stream:
            self._exchange.header_only(header=packed, num_match=num_match, question=question, stream=stream)
        self._faults.await_answer(operation, question, self._host_limit_secs, self._stream.cuda_stream)
        self._faults.refused(operation, error)

    def take_faults(self) -> list[str]:
        return self._faults.take()

    def reset(self) -> None:
        self._synchronize()
        try:
            with torch.cuda.device(self._device):
                self._memory.reset()
        except RuntimeError as error:  # the others may have a new generation by now
            self._faults.stop(str(error))
            raise
        self._faults.forget()
        self._num_calls = 0

    @property
    def members(self) -> tuple[int, ...]:
        return tuple(range(len(self.ranks)))

    def shrink(self, note: int) -> dict[int, int]:
        raise EPTimeoutError(
            "the intranode backend does not go on without a rank of its node; where all live, call reset() on each."
        )

    def _check_device(self, operation: str, rows: Tensor) -> None:
        if rows.device != self._device:
            error = ValueError(
                f"the rows are on {rows.device}, but this buffer's kernels run on {self._device}; move them there, or "
                "use backend='torch'."
            )
            self.refuse(operation, error)

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        with torch.cuda.device(self._device):
            return self._memory.empty(shape, dtype)

    # -- along a handle -----------------------------------------------------------------------------------------------

    def _view(self, handle: DispatchHandle) -> DispatchHandle:
        return kernel_view(handle, self._kernels, self._num_local(handle))

    def _num_local(self, handle: DispatchHandle) -> int:
        """L, read off the length of the geometry; any number will do where the view has to be made."""
        if not handle.geometry.numel():
            return handle.num_experts
        return (handle.geometry.numel() - self._kernels.geometry_length(len(self.ranks), 0)) // 2

    def _header(
        self,
        operation: str,
        handle: DispatchHandle,
        hidden: int,
        dtype: torch.dtype,
        weights: Tensor | None,
        exact: bool,
        own_bytes: int,
        offsets: tuple[int, int] = (0, 0),
        places: tuple[int, ...] = (),
    ) -> tuple[bytes, int]:
        """The header of a call along a handle, packed."""
        status = OK if own_bytes <= self._exchange.slot_bytes else DOES_NOT_FIT
        header = Header(
            operation=OPERATIONS.index(operation),
            handle=handle.uid,
            hidden=hidden,
            num_topk=handle.num_topk,
            num_experts=handle.num_experts,
            dtype=DTYPES.index(dtype) if dtype in DTYPES else len(DTYPES) + dtype.itemsize,
            weights_dtype=-1 if weights is None else DTYPES.index(weights.dtype),
            layout=LAYOUTS.index(handle.layout),
            alignment=handle.alignment,
            exact=exact,
            placement=handle.placement,
        )
        return self._pack(header, status, own_bytes, offsets, places)

    def _combine_bytes(self, handle: DispatchHandle, row_bytes: int, rank: int) -> int:
        """What a combine puts into the slot of `rank`: its compact rows, without its own."""
        if not handle.is_known:
            return handle.recv_token.shape[0] * row_bytes
        world = len(self.ranks)
        return sum(handle.rank_rows[source * world + rank] for source in range(world) if source != rank) * row_bytes

    def _make_room(self, handle: DispatchHandle, row_bytes: int, exact: bool = False, with_own: bool = False) -> None:
        """Grows the segments where some rank of a call along `handle` needs more: all ranks work out the same need.

        `with_own`: the rows that a rank sends itself lie in its slot too.
        """
        if not handle.is_known:
            return
        world = len(self.ranks)
        ranks = range(world)
        need_bytes = max(self._combine_bytes(handle, row_bytes, rank) for rank in ranks)
        need_bytes = max(need_bytes, max(handle.rank_tokens) * row_bytes)
        num_compact = max(sum(handle.rank_rows[rank::world]) for rank in ranks)
        if with_own:
            need_bytes = max(need_bytes, num_compact * row_bytes)
        if exact:  # no rank has more pairs than slots in the tokens it receives
            num_rows = num_compact * handle.num_topk + handle.num_experts * handle.alignment
            need_bytes = max(need_bytes, num_rows * (row_bytes + 12) + 1024)
        if need_bytes > self._exchange.slot_bytes:
            self._grow_together(
                Header(operation=OPERATIONS.index("combine"), hidden=row_bytes, handle=handle.uid), need_bytes
            )


def _as_factors(weights: Tensor | None, rows_dtype: torch.dtype) -> Tensor | None:
    """[R] weights in the dtype of the sums, which the kernels multiply in."""
    return None if weights is None else weights.to(accumulation_dtype(rows_dtype)).contiguous()


def _tensors_of(handle: DispatchHandle) -> tuple[Tensor, ...]:
    return handle.recv_token, handle.pair_row, handle.token_row, handle.slot_rank, handle.geometry
