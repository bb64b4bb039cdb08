"""Types of the part of `moe_ep._C` that moves rows between the ranks of a node; csrc/bindings/intranode.cpp."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

# Of a plan: compact rows, rows, whether any rank needs the gradient of x, and of the weights; tokens of each rank, rows
# from each to each, pairs from each.
Counts = tuple[int, int, bool, bool, tuple[int, ...], tuple[int, ...], tuple[int, ...]]
# (verdict, epoch, bad slot, bad id) of the newest answer, and the counts of the newest plan.
Answer = tuple[int, int, int, int, Counts]
# (x, stride, bytes of a row, out, poison, padding): `Rows` of csrc/intranode/move.h.
NativeRows = tuple[int, int, int, int, int, int]


class NativeRoute(Protocol):
    """`moe_ep._C.Route`: what the calls along one handle share. Python hands it on."""

    def set_rows(self, num_rows: int, num_compact_rows: int, /) -> None: ...


class NativeExchange(Protocol):
    """`moe_ep._C.Exchange`: memory that ranks share, and the kernels on it. See csrc/exchange/host.h.

    Launches do not wait for the device, and run on that of the exchange whichever is current. They are ordered behind
    the stream `caller`, and it behind them if `joins`; they return whether a CUDA graph captures them. `header` is 32
    int64 as bytes, `num_match` of them the same on all ranks. `need_bytes` are what this rank puts into its slot: where
    that is too little, the call says so to all ranks. `places` say where rows lie that peers read in place
    (`NodeMemory.places_of`); empty for none.
    """

    slot_bytes: int
    state_address: int
    record_address: int

    def export_control(self) -> bytes: ...
    def export_segment(self) -> bytes: ...
    def open_control(self, peer: int, exported: bytes) -> None: ...
    def open_segment(self, peer: int, exported: bytes) -> None: ...
    def allocate_block(self, num_bytes: int) -> int: ...
    def export_block(self) -> bytes: ...
    def adopt_block(self, addresses: Sequence[int]) -> None: ...
    def open_block(self, peer: int, exported: bytes) -> None: ...
    def close_segments(self) -> None: ...
    def allocate_segment(self, slot_bytes: int) -> None: ...
    def begin_generation(self, generation: int) -> None: ...
    def launch_on(self, stream: int, bulk_copies: bool) -> None: ...
    def wait_answer(self, question: int, limit_secs: float, /) -> Answer | None: ...
    def answer(self) -> Answer: ...
    def expert_counts(self, num_local: int, alignment: int) -> tuple[list[int], list[int]]: ...
    def headers(self, size: int) -> bytes: ...
    def has_fault(self) -> bool: ...
    def take_faults(self) -> list[tuple[str, list[int]]]:
        """Eight numbers each; of "refused", the first since the last look, the headers of all ranks behind them."""

    def join(self, caller: int, /) -> None: ...

    def plan(
        self,
        caller: int,
        joins: bool,
        num_sms: int,
        plan: object,
        output: object | None,
        header: bytes,
        num_match: int,
        question: int,
        /,
    ) -> bool: ...

    def plan_fill(
        self, caller: int, joins: bool, num_sms: int, plan: object, output: object, header: bytes, /
    ) -> bool: ...

    def move(
        self,
        caller: int,
        joins: bool,
        num_sms: int,
        route: NativeRoute,
        operation: int,
        hidden: int,
        dtype_number: int,
        need_bytes: int,
        places: tuple[int, ...],
        rows: list[NativeRows],
        dtype: str,
        weights: int,
        made_rows: int,
        grad_weights: int,
        /,
    ) -> bool: ...

    def combine(
        self,
        caller: int,
        joins: bool,
        num_sms: int,
        route: NativeRoute,
        operation: int,
        hidden: int,
        dtype_number: int,
        need_bytes: int,
        places: tuple[int, ...],
        rows: int,
        row_bytes: int,
        y: int,
        poison: int,
        dtype: str,
        bias_0: int,
        bias_1: int,
        weights: int,
        is_weighted: bool,
        weights_dtype: int,
        exact: bool,
        pairs_offset: int,
        weights_offset: int,
        num_rounds: int,
        slot_rows: int,
        rounds: int,
        /,
    ) -> bool: ...

    def numbers_home(
        self,
        caller: int,
        joins: bool,
        num_sms: int,
        route: NativeRoute,
        operation: int,
        dtype_number: int,
        need_bytes: int,
        numbers: int,
        num_compact_rows: int,
        sums: bool,
        out: int,
        dtype: str,
        /,
    ) -> bool: ...

    def all_reduce(
        self,
        caller: int,
        joins: bool,
        num_sms: int,
        header: bytes,
        num_match: int,
        question: int,
        numbers: int,
        out: int,
        count: int,
        dtype: str,
        /,
    ) -> bool: ...

    def header_only(self, caller: int, joins: bool, header: bytes, num_match: int, question: int, /) -> bool: ...
    def opening(self, header: bytes, num_match: int, question: int, /) -> bytes:
        """A call for `NativeRail.open`, with the memory as it is now."""

    def done_only(self, caller: int, joins: bool, header: bytes, /) -> bool: ...
    def drain(self, header: bytes, /) -> None: ...


class ExchangeKernels(Protocol):
    """What `moe_ep._C` offers beside `Exchange` for it."""

    max_ranks: int
    max_chunks: int
    max_local_experts: int

    def Exchange(self, *, rank: int, size: int, timeout_secs: float) -> NativeExchange: ...  # noqa: N802 (a class)
    def PlanInput(self, **arguments: Any) -> object: ...  # noqa: N802 (a class)
    def PlanOutput(self, **arguments: Any) -> object: ...  # noqa: N802 (a class)
    def Route(self, **arguments: Any) -> NativeRoute: ...  # noqa: N802 (a class)
    def pci_bus_id(self) -> str: ...
    def can_reach(self, peer_pci_bus_id: str) -> bool: ...
    def has_bulk_copies(self) -> bool: ...
    def geometry_length(self, size: int, num_local: int) -> int: ...
    def round_geometry_length(self, size: int) -> int: ...
    def chunk_tokens(self, num_tokens: int) -> int: ...
