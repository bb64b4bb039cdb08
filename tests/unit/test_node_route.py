"""What the calls along a handle share inside a node: worked out once a handle, and never for another one's tensors."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from moe_ep.backends import node_route
from moe_ep.backends.intranode import IntranodeBackend
from moe_ep.backends.node_route import Staging, route_of, staging_of
from moe_ep.handle import DispatchHandle
from tests.helpers.fake_exchange import FakeNode
from tests.unit.node_helpers import NUM_ROWS, NUM_TOKENS, PATIENCE_SECS, RANK, construct, make_handle, newest, on_cpu

COPIES: dict[str, Callable[[DispatchHandle], DispatchHandle]] = {
    "pickle": lambda handle: pickle.loads(pickle.dumps(handle)),  # type: ignore[no-any-return]
    "deepcopy": copy.deepcopy,
    "replace": lambda handle: replace(handle, uid=78),
    "unpack": lambda handle: DispatchHandle.unpack(handle.pack()),
}


@pytest.fixture
def node(monkeypatch: pytest.MonkeyPatch) -> FakeNode:
    return FakeNode(2).install(monkeypatch)


def test_a_handle_has_one_route_for_all_its_calls_and_buffers(node: FakeNode) -> None:
    first, second = construct(node)[RANK], construct(node)[RANK]
    handle = make_handle()
    route = route_of(handle, first._kernels)
    for backend in (first, second):
        backend.dispatch(handle, torch.ones(NUM_TOKENS, 8))
        backend.combine(handle, torch.ones(NUM_ROWS, 8), None, exact=False)
        assert newest(backend).arguments["route"] is route.native
    assert route_of(handle, second._kernels) is route


@pytest.mark.parametrize("name", COPIES)
def test_a_copy_of_a_handle_has_a_route_of_its_own(node: FakeNode, name: str) -> None:
    kernels, handle = construct(node)[RANK]._kernels, make_handle()
    route = route_of(handle, kernels)
    other = COPIES[name](handle)
    assert not other.prepared
    copied = route_of(other, kernels)
    assert copied is not route
    assert copied.uid == other.uid
    assert copied.native.recv_token == other.recv_token.data_ptr()  # type: ignore[attr-defined]


def test_a_shallow_copy_has_the_same_tensors_and_so_the_same_route(node: FakeNode) -> None:
    kernels, handle = construct(node)[RANK]._kernels, make_handle()
    other = copy.copy(handle)
    assert other is not handle
    route = route_of(other, kernels)
    assert route_of(handle, kernels) is route
    assert other.recv_token is handle.recv_token


def test_the_handle_of_another_backend_is_worked_out_once(node: FakeNode, monkeypatch: pytest.MonkeyPatch) -> None:
    backend, made = construct(node)[RANK], []
    handle = make_handle(geometry=torch.zeros(0, dtype=torch.int32))

    def view(handle: DispatchHandle, *_: object) -> DispatchHandle:
        made.append(replace(handle, geometry=torch.zeros(151, dtype=torch.int32)))
        return made[-1]

    monkeypatch.setattr(node_route, "kernel_view", view)
    for _ in range(3):
        backend.dispatch(handle, torch.ones(NUM_TOKENS, 8))
    assert len(made) == 1
    assert newest(backend).arguments["geometry"] == made[0].geometry.data_ptr()


def test_staging_is_that_of_the_rank_with_the_most_rows() -> None:
    # Rows from rank i to rank j. They get 7, 9 and 8 rows; 6, 3 and 7 of them from others.
    rank_rows = (1, 2, 3, 5, 6, 4, 1, 1, 1)
    for rank, for_peers in enumerate((6, 3, 7)):
        assert staging_of((4, 7, 2), rank_rows, rank) == (for_peers, 7, 9, (4, 7, 2))
    assert staging_of((40, 7, 2), rank_rows, 0) == (6, 40, 9, (40, 7, 2))
    assert staging_of((3,), (3,), 0) == (0, 3, 3, (3,))
    assert staging_of((0, 0), (0, 0, 0, 0), 1) == (0, 0, 0, (0, 0))


def test_the_most_tokens_are_those_of_one_rank_and_none_where_only_the_device_knows() -> None:
    assert staging_of((4, 3, 2), (1, 4, 4, 3, 1, 3, 2, 2, 1), 0).most_tokens == 4
    assert Staging(5, 0, 0, ()).most_tokens == 0


def test_what_only_the_device_knows_makes_no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    FakeNode(1).install(monkeypatch)
    alone = on_cpu(IntranodeBackend(None, PATIENCE_SECS))
    handle = make_handle(recv_counts=(-1, -1), rank_rows=(-1,) * 4, rank_tokens=(-1, -1))
    route = route_of(handle, alone._kernels)
    assert route.staging == (handle.recv_token.shape[0], 0, 0, ())
