"""Memory that the ranks of a node share: how it is opened, grown, reset and closed, and in which order."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
import torch

from moe_ep.backends import node_memory
from moe_ep.backends.node_memory import NodeMemory
from moe_ep.errors import EPTimeoutError
from tests.helpers.fake_exchange import FakeNode
from tests.helpers.scale_experts import caught

UNIT_BYTES = 8 << 20
PATIENCE_SECS = 30.0
LIMIT_SECS = 0.6  # of a wait that fails, or in which threads of this process meet


@pytest.fixture(params=[2, 3])
def node(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> FakeNode:
    return FakeNode(request.param).install(monkeypatch)


@pytest.fixture
def pair(monkeypatch: pytest.MonkeyPatch) -> FakeNode:
    monkeypatch.setattr(node_memory, "_RESET_SLACK_SECS", 0.2)
    return FakeNode(2).install(monkeypatch)


def construct(node: FakeNode, limit_secs: float = PATIENCE_SECS) -> list[NodeMemory]:
    """The limit holds from then on; threads may start as late as they like."""
    memories = node.run(lambda rank: NodeMemory(node.group(rank, first=4), PATIENCE_SECS, 1000))
    return with_limit(memories, limit_secs)


def with_limit(memories: list[NodeMemory], limit_secs: float) -> list[NodeMemory]:
    for memory in memories:
        memory.timeout_secs = limit_secs
    return memories


def on_all(node: FakeNode, memories: list[NodeMemory], work: Callable[[NodeMemory], object]) -> list[str]:
    """`work` on every rank; what memory saw of it, as events."""
    before = len(node.events)
    node.run(lambda rank: work(memories[rank]))
    return [f"{rank}: {what}" for rank, what in node.events[before:]]


def generations(memories: list[NodeMemory]) -> list[int]:
    for memory in memories:
        assert memory.generation == memory.exchange.generation  # type: ignore[attr-defined]
    return [memory.generation for memory in memories]


def assert_all_open(node: FakeNode, serial: int) -> None:
    """The segment number `serial` of each rank is open on every other, and no older one is."""
    open_now = {name.decode(): ranks for name, ranks in node.opened.items() if ranks}
    everyone = set(range(node.size))
    assert open_now == {f"segment {rank}.{serial}": everyone - {rank} for rank in everyone}


def places(events: list[str], what: str) -> list[int]:
    return [place for place, event in enumerate(events) if event.split(": ")[1].startswith(what)]


def assert_rebuilt(events: list[str], size: int) -> None:
    """Everybody has closed before anybody frees, everybody has allocated before anybody opens."""
    closes, allocates = places(events, "close"), places(events, "allocate")
    opens, begins = places(events, "open segment"), places(events, "generation")
    assert (len(closes), len(allocates), len(opens), len(begins)) == (size, size, size * (size - 1), size)
    assert max(closes) < min(allocates)
    assert max(allocates) < min(opens)
    for rank in range(size):
        own = [event for event in events if event.startswith(f"{rank}: ")]
        assert own[-1].startswith(f"{rank}: generation"), own


def test_a_new_memory_is_open_on_every_peer_in_generation_one(node: FakeNode) -> None:
    memories = construct(node)
    assert_all_open(node, 1)
    assert generations(memories) == [1] * node.size
    assert {memory.name for memory in memories} == {memories[0].name}
    assert [memory.rank for memory in memories] == list(range(node.size))
    assert memories[0].ranks == tuple(range(4, 4 + node.size))
    assert [memory.exchange.slot_bytes for memory in memories] == [UNIT_BYTES] * node.size
    controls = [what for _, what in node.events if what.startswith("open control")]
    assert len(controls) == node.size * (node.size - 1)


def test_memories_of_one_group_have_names_of_their_own(node: FakeNode) -> None:
    first, second = construct(node), construct(node)
    assert first[0].name != second[0].name


def test_growth_closes_then_frees_then_opens(node: FakeNode) -> None:
    memories = construct(node)
    for serial, num_bytes in ((2, UNIT_BYTES + 1), (3, 5 * UNIT_BYTES)):
        events = on_all(node, memories, lambda memory, n=num_bytes: memory.grow(n))  # type: ignore[misc]
        assert_rebuilt(events, node.size)
        assert_all_open(node, serial)
        assert generations(memories) == [serial] * node.size
        units = -(-num_bytes // UNIT_BYTES)
        assert [memory.exchange.slot_bytes for memory in memories] == [units * UNIT_BYTES] * node.size


def test_a_reset_with_intact_mappings_keeps_segments_and_begins_a_generation(node: FakeNode) -> None:
    memories = construct(node)
    for generation in (2, 3):
        events = on_all(node, memories, NodeMemory.reset)
        assert sorted(events) == [f"{rank}: generation {generation}" for rank in range(node.size)]
    assert_all_open(node, 1)


def test_a_generation_is_one_more_than_the_highest_of_all_ranks(node: FakeNode) -> None:
    memories = construct(node)
    memories[1].generation = 41  # a reset or growth that ended on rank 1 alone
    on_all(node, memories, NodeMemory.reset)
    assert generations(memories) == [42] * node.size


def test_a_reset_rebuilds_on_all_ranks_where_one_has_lost_its_mappings(node: FakeNode) -> None:
    memories = construct(node)
    memories[1]._intact = False
    memories[1].generation = 6
    assert_rebuilt(on_all(node, memories, NodeMemory.reset), node.size)
    assert_all_open(node, 2)
    assert generations(memories) == [7] * node.size
    events = on_all(node, memories, NodeMemory.reset)
    assert not places(events, "close"), "all are intact again"


def test_a_reset_gives_all_ranks_the_largest_segment(node: FakeNode) -> None:
    """A growth can end on one rank and time out on another: then slots differ, though all are intact."""
    memories = construct(node)
    memories[0].exchange.slot_bytes = 3 * UNIT_BYTES
    assert_rebuilt(on_all(node, memories, NodeMemory.reset), node.size)
    assert [memory.exchange.slot_bytes for memory in memories] == [3 * UNIT_BYTES] * node.size


def test_a_growth_in_which_a_rank_does_not_come_keeps_the_mappings(pair: FakeNode) -> None:
    memories = construct(pair, LIMIT_SECS)
    before = len(pair.events)
    began = time.monotonic()
    kind, text = caught(lambda: memories[0].grow(2 * UNIT_BYTES))
    assert kind is EPTimeoutError
    assert "did not meet for growth within 0.6 s: rank 5 did not take part" in text
    assert time.monotonic() - began < LIMIT_SECS + 10
    assert pair.events[before:] == []
    assert_all_open(pair, 1)
    events = on_all(pair, with_limit(memories, PATIENCE_SECS), NodeMemory.reset)
    assert not places(events, "allocate"), "the reset keeps segments and addresses"


def test_a_growth_that_ends_half_way_is_rebuilt_by_the_next_reset(pair: FakeNode) -> None:
    memories = construct(pair, LIMIT_SECS)

    def grow(rank: int) -> None:
        if rank == 0:
            kind, text = caught(lambda: memories[0].grow(2 * UNIT_BYTES))
            assert kind is EPTimeoutError
            assert "growth" in text
        else:  # comes to the first barrier, and no further
            memories[1]._gather("growth/1/begin", "", PATIENCE_SECS)

    pair.run(grow)
    assert pair.opened[b"segment 1.1"] == set(), "rank 0 has closed"
    assert_rebuilt(on_all(pair, with_limit(memories, PATIENCE_SECS), NodeMemory.reset), 2)
    assert_all_open(pair, 2)
    assert generations(memories) == [2, 2]


def test_a_growth_without_memory_is_rebuilt_by_a_reset_once_there_is_some(pair: FakeNode) -> None:
    memories = construct(pair, LIMIT_SECS)
    pair.exchanges[1].is_full = True

    def grow(rank: int) -> str:
        return caught(lambda: memories[rank].grow(2 * UNIT_BYTES))[1]

    first, second = pair.run(grow)
    assert "rank 5 did not take part" in first
    assert "cudaErrorMemoryAllocation" in second
    pair.exchanges[1].is_full = False
    on_all(pair, with_limit(memories, PATIENCE_SECS), NodeMemory.reset)
    assert generations(memories) == [2, 2]
    assert [memory.exchange.slot_bytes for memory in memories] == [2 * UNIT_BYTES] * 2


def test_a_reset_to_which_a_rank_does_not_come_fails_and_the_next_one_works(pair: FakeNode) -> None:
    memories = construct(pair, 0.1)
    kind, text = caught(memories[1].reset)
    assert kind is EPTimeoutError
    assert "did not meet within 0.4 s: rank 4 did not take part" in text  # twice the limit, and slack
    events = on_all(pair, with_limit(memories, PATIENCE_SECS), NodeMemory.reset)
    assert sorted(events) == ["0: generation 2", "1: generation 2"]


def test_close_is_local(pair: FakeNode) -> None:
    memories = construct(pair)
    before = len(pair.events)
    memories[0].close()  # rank 1 does nothing
    assert pair.events[before:] == [(0, "close")]
    assert pair.opened[b"segment 0.1"] == {1}, "what a peer has open stays open"


def test_tensors_that_peers_read_lie_in_blocks_that_all_open(pair: FakeNode) -> None:
    memories = construct(pair)
    shapes = {0: (4, 6), 1: (0, 6)}
    first = pair.run(lambda rank: memories[rank].empty(shapes[rank], torch.bfloat16))
    second = pair.run(lambda rank: memories[rank].empty((2, 3), torch.float64))
    opens = [(rank, what) for rank, what in pair.events if what.startswith("open block")]
    assert sorted(opens) == [(rank, f"open block {1 - rank}.{number}") for rank in (0, 1) for number in (1, 2)]
    assert [tuple(tensor.shape) for tensor in first] == [shapes[0], shapes[1]]
    assert {tensor.dtype for tensor in first} == {torch.bfloat16}
    memory, rows = memories[0], first[0]
    assert memory.places_of([rows]) == (1, 0, 12)
    assert memory.places_of([second[0]]) == (2, 0, 24)
    assert memory.places_of([rows[1:, 2:]]) == (1, 12 + 4, 12)
    assert memory.places_of([rows[::2], rows[:, 3:]]) == (1 | 1 << 8, 0, 24, 6, 12)
    assert memory.places_of([rows, second[0]]) == (1 | 2 << 8, 0, 12, 0, 24), "rows in one block, scales in another"
    assert memory.places_of([rows, torch.zeros(4, 6)]) == ()
    assert memory.places_of([torch.zeros(4, 6)]) == ()
    assert memories[1].places_of([rows]) == (), "a block of another rank is not one's own"


def test_a_rank_alone_needs_no_store(monkeypatch: pytest.MonkeyPatch) -> None:
    node = FakeNode(1).install(monkeypatch)
    monkeypatch.delattr(node, "store")
    memory = NodeMemory(None, PATIENCE_SECS, 3 * UNIT_BYTES)
    memory.grow(4 * UNIT_BYTES)
    memory.reset()
    memory.leave_text("reason/1/0", "text")
    assert memory.texts("reason/1/0", 0.1, 0) is None
    memory.close()
    what = [event for _, event in node.events]
    assert what == ["allocate", "generation 1", "close", "allocate", "generation 2", "generation 3", "close"]
    assert (memory.ranks, memory.rank, memory.generation) == ((0,), 0, 3)


def test_reasons_are_left_for_the_others_and_a_missing_one_is_none(pair: FakeNode) -> None:
    memories = construct(pair)
    memories[1].leave_text("reason/1/3", "an id is bad")
    assert memories[0].texts("reason/1/3", PATIENCE_SECS, 1) == "an id is bad"
    assert memories[0].texts("reason/1/3", 0.05, 0) is None


def test_a_rank_that_does_not_construct_is_named(pair: FakeNode) -> None:
    kind, text = caught(lambda: NodeMemory(pair.group(0, first=4), LIMIT_SECS, 0))
    assert kind is EPTimeoutError
    assert "the EP group of ranks [4, 5] did not meet within 0.6 s: rank 5 did not take part" in text


def test_ranks_that_ask_for_different_sizes_get_the_largest(node: FakeNode) -> None:
    memories = node.run(lambda rank: NodeMemory(node.group(rank), PATIENCE_SECS, 1000 if rank else 3 * UNIT_BYTES + 1))
    assert [memory.exchange.slot_bytes for memory in memories] == [4 * UNIT_BYTES] * len(memories)
