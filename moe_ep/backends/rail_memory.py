"""The memory of a rail: a block of each rank, which the ranks of its rail write and those of its node read."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Literal

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from moe_ep._native.rail import NativeRail, NativeRound, RailKernels
from moe_ep.backends.meeting import meet
from moe_ep.backends.node_legs import NodeLegs
from moe_ep.backends.node_memory import Gathering
from moe_ep.backends.nvshmem_world import Watched, nvshmem_world
from moe_ep.errors import ConfigError, EPTimeoutError
from moe_ep.topology import Topology

Hop = Literal["ipc", "nvshmem"]
_STEP_BYTES = 256
_POLL_SECS = 0.0005


class RailMemory:
    """One rank's part of its rail. Collective over the EP group: construct, `begin`.

    Args:
        group: the EP group, of two nodes or more.
        topology: of the group.
        hop: what carries the rows.
        node: the exchange inside the node, which fails where a wait here does.
        kernels: of the IPC hop.
        num_bytes: of the block, at most; both slots of what comes and of what goes lie in it.
        timeout_secs: limit of every wait.

    Attributes:
        native: the rail.
        rounds: makes its rounds.
        node, num_nodes: of this rank, and how many there are.
        block_number: under which the ranks of the node read the block in place; 0 where they do not reach it.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        topology: Topology,
        hop: Hop,
        node: NodeLegs,
        kernels: RailKernels,
        num_bytes: int,
        timeout_secs: float,
    ) -> None:
        ranks, rank = dist.get_process_group_ranks(group), dist.get_rank(group)
        self.node, self.num_nodes = topology.node_of(rank), topology.num_nodes
        if self.num_nodes > kernels.max_nodes:
            raise ConfigError(
                f"the EP group has {self.num_nodes} nodes; the kernels between nodes take at most {kernels.max_nodes}. "
                "Use fewer nodes, or hop='torch'."
            )
        self._timeout_secs, self._hop, self._topology = timeout_secs, hop, topology
        base = c10d.PrefixStore("moe_ep/rail/" + "-".join(map(str, ranks)), c10d._get_default_store())
        number = meet(base, ranks, rank, timeout_secs)
        self._gathering = Gathering(c10d.PrefixStore(str(number), base), ranks, rank)
        self._flow_bytes = max(1, num_bytes // (4 * self.num_nodes) // _STEP_BYTES) * _STEP_BYTES
        self._watched = Watched(node.state_address, node.record_address, timeout_secs)
        self.rounds: Callable[..., NativeRound]
        if hop == "ipc":
            self._open_ipc(node, kernels, rank)
        else:
            self._open_nvshmem(node, rank)
        self._generation = 0 if hop == "ipc" else nvshmem_world().generation
        self.begin("start")

    @property
    def flow_bytes(self) -> int:
        """What goes from one node to another in a round, at most."""
        return self.native.flow_bytes

    def begin(self, name: str) -> None:
        """A new generation, the same on all ranks. `name` is used once. No call of this rank is under way, and what it
        has put is settled.

        Raises:
            EPTimeoutError: a rank did not come.
        """
        notes = self._gathering.all(f"{name}/generation", str(self._generation), self._timeout_secs)
        self._generation = 1 + max(map(int, notes))
        self.native.begin_generation(self._generation)
        if self._hop == "nvshmem":
            nvshmem_world().generation = self._generation

    def leave_reason(self, opening: int, text: str) -> None:
        """Tells the ranks of the EP group why this one refused an opening."""
        self._gathering.leave(f"reason/{self._generation}/{opening}", text)

    def reason(self, opening: int, place: int, limit_secs: float) -> str | None:
        """What the rank at `place` left, or None if nothing within the limit."""
        return self._gathering.left(f"reason/{self._generation}/{opening}", place, limit_secs)

    def drain(self, stream: int) -> None:
        """Until the ranks of the rail have taken what this one sent."""
        behind_all = self.rounds(
            number=1, num_rounds=2, operation=0, row_bytes=16, flow_bytes=_STEP_BYTES, first_out=0, num_in=0
        )
        self.native.wait_free(behind_all, stream)

    def settle(self, stream: torch.cuda.Stream) -> None:
        """Waits on the host until what this rank has put is there, after its kernels have ended: it may come later than
        they end, and must not come into a new generation.

        Raises:
            EPTimeoutError: it did not come there within the limit.
        """
        if not self._settles(stream):
            raise EPTimeoutError(
                f"what this rank has sent to other nodes did not come there within {self._timeout_secs:g} s: a node of "
                "its rail is gone, or the network between them. Look at the logs of all ranks, and start the job again."
            )

    def close(self, stream: torch.cuda.Stream) -> bool:
        """Gives memory back that others will use, unless something of this rank is still on its way into theirs. All
        else ends with this object.

        Returns:
            Whether all is there, and symmetric memory may serve again.
        """
        if self._hop == "ipc" or not self._settles(stream):
            return False
        nvshmem_world().give_back(self.native)
        return True

    def _settles(self, stream: torch.cuda.Stream) -> bool:
        self.native.settle(stream.cuda_stream)
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(stream)
        deadline = time.monotonic() + self._timeout_secs
        while not event.query():  # type: ignore[no-untyped-call]
            if time.monotonic() > deadline:
                return False
            time.sleep(_POLL_SECS)
        return True

    def _open_ipc(self, node: NodeLegs, kernels: RailKernels, rank: int) -> None:
        self.rounds = kernels.RailRound
        rail = kernels.IpcRail(
            node=self.node, num_nodes=self.num_nodes, flow_bytes=self._flow_bytes, **self._watched._asdict()
        )
        self.native: NativeRail = rail
        exported = self._gathering.all("block", rail.export_block().hex(), self._timeout_secs)
        for peer in range(self.num_nodes):
            if peer != self.node:
                place = self._topology.rank_at(peer, self._topology.rail_of(rank))
                rail.open_block(peer, bytes.fromhex(exported[place]))
        self.block_number = node.memory.adopt(rail.export_block, [rail.block] * len(node.ranks))

    def _open_nvshmem(self, node: NodeLegs, rank: int) -> None:
        world, topology = nvshmem_world(), self._topology
        world.start(self._gathering, self._timeout_secs)
        self.rounds = world.kernels.RailRound
        own = topology.rail_of(rank)
        pes = [topology.rank_at(peer, own) for peer in range(self.num_nodes)]
        rail = world.rail(self._gathering, self._timeout_secs, self.node, pes, self._flow_bytes, self._watched)
        self.native = rail
        places = topology.ranks_of(self.node)
        addresses = [rail.block if place == rank else rail.address_at(place) for place in places]
        reached = self._gathering.all("reached", str(int(all(addresses))), self._timeout_secs)
        reads = all(reached[place] == "1" for place in places)
        self.block_number = node.memory.adopt(None, addresses) if reads else 0
