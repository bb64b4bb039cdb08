"""Calls inside a node that must not start: closed, dead, on the wrong device; and how all ranks raise what one does."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import cast

import pytest
import torch

import moe_ep
from moe_ep.backends.header import ERRORS, OPERATIONS
from moe_ep.backends.intranode import IntranodeBackend
from moe_ep.backends.node_header import STATUS_WORD
from moe_ep.buffer import Buffer
from moe_ep.errors import ConfigError, EPTimeoutError
from moe_ep.placement import ExpertPlacement
from tests.helpers.fake_exchange import FakeNode
from tests.helpers.scale_experts import caught
from tests.unit.node_helpers import (
    NUM_ROWS,
    NUM_TOKENS,
    PATIENCE_SECS,
    RANK,
    construct,
    fake_of,
    make_handle,
    make_request,
    names,
    newest,
)

CALLS: dict[str, Callable[[IntranodeBackend], object]] = {
    "dispatch": lambda backend: backend.plan(make_request(NUM_TOKENS, world=2)),
    "dispatch ": lambda backend: backend.plan(make_request(NUM_TOKENS, world=2, max_rows=8)),
    "cached dispatch": lambda backend: backend.dispatch(make_handle(), torch.ones(NUM_TOKENS, 8)),
    "dispatch backward": lambda backend: backend.dispatch_backward(make_handle(), torch.ones(NUM_ROWS, 8), None),
    "combine": lambda backend: backend.combine(make_handle(), torch.ones(NUM_ROWS, 8), None, False),
    "combine backward": lambda backend: backend.combine_backward(make_handle(), torch.ones(NUM_TOKENS, 8), None, None),
    "all_reduce": lambda backend: backend.all_reduce(torch.ones(3)),
}


@pytest.fixture
def node(monkeypatch: pytest.MonkeyPatch) -> FakeNode:
    return FakeNode(2).install(monkeypatch)


@pytest.mark.parametrize("call", CALLS)
def test_a_closed_buffer_starts_nothing(node: FakeNode, call: str) -> None:
    backend = construct(node)[RANK]
    backend.close()
    assert names(backend) == ["drain"]
    expected = f"{call.strip()} was not started: the buffer is closed. Close it after the last backward."
    assert caught(lambda: CALLS[call](backend)) == (RuntimeError, expected)
    assert names(backend) == ["drain"]


def test_a_buffer_closes_once_after_its_last_kernel_and_by_itself(node: FakeNode) -> None:
    backend = construct(node)[RANK]
    before = len(node.events)
    backend.close()
    backend.close()
    assert names(backend) == ["drain"]
    assert newest(backend).arguments["stream"] == backend.stream.cuda_stream
    assert backend.stream.num_synchronizes == 1  # type: ignore[attr-defined]
    assert node.events[before:] == [(RANK, "close")]


def test_a_close_waits_for_replays_before_it_drains(node: FakeNode, monkeypatch: pytest.MonkeyPatch) -> None:
    backend, seen = construct(node)[RANK], []
    backend._is_in_graph = True
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: seen.append(names(backend)))
    backend.close()
    assert seen == [[], ["drain"]]


@pytest.mark.parametrize("call", CALLS)
def test_nothing_is_started_after_a_time_limit(node: FakeNode, call: str) -> None:
    backends = construct(node)
    backend = backends[RANK]
    fake_of(backend).faults = [("timeout", [0, 1, 4, 2, 1, 2, 0, 0])]
    kind, sentence = caught(backend.take_faults)
    assert kind is EPTimeoutError
    assert caught(lambda: CALLS[call](backend)) == (EPTimeoutError, f"{call.strip()} was not started: {sentence}")
    assert caught(lambda: backend.refuse("combine", ValueError("rows"))) == (
        EPTimeoutError,
        f"combine was not started: {sentence}",
    )
    assert names(backend) == []
    node.run(lambda rank: backends[rank].reset())
    assert backend.take_faults() == []
    CALLS["cached dispatch"](backend)
    assert names(backend) == ["move"]


def test_a_time_limit_of_a_call_whose_host_waits_is_raised_by_it(
    node: FakeNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = construct(node)[RANK]
    fake_of(backend).is_stuck = True
    monkeypatch.setattr(IntranodeBackend, "_host_limit_secs", 1.0)
    kind, text = caught(lambda: CALLS["dispatch"](backend))
    assert kind is EPTimeoutError
    assert text.startswith("dispatch on rank 1 has not begun on the device after 1 s")
    assert names(backend) == ["plan_count", "plan_fill"]


@pytest.mark.parametrize("odd", [0, 1])
def test_rows_on_the_cpu_are_refused_on_all_ranks_before_any_is_read(node: FakeNode, odd: int) -> None:
    """The others have CUDA tensors here: their call runs on the device, which sees the refusal."""
    backends = construct(node)
    backends[odd]._device = torch.device("cuda", 0)

    def dispatch(rank: int) -> tuple[type[BaseException] | None, str]:
        return caught(lambda: backends[rank].plan(make_request(4, world=2)))

    expected = (
        f"EP rank {odd} refused dispatch: the rows are on cpu, but this buffer's kernels run on cuda:0; move them "
        "there, or use backend='torch'."
    )
    assert node.run(dispatch) == [(ValueError, expected)] * 2
    assert names(backends[odd]) == ["header_only"]
    assert names(backends[1 - odd]) == ["plan_count", "plan_fill"]
    assert newest(backends[odd]).words[STATUS_WORD] == ERRORS.index(ValueError)


@pytest.mark.parametrize("operation", ["open_dispatch", "open_combine"])
def test_calls_along_a_handle_look_at_the_device_of_their_rows_first(node: FakeNode, operation: str) -> None:
    backends = construct(node)
    arguments = {"open_dispatch": (), "open_combine": (None, False, False)}[operation]

    def call(rank: int) -> tuple[type[BaseException] | None, str]:
        if rank == 0:
            backends[0]._device = torch.device("cuda", 0)
        opens = getattr(backends[rank], operation)
        if rank == 1:
            opens(make_handle(), torch.ones(NUM_ROWS, 8), *arguments)  # fine: the header travels with the rows
            return caught(
                lambda: CALLS[operation.replace("open_", "").replace("dispatch", "cached dispatch")](backends[1])
            )
        return caught(lambda: opens(make_handle(), torch.ones(NUM_ROWS, 8), *arguments))

    (kind, text), other = node.run(call)
    assert kind is ValueError
    assert "the rows are on cpu, but this buffer's kernels run on cuda:0" in text
    assert other == (None, ""), "the kernel fills its outputs, and the next look at the record says why"
    assert fake_of(backends[1]).launches[-1].name in ("move", "combine")


@pytest.mark.parametrize("kind", [ValueError, TypeError, ConfigError, RuntimeError])
def test_a_refusal_is_the_same_error_on_all_ranks(node: FakeNode, kind: type[Exception]) -> None:
    backends = construct(node)

    def call(rank: int) -> tuple[type[BaseException] | None, str]:
        if rank == 1:
            return caught(lambda: backends[1].refuse("dispatch", kind("topk is too large.")))
        return caught(lambda: backends[0].plan(make_request(4, world=2)))

    assert node.run(call) == [(kind, "EP rank 1 refused dispatch: topk is too large.")] * 2
    assert [backend.take_faults() for backend in backends] == [[], []]
    assert backends[0]._num_calls == backends[1]._num_calls


@pytest.mark.parametrize("grows", [False, True])
def test_rows_and_weights_that_the_others_sum_are_refused_one_after_the_other(node: FakeNode, grows: bool) -> None:
    """Two calls of the others, whose hosts do not wait; or none, where they ask for room first and hear of it there."""
    backends = construct(node)
    handle = make_handle("compact", rank=0)
    if grows:
        fake_of(backends[0]).slot_bytes = 16

    def call(rank: int) -> tuple[type[BaseException] | None, str]:
        if rank == 1:
            return caught(lambda: backends[1].refuse("combine", ValueError("x has 3 rows."), num_parts=2))

        def sums() -> None:
            backends[0].combine(handle, torch.ones(handle.num_rows, 8), None, False)
            backends[0].sum_weights(handle, torch.ones(handle.num_rows, handle.num_topk))

        return caught(sums)

    refused = ValueError, "EP rank 1 refused combine: x has 3 rows."
    assert node.run(call) == [refused if grows else (None, ""), refused]
    assert names(backends[0]) == (["header_only"] if grows else ["combine", "numbers_home"])
    assert names(backends[1]) == ["header_only"] * len(names(backends[0]))
    assert backends[0]._num_calls == backends[1]._num_calls


def test_a_sum_that_met_a_refusal_is_raised_before_the_next_wait_for_the_rank_that_left(node: FakeNode) -> None:
    backends = construct(node)
    error = ValueError("x has 128 columns.")

    def call(rank: int) -> tuple[type[BaseException] | None, str]:
        if rank == 0:
            return caught(lambda: backends[0].refuse("dispatch", error))
        backends[1].all_reduce(torch.ones(3))
        return caught(lambda: backends[1].plan(make_request(4, world=2)))

    (kind, text), (other_kind, other_text) = node.run(call)
    assert (kind, text) == (ValueError, "EP rank 0 refused dispatch: x has 128 columns.")
    assert (other_kind, other_text) == (ValueError, "EP rank 0 refused all_reduce: x has 128 columns.")
    assert names(backends[1]) == ["all_reduce"], "no plan is started that rank 0 does not come to"
    assert backends[0]._num_calls == backends[1]._num_calls, "the ranks are in step, and go on without a reset"


@pytest.mark.parametrize("hidden", [4, 0], ids=["a good call", "a call that is refused itself"])
def test_a_dispatch_behind_a_refused_sum_sends_nothing_to_the_rank_that_left(node: FakeNode, hidden: int) -> None:
    """Also where the device has reported the refusal by then, so that check() sees it first."""
    backends = construct(node)
    placement = ExpertPlacement.balanced(4, 2)
    stub = SimpleNamespace(backend=backends[1], num_channels=1, anchor=None, placement=lambda num_experts: placement)
    stub.check = lambda: Buffer.check(cast(Buffer, stub))

    def call(rank: int) -> tuple[type[BaseException] | None, str]:
        if rank == 0:
            return caught(lambda: backends[0].refuse("dispatch", ValueError("x has 128 columns.")))
        backends[1].all_reduce(torch.ones(3))
        fake_of(backends[1]).wait_answer(1, PATIENCE_SECS)
        x, idx = torch.ones(4, hidden), torch.zeros(4, 2, dtype=torch.int64)
        return caught(lambda: moe_ep.dispatch(cast(Buffer, stub), x, idx, num_experts=4))

    assert node.run(call)[1] == (ValueError, "EP rank 0 refused all_reduce: x has 128 columns.")
    assert names(backends[1]) == ["all_reduce"]


def test_a_sum_whose_refusal_was_told_is_not_raised_again(node: FakeNode) -> None:
    backends = construct(node)

    def call(rank: int) -> tuple[list[str], tuple[type[BaseException] | None, str]]:
        if rank == 0:
            return [], caught(lambda: backends[0].refuse("dispatch", ValueError("x has 128 columns.")))
        backends[1].all_reduce(torch.ones(3))
        fake_of(backends[1]).wait_answer(1, PATIENCE_SECS)
        return backends[1].take_faults(), caught(backends[1].settle)

    _, (told, later) = node.run(call)
    assert told == ["EP rank 0 refused all_reduce: x has 128 columns."]
    assert later == (None, "")


def test_a_refusal_that_was_told_hides_none_of_a_later_generation(node: FakeNode) -> None:
    """Epochs begin anew where memory has grown: the plan that is refused here has the epoch of the sum that was."""
    backends = construct(node)
    fake_of(backends[1]).bad = (3, 9)

    def call(rank: int) -> tuple[type[BaseException] | None, str]:
        if rank == 0:
            caught(lambda: backends[0].refuse("dispatch", ValueError("x has 128 columns.")))
        else:
            backends[1].all_reduce(torch.ones(3))
            fake_of(backends[1]).wait_answer(1, PATIENCE_SECS)
            assert len(backends[1].take_faults()) == 1
            backends[1].settle()
        backends[rank]._memory.grow(1)
        return caught(lambda: backends[rank].plan(make_request(4, world=2)))

    for kind, text in node.run(call):
        assert kind is ValueError
        assert text.startswith("EP rank 1 refused dispatch: topk_idx[1, 1] is 9;")
    assert backends[0]._memory.generation == backends[1]._memory.generation == 2, "nobody takes it for growth"


def test_no_call_waits_for_a_sum_that_was_not_started(node: FakeNode, monkeypatch: pytest.MonkeyPatch) -> None:
    backend = construct(node)[RANK]

    def fails(*given: object) -> bool:
        raise RuntimeError("numbers have dtype float8_e5m2, which cannot be summed here: convert them.")

    monkeypatch.setattr(fake_of(backend), "all_reduce", fails)
    kind, text = caught(lambda: backend.all_reduce(torch.ones(3)))
    assert (kind, text[:12]) == (RuntimeError, "numbers have")
    assert caught(backend.settle) == (None, "")


def test_a_refusal_of_a_closed_buffer_or_by_a_time_limit_sends_nothing(node: FakeNode) -> None:
    backend = construct(node)[RANK]
    late = EPTimeoutError("rank 0 did not come")
    with pytest.raises(EPTimeoutError) as raised:
        backend.refuse("dispatch", late)
    assert raised.value is late
    backend.close()
    with pytest.raises(TypeError, match="a list"):
        backend.refuse("dispatch", TypeError("a list"))
    assert names(backend) == ["drain"]


def test_ranks_that_disagree_say_so_alike(node: FakeNode) -> None:
    backends = construct(node)
    answers = node.run(lambda rank: caught(lambda: backends[rank].plan(make_request(4, world=2, hidden=8 + 8 * rank))))
    expected = (
        "dispatch: the ranks of the EP group disagree on the hidden size H: rank 0 has 8, rank 1 has 16. Give every "
        "rank the same value and call the operations in the same order on every rank."
    )
    assert answers == [(ConfigError, expected)] * 2


def test_a_bad_id_is_a_value_error_on_all_ranks_and_leaves_its_reason(node: FakeNode) -> None:
    backends = construct(node)
    fake_of(backends[1]).bad = (3, 9)
    answers = node.run(lambda rank: caught(lambda: backends[rank].plan(make_request(4, world=2))))
    expected = (
        "EP rank 1 refused dispatch: topk_idx[1, 1] is 9; an id must lie in [-1, 4) (num_experts = 4, -1 = no expert). "
        "Check the router that made it."
    )
    assert answers == [(ValueError, expected)] * 2


def test_a_backend_of_a_node_does_not_go_on_without_a_rank(node: FakeNode) -> None:
    backend = construct(node)[RANK]
    with pytest.raises(EPTimeoutError, match=r"does not go on without a rank of its node.*call reset\(\) on each"):
        backend.shrink(0)
    assert backend.members == (0, 1)


def test_every_operation_has_a_call_here() -> None:
    assert {call.strip() for call in CALLS} == set(OPERATIONS)


def test_more_experts_than_the_kernels_count_on_one_rank_are_refused_on_all(node: FakeNode) -> None:
    backends = construct(node)
    for kernels in node.kernels_of.values():
        assert kernels is not None
        kernels.max_local_experts = 2
    placement = ExpertPlacement.of([0, 0, 0, 1], 2)
    answers = node.run(lambda rank: caught(lambda: backends[rank].plan(make_request(4, world=2, placement=placement))))
    expected = (
        "EP rank 0 refused dispatch: expert_placement gives a rank 3 experts; the intranode backend counts at most 2. "
        "Use more ranks, or backend='torch'."
    )
    assert answers[0] == (ValueError, expected)
    assert answers[1] == (ValueError, expected)
    assert names(backends[0]) == names(backends[1]) == ["header_only"], "before any launch of the plan"
