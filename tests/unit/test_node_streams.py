"""Calls inside a node among streams: behind the caller's, the caller behind them, and what lives until they end."""

from __future__ import annotations

import weakref
from typing import Any, NoReturn

import pytest
import torch

from moe_ep.backends import node_calls
from moe_ep.backends.intranode import IntranodeBackend
from moe_ep.backends.node_rows import Load
from moe_ep.placement import ExpertPlacement
from tests.helpers.fake_exchange import FakeNode
from tests.helpers.fake_streams import FakeEvent, FakeStream
from tests.unit.node_helpers import (
    NUM_ROWS,
    NUM_TOKENS,
    PATIENCE_SECS,
    fake_of,
    make_handle,
    make_request,
    names,
    on_cpu,
    one_rank,
)


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> IntranodeBackend:
    FakeNode(1).install(monkeypatch)
    return on_cpu(IntranodeBackend(None, PATIENCE_SECS))


def streams_of(backend: IntranodeBackend) -> tuple[FakeStream, FakeStream]:
    """The current stream and the buffer's own."""
    current: Any = torch.cuda.current_stream(backend._device)
    own: Any = backend.stream
    return current, own


def test_a_call_waits_for_the_callers_stream_which_waits_for_the_call(alone: IntranodeBackend) -> None:
    current, own = streams_of(alone)
    assert own.priority == -1
    alone.dispatch(one_rank(make_handle()), torch.ones(NUM_TOKENS, 8))
    assert fake_of(alone).launches[-1].arguments["stream"] == own.cuda_stream
    assert (own.past, current.past) == ([current], [own])
    alone.joins_stream = False
    alone.dispatch(one_rank(make_handle()), torch.ones(NUM_TOKENS, 8))
    assert (own.past, current.past) == ([current, current], [own]), "the caller waits for the buffer's stream itself"


def test_a_call_from_the_buffers_own_stream_waits_for_nothing(
    alone: IntranodeBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, own = streams_of(alone)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device_idx: own.cuda_stream)
    alone.dispatch(one_rank(make_handle()), torch.ones(NUM_TOKENS, 8))
    assert names(alone) == ["move"]
    assert own.past == []


def test_counts_are_read_behind_their_sum_also_where_the_call_is_asynchronous(alone: IntranodeBackend) -> None:
    current, own = streams_of(alone)
    alone.joins_stream = False
    alone.exchange_counts(torch.tensor([1, 2]), ExpertPlacement.balanced(2, 1))
    assert current.past[-1] is own


def test_what_an_asynchronous_call_reads_lives_until_it_has_ended(
    alone: IntranodeBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[FakeEvent] = []

    def event() -> FakeEvent:
        events.append(FakeEvent())
        events[-1].has_fired = False
        return events[-1]

    monkeypatch.setattr(node_calls, "_event", event)
    alone.joins_stream = False
    handle = one_rank(make_handle())
    x = torch.ones(NUM_TOKENS, 8)
    kept = weakref.ref(x)
    alone.dispatch(handle, x)
    del x
    assert kept() is not None
    alone.combine(handle, torch.ones(NUM_ROWS, 8), None, exact=False)
    assert kept() is not None, "the first call has not ended"
    events[0].has_fired = True
    alone.combine(handle, torch.ones(NUM_ROWS, 8), None, exact=False)
    assert kept() is None
    assert len(alone._kept) == 2
    alone.close()
    assert not alone._kept


def test_what_a_call_in_a_graph_reads_lives_as_long_as_the_buffer(alone: IntranodeBackend) -> None:
    alone.joins_stream = False
    fake_of(alone).node.is_capturing = True
    x = torch.ones(NUM_TOKENS, 8)
    kept = weakref.ref(x)
    alone.dispatch(one_rank(make_handle()), x)
    del x
    fake_of(alone).node.is_capturing = False
    for _ in range(3):
        alone.dispatch(one_rank(make_handle()), torch.ones(NUM_TOKENS, 8))
    assert kept() is not None
    alone.close()
    assert kept() is None


def first_dispatch(backend: IntranodeBackend) -> None:
    exchange = fake_of(backend)
    exchange.plan_rows, exchange.plan_counts = (4, 4), ((4,), (4,), (8,), [8, 0])
    backend.plan_and_dispatch(make_request(4), None)


def test_plan_and_rows_of_a_first_dispatch_are_joined_once(alone: IntranodeBackend) -> None:
    """Between them the caller's stream has nothing to wait for, and so the rows do not wait for its wait."""
    current, own = streams_of(alone)
    first_dispatch(alone)
    assert names(alone) == ["plan_count", "plan_fill", "move"]
    assert (own.past, current.past) == ([current, current], [own])
    alone.plan(make_request(4))
    assert (own.past[2:], current.past[1:]) == ([current], [own])


@pytest.mark.parametrize("joins", [True, False])
def test_a_first_dispatch_that_fails_on_its_way_leaves_no_plan_unjoined(
    alone: IntranodeBackend, monkeypatch: pytest.MonkeyPatch, joins: bool
) -> None:
    """The memory that its kernels write would be somebody else's before they have ended."""

    def no_memory(*_: object) -> NoReturn:
        raise torch.OutOfMemoryError("no memory")

    monkeypatch.setattr(Load, "outs", no_memory)
    alone.joins_stream = joins
    current, own = streams_of(alone)
    with pytest.raises(torch.OutOfMemoryError):
        first_dispatch(alone)
    assert names(alone) == ["plan_count", "plan_fill"]
    assert current.past == ([own] if joins else [])
    assert len(alone._kept) == (0 if joins else 1)


def test_a_call_inside_a_capture_is_remembered_by_the_buffer(alone: IntranodeBackend) -> None:
    alone.dispatch(one_rank(make_handle()), torch.ones(NUM_TOKENS, 8))
    assert not alone._is_in_graph
    fake_of(alone).node.is_capturing = True
    alone.dispatch(one_rank(make_handle()), torch.ones(NUM_TOKENS, 8))
    fake_of(alone).node.is_capturing = False
    alone.dispatch(one_rank(make_handle()), torch.ones(NUM_TOKENS, 8))
    assert alone._is_in_graph, "its memory cannot move any more"
