"""Whether the ranks of a group reach each other's GPU memory: one answer, the same sentence on every rank."""

from __future__ import annotations

import pytest
import torch

from moe_ep.backends import node_memory
from moe_ep.backends.node_memory import why_unavailable
from moe_ep.errors import EPTimeoutError
from tests.helpers.fake_exchange import FakeKernels, FakeNode
from tests.helpers.scale_experts import caught

PATIENCE_SECS = 30.0
FIRST = 8  # global number of the first rank


@pytest.fixture(params=[2, 3])
def node(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> FakeNode:
    return FakeNode(request.param).install(monkeypatch)


def answers(node: FakeNode) -> set[str | None]:
    return set(node.run(lambda rank: why_unavailable(node.group(rank, FIRST), PATIENCE_SECS)))


def kernels_of(node: FakeNode, rank: int) -> FakeKernels:
    kernels = node.kernels_of[rank]
    assert kernels is not None
    return kernels


def test_ranks_that_reach_each_other_have_no_obstacle(node: FakeNode) -> None:
    assert answers(node) == {None}
    assert answers(node) == {None}, "asked again, by a second buffer"


@pytest.mark.parametrize("odd", [0, 1])
def test_one_rank_without_kernels_is_named_on_every_rank(node: FakeNode, odd: int) -> None:
    node.kernels_of[odd] = None
    expected = f"on rank {FIRST + odd} this install has no CUDA kernels, because no nvcc was found when it was made"
    assert answers(node) == {expected}


def test_one_rank_without_a_device_is_named_on_every_rank(node: FakeNode, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: node.rank != 1)
    assert answers(node) == {f"on rank {FIRST + 1} torch sees no CUDA device"}


def test_of_several_obstacles_all_ranks_give_the_lowest_ranks(node: FakeNode) -> None:
    node.kernels_of = dict.fromkeys(range(node.size))
    (text,) = answers(node)
    assert text is not None
    assert text.startswith(f"on rank {FIRST} this install has no CUDA kernels")


def test_a_rank_on_another_machine_is_named_on_every_rank(node: FakeNode, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_memory, "host_id", lambda: "far" if node.rank == 1 else "near")
    assert answers(node) == {f"on rank {FIRST} rank {FIRST + 1} is on another machine"}


def test_a_gpu_that_one_rank_cannot_reach_is_named_on_every_rank(node: FakeNode) -> None:
    """Reach need not be mutual: one container sees fewer devices than the other."""
    last = node.size - 1
    kernels_of(node, last).unreachable = ("0000:00:00.0",)
    expected = f"on rank {FIRST + last} the GPU of rank {FIRST} (0000:00:00.0) cannot be reached from 0000:0{last}:00.0"
    assert answers(node) == {expected}


def test_a_group_with_more_ranks_than_the_kernels_take_says_so(node: FakeNode) -> None:
    for rank in range(node.size):
        kernels_of(node, rank).max_ranks = node.size - 1
    assert answers(node) == {f"on rank {FIRST} the group has more than {node.size - 1} ranks"}


def test_a_rank_that_does_not_ask_is_named_within_the_limit(node: FakeNode) -> None:
    kind, text = caught(lambda: why_unavailable(node.group(0, FIRST), 0.2))
    assert kind is EPTimeoutError
    assert "did not take part" in text
    assert f"{FIRST + 1}" in text


def test_a_rank_alone_answers_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    node = FakeNode(1).install(monkeypatch)
    monkeypatch.delattr(node, "store")
    for group in (None, node.group(0)):
        assert why_unavailable(group, PATIENCE_SECS) is None
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert why_unavailable(None, PATIENCE_SECS) == "torch sees no CUDA device"
    node.kernels_of[0] = None
    text = why_unavailable(None, PATIENCE_SECS)
    assert text is not None
    assert text.startswith("this install has no CUDA kernels")


def test_a_machine_is_told_from_another_as_long_as_it_runs() -> None:
    assert node_memory.host_id()
    assert node_memory.host_id() == node_memory.host_id()
