"""Room in the segments of a node: calls that need more grow on all ranks, once; failed growth starts nothing."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from moe_ep.backends import node_memory
from moe_ep.backends.intranode import IntranodeBackend
from moe_ep.backends.node_calls import START_BYTES
from moe_ep.backends.node_header import DOES_NOT_FIT, NEED_WORD, STATUS_WORD
from moe_ep.errors import EPTimeoutError
from moe_ep.handle import DispatchHandle
from tests.helpers.fake_exchange import FakeNode
from tests.helpers.scale_experts import caught
from tests.unit.node_helpers import (
    NUM_TOKENS,
    PATIENCE_SECS,
    construct,
    fake_of,
    make_handle,
    make_request,
    names,
    newest,
    on_cpu,
    one_rank,
)


@pytest.fixture
def node(monkeypatch: pytest.MonkeyPatch) -> FakeNode:
    return FakeNode(2).install(monkeypatch)


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> IntranodeBackend:
    FakeNode(1).install(monkeypatch)
    return on_cpu(IntranodeBackend(None, PATIENCE_SECS))


def large_handle(num_tokens: int, **changes: Any) -> DispatchHandle:
    """Every token of rank 1 goes to both ranks, rank 0 has one that stays."""
    many = (4, num_tokens)
    return make_handle(
        "compact",
        num_tokens=num_tokens,
        num_rows=num_tokens,
        rank_tokens=many,
        rank_rows=(4, 0, num_tokens, num_tokens),
        **changes,
    )


def test_a_call_along_a_handle_that_is_too_large_grows_once_on_all_ranks(node: FakeNode) -> None:
    backends = construct(node)
    num_tokens = START_BYTES // 16 + 1
    handle = large_handle(num_tokens)
    rows = torch.empty(1, 4).expand(num_tokens, 4)

    def move(rank: int) -> None:
        backends[rank].dispatch(handle, rows)
        backends[rank].dispatch(handle, rows)

    node.run(move)
    for backend in backends:
        assert names(backend) == ["header_only", "move", "move"]
        question, first, second = fake_of(backend).launches
        assert question.words[STATUS_WORD] == DOES_NOT_FIT
        assert question.words[NEED_WORD] == num_tokens * 16
        assert question.arguments["question"] > 0
        assert first.words[STATUS_WORD] == second.words[STATUS_WORD] == 0
        assert backend._exchange.slot_bytes == START_BYTES + (8 << 20)
        assert backend._memory.generation == 2


def test_weights_on_their_way_home_find_room_for_the_own_rows_too(node: FakeNode) -> None:
    """Weights of the rows that a rank sends itself lie in its slot; K of them can be wider than a row."""
    backends = construct(node)
    num_tokens = START_BYTES // 256  # K = 64 float32 numbers each; twice as many rows arrive on rank 0
    changes: dict[str, Any] = {"num_topk": 64, "rank_tokens": (num_tokens, num_tokens)}
    handle = replace(large_handle(num_tokens), rank_rows=(num_tokens,) * 4, num_rows=2 * num_tokens, **changes)
    weights = torch.empty(1, 1).expand(2 * num_tokens, 64)
    node.run(lambda rank: backends[rank].sum_weights(handle, weights))
    for backend in backends:
        assert names(backend) == ["header_only", "numbers_home"]
        launch = newest(backend)
        assert launch.words[STATUS_WORD] == 0
        assert launch.words[NEED_WORD] == 2 * START_BYTES == backend._exchange.slot_bytes


def test_an_exact_combine_finds_room_for_all_its_parts(node: FakeNode) -> None:
    backends = construct(node)
    num_tokens = START_BYTES // 32
    handle = replace(make_handle(alignment=8), rank_tokens=(1, num_tokens), num_tokens=num_tokens)
    handle = replace(handle, rank_rows=(0, 1, 0, num_tokens), recv_counts=(1, num_tokens), num_rows=2 * num_tokens)
    rows = torch.empty(1, 4).expand(2 * num_tokens, 4)
    node.run(lambda rank: backends[rank].combine(handle, rows, None, exact=True))
    for backend in backends:
        assert names(backend) == ["header_only", "combine"]
        launch = newest(backend)
        assert START_BYTES < launch.words[NEED_WORD] <= backend._exchange.slot_bytes
        assert launch.words[STATUS_WORD] == 0


def test_a_plan_that_does_not_fit_grows_once_and_runs_again(
    alone: IntranodeBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_tokens = START_BYTES // 8 + 1
    grow, ended = alone._memory.grow, []

    def grow_behind(num_bytes: int) -> None:
        ended.append(alone.stream.num_synchronizes)  # type: ignore[attr-defined]
        grow(num_bytes)

    monkeypatch.setattr(alone._memory, "grow", grow_behind)
    exchange = fake_of(alone)
    exchange.plan_rows = (1, 1)
    exchange.plan_counts = ((num_tokens,), (1,), (1,), [1, 0])
    topk_idx = torch.zeros(1, 1, dtype=torch.int32).expand(num_tokens, 2)
    plan = alone.plan(make_request(num_tokens, hidden=1, topk_idx=topk_idx))
    assert names(alone) == ["plan_count", "plan_fill"] * 2, "the first plan_fill finds a call that has ended"
    assert ended == [1], "of this generation: it would take the new one for a call to end (rule 19)"
    first, _, second, fill = exchange.launches
    assert (first.words[STATUS_WORD], second.words[STATUS_WORD]) == (DOES_NOT_FIT, 0)
    assert first.words[NEED_WORD] == second.words[NEED_WORD] > START_BYTES
    assert second.arguments["question"] == first.arguments["question"] + 1
    assert fill.arguments["header"] == second.arguments["header"]
    assert exchange.slot_bytes == START_BYTES + (8 << 20)
    assert (plan.handle.num_rows, plan.tokens_per_expert) == (1, [1, 0])


def test_a_growth_that_fails_leaves_nothing_that_could_be_started(node: FakeNode) -> None:
    """Its mappings may be gone; the kernel that looked for them would take the context with it."""
    backends = construct(node)
    num_tokens = START_BYTES // 16 + 1
    handle = large_handle(num_tokens)
    rows = torch.empty(1, 4).expand(num_tokens, 4)
    fake_of(backends[0]).is_full = True
    backends[1]._memory.timeout_secs = 0.5

    def move(rank: int) -> tuple[tuple[Any, str], tuple[Any, str], list[str]]:
        first = caught(lambda: backends[rank].dispatch(handle, rows))
        before = len(names(backends[rank]))
        second = caught(lambda: backends[rank].dispatch(make_handle("compact"), torch.ones(NUM_TOKENS, 4)))
        return first, second, names(backends[rank])[before:]

    (full, after_full, started), (alone, after_alone, started_alone) = node.run(move)
    assert full[0] is RuntimeError
    assert "cudaErrorMemoryAllocation" in full[1]
    assert alone[0] is EPTimeoutError
    assert "did not meet for growth within 0.5 s: rank 0 did not take part" in alone[1]
    for (_, text), (kind, later) in ((full, after_full), (alone, after_alone)):
        assert kind is EPTimeoutError
        assert f" was not started: {text}" in later
        assert "Buffer.reset()" in later
    assert started == started_alone == []
    fake_of(backends[0]).is_full = False
    backends[1]._memory.timeout_secs = PATIENCE_SECS
    node.run(lambda rank: backends[rank].reset())
    node.run(lambda rank: backends[rank].dispatch(make_handle("compact"), torch.ones(NUM_TOKENS, 4)))


def test_a_reset_that_fails_leaves_nothing_that_could_be_started(
    node: FakeNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node_memory, "_RESET_SLACK_SECS", 0.4)
    backends = construct(node)
    memory = backends[1]._memory
    memory.timeout_secs = 0.0
    kind, text = caught(backends[1].reset)
    assert (kind, "rank 0 did not take part" in text) == (EPTimeoutError, True)
    with pytest.raises(EPTimeoutError, match="cached dispatch was not started: the EP group"):
        backends[1].dispatch(make_handle(), torch.ones(NUM_TOKENS, 4))
    assert names(backends[1]) == []
    memory.timeout_secs = PATIENCE_SECS
    node.run(lambda rank: backends[rank].reset())
    backends[1].dispatch(make_handle(), torch.ones(NUM_TOKENS, 4))


def test_memory_does_not_move_inside_a_graph_or_under_one(alone: IntranodeBackend) -> None:
    node = fake_of(alone).node
    request = make_request(4)
    handle = one_rank(large_handle(START_BYTES // 16 + 1))
    rows = torch.empty(1, 4).expand(handle.num_tokens, 4)
    node.is_capturing = True
    kind, text = caught(lambda: alone.dispatch(handle, rows))
    assert kind is RuntimeError
    assert "memory cannot grow inside a CUDA graph. Run the call once before the capture" in text
    assert f"num_nvl_bytes of at least {2 * (START_BYTES + 16)}" in text
    kind, text = caught(lambda: alone.plan(request))
    assert kind is RuntimeError
    assert "dispatch waits for the counts of all ranks, which a CUDA graph cannot; give max_rows" in text
    assert names(alone) == []
    alone.dispatch(one_rank(make_handle()), torch.ones(NUM_TOKENS, 4))
    node.is_capturing = False
    kind, text = caught(lambda: alone.dispatch(handle, rows))
    assert kind is RuntimeError
    assert "its memory cannot grow any more, because a CUDA graph holds addresses in it" in text
    assert alone._exchange.slot_bytes == START_BYTES
