"""What becomes of rows on their way between nodes when a buffer is reset, or closed: none comes into what follows."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import moe_ep
from moe_ep.backends import internode_choice, rail_memory
from moe_ep.backends.nvshmem_world import NvshmemWorld
from tests.helpers.played_kernels import NoStream, PlayedRail, played
from tests.helpers.ranks import Pools

ROOMY = 1 << 16  # bytes of a rail
NUM_TOKENS, HIDDEN = 12, 8
SETTINGS: dict[str, Any] = {"backend": "internode", "ranks_per_node": 1}


def _dispatch(buffer: moe_ep.Buffer) -> torch.Tensor:
    world = buffer.group_size
    x = torch.full((NUM_TOKENS, HIDDEN), float(buffer.rank))
    idx = torch.arange(2 * NUM_TOKENS).view(NUM_TOKENS, 2) % world
    return moe_ep.dispatch(buffer, x, idx, None, num_experts=world, layout="compact").x


def _give_up(buffer: moe_ep.Buffer) -> None:
    """A dispatch that sends its rows, and ends before anybody has them."""
    late = moe_ep.EPTimeoutError("the rows of a round did not come")
    with mock.patch.object(PlayedRail, "wait", side_effect=late), pytest.raises(moe_ep.EPTimeoutError):
        _dispatch(buffer)


def _check(buffer: moe_ep.Buffer) -> None:
    rows = _dispatch(buffer)
    assert sorted(set(rows[:, 0].tolist())) == [float(rank) for rank in range(buffer.group_size)]


class NeverThere(NoStream):
    def query(self) -> bool:
        return False


def _world_of(kernels: Any, stack: ExitStack) -> NvshmemWorld:
    """NVSHMEM as a process has it once it has begun, on played rails."""
    world = NvshmemWorld()
    world._kernels = kernels
    world._ranks = tuple(range(kernels.world))
    stack.enter_context(mock.patch.object(rail_memory, "nvshmem_world", return_value=world))
    stack.enter_context(mock.patch.object(internode_choice, "why_no_nvshmem", return_value=""))
    return world


def _reset(group: dist.ProcessGroup, hop: str) -> None:
    with ExitStack() as stack:
        _world_of(stack.enter_context(played(group, 1, ROOMY)), stack)
        buffer = moe_ep.Buffer(group, hop=hop, timeout_secs=20, **SETTINGS)
        for _ in range(2):
            _give_up(buffer)
            buffer.reset()
            _check(buffer)
        buffer.close()


@pytest.mark.parametrize("hop", ["ipc", "nvshmem"])
def test_a_reset_waits_for_what_a_call_that_was_given_up_has_put(ranks: Pools, hop: str) -> None:
    ranks.run(_reset, 2, hop)


def _close(group: dist.ProcessGroup) -> tuple[int, int]:
    """How many rails there are after a close of a failed buffer and another buffer: rows there, and never there."""
    with ExitStack() as stack:
        world = _world_of(stack.enter_context(played(group, 1, ROOMY)), stack)
        numbers = []
        for event in (NoStream, NeverThere):
            first = moe_ep.Buffer(group, hop="nvshmem", timeout_secs=1, **SETTINGS)
            _give_up(first)
            with mock.patch.object(torch.cuda, "Event", event):
                first.close()
            second = moe_ep.Buffer(group, hop="nvshmem", timeout_secs=20, **SETTINGS)
            _check(second)
            second.close()
            numbers.append(len(world._made))
        return numbers[0], numbers[1]


def test_memory_of_a_closed_buffer_serves_again_once_nothing_is_on_its_way_there(ranks: Pools) -> None:
    assert ranks.run(_close, 2) == [(1, 2)] * 2


def _never_there(group: dist.ProcessGroup) -> str:
    with ExitStack() as stack:
        _world_of(stack.enter_context(played(group, 1, ROOMY)), stack)
        buffer = moe_ep.Buffer(group, hop="nvshmem", timeout_secs=1, **SETTINGS)
        _give_up(buffer)
        with mock.patch.object(torch.cuda, "Event", NeverThere), pytest.raises(moe_ep.EPTimeoutError) as caught:
            buffer.reset()
        return str(caught.value)


def test_a_reset_does_not_wait_for_ever_for_what_does_not_come_there(ranks: Pools) -> None:
    for text in ranks.run(_never_there, 2):
        assert text.startswith("what this rank has sent to other nodes did not come there within 1 s")
