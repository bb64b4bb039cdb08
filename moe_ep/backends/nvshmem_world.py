"""NVSHMEM in this process. A process begins it once, over the ranks of one EP group, and it lasts as long as it does.

Symmetric memory is taken and freed by all ranks together, so what a closed buffer leaves is kept for the next one.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import pickle
from typing import Any, NamedTuple

import torch

from moe_ep._native_rail import NativeNvshmemRail, NativeRail, NvshmemKernels, load_nvshmem
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
    """The exchange inside the node that fails where a rail does, and the limit of its waits; csrc/rail.h."""

    node_state: int
    record: int
    timeout_secs: float


class NvshmemWorld:
    """See above.

    Attributes:
        generation: the highest of any rail so far.
    """

    def __init__(self) -> None:
        self.generation = 0
        self._ranks: tuple[int, ...] = ()
        self._kernels: NvshmemKernels | None = None
        self._idle: list[tuple[tuple[int, ...], int, NativeNvshmemRail]] = []
        self._in_use: dict[int, tuple[tuple[int, ...], int, NativeNvshmemRail]] = {}

    @property
    def kernels(self) -> NvshmemKernels:
        assert self._kernels is not None
        return self._kernels

    def start(self, gathering: Gathering, timeout_secs: float) -> None:
        """Initialises NVSHMEM over the ranks of `gathering`, if that has not happened yet. Collective over them.

        Raises:
            ConfigError: it was initialised over other ranks.
        """
        if self._kernels is not None:
            if gathering.ranks != self._ranks:
                raise ConfigError(
                    f"NVSHMEM runs in this process over ranks {list(self._ranks)} already, and a process can begin it "
                    f"once; the EP group has ranks {list(gathering.ranks)}. Use one EP group a process, or hop='torch'."
                )
            return
        core: Any = importlib.import_module("nvshmem.core")
        device: Any = importlib.import_module("cuda.core").Device(torch.cuda.current_device())
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
        self._kernels, self._ranks = kernels, gathering.ranks

    def rail(self, node: int, pes: list[int], flow_bytes: int, watched: Watched) -> NativeNvshmemRail:
        """A rail whose processing elements are `pes`: one that lies idle, or a new one. Collective over all ranks."""
        key = (node, *pes)
        for place, (idle, idle_bytes, rail) in enumerate(self._idle):
            if (idle, idle_bytes) == (key, flow_bytes):
                del self._idle[place]
                rail.watch(**watched._asdict())
                break
        else:
            rail = self.kernels.NvshmemRail(node=node, pes=pes, flow_bytes=flow_bytes, **watched._asdict())
        self._in_use[id(rail)] = (key, flow_bytes, rail)
        return rail

    def give_back(self, rail: NativeRail) -> None:
        """Keeps the memory of a rail for the next one."""
        entry = self._in_use.pop(id(rail), None)
        if entry is not None:
            self._idle.append(entry)


@functools.cache
def nvshmem_world() -> NvshmemWorld:
    """The one of this process."""
    return NvshmemWorld()
