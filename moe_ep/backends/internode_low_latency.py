"""The low-latency calls between nodes: the kernels that serve those of one node, over all ranks of the EP group.

Rows go straight to their slots, whatever the topology: a rank whose memory this GPU reaches is stored into, over CUDA
IPC or where NVSHMEM finds it; to any other rank rows, words and acks are put. Nothing is relayed, so a rank may be left
out here.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from moe_ep._native import NativeKernels
from moe_ep._native.exchange import NativeExchange
from moe_ep._native.low_latency import LowLatencyCallKernels, NativeNvshmemLowLatency
from moe_ep.backends.device_faults import DeviceFaults
from moe_ep.backends.node_legs import NodeLegs
from moe_ep.backends.node_low_latency import NodeLowLatency
from moe_ep.backends.node_low_latency_memory import IpcLowLatencyMemory, NodeLowLatencyMemory
from moe_ep.backends.node_memory import NodeMemory
from moe_ep.backends.nvshmem_world import NvshmemWorld, Watched, nvshmem_world
from moe_ep.backends.rail_memory import Hop, RailMemory
from moe_ep.topology import Topology

STORES_ACROSS_NODES = True  # into memory of other nodes that this GPU reaches; otherwise rows are put there too


class ApartMemory(NodeMemory):
    """Ranks that meet, each with an exchange of its own for what fails, and open nothing of each other here.

    Args:
        group: the EP group, or None for a single rank.
        timeout_secs: limit of every wait.
    """

    def __init__(self, group: dist.ProcessGroup | None, timeout_secs: float) -> None:
        super().__init__(group, timeout_secs, 0)

    def _make_exchange(self, kernels: NativeKernels) -> NativeExchange:
        """Of a larger group than an exchange takes, that of one rank: what lies in it for peers has no use here."""
        if len(self.ranks) <= kernels.max_ranks:
            return super()._make_exchange(kernels)
        return kernels.Exchange(rank=0, size=1, timeout_secs=self.timeout_secs)

    def _open(self, num_bytes: int, name: str) -> None:
        generations = self._share(f"{name}/segment", self.exchange.export_segment, self.exchange.open_segment)
        self._begin(max(generations) + 1)
        self._intact = True

    def _share(self, name: str, export: Callable[[], bytes], opens: Callable[[int, bytes], None]) -> list[int]:
        return [int(text) for text in self._gather(name, str(self.generation), self.timeout_secs)]


def most_ranks(kernels: NativeKernels, num_nodes: int, hop: Hop) -> int:
    """The most ranks that the low-latency kernels serve."""
    return kernels.low_latency_max_ranks if num_nodes > 1 and hop == "nvshmem" else kernels.max_ranks


class NvshmemLowLatencyMemory(NodeLowLatencyMemory):
    """Symmetric memory for low-latency rows, which NVSHMEM's world keeps for the next buffer.

    Args:
        node: the ranks, which meet here.
        kernels: of `moe_ep._C`.
        world: NVSHMEM, begun over these ranks.
        settle: waits until what this rank has put is there.
        stored_to: by rank, whether this one stores into its memory where it reaches it.
    """

    native: NativeNvshmemLowLatency

    def __init__(
        self,
        node: NodeMemory,
        kernels: NativeKernels,
        world: NvshmemWorld,
        settle: Callable[[], None],
        stored_to: Sequence[bool],
    ) -> None:
        super().__init__(node, kernels)
        self._world, self._settle, self._stored_to = world, settle, list(stored_to)

    @property
    def calls(self) -> LowLatencyCallKernels:
        return self._world.kernels

    def close(self) -> None:
        """Nothing is mapped for this buffer alone; the world takes the memory back by `give_back`."""

    def give_back(self) -> None:
        if self._has_native:
            self._world.give_back(self.native)

    def _make(self, name: str) -> None:
        node, exchange = self._node, self._node.exchange
        watched = Watched(exchange.state_address, exchange.record_address, node.timeout_secs)

        def gather_idle(idle: list[int]) -> list[list[int]]:
            return [json.loads(text) for text in node.gather(f"{name}/idle", json.dumps(idle))]

        self.native = self._world.low_latency(node.rank, len(node.ranks), gather_idle, watched)

    def _replace(self, name: str, num_words: int, num_bytes: int) -> None:
        self._settle()  # acks and words of earlier calls, of other buffers too
        self._node.gather(f"{name}/settled", "")
        if num_words <= self.native.words_a_slot and num_bytes <= self.native.bytes_a_slot:
            self.native.clear()
        else:
            self.native.allocate(num_words, num_bytes)
        self.native.open(self._stored_to)


class InternodeLowLatency:
    """One rank's low-latency calls between nodes, with the exchange that fails where they do. Collective: construct,
    `reset`.

    Args:
        group: the EP group, or None for a single rank.
        topology: of the group.
        hop: what reaches the ranks of other nodes.
        kernels: of `moe_ep._C`.
        legs: the exchange inside the node; calls run where its do.
        rail: of this rank, or None where there is one node.
        timeout_secs: limit of every wait.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        topology: Topology,
        hop: Hop,
        kernels: NativeKernels,
        legs: NodeLegs,
        rail: RailMemory | None,
        timeout_secs: float,
    ) -> None:
        self._ranks = ApartMemory(group, timeout_secs)
        self._faults = DeviceFaults(self._ranks)
        self._device, self._stream = legs.device, legs.stream
        self._memory: IpcLowLatencyMemory | NvshmemLowLatencyMemory
        if rail is None or hop == "ipc":
            self._memory = IpcLowLatencyMemory(self._ranks, kernels)
        else:
            near = topology.ranks_of(topology.node_of(self._ranks.rank))
            stored_to = [STORES_ACROSS_NODES or rank in near for rank in range(topology.world_size)]
            settle = functools.partial(rail.settle, legs.stream)
            self._memory = NvshmemLowLatencyMemory(self._ranks, kernels, nvshmem_world(), settle, stored_to)

    @functools.cached_property
    def calls(self) -> NodeLowLatency:
        """The kernels; made at the first use."""
        return NodeLowLatency(self._ranks, self._memory, self._faults, self._device, self._stream)

    def take_faults(self) -> list[str]:
        return self._faults.take()

    def clear(self) -> None:
        """Before the ranks meet for a reset."""
        if self._is_used:
            torch.cuda.synchronize(self._device)  # kernels run on the caller's streams
            self.calls.clear()

    def reset(self) -> None:
        """A new generation. What this rank has put is settled.

        Raises:
            EPTimeoutError: a rank did not come.
        """
        try:
            self._ranks.reset()
        except RuntimeError as error:  # the others may have a new generation by now
            self._faults.stop(str(error))
            raise
        self._faults.forget()
        if self._is_used:
            self.calls.reset()

    def close(self) -> None:
        """Until no peer writes into this rank's memory any more."""
        if self._is_used:
            self.calls.close()
        self._ranks.close()

    def give_back(self) -> None:
        """Leaves memory to the next buffer, behind `close`, where what this rank has put is settled."""
        if isinstance(self._memory, NvshmemLowLatencyMemory):
            self._memory.give_back()

    @property
    def _is_used(self) -> bool:
        return "calls" in self.__dict__
