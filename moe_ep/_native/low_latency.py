"""Types of the parts of `moe_ep._C` and `moe_ep._C_nvshmem` for the low-latency calls; csrc/bindings/low_latency.h."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from moe_ep._native.exchange import NativeExchange


class NativeShape(Protocol):
    """`moe_ep._C.LowLatencyShape`: what is alike on all ranks. Python only hands it on."""


class NativeDispatch(Protocol):
    """`moe_ep._C.LowLatencyDispatch`: the addresses of one dispatch. Python only hands it on."""


class NativeCombine(Protocol):
    """`moe_ep._C.LowLatencyCombine`: the addresses of one combine. Python only hands it on."""


class NativeLaunch(Protocol):
    """`moe_ep._C.LowLatencyLaunch`: where and how a kernel runs. Python only hands it on."""


class NativeLowLatency(Protocol):
    """Memory that the ranks write into each other's, whatever the hop; csrc/low_latency/memory.h.

    Launches do not wait for the device.
    """

    words_a_slot: int
    bytes_a_slot: int

    def allocate(self, words_a_slot: int, bytes_a_slot: int) -> None: ...
    def clear(self) -> None: ...
    def begin(self, generation: int) -> None: ...
    def dispatch(self, launch: NativeLaunch, operation: int, dispatch: NativeDispatch, /) -> None: ...
    def combine(self, launch: NativeLaunch, operation: int, combine: NativeCombine, dtype: str, /) -> None: ...
    def refuse(self, launch: NativeLaunch, operation: int, /) -> None: ...
    def drain(self, launch: NativeLaunch, /) -> None: ...


class NativeIpcLowLatency(NativeLowLatency, Protocol):
    """`moe_ep._C.LowLatency`: memory that the others open."""

    def export_own(self) -> bytes: ...
    def open(self, peer: int, exported: bytes) -> None: ...
    def close(self) -> None: ...


class NativeNvshmemLowLatency(NativeLowLatency, Protocol):
    """`moe_ep._C_nvshmem.NvshmemLowLatency`: symmetric memory; csrc/nvshmem/low_latency_nvshmem.h."""

    def watch(self, *, state: int, record: int, timeout_secs: float) -> None: ...
    def open(self, stored_to: Sequence[bool]) -> None: ...
    def release(self) -> None: ...
    def put_to(self) -> list[int]: ...


class LowLatencyCallKernels(Protocol):
    """What an extension offers for low-latency calls; each takes its own shapes, calls and launches."""

    low_latency_max_ranks: int  # over NVSHMEM; inside a node, and over CUDA IPC, those of an exchange
    low_latency_max_pairs: int  # M * K
    low_latency_max_scales: int  # of a row
    low_latency_max_counts: int  # W times the most experts of a rank

    def LowLatencyShape(  # noqa: N802 (a class)
        self, *, hidden: int, row_bytes: int, num_topk: int, num_experts: int, most_local: int, max_tokens: int
    ) -> NativeShape: ...

    def LowLatencyDispatch(  # noqa: N802 (a class)
        self,
        *,
        shape: NativeShape,
        format: int,  # noqa: A002 (its name there)
        elem_bytes: int,
        num_tokens: int,
        num_local: int,
        x: int,
        ids: int,
        id_bytes: int,
        owner: int,
        local_idx: int,
        rows: int,
        scales: int,
        recv_count: int,
        layout_range: int,
        src_info: int,
        cumulative: int,
        row_places: int,
        slot_rank: int,
    ) -> NativeDispatch: ...

    def LowLatencyCombine(  # noqa: N802 (a class)
        self,
        *,
        shape: NativeShape,
        num_tokens: int,
        rows: int,
        row_places: int,
        slot_rank: int,
        weights: int,
        out: int,
    ) -> NativeCombine: ...

    def LowLatencyLaunch(  # noqa: N802 (a class)
        self,
        *,
        stream: int,
        num_blocks: int,
        sends: bool,
        receives: bool,
        mask: int,
        ticket: int,
        stats: int,
        print: int,  # noqa: A002 (its name there)
        enable_shrink: bool,
    ) -> NativeLaunch: ...

    def low_latency_row_bytes(self, num_bytes: int) -> int: ...
    def low_latency_needs(
        self, size: int, shape: NativeShape, combined: NativeShape, dtype: str
    ) -> tuple[int, int]: ...


class LowLatencyKernels(LowLatencyCallKernels, Protocol):
    """What `moe_ep._C` offers for the low-latency calls."""

    def LowLatency(self, exchange: NativeExchange) -> NativeIpcLowLatency: ...  # noqa: N802 (a class)
    def num_sms(self) -> int: ...
