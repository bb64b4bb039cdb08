"""What every call inside a node needs around its kernel: a header, room, its place among streams, and a verdict."""

from __future__ import annotations

import itertools
import struct
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

from moe_ep._native import require
from moe_ep.backends.base import DispatchRequest
from moe_ep.backends.device_faults import GROW, DeviceFaults
from moe_ep.backends.header import OK, OPERATIONS, Header
from moe_ep.backends.node_memory import NodeMemory

START_BYTES = 16 << 20  # of a slot, where the caller asks for less
DOES_NOT_FIT = 100  # status of a rank; csrc/exchange.h
_PLACES_WORD = 20  # of a header: block of rows that peers read in place, offset and stride of each kind
NEED_WORD = 25  # of a header: bytes that this rank puts into its slot
_HOST_SLACK_SECS = 30.0  # over the device's own limit, for kernels that queue before ours


class NodeCalls:
    """One rank's memory, stream and faults; launches go through `_launching`.

    Args:
        group: the EP group, or None for a single rank.
        timeout_secs: limit of every wait.
        num_bytes: what the two slots of the segment hold at first, together.
    """

    def __init__(self, group: dist.ProcessGroup | None, timeout_secs: float, num_bytes: int) -> None:
        self._kernels = require()
        self._device = torch.device("cuda", torch.cuda.current_device())
        self._memory = NodeMemory(group, timeout_secs, max(START_BYTES, num_bytes // 2))
        self.ranks, self.rank = self._memory.ranks, self._memory.rank
        self.num_sms = 20
        self.joins_stream = True
        self._exchange = self._memory.exchange
        self._faults = DeviceFaults(self._memory)
        self._stream = torch.cuda.Stream(self._device, priority=-1)  # type: ignore[no-untyped-call]
        self._before, self._after = _event(), _event()
        self._kept: deque[tuple[torch.cuda.Event, tuple[object, ...]]] = deque()
        self._kept_for_graphs: list[tuple[object, ...]] = []
        self._is_in_graph = False  # some CUDA graph holds addresses of the segments
        self._num_calls = 0  # of a generation or more; ranks count alike, since a call that one refuses is one on all
        self._questions = itertools.count(1)
        self._closed = False

    @property
    def stream(self) -> torch.cuda.Stream:
        """The stream of the kernels."""
        return self._stream

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        # Peers may still read what this rank published last.
        self._exchange.drain(header=self._pack(Header(), OK, 0)[0], stream=self._stream.cuda_stream)
        self._synchronize()
        self._kept.clear()
        self._kept_for_graphs.clear()
        self._memory.close()

    def _synchronize(self) -> None:
        """Until no kernel of this exchange runs: a graph replays on whatever stream its caller chose."""
        if self._is_in_graph:
            torch.cuda.synchronize(self._device)
        else:
            self._stream.synchronize()

    @property
    def _host_limit_secs(self) -> float:
        return self._memory.timeout_secs + _HOST_SLACK_SECS

    def _pack(
        self,
        header: Header,
        status: int,
        need_bytes: int,
        offsets: tuple[int, int] = (0, 0),
        places: tuple[int, ...] = (),
    ) -> tuple[bytes, int]:
        """The header of a call, and how many of its words must be alike on all ranks. Once a call.

        Args:
            header: of the call.
            status: OK, the number of an error class, or DOES_NOT_FIT.
            need_bytes: what this rank puts into its slot.
            offsets: of parts of the slot, for the exact combine.
            places: where rows lie that peers read in place (`NodeMemory.places_of`).
        """
        self._num_calls += 1
        words = header.match_words()
        num_match = len(words)
        words += [0] * (_PLACES_WORD - num_match)
        words += [*places, *[0] * (NEED_WORD - _PLACES_WORD - len(places))]
        words += [need_bytes, *offsets, status, header.x_needs_grad, header.weights_need_grad, header.num_tokens]
        return struct.pack("32q", *words), num_match

    def _must_not_capture(self, operation: str) -> None:
        if torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                f"{operation} waits for the counts of all ranks, which a CUDA graph cannot; give max_rows, or go along "
                "a handle that was made before the capture."
            )

    def _grow_together(self, header: Header, need_bytes: int) -> None:
        if need_bytes <= self._exchange.slot_bytes:
            return
        if torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                f"the call needs {need_bytes} bytes a slot and the buffer has {self._exchange.slot_bytes}; memory "
                "cannot grow inside a CUDA graph. Run the call once before the capture, or give Buffer a "
                f"num_nvl_bytes of at least {2 * need_bytes}."
            )
        packed, num_match = self._pack(header, DOES_NOT_FIT, need_bytes)
        question = next(self._questions)
        operation = OPERATIONS[header.operation]
        with self._launching(operation) as stream:
            self._exchange.header_only(header=packed, num_match=num_match, question=question, stream=stream)
        if self._ask(operation, question, None) == GROW:
            self._grow()

    def _grow(self) -> None:
        """Makes room for the call that was answered last. Collective."""
        need_bytes = max(self._faults.needs(NEED_WORD))
        if self._is_in_graph:
            raise RuntimeError(
                f"the call needs {need_bytes} bytes a slot on some rank, the buffer has {self._exchange.slot_bytes}, "
                "and its memory cannot grow any more, because a CUDA graph holds addresses in it. Make the largest "
                f"call before the capture, or give Buffer a num_nvl_bytes of at least {2 * need_bytes}."
            )
        try:
            with torch.cuda.device(self._device):
                self._memory.grow(need_bytes)
        except RuntimeError as error:  # mappings may be gone, here or on a peer: no kernel may look for them
            self._faults.stop(f"{error} Buffer.reset() on every rank makes the buffer usable again.")
            raise

    def _ask(self, operation: str, question: int, request: DispatchRequest | None) -> int:
        """Waits for the verdict of a call; GO or GROW, everything else raises."""
        return self._faults.verdict(operation, question, self._host_limit_secs, self._stream.cuda_stream, request)

    @contextmanager
    def _launching(self, operation: str, *tensors: object) -> Iterator[int]:
        """Orders the buffer's stream behind the current one, and the current one behind it unless told not to."""
        if self._closed:
            raise RuntimeError(f"{operation} was not started: the buffer is closed. Close it after the last backward.")
        self._faults.raise_if_dead(operation)
        self._is_in_graph |= torch.cuda.is_current_stream_capturing()
        with torch.cuda.device(self._device):  # the caller's may be another one by now
            current = torch.cuda.current_stream(self._device)
            self._before.record(current)
            self._stream.wait_event(self._before)
            yield self._stream.cuda_stream
            if self.joins_stream:
                self._after.record(self._stream)
                current.wait_event(self._after)
            else:
                self._keep(tensors)

    def _keep(self, tensors: tuple[object, ...]) -> None:
        """Holds what a call reads and writes until it has ended, since no stream waits for it yet."""
        if torch.cuda.is_current_stream_capturing():  # an event of a capture cannot be asked; the graph has no end
            self._kept_for_graphs.append(tensors)
            return
        while self._kept and self._kept[0][0].query():  # type: ignore[no-untyped-call]
            self._kept.popleft()
        event = _event()
        event.record(self._stream)
        self._kept.append((event, tensors))


def _event() -> torch.cuda.Event:
    return torch.cuda.Event()  # type: ignore[no-untyped-call]
