"""NVSHMEM in this process. A process begins it once, over the ranks of one EP group, and it lasts as long as it does.

Symmetric memory is taken and freed by all ranks together, so what a closed buffer leaves is kept for the next one.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import json
import pickle
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import torch

from moe_ep._native.low_latency import NativeNvshmemLowLatency
from moe_ep._native.rail import NativeNvshmemRail, NativeRail, NvshmemKernels, load_nvshmem
from moe_ep.backends.node_memory import Gathering
from moe_ep.errors import ConfigError


def why_no_nvshmem() -> str:
    """Why rails over NVSHMEM cannot run in this install; empty if nothing is missing."""
    for name in ("nvshmem", "cuda"):
        if importlib.util.find_spec(name) is None:
            return (
                f"Python's package {name} is missing, which NVSHMEM is started with: pip install nvshmem4py-cu13 "
                "(nvshmem4py-cu12 for CUDA 12)"
            )
    if importlib.util.find_spec("moe_ep._C_nvshmem") is None:
        return (
            "this install has no kernels for NVSHMEM, because its wheel was not found when it was made: install "
            "nvidia-nvshmem-cu13 (or -cu12), then moe_ep again"
        )
    return ""


class Watched(NamedTuple):
    """The exchange that fails where a rail or a low-latency call does, and the limit of their waits."""

    node_state: int
    record: int
    timeout_secs: float


@dataclass
class _Made:
    """A rail, or memory for low latency, which symmetric memory belongs to for good.

    Attributes:
        native: the rail, or the memory.
        shape: of a rail node and processing elements, bytes of a flow; of other memory its kind.
        is_idle: nobody uses it.
    """

    native: NativeNvshmemRail | NativeNvshmemLowLatency
    shape: Hashable
    is_idle: bool


class NvshmemWorld:
    """See above.

    Attributes:
        generation: the highest of any rail so far.
    """

    def __init__(self) -> None:
        self.generation = 0
        self._ranks: tuple[int, ...] = ()
        self._device_idx = 0
        self._kernels: NvshmemKernels | None = None
        self._made: list[_Made] = []  # all ranks make them together, so a number stands for the same memory on all

    @property
    def kernels(self) -> NvshmemKernels:
        assert self._kernels is not None
        return self._kernels

    def start(self, gathering: Gathering, timeout_secs: float) -> None:
        """Initialises NVSHMEM over the ranks of `gathering`, if that has not happened yet. Collective over them.

        Raises:
            ConfigError: it was initialised over other ranks, or on another device than the current one.
        """
        device_idx = torch.cuda.current_device()
        if self._kernels is not None:
            if gathering.ranks != self._ranks:
                raise ConfigError(
                    f"NVSHMEM runs in this process over ranks {list(self._ranks)} already, and a process can begin it "
                    f"once; the EP group has ranks {list(gathering.ranks)}. Use one EP group a process, or hop='torch'."
                )
            if device_idx != self._device_idx:
                raise ConfigError(
                    f"NVSHMEM runs in this process on device {self._device_idx} already, but device {device_idx} is "
                    "current: call torch.cuda.set_device before the buffer is made, alike every time."
                )
            return
        core: Any = importlib.import_module("nvshmem.core")
        device: Any = importlib.import_module("cuda.core").Device(device_idx)
        device.set_current()
        note = pickle.dumps(core.get_unique_id()).hex() if gathering.rank == 0 else ""
        unique_id = pickle.loads(bytes.fromhex(gathering.all("unique-id", note, timeout_secs)[0]))
        core.init(
            device=device,
            uid=unique_id,
            rank=gathering.rank,
            nranks=len(gathering.ranks),
            initializer_method="uid",
        )
        kernels = load_nvshmem()
        assert kernels is not None
        kernels.register_kernels()
        self._kernels, self._ranks, self._device_idx = kernels, gathering.ranks, device_idx

    def rail(
        self, gathering: Gathering, timeout_secs: float, node: int, pes: list[int], flow_bytes: int, watched: Watched
    ) -> NativeNvshmemRail:
        """A rail whose processing elements are `pes`: one that lies idle on all ranks, or a new one. Collective.

        Args:
            gathering: of this rail alone.
            timeout_secs: how long to wait for the others.
            node, pes, flow_bytes, watched: as `NvshmemRail` takes them.

        Raises:
            EPTimeoutError: a rank did not come.
        """

        def gather_idle(idle: list[int]) -> list[list[int]]:
            return [json.loads(text) for text in gathering.all("idle", json.dumps(idle), timeout_secs)]

        shape = ((node, *pes), flow_bytes)
        rail = cast("NativeNvshmemRail | None", self._idle_of(shape, gather_idle))
        if rail is not None:
            rail.watch(**watched._asdict())
            return rail
        rail = self.kernels.NvshmemRail(node=node, pes=pes, flow_bytes=flow_bytes, **watched._asdict())
        self._made.append(_Made(rail, shape, False))
        return rail

    def low_latency(
        self, rank: int, size: int, gather_idle: Callable[[list[int]], list[list[int]]], watched: Watched
    ) -> NativeNvshmemLowLatency:
        """Memory for low-latency rows, of whatever size: that which lies idle on all ranks, or new. Collective.

        Args:
            rank, size: this rank's place in the group that NVSHMEM was begun over, W.
            gather_idle: every rank's list.
            watched: as `NvshmemLowLatency` takes it.

        Raises:
            EPTimeoutError: a rank did not come.
        """
        memory = cast("NativeNvshmemLowLatency | None", self._idle_of("low latency", gather_idle))
        if memory is not None:
            memory.watch(state=watched.node_state, record=watched.record, timeout_secs=watched.timeout_secs)
            return memory
        memory = self.kernels.NvshmemLowLatency(
            rank=rank,
            size=size,
            state=watched.node_state,
            record=watched.record,
            timeout_secs=watched.timeout_secs,
        )
        self._made.append(_Made(memory, "low latency", False))
        return memory

    def give_back(self, native: NativeRail | NativeNvshmemLowLatency) -> None:
        """Keeps the memory of a rail, or of low latency, for the next one."""
        for made in self._made:
            made.is_idle |= made.native is native

    def _idle_of(
        self, shape: Hashable, gather_idle: Callable[[list[int]], list[list[int]]]
    ) -> NativeNvshmemRail | NativeNvshmemLowLatency | None:
        """What lies idle on all ranks; it is in use from now on."""
        idle = [number for number, made in enumerate(self._made) if made.is_idle and made.shape == shape]
        # Ranks close buffers when they like: one may have closed more than another, or in another order.
        common = set(idle).intersection(*gather_idle(idle))
        if not common:
            return None
        made = self._made[min(common)]
        made.is_idle = False
        return made.native


@functools.cache
def nvshmem_world() -> NvshmemWorld:
    """The one of this process."""
    return NvshmemWorld()
