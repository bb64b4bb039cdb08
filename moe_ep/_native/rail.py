"""What the CUDA extensions offer between nodes: rails over CUDA IPC (`moe_ep._C`) and NVSHMEM (`moe_ep._C_nvshmem`).

The contracts are in the headers of csrc/internode and of csrc/nvshmem.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Sequence
from typing import Protocol, cast

from moe_ep._native.low_latency import LowLatencyCallKernels, NativeNvshmemLowLatency

RAIL_MODULE = "moe_ep._C_nvshmem"


class NativeRound(Protocol):
    """`RailRound` of csrc/internode/rail.h."""


class NativeRail(Protocol):
    """One rank's part of a rail, whatever carries it."""

    block: int
    block_bytes: int
    flow_bytes: int

    def inbox(self, slot: int) -> int:
        """Where in the block the rows of a slot come in, node after node, bytes."""

    def outbox(self, slot: int) -> int:
        """Where in the block the rows of a slot set out, node after node, bytes."""

    def watch(self, *, node_state: int, record: int, timeout_secs: float) -> None: ...

    def begin_generation(self, generation: int) -> None: ...

    def sent_bytes(self) -> int:
        """Bytes of rows put to other nodes since then; the host waits for the device."""

    def open(self, call: bytes, stream: int) -> None:
        """Opens a call of all ranks, which `NativeExchange.opening` made. What the stream runs until the next opening
        fills its outputs and leaves, unless they agreed."""

    def send(
        self, round: NativeRound, rows: Sequence[tuple[int, int, int]], token: int, num_sms: int, stream: int
    ) -> None:
        """(x, stride in bytes, bytes) of each kind of rows; `token` 0: what lies in the outbox."""

    def wait_free(self, round: NativeRound, stream: int) -> None: ...

    def wait(self, round: NativeRound, stream: int) -> None: ...

    def take(self, round: NativeRound, stream: int) -> None: ...

    def settle(self, stream: int) -> None:
        """The stream waits until what this rank has put, in kernels that have ended, is there."""


class NativeIpcRail(NativeRail, Protocol):
    """A rail between processes of one machine."""

    def export_block(self) -> bytes: ...

    def open_block(self, node: int, exported: bytes) -> None: ...


class NativeNvshmemRail(NativeRail, Protocol):
    """A rail over NVSHMEM."""

    def release(self) -> None: ...

    def address_at(self, pe: int) -> int: ...


class RoundKernels(Protocol):
    """An extension that sends rounds between nodes; each has rounds of its own."""

    def RailRound(
        self,
        *,
        number: int,
        num_rounds: int,
        operation: int,
        row_bytes: int,
        flow_bytes: int,
        first_out: int,
        num_in: int,
    ) -> NativeRound: ...


class RailKernels(RoundKernels, Protocol):
    """The part of `moe_ep._C` that works between nodes."""

    max_nodes: int

    def IpcRail(
        self, *, node: int, num_nodes: int, flow_bytes: int, node_state: int, record: int, timeout_secs: float
    ) -> NativeIpcRail: ...

    def node_sum(
        self,
        *,
        inbox: int,
        flow_bytes: int,
        own: int,
        own_by_place: bool,
        bias: tuple[int, int],
        place: int,
        node: int,
        num_nodes: int,
        first_token: int,
        num_tokens: int,
        row_bytes: int,
        y: int,
        poison: int,
        state: int,
        dtype: str,
        num_sms: int,
        stream: int,
    ) -> None: ...


class NvshmemKernels(RoundKernels, LowLatencyCallKernels, Protocol):
    """`moe_ep._C_nvshmem`."""

    def register_kernels(self) -> None: ...

    def NvshmemRail(
        self,
        *,
        node: int,
        pes: Sequence[int],
        flow_bytes: int,
        node_state: int,
        record: int,
        timeout_secs: float,
    ) -> NativeNvshmemRail: ...

    def NvshmemLowLatency(
        self, *, rank: int, size: int, state: int, record: int, timeout_secs: float
    ) -> NativeNvshmemLowLatency: ...


@functools.cache
def load_nvshmem() -> NvshmemKernels | None:
    """The extension, or None where this install was made without NVSHMEM.

    NVSHMEM's own library must be in the process by then: import nvshmem4py first.
    """
    try:
        module = importlib.import_module(RAIL_MODULE)
    except ModuleNotFoundError as error:
        if error.name != RAIL_MODULE:
            raise
        return None
    return cast(NvshmemKernels, module)
