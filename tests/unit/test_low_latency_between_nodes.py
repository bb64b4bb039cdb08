"""Low latency between nodes on its host side, with kernels that run on the CPU: memory by hop, who is put to, ends."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from moe_ep.backends import internode_low_latency, node_low_latency_memory
from moe_ep.backends.internode_low_latency import InternodeLowLatency, most_ranks
from moe_ep.backends.nvshmem_world import NvshmemWorld
from moe_ep.errors import EPTimeoutError
from moe_ep.topology import Topology
from tests.distributed.test_low_latency import Options
from tests.helpers.fake_low_latency import FakeLowLatency, LowLatencyFakeKernels, LowLatencyNode
from tests.unit.node_helpers import PATIENCE_SECS
from tests.unit.test_low_latency_node import HOOK, PLAIN, NodeBuffer, scenes

FP8 = Options(use_fp8=True)
SHAPES = [(2, 1), (2, 2), (3, 1)]  # (nodes, ranks a node)


class FakeSymmetric(FakeLowLatency):
    """Memory of NVSHMEM: all ranks take it together, and nobody opens it."""

    def __init__(self, node: LowLatencyNode, rank: int, size: int, watched: dict[str, Any]) -> None:
        super().__init__(SimpleNamespace(node=node, rank=rank, size=size))  # type: ignore[arg-type]
        self.watched, self.stored_to = watched, [False] * size
        self.sizes: list[tuple[int, int]] = []

    def watch(self, **watched: Any) -> None:
        self.watched = watched

    def allocate(self, words_a_slot: int, bytes_a_slot: int) -> None:
        self.sizes.append((words_a_slot, bytes_a_slot))
        self.words_a_slot, self.bytes_a_slot = words_a_slot, bytes_a_slot
        self.clear()

    def open(self, stored_to: Sequence[bool]) -> None:  # type: ignore[override]
        self.stored_to = list(stored_to)


class NvshmemFakeKernels(LowLatencyFakeKernels):
    """`moe_ep._C_nvshmem` as far as low latency needs it."""

    def NvshmemLowLatency(self, *, rank: int, size: int, **watched: Any) -> FakeSymmetric:  # noqa: N802 (a class)
        assert isinstance(self.node, LowLatencyNode)
        return FakeSymmetric(self.node, rank, size, watched)


@dataclass
class FakeRail:
    """Of a rail what low latency asks of it."""

    num_settled: int = 0
    is_late: bool = False

    def settle(self, stream: object) -> None:
        if self.is_late:
            raise EPTimeoutError("it did not come there")
        self.num_settled += 1


@dataclass
class BetweenNodes:
    """Ranks that are threads, as nodes of `ranks_per_node`, each with the NVSHMEM of a process."""

    node: LowLatencyNode
    ranks_per_node: int
    hop: Any
    worlds: list[NvshmemWorld] = field(default_factory=list)
    rails: list[FakeRail] = field(default_factory=list)

    def __post_init__(self) -> None:
        for rank in range(self.node.size):
            world: Any = NvshmemWorld()
            world._kernels = NvshmemFakeKernels(self.node, rank)
            self.worlds.append(world)
            self.rails.append(FakeRail())

    def calls_of(self, rank: int) -> InternodeLowLatency:
        topology = Topology(self.node.size, self.ranks_per_node)
        legs: Any = SimpleNamespace(device=torch.device("cpu"), stream=torch.cuda.Stream())
        kernels: Any = self.node.kernels_of[rank]
        rail: Any = self.rails[rank] if topology.num_nodes > 1 else None
        group = self.node.group(rank)
        return InternodeLowLatency(group, topology, self.hop, kernels, legs, rail, PATIENCE_SECS)

    def run(self, work: Callable[[Any, int], Any]) -> list[Any]:
        """`work(buffer, rank)`; the buffers are closed behind it."""

        def each(rank: int) -> Any:
            backend: Any = FarBackend(self.calls_of(rank), self.node.size, rank)
            owner = scenes(self.node.size)[0].owner
            result = work(NodeBuffer(backend, owner, enable_shrink=True), rank)
            backend.close()
            return result

        return self.node.run(each)


class FarBackend:
    """Of backend `internode` what the low-latency calls use."""

    name = "internode"

    def __init__(self, between: InternodeLowLatency, size: int, rank: int) -> None:
        self.between, self.ranks, self.rank, self.num_sms = between, tuple(range(size)), rank, 12
        self.low_latency, self.take_faults = between.calls, between.take_faults

    def reset(self) -> None:
        self.between.clear()
        self.between.reset()

    def close(self) -> None:
        self.between.close()
        self.between.give_back()


@pytest.fixture(autouse=True)
def _on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Tensor, "cuda", lambda self: self)
    monkeypatch.setattr(Tensor, "record_stream", lambda self, stream: None)


def between_nodes(monkeypatch: pytest.MonkeyPatch, num_nodes: int, ranks_per_node: int, hop: str) -> BetweenNodes:
    node = LowLatencyNode(num_nodes * ranks_per_node)
    node.install(monkeypatch)
    between = BetweenNodes(node, ranks_per_node, hop)
    monkeypatch.setattr(internode_low_latency, "nvshmem_world", lambda: between.worlds[node.rank])
    return between


def native_of(buffer: Any) -> Any:
    return buffer.backend.low_latency._memory.native


# case E01, E02, I01, I02
@pytest.mark.parametrize("hop", ["ipc", "nvshmem"])
@pytest.mark.parametrize(("num_nodes", "ranks_per_node"), SHAPES)
def test_calls_between_nodes_give_what_the_loops_give(
    monkeypatch: pytest.MonkeyPatch, num_nodes: int, ranks_per_node: int, hop: str
) -> None:
    between = between_nodes(monkeypatch, num_nodes, ranks_per_node, hop)
    of_rank = scenes(between.node.size, "holes", hidden=128)

    def work(buffer: Any, rank: int) -> str:
        for option in (PLAIN, HOOK, FP8):
            of_rank[rank].round_trip(buffer, option)
        buffer.reset()
        of_rank[rank].round_trip(buffer, HOOK)
        return type(native_of(buffer)).__name__

    expected = "FakeLowLatency" if hop == "ipc" else "FakeSymmetric"
    assert between.run(work) == [expected] * between.node.size
    assert not any(ranks for name, ranks in between.node.opened.items() if name.startswith(b"lowlatency"))


def test_one_node_needs_no_nvshmem_whatever_the_hop(monkeypatch: pytest.MonkeyPatch) -> None:
    between = between_nodes(monkeypatch, 1, 2, "nvshmem")
    of_rank = scenes(2)

    def work(buffer: Any, rank: int) -> str:
        of_rank[rank].round_trip(buffer)
        return type(native_of(buffer)).__name__

    assert between.run(work) == ["FakeLowLatency"] * 2


@pytest.mark.parametrize("stores", [True, False])
def test_every_rank_that_is_reached_is_stored_to_unless_nodes_are_kept_apart(
    monkeypatch: pytest.MonkeyPatch, stores: bool
) -> None:
    monkeypatch.setattr(internode_low_latency, "STORES_ACROSS_NODES", stores)
    between = between_nodes(monkeypatch, 2, 2, "nvshmem")
    of_rank = scenes(4)

    def work(buffer: Any, rank: int) -> list[bool]:
        of_rank[rank].round_trip(buffer)
        stored_to: list[bool] = native_of(buffer).stored_to
        return stored_to

    apart = [[True, True, False, False]] * 2 + [[False, False, True, True]] * 2
    assert between.run(work) == ([[True] * 4] * 4 if stores else apart)


def test_gpus_of_two_machines_are_not_shared_though_their_bus_numbers_are_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two ranks share each GPU; a grid takes no account of those on the other machine."""
    between = between_nodes(monkeypatch, 2, 2, "nvshmem")
    of_rank = scenes(4)
    monkeypatch.setattr(LowLatencyFakeKernels, "pci_bus_id", lambda self: "0000:01:00.0")
    monkeypatch.setattr(node_low_latency_memory, "host_id", lambda: f"host {between.node.rank // 2}")

    def work(buffer: Any, rank: int) -> int:
        of_rank[rank].round_trip(buffer)
        return int(buffer.backend.low_latency._memory.num_blocks)

    assert between.run(work) == [128 // 2] * 4


def test_memory_of_a_closed_buffer_serves_the_next_and_grows_there(monkeypatch: pytest.MonkeyPatch) -> None:
    between = between_nodes(monkeypatch, 2, 1, "nvshmem")
    seen: list[list[Any]] = []
    for hidden in (256, 64, 1024):
        of_rank = scenes(2, hidden=hidden)

        def work(buffer: Any, rank: int, of_rank: Any = of_rank) -> Any:
            of_rank[rank].round_trip(buffer)
            of_rank[rank].round_trip(buffer, HOOK)
            assert native_of(buffer).watched["timeout_secs"] == PATIENCE_SECS
            return native_of(buffer)

        seen.append(between.run(work))
    assert seen[0] == seen[1] == seen[2]
    for rank in range(2):
        (first_words, first_bytes), (words, num_bytes) = seen[0][rank].sizes  # the smaller calls took what there was
        assert words >= first_words
        assert num_bytes > first_bytes
        assert between.rails[rank].num_settled == 3  # before each buffer's words are zeroed
    assert [len(world._made) for world in between.worlds] == [1, 1]


def test_two_buffers_have_memory_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    between = between_nodes(monkeypatch, 2, 1, "nvshmem")
    of_rank = scenes(2)

    def each(rank: int) -> None:
        backends: list[Any] = [FarBackend(between.calls_of(rank), 2, rank) for _ in range(2)]
        buffers = [NodeBuffer(backend, of_rank[0].owner) for backend in backends]
        for buffer in buffers:
            of_rank[rank].round_trip(buffer)  # type: ignore[arg-type]
        assert native_of(buffers[0]) is not native_of(buffers[1])

    # Their words have one store here, which is that of one memory: the second's calls would be taken for the first's.
    monkeypatch.setattr(FakeSymmetric, "begin", _begin_apart())
    between.node.run(each)
    assert [len(world._made) for world in between.worlds] == [2, 2]


def _begin_apart() -> Callable[[FakeSymmetric, int], None]:
    """Generations of their own for every memory of a rank."""
    begin, numbers, lock = FakeLowLatency.begin, dict[int, list[FakeSymmetric]](), threading.Lock()

    def apart(self: FakeSymmetric, generation: int) -> None:
        with lock:
            mine = numbers.setdefault(self.rank, [])
            if self not in mine:
                mine.append(self)
        begin(self, generation + 1000 * mine.index(self))

    return apart


def test_memory_is_not_taken_where_something_is_still_on_its_way(monkeypatch: pytest.MonkeyPatch) -> None:
    between = between_nodes(monkeypatch, 2, 1, "nvshmem")
    of_rank = scenes(2)
    for rail in between.rails:
        rail.is_late = True

    def work(buffer: Any, rank: int) -> None:
        with pytest.raises(EPTimeoutError, match="did not come there"):
            of_rank[rank].dispatch(buffer, PLAIN)
        del buffer.backend.between.__dict__["calls"]  # there is nothing to drain

    between.run(work)


def test_over_nvshmem_more_ranks_are_served_than_an_exchange_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    between = between_nodes(monkeypatch, 4, 1, "nvshmem")
    of_rank, kernels = scenes(4), cast("Any", between.node.kernels_of[0])
    for of_one in between.node.kernels_of.values():
        assert of_one is not None
        of_one.max_ranks = 2
    assert [most_ranks(kernels, *how) for how in ((4, "nvshmem"), (4, "ipc"), (1, "nvshmem"))] == [128, 2, 2]

    def work(buffer: Any, rank: int) -> list[int]:
        of_rank[rank].round_trip(buffer, HOOK)
        buffer.reset()
        of_rank[rank].round_trip(buffer)
        exchange = buffer.backend.between._ranks.exchange
        return [exchange.rank, exchange.size]

    assert between.run(work) == [[0, 1]] * 4


def test_faults_of_low_latency_are_told_and_a_failed_reset_stops_the_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    between = between_nodes(monkeypatch, 2, 1, "ipc")
    of_rank = scenes(2)

    def work(buffer: Any, rank: int) -> None:
        of_rank[rank].round_trip(buffer)
        exchange = buffer.backend.between._ranks.exchange
        exchange.faults.append(("low_latency", [0, 6, 2, 9, 4, 0, 0, 0]))
        assert any("names an expert (number 2" in text for text in buffer.backend.take_faults())
        exchange.faults.clear()
        between.node.run_barrier.wait()  # type: ignore[attr-defined]
        monkeypatch.setattr(type(buffer.backend.between._ranks), "reset", _fails)
        with pytest.raises(EPTimeoutError):
            buffer.backend.reset()
        with pytest.raises(EPTimeoutError, match="was not started: rank 1 did not meet"):
            of_rank[rank].dispatch(buffer, PLAIN)

    between.node.run_barrier = threading.Barrier(2)  # type: ignore[attr-defined]
    between.run(work)


def _fails(self: object) -> None:
    raise EPTimeoutError("rank 1 did not meet")
