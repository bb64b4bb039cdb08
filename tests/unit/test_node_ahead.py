"""Dispatches inside a node that some hosts do not wait for: who raises takes part in the rows that they have begun."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from moe_ep.backends.device_faults import REFUSE
from moe_ep.backends.header import OPERATIONS
from moe_ep.backends.intranode import IntranodeBackend
from moe_ep.backends.node_calls import START_BYTES
from moe_ep.backends.node_header import GOES_ON_WORD, STATUS_WORD
from tests.helpers.fake_exchange import FakeNode
from tests.helpers.scale_experts import caught
from tests.unit.node_helpers import construct, fake_of, make_request, names

MAX_ROWS = 8


@pytest.fixture
def node(monkeypatch: pytest.MonkeyPatch) -> FakeNode:
    return FakeNode(2).install(monkeypatch)


def goes_on(backend: IntranodeBackend, **changes: Any) -> None:
    """A dispatch whose host waits for nothing."""
    backend.plan_and_dispatch(make_request(4, world=2, max_rows=MAX_ROWS, **changes), None)


def waits(backend: IntranodeBackend, **changes: Any) -> None:
    exchange = fake_of(backend)
    exchange.plan_rows, exchange.plan_counts = (6, 6), ((4, 4), (3,) * 4, (6, 6), [6, 6])
    backend.plan_and_dispatch(make_request(4, world=2, **changes), None)


def uids(node: FakeNode, backends: list[IntranodeBackend], max_rows: int | None) -> list[int]:
    def uid(rank: int) -> int:
        exchange = fake_of(backends[rank])
        exchange.plan_rows, exchange.plan_counts = (6, 6), ((4, 4), (3,) * 4, (6, 6), [6, 6])
        return backends[rank].plan(make_request(4, world=2, max_rows=max_rows)).handle.uid

    return node.run(uid)


def test_a_rank_that_refuses_refuses_the_rows_behind_the_plan_too(node: FakeNode) -> None:
    """Otherwise the others would wait for it in the next call, and count that differently from then on."""
    backends = construct(node)

    def call(rank: int) -> tuple[Any, str]:
        if rank == 0:
            return caught(lambda: goes_on(backends[0]))
        return caught(lambda: backends[1].refuse("dispatch", TypeError("x is a list.")))

    assert node.run(call) == [(None, ""), (TypeError, "EP rank 1 refused dispatch: x is a list.")]
    assert names(backends[0]) == ["plan_count", "plan_fill", "move"]
    assert names(backends[1]) == ["header_only"] * 2
    plan, _, rows = fake_of(backends[0]).launches
    refusal, joined = fake_of(backends[1]).launches
    assert (plan.words[GOES_ON_WORD], rows.words[GOES_ON_WORD]) == (1, 0)
    assert [OPERATIONS[launch.words[0]] for launch in (refusal, joined)] == ["dispatch", "cached dispatch"]
    assert refusal.words[STATUS_WORD] == joined.words[STATUS_WORD] == 2
    assert fake_of(backends[0]).epoch == fake_of(backends[1]).epoch == 2
    for max_rows in (MAX_ROWS, None):
        first, second = uids(node, backends, max_rows)
        assert first == second, "handles made before a reset match"


@pytest.mark.parametrize("call_of_both", [0, 1])
def test_whichever_refusal_is_in_the_record_has_its_text(node: FakeNode, call_of_both: int) -> None:
    """The rank that went on finds the one of the plan, or that of the rows where it has taken the first."""
    backends = construct(node)

    def call(rank: int) -> None:
        if rank == 0:
            goes_on(backends[0])
        else:
            caught(lambda: backends[1].refuse("dispatch", TypeError("x is a list.")))

    node.run(call)
    exchange = fake_of(backends[0])
    exchange._asked = (exchange.generation, call_of_both)
    exchange.faults = [exchange.refusal(REFUSE)]
    expected = ["EP rank 1 refused dispatch: x is a list.", "EP rank 1 refused cached dispatch: EP rank 1 refused"]
    (text,) = backends[0].take_faults()
    assert text.startswith(expected[call_of_both])


def test_ranks_that_disagree_raise_and_leave_nobody_waiting(node: FakeNode) -> None:
    backends = construct(node)

    def call(rank: int) -> tuple[Any, str]:
        return caught(lambda: (goes_on, waits)[rank](backends[rank], hidden=8 + 8 * rank))

    quiet, (_, text) = node.run(call)
    assert quiet == (None, "")
    assert "disagree on the hidden size H: rank 0 has 8, rank 1 has 16" in text
    assert names(backends[1]) == ["plan_count", "plan_fill", "header_only"]


def test_no_rank_grows_where_another_has_gone_on(node: FakeNode) -> None:
    """The one that did not wait would not come to the growth."""
    backends = construct(node)
    num_tokens = START_BYTES // 8 + 1
    large = {"topk_idx": torch.zeros(1, 1, dtype=torch.int32).expand(num_tokens, 2), "x": torch.ones(1, 4)}
    large["x"] = large["x"].expand(num_tokens, 4)

    def call(rank: int) -> tuple[Any, str]:
        if rank == 0:
            return caught(lambda: goes_on(backends[0]))
        request = replace(make_request(4, world=2), **large)
        return caught(lambda: backends[1].plan(request))

    quiet, (kind, text) = node.run(call)
    assert quiet == (None, "")
    assert kind is RuntimeError
    assert text.startswith("dispatch needs more memory than the buffer's")
    assert names(backends[1]) == ["plan_count", "plan_fill", "header_only"]
    assert backends[1]._memory.generation == 1


def test_where_both_wait_the_payload_of_a_refused_dispatch_is_nobodys_call(node: FakeNode) -> None:
    backends = construct(node)

    def call(rank: int) -> tuple[Any, str]:
        if rank == 0:
            return caught(lambda: waits(backends[0]))
        return caught(lambda: backends[1].refuse("dispatch", TypeError("x is a list.")))

    assert node.run(call) == [(TypeError, "EP rank 1 refused dispatch: x is a list.")] * 2
    assert (names(backends[0]), names(backends[1])) == (["plan_count", "plan_fill"], ["header_only"])


def test_the_rows_of_a_first_dispatch_start_right_behind_its_plan(node: FakeNode) -> None:
    backends = construct(node)
    node.run(lambda rank: waits(backends[rank]))
    for backend in backends:
        assert names(backend) == ["plan_count", "plan_fill", "move"]
        _, fill, move = fake_of(backend).launches
        assert move.arguments["recv_token"] == fill.arguments["recv_token"]
        assert move.arguments["token_row"] == fill.arguments["token_row"]
        assert move.arguments["num_rows"] == 6
        assert (fill.arguments["only_if_enough"], fill.arguments["num_rows"]) == (True, 7), "made before the counts"
