"""The low-latency calls on kernels, which push every row to where it is needed (csrc/low_latency).

Letters: T tokens of this rank, H hidden, K slots a token, E experts, L of them local, W ranks, M the most tokens of a
rank, N = W * M places an expert, B = H / 128 scales a row.

A call is one kernel on the caller's stream, or two where a hook receives. Its number lives on the device, so graphs
replay among other calls. Nothing waits for the device here, but for the first call of a size, which makes room.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from moe_ep._native.arguments import address, dtype_name
from moe_ep._native.low_latency import LowLatencyCallKernels, NativeCombine, NativeDispatch, NativeLaunch, NativeShape
from moe_ep.backends.device_faults import DeviceFaults
from moe_ep.backends.header import CALLS, dtype_number
from moe_ep.backends.node_low_latency_memory import NodeLowLatencyMemory
from moe_ep.backends.node_memory import NodeMemory
from moe_ep.low_latency.layout import AS_GIVEN, FP8_UE8M0, CallShape, NodeRouting
from moe_ep.placement import fingerprint_of

OPEN, MASKED, LOST = 0, 1, 2  # how a rank stands in the mask
DISPATCH, COMBINE = (CALLS.index(name) for name in ("low_latency_dispatch", "low_latency_combine"))
_PRINT_BITS = 16
Launch = Callable[[NativeLaunch], None]


@dataclass(frozen=True, eq=False)
class Native:
    """A `CallShape` as the kernels take it: of a dispatch and of its combine, with what both need of a slot."""

    dispatch: NativeShape
    combine: NativeShape
    needs: tuple[int, int]


@dataclass(frozen=True, eq=False)
class Outputs:
    """What a dispatch writes; the attributes are those of `low_latency_dispatch` and its handle."""

    recv: Tensor
    scales: Tensor | None
    recv_count: Tensor
    src_info: Tensor
    layout_range: Tensor
    routing: NodeRouting


@dataclass(frozen=True, eq=False)
class Pending:
    """A call whose rows are on their way. It keeps what its second kernel reads and writes."""

    launch: Launch
    stream: torch.cuda.Stream
    print_of_call: int
    stats: Tensor | None
    ticket: Tensor | None
    tensors: tuple[Tensor | None, ...] = field(repr=False)
    is_captured: bool

    def keep_for(self, stream: torch.cuda.Stream) -> None:
        """Memory of these tensors that the caller lets go of is not handed out again before `stream` is past them."""
        for tensor in (*self.tensors, self.stats, self.ticket):
            if tensor is not None:
                tensor.record_stream(stream)


class NodeLowLatency:
    """One rank's low-latency calls.

    Args:
        node: memory of the backend; it meets the other ranks.
        memory: for the rows.
        faults: of the backend.
        device: of the tensors.
        own_stream: for asynchronous calls.

    Attributes:
        rank, world: this rank's place in the EP group, W.
        device: of the tensors.
        mask: [W] int32 on the device, how each rank stands.
        enable_shrink: whether a rank that does not come is left out from then on.
        is_waited_for: whether the result of an earlier call is in flight, until its hook runs.
        num_calls: calls that this rank has begun.
    """

    def __init__(
        self,
        node: NodeMemory,
        memory: NodeLowLatencyMemory,
        faults: DeviceFaults,
        device: torch.device,
        own_stream: torch.cuda.Stream,
    ) -> None:
        if torch.cuda.is_current_stream_capturing():  # the mask would be filled by a replay
            raise RuntimeError(
                "the first low-latency call of a buffer makes its mask and memory, which cannot happen inside a CUDA "
                "graph; run the call once before the capture."
            )
        self._node, self._memory = node, memory
        self.rank, self.world = node.rank, len(node.ranks)
        self._faults = faults
        self.device = device
        self.own_stream = own_stream
        self.mask = torch.zeros(self.world, dtype=torch.int32, device=device)
        self.enable_shrink = self.is_waited_for = False
        self._last_stream: torch.cuda.Stream | None = None
        self._last_captured: torch.cuda.Stream | None = None
        self._receiving: set[torch.cuda.Stream] = set()  # the streams of second halves, since the mask changed
        self._is_in_graph = False
        self.num_calls = 0
        self._native_of = functools.cache(self._native)

    @property
    def _kernels(self) -> LowLatencyCallKernels:
        return self._memory.calls

    # -- what can be served -----------------------------------------------------------------------------------------

    def check(self, shape: CallShape) -> None:
        """Refuses what the kernels cannot move.

        Raises:
            ValueError: the sentence says what and where the limit is.
        """
        row_bytes = shape.hidden * shape.dtype.itemsize
        if row_bytes % 16:
            raise ValueError(
                f"x has H = {shape.hidden}, rows of {row_bytes} bytes; the low-latency kernels move rows of a "
                "multiple of 16 bytes. Pad H, or use backend='torch'."
            )
        limits = (
            ("M * K", shape.num_max * shape.num_topk, self._kernels.low_latency_max_pairs),
            ("H / 128", -(-shape.hidden // 128), self._kernels.low_latency_max_scales),
            (
                "the number of ranks times the most experts of a rank",
                self.world * shape.placement.most_local,
                self._kernels.low_latency_max_counts,
            ),
            (
                "M times the number of ranks times the most experts of a rank",
                shape.num_max * self.world * shape.placement.most_local,
                2**31 - 1,
            ),
        )
        for name, value, limit in limits:
            if value > limit:
                raise ValueError(
                    f"{name} is {value}; the low-latency kernels take at most {limit}. Make it smaller, or use "
                    "backend='torch'."
                )

    def check_device(self, *tensors: Tensor) -> None:
        for tensor in tensors:
            if tensor.device != self.device:
                raise ValueError(
                    f"a tensor is on {tensor.device}, but this buffer's kernels run on {self.device}; move it there, "
                    "or use backend='torch'."
                )

    def _native(self, shape: CallShape) -> Native:
        def of(row_bytes: int) -> NativeShape:
            return self._kernels.LowLatencyShape(
                hidden=shape.hidden,
                row_bytes=self._kernels.low_latency_row_bytes(row_bytes),
                num_topk=shape.num_topk,
                num_experts=shape.placement.num_experts,
                most_local=shape.placement.most_local,
                max_tokens=shape.num_max,
            )

        home_bytes = shape.hidden * shape.home_dtype.itemsize
        sent_bytes = home_bytes if shape.row_format == AS_GIVEN else shape.hidden + 4 * shape.num_scale_words
        dispatch, combine = of(sent_bytes), of(home_bytes)
        size, dtype = self.world, dtype_name(shape.home_dtype)
        return Native(dispatch, combine, self._kernels.low_latency_needs(size, dispatch, combine, dtype))

    # -- calls ------------------------------------------------------------------------------------------------------

    def dispatch(
        self,
        shape: CallShape,
        x: Tensor,
        topk_idx: Tensor,
        cumulative: Tensor | None,
        stats: Tensor | None,
        with_hook: bool,
        asynchronous: bool,
    ) -> tuple[Outputs, Pending]:
        """Sends the rows; receives them too unless `with_hook`, for `receive` to do it."""
        native = self._make_room("low_latency_dispatch", shape)
        x, topk_idx = _readable(x), topk_idx.contiguous()
        out = self._outputs(shape, x.shape[0])
        owner, local_idx = shape.placement.kernel_tables(self.device)
        given: NativeDispatch = self._kernels.LowLatencyDispatch(
            shape=native.dispatch,
            format=shape.row_format,
            elem_bytes=x.element_size(),
            num_tokens=x.shape[0],
            num_local=out.src_info.shape[0],
            x=x.data_ptr(),
            ids=topk_idx.data_ptr(),
            id_bytes=topk_idx.element_size(),
            owner=owner.data_ptr(),
            local_idx=local_idx.data_ptr(),
            rows=out.recv.data_ptr(),
            scales=address(out.scales),
            recv_count=out.recv_count.data_ptr(),
            layout_range=out.layout_range.data_ptr(),
            src_info=out.src_info.data_ptr(),
            cumulative=address(cumulative),
            row_places=out.routing.row_places.data_ptr(),
            slot_rank=out.routing.slot_rank.data_ptr(),
        )
        number = shape.row_format << 4 | dtype_number(shape.dtype)
        tensors = (x, topk_idx, out.recv, out.scales, out.recv_count, out.src_info, out.layout_range, cumulative)
        pending = Pending(
            launch=lambda how: self._memory.native.dispatch(how, DISPATCH, given),
            stream=self._stream_of(asynchronous),
            print_of_call=_print_of(DISPATCH, number, shape),
            stats=stats,
            ticket=self._ticket(with_hook),
            tensors=(*tensors, out.routing.row_places, out.routing.slot_rank),
            is_captured=torch.cuda.is_current_stream_capturing(),
        )
        self._begin(pending, with_hook, asynchronous)
        return out, pending

    def combine(
        self,
        routing: NodeRouting,
        rows: Tensor,
        weights: Tensor,
        out: Tensor,
        stats: Tensor | None,
        with_hook: bool,
        asynchronous: bool,
    ) -> Pending:
        """Sends [L, N, H] rows home; adds them up into contiguous `out` [T, H] too unless `with_hook`."""
        shape = routing.shape
        if rows.dtype != shape.home_dtype:
            shape = replace(shape, row_format=AS_GIVEN, dtype=rows.dtype)
        native = self._make_room("low_latency_combine", shape)
        rows, weights = _readable(rows), weights.contiguous()
        given: NativeCombine = self._kernels.LowLatencyCombine(
            shape=native.combine,
            num_tokens=routing.num_tokens,
            rows=rows.data_ptr(),
            row_places=routing.row_places.data_ptr(),
            slot_rank=routing.slot_rank.data_ptr(),
            weights=weights.data_ptr(),
            out=out.data_ptr(),
        )
        dtype = dtype_name(rows.dtype)
        pending = Pending(
            launch=lambda how: self._memory.native.combine(how, COMBINE, given, dtype),
            stream=self._stream_of(asynchronous),
            print_of_call=_print_of(COMBINE, dtype_number(rows.dtype), shape),
            stats=stats,
            ticket=self._ticket(with_hook),
            tensors=(rows, weights, out, routing.row_places, routing.slot_rank),
            is_captured=torch.cuda.is_current_stream_capturing(),
        )
        self._begin(pending, with_hook, asynchronous)
        return pending

    def receive(self, pending: Pending) -> None:
        """The second half of a call, on the current stream.

        Raises:
            RuntimeError: a CUDA graph captures one half and not the other: they would not take turns.
        """
        if pending.is_captured != torch.cuda.is_current_stream_capturing():
            here, there = ("outside", "in one") if pending.is_captured else ("inside", "outside")
            raise RuntimeError(
                f"this hook was called {here} a capture of a CUDA graph, and its call was made {there}: a replay would "
                "run one of them alone. Make the call and call its hook both inside captures, or both outside."
            )
        stream = torch.cuda.current_stream(self.device)
        if stream != pending.stream:
            stream.wait_stream(pending.stream)
            pending.keep_for(stream)
        self._receiving.add(stream)
        pending.launch(self._how(stream, pending, sends=False, receives=True))

    def refuse(self, operation: str) -> None:
        """Takes part in a call that this rank refuses, as far as the other ranks can be told."""
        if self._faults.is_dead or torch.cuda.is_current_stream_capturing():
            return
        if not self._memory.is_ready((0, 0)):
            self._meet((0, 0), refused=operation)
            return
        stream = self._stream_of(False)
        self.num_calls += 1
        self._memory.native.refuse(self._how(stream, None, sends=True, receives=True), CALLS.index(operation))

    def set_masked(self, rank: int, is_masked: bool) -> None:
        """Leaves a rank out, or takes it in again unless it is lost: between the calls so far and those that follow."""
        one = self.mask[rank : rank + 1]
        self._come_between_calls()
        one.masked_fill_(one != LOST, MASKED if is_masked else OPEN)

    def unmask_all(self) -> None:
        self._come_between_calls()
        self.mask.masked_fill_(self.mask == MASKED, OPEN)

    def _come_between_calls(self) -> None:
        """The blocks of a call look at the mask one by one, and must all see the same, on whatever stream it runs."""
        stream = self._stream_of(False)
        if not torch.cuda.is_current_stream_capturing():
            for receiving in self._receiving - {stream}:
                stream.wait_stream(receiving)
            self._receiving.clear()

    def clear(self) -> None:
        """Before the ranks meet for a reset. Nothing of this rank runs."""
        self._memory.clear()

    def reset(self) -> None:
        """A new generation, behind that of the backend's memory. Nothing of this rank runs."""
        self._memory.reset()
        self.mask.masked_fill_(self.mask == LOST, OPEN)
        torch.cuda.current_stream(self.device).synchronize()  # the next call may come on another stream, or in a graph
        self._last_stream = None

    def close(self) -> None:
        """Waits until no peer writes into this rank's memory any more, and lets go of theirs."""
        if self._memory.is_ready((0, 0)):
            torch.cuda.synchronize(self.device)  # the last call, on whatever stream: what it sent is waited for
            if not self._faults.is_dead:
                self._memory.native.drain(self._how(self.own_stream, None, sends=True, receives=False))
            torch.cuda.synchronize(self.device)
            self._memory.close()

    # -- parts ------------------------------------------------------------------------------------------------------

    def _outputs(self, shape: CallShape, num_tokens: int) -> Outputs:
        world, device, num_max = self.world, self.device, shape.num_max
        num_local, num_places = len(shape.placement.experts_of(self._node.rank)), world * num_max
        is_fp8 = shape.row_format != AS_GIVEN

        def empty(*sizes: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.empty(sizes, dtype=dtype, device=device)

        scales = None
        if is_fp8:
            dtype = torch.int32 if shape.row_format == FP8_UE8M0 else torch.float32
            scales = empty(num_local, shape.num_scale_words, num_places, dtype=dtype).transpose(1, 2)
        routing = NodeRouting(
            ranks=self._node.ranks,
            rank=self._node.rank,
            shape=shape,
            num_tokens=num_tokens,
            row_places=empty(1 + world * num_max * shape.num_topk, 2),
            slot_rank=empty(num_tokens, shape.num_topk),
        )
        dtype = torch.float8_e4m3fn if is_fp8 else shape.dtype
        return Outputs(
            recv=empty(num_local, num_places, shape.hidden, dtype=dtype),
            scales=scales,
            recv_count=empty(num_local),
            src_info=empty(num_local, num_places),
            layout_range=empty(num_local, world, dtype=torch.int64),
            routing=routing,
        )

    def _make_room(self, operation: str, shape: CallShape) -> Native:
        self._faults.raise_if_dead(operation)
        native = self._native_of(shape)
        if not self._memory.is_ready(native.needs):
            if torch.cuda.is_current_stream_capturing():
                raise RuntimeError(
                    f"{operation} makes room for its rows first, which cannot happen inside a CUDA graph; run the call "
                    "once before the capture."
                )
            torch.cuda.synchronize(self.device)
            self._meet(native.needs)
        return native

    def _meet(self, needs: tuple[int, int], refused: str = "") -> None:
        with torch.cuda.device(self.device):  # which the ranks of a GPU are counted by
            self._memory.meet(needs, self._is_in_graph, self.is_waited_for, refused)

    def _ticket(self, with_hook: bool) -> Tensor | None:
        return torch.empty(1, dtype=torch.int64, device=self.device) if with_hook else None

    def _begin(self, pending: Pending, with_hook: bool, asynchronous: bool) -> None:
        pending.launch(self._how(pending.stream, pending, sends=True, receives=not with_hook))
        self.num_calls += 1
        if asynchronous:
            pending.keep_for(pending.stream)

    def _stream_of(self, asynchronous: bool) -> torch.cuda.Stream:
        """Where the next call runs: behind what the caller's stream has been given, and behind the call before it."""
        current = torch.cuda.current_stream(self.device)
        stream = self.own_stream if asynchronous else current
        if asynchronous:
            stream.wait_stream(current)
        if torch.cuda.is_current_stream_capturing():
            self._is_in_graph = True
            last, self._last_captured = self._last_captured, stream
            if last is not None and last != stream and not _is_capturing(last):
                last = None  # of an earlier graph
        else:
            last, self._last_stream = self._last_stream, stream
        if last is not None and last != stream:
            stream.wait_stream(last)
        return stream

    def _how(self, stream: torch.cuda.Stream, pending: Pending | None, sends: bool, receives: bool) -> NativeLaunch:
        return self._kernels.LowLatencyLaunch(
            stream=stream.cuda_stream,
            num_blocks=self._memory.num_blocks,
            sends=sends,
            receives=receives,
            mask=self.mask.data_ptr(),
            ticket=0 if pending is None else address(pending.ticket),
            stats=address(pending.stats) if receives and pending is not None else 0,
            print=0 if pending is None else pending.print_of_call,
            enable_shrink=self.enable_shrink,
        )


def _readable(rows: Tensor) -> Tensor:
    """The rows, contiguous and from a multiple of 16 bytes on."""
    rows = rows.contiguous()
    return rows.clone() if rows.data_ptr() % 16 else rows


def _is_capturing(stream: torch.cuda.Stream) -> bool:
    with torch.cuda.stream(stream):
        return torch.cuda.is_current_stream_capturing()


@functools.lru_cache(maxsize=256)
def _print_of(operation: int, number: int, shape: CallShape) -> int:
    """By which the ranks see whether they are in the same call. `number` stands for what travels."""
    alike = (operation, number, shape.hidden, shape.num_topk, shape.num_max, shape.placement.fingerprint)
    return fingerprint_of(*alike) % (1 << _PRINT_BITS)
