"""What a buffer remembers between low-latency calls, and the hooks that complete them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from weakref import WeakSet

from torch import Tensor

from moe_ep.low_latency.layout import LowLatencyHandle

MAX_IN_FLIGHT = 2


class ReceiveHook:
    """Completes one low-latency call: writes what it received into its results. To be called once.

    Attributes:
        call: the operation.
        handle: what the call made, if it is a dispatch.
        number: of the call among those that kernels serve.
    """

    def __init__(self, call: str, write: Callable[[], None], handle: LowLatencyHandle | None, number: int = 0) -> None:
        self.call = call
        self.handle = handle
        self.number = number
        self._write: Callable[[], None] | None = write
        self._lost_by = ""

    @property
    def has_run(self) -> bool:
        return self._write is None

    def lose(self, by: str) -> None:
        """The results do not come any more, since `by` was called."""
        self._lost_by = by

    def __call__(self) -> None:
        """Writes the results.

        Raises:
            RuntimeError: it has run before, or its results are lost.
        """
        if self._write is None:
            raise RuntimeError(f"this hook of {self.call} has already run; call each hook once.")
        if self._lost_by:
            raise RuntimeError(
                f"the results of this {self.call} were in flight when {self._lost_by} was called, and are lost; call "
                "hooks first, or make the call anew."
            )
        self._write()
        self._write = None


@dataclass
class LowLatencyState:
    """What a buffer remembers between low-latency calls.

    Attributes:
        enable_shrink: whether ranks may be masked.
        masked: ranks of the group that this rank leaves out.
        hooks: of calls whose results may be in flight.
        combine_buffer: handed out by `get_next_low_latency_combine_buffer`, until a combine reads it.
        num_calls: low-latency calls begun since the last reset, counted where ranks may be left out.
        lost: handles of dispatches whose results will not come.
    """

    enable_shrink: bool
    masked: set[int] = field(default_factory=set)
    hooks: list[ReceiveHook] = field(default_factory=list)
    combine_buffer: Tensor | None = None
    num_calls: int = 0
    lost: WeakSet[LowLatencyHandle] = field(default_factory=WeakSet)

    def lose(self, by: str) -> None:
        """Whatever is in flight is lost, since `by` was called."""
        for hook in self.in_flight():
            hook.lose(by)
            if hook.handle is not None:
                self.lost.add(hook.handle)
        self.hooks.clear()

    def in_flight(self) -> list[ReceiveHook]:
        self.hooks = [hook for hook in self.hooks if not hook.has_run]
        return self.hooks

    def check_room(self, call: str) -> None:
        in_flight = self.in_flight()
        if len(in_flight) >= MAX_IN_FLIGHT:
            raise RuntimeError(
                f"{call} was called while {len(in_flight)} results are in flight, those of "
                f"{' and '.join(hook.call for hook in in_flight)}: their hooks have not run, and at most "
                f"{MAX_IN_FLIGHT} may wait. Call one of the hooks first."
            )

    def check_slot(self, call: str, number: int) -> None:
        """Kernels write every other call into the same places: those of call `number - 2` must be free."""
        for hook in self.in_flight():
            if hook.number <= number - 2:
                raise RuntimeError(
                    f"{call} was called while the result of a {hook.call} two calls before it is in flight: its hook "
                    "has not run, and its place is needed. Call that hook first."
                )

    def check_shrink(self, call: str) -> None:
        if not self.enable_shrink:
            raise RuntimeError(f"{call} needs a buffer that may leave ranks out: construct it with enable_shrink=True.")
