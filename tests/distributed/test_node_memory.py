"""Memory of a node between processes over a real store: who opens what, growth, reset, a rank that stays away."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from moe_ep.backends import node_memory
from moe_ep.backends.node_memory import NodeMemory, why_unavailable
from moe_ep.errors import EPTimeoutError
from tests.helpers.fake_exchange import FakeKernels, FakeNode
from tests.helpers.ranks import Pools
from tests.helpers.scale_experts import caught

PATIENCE_SECS = 30.0
LIMIT_SECS = 0.5
GRACE_SECS = 10.0
UNIT_BYTES = 8 << 20


@contextmanager
def fake_node(group: dist.ProcessGroup, **kernels: tuple[str, ...]) -> Iterator[FakeNode]:
    """Kernels that keep the books, of this process's rank; group and store are the real ones."""
    node, rank = FakeNode(dist.get_world_size(group)), dist.get_rank(group)
    mine = FakeKernels(node, rank, **kernels)  # type: ignore[arg-type]
    with (
        mock.patch.object(node_memory, "load", return_value=mine),
        mock.patch.object(torch.cuda, "is_available", return_value=True),
    ):
        yield node


def _open_grow_reset(group: dist.ProcessGroup) -> tuple[list[str], list[int], list[int]]:
    """What happened on this rank, the generation after each step, and the names of two memories."""
    generations = []
    with fake_node(group) as node:
        memory = NodeMemory(group, PATIENCE_SECS, 1000)
        generations.append(memory.generation)
        memory.grow(UNIT_BYTES + 1)
        generations.append(memory.generation)
        memory.reset()
        generations.append(memory.generation)
        if memory.rank == 1:
            memory._intact, memory.generation = False, 20
        memory.reset()
        generations.append(memory.generation)
        events = [what for _, what in node.events]
        names = [memory.name, NodeMemory(group, PATIENCE_SECS, 1000).name]
        memory.close()
        return events, generations, names


def _expected_events(world: int, rank: int) -> list[str]:
    peers = [peer for peer in range(world) if peer != rank]

    def opens(kind: str, serial: str = "") -> list[str]:
        return [f"open {kind} {peer}{serial}" for peer in peers]

    built = [["allocate", *opens("segment", f".{serial}")] for serial in (1, 2, 3)]
    first = [*opens("control"), *built[0], "generation 1"]
    grown = ["close", *built[1], "generation 2"]
    return [*first, *grown, "generation 3", "close", *built[2], "generation 21"]


@pytest.mark.parametrize("world", [2, 3])
def test_processes_open_grow_and_reset_together(ranks: Pools, world: int) -> None:
    results = ranks.run(_open_grow_reset, world)
    for rank, (events, generations, _) in enumerate(results):
        assert generations == [1, 2, 3, 21]
        assert events == _expected_events(world, rank)
    first, second = results[0][2]
    assert first != second
    assert all(names == [first, second] for _, _, names in results)


def _stay_away(group: dist.ProcessGroup) -> tuple[type[BaseException] | None, str, float, list[str]]:
    """Rank 1 does not come to a growth; then all reset, and all grow."""
    with fake_node(group) as node:
        memory = NodeMemory(group, PATIENCE_SECS, 1000)
        memory.timeout_secs, before, began = LIMIT_SECS, len(node.events), time.monotonic()
        kind, text = (None, "") if memory.rank == 1 else caught(lambda: memory.grow(2 * UNIT_BYTES))
        waited_secs = time.monotonic() - began
        memory.timeout_secs = PATIENCE_SECS
        memory.reset()
        memory.grow(2 * UNIT_BYTES)
        assert memory.generation == 3
        return kind, text, waited_secs, [what for _, what in node.events[before:]]


@pytest.mark.parametrize("world", [2, 3])
def test_a_growth_without_one_rank_names_it_and_keeps_what_is_open(ranks: Pools, world: int) -> None:
    for rank, (kind, text, waited_secs, events) in enumerate(ranks.run(_stay_away, world)):
        assert events[:2] == ["generation 2", "close"], "nothing was closed before the reset"
        if rank != 1:
            assert kind is EPTimeoutError
            assert f"within {LIMIT_SECS:g} s: rank 1 did not take part" in text
            assert waited_secs < LIMIT_SECS + GRACE_SECS


def _why(group: dist.ProcessGroup, odd: str) -> list[str | None]:
    rank = dist.get_rank(group)
    unreachable = ("0000:00:00.0",) if odd == "gpu" and rank == 1 else ()
    with fake_node(group, unreachable=unreachable):
        host = f"machine {rank == 1 and odd == 'host'}"
        if odd == "kernels" and rank == 1:
            node_memory.load.return_value = None  # type: ignore[attr-defined]
        with mock.patch.object(node_memory, "host_id", return_value=host):
            return [why_unavailable(group, PATIENCE_SECS) for _ in range(2)]


WHY = {
    "nothing": None,
    "kernels": "on rank 1 this install has no CUDA kernels, because no nvcc was found when it was made",
    "host": "on rank 0 rank 1 is on another machine",
    "gpu": "on rank 1 the GPU of rank 0 (0000:00:00.0) cannot be reached from 0000:01:00.0",
}


@pytest.mark.parametrize("odd", WHY)
def test_all_processes_give_the_same_reason(ranks: Pools, odd: str) -> None:
    assert ranks.run(_why, 3, odd) == [[WHY[odd]] * 2] * 3


def _hosts(group: dist.ProcessGroup) -> tuple[int, str]:
    return os.getpid(), node_memory.host_id()


def test_processes_of_one_machine_know_that_it_is_one(ranks: Pools) -> None:
    results = ranks.run(_hosts, 2)
    assert len({pid for pid, _ in results}) == 2
    assert len({host for _, host in results}) == 1
