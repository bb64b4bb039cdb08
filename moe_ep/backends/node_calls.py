"""What every call inside a node needs around its kernel: a header, room, its place among streams, and a verdict."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Concatenate, ParamSpec

import torch
import torch.distributed as dist
from torch import Tensor

from moe_ep._native import require
from moe_ep._native.exchange import Answer
from moe_ep.backends import combine_rounds
from moe_ep.backends.base import DispatchRequest
from moe_ep.backends.combine_rounds import CombineRounds
from moe_ep.backends.device_faults import GROW, DeviceFaults
from moe_ep.backends.header import NUM_MATCH_WORDS, OK, OPERATIONS, Header, status_of
from moe_ep.backends.node_header import NEED_WORD, pack
from moe_ep.backends.node_memory import NodeMemory
from moe_ep.backends.node_route import Route
from moe_ep.errors import EPTimeoutError

START_BYTES = 16 << 20  # of a slot, where the caller asks for less
_HOST_SLACK_SECS = 30.0  # over the device's own limit, for kernels that queue before ours
_COMBINE = OPERATIONS.index("combine")
_P = ParamSpec("_P")


class NodeCalls:
    """One rank's memory, stream and faults; launches go through `_launch`.

    Args:
        group: the EP group, or None for a single rank.
        timeout_secs: limit of every wait.
        num_bytes: what the two slots of the segment hold at first, together.
        part: places in the group of the ranks of this node; None for all.
    """

    def __init__(
        self, group: dist.ProcessGroup | None, timeout_secs: float, num_bytes: int = 0, part: range | None = None
    ) -> None:
        self._kernels = require()
        self._device_idx = torch.cuda.current_device()
        self._device = torch.device("cuda", self._device_idx)
        self._memory = NodeMemory(group, timeout_secs, max(START_BYTES, num_bytes // 2), part)
        self.ranks, self.rank = self._memory.ranks, self._memory.rank
        self.num_sms = 20
        self.joins_stream = True
        self._exchange = self._memory.exchange
        self._faults = DeviceFaults(self._memory)
        self._stream = torch.cuda.Stream(self._device, priority=-1)  # type: ignore[no-untyped-call]
        self._exchange.launch_on(stream=self._stream.cuda_stream, bulk_copies=self._kernels.has_bulk_copies())
        self._kept: deque[tuple[torch.cuda.Event, tuple[object, ...]]] = deque()
        self._kept_for_graphs: list[tuple[object, ...]] = []
        self._is_in_graph = False  # some CUDA graph holds addresses of the segments
        self._num_calls = 0  # of a generation or more; ranks count alike: a call that one refuses is one on all
        self._questions = itertools.count(1)
        self._unsettled: tuple[str, int] | None = None  # a call whose verdict the next wait of the host asks for
        self._closed = False

    @property
    def device(self) -> torch.device:
        """That of the kernels, whichever is current."""
        return self._device

    @property
    def stream(self) -> torch.cuda.Stream:
        """The stream of the kernels."""
        return self._stream

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        if self._is_in_graph:  # a replay that still runs, on whatever stream, comes before what is drained
            self._synchronize()
        # Peers may still read what this rank published last.
        self._exchange.drain(pack(Header()))
        self._synchronize()
        self._kept.clear()
        self._kept_for_graphs.clear()
        self._memory.close()

    def reset(self) -> None:
        """See `moe_ep.backends.base.Backend`."""
        self._synchronize()
        try:
            with torch.cuda.device(self._device):
                self._memory.reset()
        except RuntimeError as error:  # the others may have a new generation by now
            self._faults.stop(str(error))
            raise
        self._faults.forget()
        self._unsettled = None
        self._num_calls = 0

    def _synchronize(self) -> None:
        """Until no kernel of this exchange runs: a graph replays on whatever stream its caller chose."""
        if self._is_in_graph:
            torch.cuda.synchronize(self._device)
        else:
            self._stream.synchronize()

    @property
    def _host_limit_secs(self) -> float:
        return self._memory.timeout_secs + _HOST_SLACK_SECS

    def _must_not_capture(self, operation: str) -> None:
        if torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                f"{operation} waits for the counts of all ranks, which a CUDA graph cannot; give max_rows, or go along "
                "a handle that was made before the capture."
            )

    def _make_room(self, route: Route, most_rows: int, row_bytes: int) -> None:
        """Grows the segments where the rank with the most rows needs more: all ranks work out the same need."""
        if most_rows * row_bytes > self._exchange.slot_bytes:
            self._grow_for(route, row_bytes, most_rows * row_bytes)

    def _grow_for(self, route: Route, row_bytes: int, most_bytes: int) -> None:
        self._grow_together(Header(operation=_COMBINE, hidden=row_bytes, handle=route.uid), most_bytes)

    def _rounds(self, route: Route, row_bytes: int) -> tuple[CombineRounds, Tensor | None]:
        """The rounds that a combine takes with the room there is, and memory for their geometries."""
        slot_rows = combine_rounds.rows_of_slot(self._exchange.slot_bytes, row_bytes)
        rounds = combine_rounds.rounds_of(route.staging, len(self.ranks), slot_rows)
        if rounds.number == 1:
            return rounds, None
        shape = rounds.number, self._kernels.round_geometry_length(len(self.ranks))
        return rounds, torch.empty(shape, dtype=torch.int32, device=self._device)

    def _must_not_grow_in_capture(self, need_bytes: int) -> None:
        if torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                f"the call needs {need_bytes} bytes a slot and the buffer has {self._exchange.slot_bytes}; memory "
                "cannot grow inside a CUDA graph. Run the call once before the capture, or give Buffer a "
                f"num_nvl_bytes of at least {2 * need_bytes}."
            )

    def _grow_together(self, header: Header, need_bytes: int) -> None:
        if need_bytes <= self._exchange.slot_bytes:
            return
        self._must_not_grow_in_capture(need_bytes)
        self.settle()
        question = self._send_header(header, OK, need_bytes)
        if self._ask(OPERATIONS[header.operation], question, None)[0] == GROW:
            self._grow()

    def _why_not_grow(self, need_bytes: int) -> RuntimeError | None:
        """What stands against more memory on this rank, and so on all."""
        if not self._is_in_graph:
            return None
        return RuntimeError(
            f"the call needs {need_bytes} bytes a slot on some rank, the buffer has {self._exchange.slot_bytes}, "
            "and its memory cannot grow any more, because a CUDA graph holds addresses in it. Make the largest "
            f"call before the capture, or give Buffer a num_nvl_bytes of at least {2 * need_bytes}."
        )

    def _grow(self) -> None:
        """Makes room for the call that was answered last. Collective."""
        need_bytes = max(self._faults.needs(NEED_WORD))
        if (obstacle := self._why_not_grow(need_bytes)) is not None:
            raise obstacle
        # The second kernel of a plan is behind the answer, and has to see the old generation's state (rule 19).
        self._synchronize()
        try:
            with torch.cuda.device(self._device):
                self._memory.grow(need_bytes)
        except RuntimeError as error:  # mappings may be gone, here or on a peer: no kernel may look for them
            self._faults.stop(f"{error} Buffer.reset() on every rank makes the buffer usable again.")
            raise

    def _send_header(self, header: Header, status: int, need_bytes: int) -> int:
        """A call without a payload, and the number of its question."""
        self._num_calls += 1
        question = next(self._questions)
        packed = pack(header, status, need_bytes)
        operation = OPERATIONS[header.operation]
        self._launch(operation, (), self._exchange.header_only, packed, NUM_MATCH_WORDS, question)
        return question

    def _ask(self, operation: str, question: int, request: DispatchRequest | None) -> Answer:
        """Waits for what became of a call, with the verdict GO or GROW; everything else raises."""
        return self._faults.verdict(operation, question, self._host_limit_secs, request, self._join_rows)

    def _question_for_later(self) -> int:
        """Of a call that `_settle_later` is told of; 0, which asks nothing, where a CUDA graph is captured."""
        return 0 if torch.cuda.is_current_stream_capturing() else next(self._questions)

    def _settle_later(self, operation: str, question: int) -> None:
        """Leaves the question of a call that has been started to `settle`."""
        if question:
            self._unsettled = operation, question

    def settle(self) -> None:
        """Raises what became of the last sum, before a call whose host waits: a rank that refused does not come to it.

        Nobody is told twice. The sum's kernel has begun by then or the wait would come later anyway, so the GPU idles
        for one launch.
        """
        if self._unsettled is not None:
            (operation, question), self._unsettled = self._unsettled, None
            if not self._faults.was_told(operation, question, self._host_limit_secs):
                self._ask(operation, question, None)

    def _join_rows(self, error: Exception) -> None:
        """Refuses the rows of a dispatch that this rank gives up and others, who did not wait, have begun."""
        question = self._send_header(Header(operation=OPERATIONS.index("cached dispatch")), status_of(error), 0)
        with suppress(EPTimeoutError):  # what the caller gets is the error
            self._faults.await_answer("cached dispatch", question, self._host_limit_secs)
            self._faults.leave_reason(str(error))

    def _launch(
        self,
        operation: str,
        tensors: tuple[object, ...] | None,
        kernel: Callable[Concatenate[int, bool, _P], bool],
        *arguments: _P.args,
        **named: _P.kwargs,
    ) -> None:
        """Starts a kernel behind the caller's stream, and orders that one behind it unless told not to.

        `tensors` are what the kernel reads and writes; None where `_join` or another launch follows that does both.
        """
        if self._closed or self._faults.dead is not None:
            self._refuse_to_launch(operation)
        joins = self.joins_stream and tensors is not None
        caller = torch._C._cuda_getCurrentRawStream(self._device_idx)
        is_captured = kernel(caller, joins, *arguments, **named)
        if is_captured:
            self._is_in_graph = True
        if tensors is not None and not joins:
            self._keep(tensors, is_captured)

    def _join(self, tensors: tuple[object, ...]) -> None:
        """What a launch without tensors has left to do."""
        if self.joins_stream:
            self._exchange.join(torch._C._cuda_getCurrentRawStream(self._device_idx))
        else:
            self._keep(tensors, torch.cuda.is_current_stream_capturing())

    def _refuse_to_launch(self, operation: str) -> None:
        if self._closed:
            raise RuntimeError(f"{operation} was not started: the buffer is closed. Close it after the last backward.")
        self._faults.raise_if_dead(operation)

    def _keep(self, tensors: tuple[object, ...], is_captured: bool) -> None:
        """Holds what a call reads and writes until it has ended, since no stream waits for it yet."""
        if is_captured:  # an event of a capture cannot be asked; the graph has no end
            self._kept_for_graphs.append(tensors)
            return
        while self._kept and self._kept[0][0].query():  # type: ignore[no-untyped-call]
            self._kept.popleft()
        event = _event()
        event.record(self._stream)
        self._kept.append((event, tensors))


def _event() -> torch.cuda.Event:
    return torch.cuda.Event()  # type: ignore[no-untyped-call]
