"""A combine whose staging would be too large runs in rounds: how many, with how much memory, and where they are cut."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from moe_ep.backends.combine_rounds import CombineRounds, rounds_of, rows_to_make_room_for
from moe_ep.backends.header import Header, disagreement
from moe_ep.backends.intranode import IntranodeBackend
from moe_ep.backends.node_calls import START_BYTES
from moe_ep.backends.node_header import NEED_WORD, STATUS_WORD
from moe_ep.backends.node_route import staging_of
from moe_ep.handle import DispatchHandle
from tests.helpers.fake_exchange import ROUNDS_WORD, FakeNode
from tests.helpers.host_program import ROOT, run_host_program
from tests.unit.node_helpers import construct, fake_of, make_handle, names, newest

ROW_BYTES = 1024
HIDDEN = ROW_BYTES // 4
NUM_TOKENS = 2 * START_BYTES // ROW_BYTES  # of a rank: two slots full at first
MANY_RANKS = 6


@pytest.fixture
def node(monkeypatch: pytest.MonkeyPatch) -> FakeNode:
    return FakeNode(MANY_RANKS).install(monkeypatch)


def everywhere(rank: int, num_tokens: int = NUM_TOKENS, world: int = MANY_RANKS) -> DispatchHandle:
    """Every token of `world` ranks goes to all of them. No kernel reads its tensors."""
    return make_handle(
        "compact",
        ranks=tuple(range(world)),
        rank=rank,
        num_tokens=num_tokens,
        num_rows=world * num_tokens,
        send_counts=(num_tokens,) * world,
        recv_counts=(num_tokens,) * world,
        rank_tokens=(num_tokens,) * world,
        rank_rows=(num_tokens,) * world**2,
        recv_token=torch.zeros(1, dtype=torch.int32).expand(world * num_tokens),
        token_row=torch.zeros(1, 1, dtype=torch.int32).expand(num_tokens, world),
    )


def bounded(rank: int, max_rows: int) -> DispatchHandle:
    """One whose counts only the device knows."""
    world = MANY_RANKS
    return replace(
        everywhere(rank),
        num_rows=max_rows,
        recv_counts=(-1,) * world,
        rank_tokens=(-1,) * world,
        rank_rows=(-1,) * world**2,
        recv_token=torch.zeros(1, dtype=torch.int32).expand(max_rows),
    )


def rows_of(handle: DispatchHandle) -> torch.Tensor:
    return torch.empty(1, HIDDEN).expand(handle.num_rows, HIDDEN)


def combine_all(node: FakeNode, backends: list[IntranodeBackend], handles: list[DispatchHandle]) -> None:
    # `contiguous` would make the rows real.
    node.run(
        lambda rank: backends[rank].combine(
            handles[rank], rows_of(handles[rank]).as_strided((1, HIDDEN), (0, 1)), None, False
        )
    )


# -- how many ---------------------------------------------------------------------------------------------------------


def test_rounds_begin_where_peers_get_more_than_two_rows_a_token() -> None:
    num_tokens = 4096
    numbers = []
    for world in (1, 2, 3, 4, 5, 7, 8, 16):
        staging = staging_of((num_tokens,) * world, (num_tokens,) * world**2, 0)
        room = rows_to_make_room_for(staging)
        assert room == min(max(world - 1, 1), 2) * num_tokens
        numbers.append(rounds_of(staging, world, room).number)
    assert numbers == [1, 1, 1, 2, 2, 4, 4, 8]  # of seven: a third of 4096 is no whole number


@pytest.mark.parametrize("tokens", [(1,) * 8, (0,) * 7 + (5,), (4097, 4096, 1, 0), (7, 9, 0, 33, 2), (3,) * 16])
@pytest.mark.parametrize("share", [0.1, 0.5, 1.0])
def test_what_a_round_stages_fits_into_the_room(tokens: tuple[int, ...], share: float) -> None:
    """Whichever range of a source goes where: as many rows as it has tokens may go to one rank."""
    world = len(tokens)
    rank_rows = tuple(int(share * tokens[i]) for i in range(world) for _ in range(world))
    staging = staging_of(tokens, rank_rows, 0)
    least = rows_to_make_room_for(staging)
    assert least <= max(2 * max(tokens), world - 1)
    for slot_rows in (least, least + 1, 2 * least, world * max(tokens)):
        rounds = rounds_of(staging, world, slot_rows)
        assert rounds == rounds_of(staging_of(tokens, rank_rows, world - 1), world, slot_rows)._replace(
            need_rows=rounds.need_rows
        )
        if rounds.number == 1:
            assert staging.most <= slot_rows
            continue
        for number in range(rounds.number):
            cut = [n * (number + 1) // rounds.number - n * number // rounds.number for n in tokens]
            assert max(sum(cut) - own for own in cut) <= rounds.need_rows <= slot_rows


def test_no_more_rounds_than_needed() -> None:
    staging = staging_of((100,) * 8, (100,) * 64, 3)
    assert rounds_of(staging, 8, 700) == (1, 700, 700)
    assert rounds_of(staging, 8, 699) == (2, 699, 350)
    assert rounds_of(staging, 8, 350) == (2, 350, 350)
    assert rounds_of(staging, 8, 349) == (3, 349, 238)
    assert rounds_of(staging, 8, 7) == (100, 7, 7)


# -- what is launched -------------------------------------------------------------------------------------------------


def test_a_slot_grows_to_two_rows_a_token_and_no_further(node: FakeNode) -> None:
    backends = construct(node)
    combine_all(node, backends, [everywhere(rank) for rank in range(MANY_RANKS)])
    for backend in backends:
        assert names(backend) == ["header_only", "combine"]
        assert fake_of(backend).launches[0].words[NEED_WORD] == 2 * NUM_TOKENS * ROW_BYTES
        assert backend._exchange.slot_bytes == 2 * NUM_TOKENS * ROW_BYTES
        launch = newest(backend)
        assert launch.words[STATUS_WORD] == 0
        assert launch.words[ROUNDS_WORD] == launch.arguments["num_rounds"] == 3
        assert launch.words[NEED_WORD] <= backend._exchange.slot_bytes
        assert launch.arguments["slot_rows"] == 2 * NUM_TOKENS
        assert launch.arguments["rounds"] != 0
        assert launch.arguments["geometry"] != launch.arguments["rounds"]


def test_what_fits_is_one_call_as_ever(node: FakeNode) -> None:
    backends = construct(node)
    fitting = START_BYTES // ROW_BYTES // (MANY_RANKS - 1)
    handles = [everywhere(rank, fitting) for rank in range(MANY_RANKS)]
    combine_all(node, backends, handles)
    for backend in backends:
        assert names(backend) == ["combine"]
        launch = newest(backend)
        assert (launch.words[ROUNDS_WORD], launch.arguments["num_rounds"], launch.arguments["rounds"]) == (1, 1, 0)
        assert launch.words[NEED_WORD] == (MANY_RANKS - 1) * fitting * ROW_BYTES


def test_the_backward_of_dispatch_runs_in_the_same_rounds(node: FakeNode) -> None:
    backends = construct(node)
    handles = [everywhere(rank) for rank in range(MANY_RANKS)]
    grads = [rows_of(handle).as_strided((1, HIDDEN), (0, 1)) for handle in handles]
    node.run(lambda rank: backends[rank].dispatch_backward(handles[rank], grads[rank], None))
    for backend in backends:
        assert newest(backend).arguments["num_rounds"] == 3


# case T05
def test_a_bound_that_a_slot_does_not_hold_takes_rounds_that_the_device_fills(node: FakeNode) -> None:
    """With max_rows no rank knows the others' tokens: the number of rounds follows from W."""
    backends = construct(node)
    fits = START_BYTES // ROW_BYTES
    for max_rows, number, need_rows in ((fits, 1, fits), (fits + 1, 3, 0)):
        combine_all(node, backends, [bounded(rank, max_rows) for rank in range(MANY_RANKS)])
        for backend in backends:
            launch = newest(backend)
            assert (launch.arguments["num_rounds"], launch.words[ROUNDS_WORD]) == (number, number)
            assert launch.words[NEED_WORD] == need_rows * ROW_BYTES
            assert launch.words[STATUS_WORD] == 0
            assert "header_only" not in names(backend), "such a call makes no room"


def test_ranks_whose_bounds_lead_to_other_rounds_are_told_apart() -> None:
    sentence = disagreement([Header(rounds=1), Header(rounds=3)])
    assert sentence is not None
    assert "disagree on the rounds of a combine (which follow from max_rows): rank 0 has 1, rank 1 has 3" in sentence


def test_three_ranks_with_a_bound_take_one_call(node: FakeNode) -> None:
    staging = staging_of((5, 5, 5), (5,) * 9, 0)._replace(for_peers=100, most=0, rank_tokens=())
    assert rounds_of(staging, 3, 10) == CombineRounds(1, 10, 100)


# -- where they are cut -----------------------------------------------------------------------------------------------


@pytest.mark.timeout(300)
def test_every_token_finds_its_rows_in_the_round_that_it_is_in(tmp_path: Path) -> None:
    """The numbers that the kernels go by, played for up to 16 ranks; see tests/unit/combine_rounds.cpp."""
    sources = [ROOT / "tests/unit/combine_rounds.cpp"]
    assert run_host_program(sources, tmp_path / "combine_rounds", "-O1") == ("", 0)
