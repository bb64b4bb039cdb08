"""Memory for low-latency rows that the ranks write into each other's, and how they meet to make room."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from typing import Any

from moe_ep._native import NativeKernels
from moe_ep._native.low_latency import LowLatencyCallKernels, NativeIpcLowLatency, NativeLowLatency
from moe_ep.backends.node_memory import NodeMemory, host_id
from moe_ep.errors import ConfigError

_SPARE_SMS = 3  # for kernels that are not ours: a call of ours may wait for what comes behind them on another stream
_GENERATIONS = 16  # of this memory within one of the backend's


class NodeLowLatencyMemory(ABC):
    """One rank's part. Nothing is allocated before the first call. Collective: `meet`.

    Attributes:
        native: the memory, once `is_ready`.
        num_blocks: blocks of a kernel: together those of the ranks of a GPU find room on it.
    """

    native: NativeLowLatency

    def __init__(self, node: NodeMemory, kernels: NativeKernels) -> None:
        self._node = node
        self._kernels = kernels
        self.num_blocks = 1
        self._has_native = False
        self._is_intact = False  # every rank's memory is open here
        self._is_agreed = False  # and so it is on all ranks
        self._num_meetings = 0  # since the backend's generation began

    @property
    @abstractmethod
    def calls(self) -> LowLatencyCallKernels:
        """The extension that makes what the calls are handed."""

    @abstractmethod
    def close(self) -> None:
        """Lets go of the others' memory. Nothing of this rank runs."""

    @abstractmethod
    def _make(self, name: str) -> None:
        """Makes `native`. Collective; `name` is used once."""

    @abstractmethod
    def _replace(self, name: str, num_words: int, num_bytes: int) -> None:
        """Room for so much a slot, open on all ranks, its words zero. Collective, as `_make`."""

    def is_ready(self, needs: tuple[int, int]) -> bool:
        """Whether all ranks have (words, bytes) a slot."""
        return self._is_agreed and needs[0] <= self.native.words_a_slot and needs[1] <= self.native.bytes_a_slot

    def meet(self, needs: tuple[int, int], is_in_graph: bool, is_waited_for: bool, refused: str = "") -> None:
        """Makes room for `needs` where there is none yet; all ranks call it for the same call.

        Args:
            needs: (words, bytes) a slot.
            is_in_graph: a CUDA graph of this rank holds addresses in the memory.
            is_waited_for: a hook of this rank has not run, and will read the memory.
            refused: the operation, where this rank refuses it and only says so.

        Raises:
            ConfigError: the ranks need different sizes.
            RuntimeError: another rank refuses the call, or a graph or a hook holds the memory that is too small.
            EPTimeoutError: a rank did not come.
        """
        name = f"low-latency/{self._node.generation}/{self._num_meetings}"
        self._num_meetings += 1
        own = {"needs": needs, "has": self._sizes(), "refused": refused, "graph": is_in_graph, "hook": is_waited_for}
        own["gpu"] = f"{host_id()} {self._kernels.pci_bus_id()}"  # GPUs of two machines have the same bus numbers
        notes = [json.loads(text) for text in self._node.gather(f"{name}/begin", json.dumps(own))]
        self._check(notes, refused)
        if refused or any(note["refused"] for note in notes):
            return
        num_sharing = sum(note["gpu"] == own["gpu"] for note in notes)
        self.num_blocks = max(1, (self._kernels.num_sms() - _SPARE_SMS) // num_sharing)
        has = self._sizes()
        alike = has is not None and all(note["has"] == list(has) for note in notes)
        if not (alike and has is not None and needs[0] <= has[0] and needs[1] <= has[1]):
            if any(note["graph"] for note in notes):
                raise RuntimeError(
                    f"the low-latency call needs {needs[0]} words and {needs[1]} bytes a slot, there are {has or 0}, "
                    "and the memory cannot grow any more, because a CUDA graph holds addresses in it. Run the largest "
                    "call once before the first capture."
                )
            if any(note["hook"] for note in notes):
                raise RuntimeError(
                    f"the low-latency call needs {needs[0]} words and {needs[1]} bytes a slot, there are {has or 0}, "
                    "and the memory cannot grow while the result of an earlier call lies in it. Call its hook first, "
                    "or run the largest call once before the others."
                )
            largest = [max(needs[i], *((note["has"] or (0, 0))[i] for note in notes)) for i in range(2)]
            self._rebuild(name, largest[0], largest[1])
        self._is_agreed = True

    def clear(self) -> None:
        """Before the ranks meet for a reset: no word of a generation long ago may pass for one of a new one."""
        if self._is_intact:
            self.native.clear()

    def reset(self) -> None:
        """Begins a generation behind that of the backend. Mappings stay where they are intact: graphs hold them."""
        self._num_meetings = 0
        self._is_agreed = False
        if self._is_intact:
            self._begin()

    def _check(self, notes: list[dict[str, Any]], refused: str) -> None:
        for rank, note in enumerate(notes):
            if note["refused"] and not refused:
                raise RuntimeError(f"EP rank {rank} refused {note['refused']}: see its log.")
        others = [note for note in notes if not note["refused"]]
        for rank, note in enumerate(notes):
            if not note["refused"] and note["needs"] != others[0]["needs"]:
                raise ConfigError(
                    "the ranks of the EP group disagree on M, H, K, E or what travels in a low-latency call: rank "
                    f"{notes.index(others[0])} needs {others[0]['needs']} words and bytes a slot, rank {rank} needs "
                    f"{note['needs']}. Give every rank the same values."
                )

    def _sizes(self) -> tuple[int, int] | None:
        return (self.native.words_a_slot, self.native.bytes_a_slot) if self._is_intact else None

    def _rebuild(self, name: str, num_words: int, num_bytes: int) -> None:
        if not self._has_native:
            self._make(name)
            self._has_native = True
        self._is_intact = self._is_agreed = False
        self._replace(name, num_words, num_bytes)
        self._begin()
        # Nobody sends before all have zeroed their states and opened all memory.
        self._node.gather(f"{name}/open", "")
        self._is_intact = True

    def _begin(self) -> None:
        self.native.begin(self._node.generation * _GENERATIONS + self._num_meetings % _GENERATIONS)


class IpcLowLatencyMemory(NodeLowLatencyMemory):
    """Memory that the others open over CUDA IPC."""

    native: NativeIpcLowLatency

    @property
    def calls(self) -> LowLatencyCallKernels:
        return self._kernels

    def close(self) -> None:
        self.native.close()

    def _make(self, name: str) -> None:
        self.native = self._kernels.LowLatency(self._node.exchange)

    def _replace(self, name: str, num_words: int, num_bytes: int) -> None:
        self.native.close()
        self._node.gather(f"{name}/closed", "")
        self.native.allocate(num_words, num_bytes)
        exported = self._node.gather(f"{name}/memory", self.native.export_own().hex())
        for peer, text in enumerate(exported):
            if peer != self._node.rank:
                self.native.open(peer, bytes.fromhex(text))
