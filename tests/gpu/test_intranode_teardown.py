"""Orders of closing and ending: every process ends by itself, with the right exit code. Case T08."""

from __future__ import annotations

import gc
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

import moe_ep
from moe_ep.config import EPConfig, MoEConfig, RouterConfig
from tests.helpers.faults import Ended, Rank, World, run_worlds
from tests.helpers.ranks import Pools
from tests.helpers.scale_experts import Setup, assert_works, caught, open_buffer

pytestmark = pytest.mark.gpu


def _two_layers(rank: Rank) -> tuple[moe_ep.MoELayer, moe_ep.MoELayer]:
    torch.cuda.set_device(rank.rank % torch.cuda.device_count())
    moe_ep.Buffer.set_num_sms(4)
    ep = EPConfig(timeout_secs=20, backend="intranode")
    config = MoEConfig(hidden_size=8, ffn_hidden_size=8, num_experts=4, router=RouterConfig(topk=2), ep=ep)
    layers = [moe_ep.MoELayer(config, rank.group).cuda() for _ in range(2)]
    for layer in layers:
        _step(layer)
    return layers[0], layers[1]


def _step(layer: moe_ep.MoELayer) -> None:
    layer(torch.ones(3, 8, device="cuda")).sum().backward()
    torch.cuda.synchronize()


def close_the_first(rank: Rank) -> None:
    first, second = _two_layers(rank)
    first.buffer.close()
    first.buffer.destroy()
    _step(second)
    assert caught(lambda: _step(first))[1] == "the buffer is closed; construct a new Buffer on every rank of the group."
    second.buffer.close()


def leave_open(rank: Rank) -> None:
    _two_layers(rank)


def close_on_one_rank(rank: Rank) -> None:
    first, second = _two_layers(rank)
    if rank.rank == 0:
        first.buffer.close()
    _step(second)


def destroy_the_world_and_go_on(rank: Rank) -> None:
    first, second = _two_layers(rank)
    dist.barrier(rank.group)
    dist.destroy_process_group()
    _step(first)
    first.buffer.close()
    second.buffer.close()


def close_before_the_backward(rank: Rank) -> None:
    first, second = _two_layers(rank)
    y = first(torch.ones(3, 8, device="cuda"))
    first.buffer.close()
    kind, text = caught(lambda: y.sum().backward())
    assert kind is RuntimeError
    assert "the buffer is closed" in text
    _step(second)


def raise_in_mid_step(rank: Rank) -> None:
    first, _ = _two_layers(rank)
    first(torch.ones(3, 8, device="cuda"))
    raise ArithmeticError("in mid-step")


ORDERS: dict[Callable[[Rank], None], int] = {
    close_the_first: 0,
    leave_open: 0,
    close_on_one_rank: 0,
    destroy_the_world_and_go_on: 0,
    close_before_the_backward: 0,
    raise_in_mid_step: 1,
}


@pytest.fixture(scope="module")
def ended() -> dict[str, list[Ended]]:
    return run_worlds([World(order.__name__, order) for order in ORDERS], limit_secs=90.0, num_at_once=3)


@pytest.mark.parametrize(("order", "code"), ORDERS.items(), ids=lambda value: getattr(value, "__name__", None))
def test_every_order_of_teardown_ends(ended: dict[str, list[Ended]], order: Callable[[Rank], None], code: int) -> None:
    for end in ended[order.__name__]:
        assert not end.stuck, end.text
        assert end.code == code, end.text
        if code:
            assert "ArithmeticError: in mid-step" in end.text


def _many_buffers(group: dist.ProcessGroup, num_buffers: int) -> list[int]:
    """Free device memory after 3 buffers and after all; each is used and closed."""
    free_bytes = []
    for i in range(1, num_buffers + 1):
        with open_buffer(group, "intranode") as buffer:
            assert_works(buffer, group, Setup("intranode", "compact", buffer.group_size))
        del buffer
        gc.collect()
        dist.barrier(group)
        if i in (3, num_buffers):
            torch.cuda.synchronize()
            dist.barrier(group)
            free_bytes.append(torch.cuda.mem_get_info()[0])
            dist.barrier(group)
    return free_bytes


@pytest.mark.no_mps  # what other processes hold on these GPUs would count
def test_closed_buffers_give_back_their_memory(ranks: Pools) -> None:  # cases T06, T08
    for early, late in ranks.run(_many_buffers, 2, 20):
        assert early - late < 64 << 20, f"{early - late} bytes are gone after 17 buffers of 36 MiB"
