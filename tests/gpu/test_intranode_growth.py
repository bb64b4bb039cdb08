"""Memory inside a node grows with need: all ranks together, whoever needs it; a call that cannot grow says so."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import moe_ep
from moe_ep.backends.node_calls import START_BYTES
from tests.gpu.busy import keep_busy
from tests.helpers.compare import assert_same_bits
from tests.helpers.ranks import Pools
from tests.helpers.scale_experts import Setup, assert_works, caught, open_buffer

pytestmark = pytest.mark.gpu
HIDDEN = 2048  # float32 rows of 8 KiB: 2,048 of them fill a slot of 16 MiB
MANY = 2 * START_BYTES // (4 * HIDDEN)


def _inputs(num_tokens: int, rank: int, hidden: int = HIDDEN) -> tuple[Tensor, Tensor]:
    """Rows that tell their rank and token apart, each for every one of 4 experts in turn."""
    token = torch.arange(num_tokens, device="cuda")
    x = (token % 509).float().unsqueeze(1).expand(num_tokens, hidden) + 1024 * (rank + 1)
    return x.contiguous(), torch.stack([token % 4, (token + 1 + rank) % 4], dim=1)


def _slot_bytes(buffer: moe_ep.Buffer) -> int:
    return int(buffer.backend._exchange.slot_bytes)  # type: ignore[attr-defined]


def _round_trip(buffer: moe_ep.Buffer, num_tokens: int, layout: str = "expert_major") -> None:
    x, idx = _inputs(num_tokens, buffer.rank)
    out = moe_ep.dispatch(buffer, x, idx, num_experts=4, layout=layout)
    y = moe_ep.combine(buffer, out.x, out.handle)
    buffer.check()
    ranks_of = [1 + int(buffer.group_size > 1 and owner[0] != owner[1]) for owner in _owners(idx, buffer.group_size)]
    copies = torch.tensor(ranks_of, device="cuda") if layout == "compact" else torch.full((num_tokens,), 2).cuda()
    assert_same_bits(y, x * copies.unsqueeze(1), f"y of {num_tokens} tokens")


def _owners(idx: Tensor, world: int) -> list[list[int]]:
    owner = [rank for rank in range(world) for _ in torch.arange(4).tensor_split(world)[rank]]
    return [[owner[expert] for expert in slots] for slots in idx.tolist()]


def _grow(group: dist.ProcessGroup, layout: str, steps: list[list[int]]) -> list[int]:
    """Round trips with `steps[i][rank]` tokens; the bytes of a slot after each."""
    sizes = []
    with open_buffer(group, "intranode") as buffer:
        for tokens in steps:
            _round_trip(buffer, tokens[buffer.rank], layout)
            sizes.append(_slot_bytes(buffer))
        assert_works(buffer, group, Setup("intranode", layout, buffer.group_size))
    return sizes


# case T05
@pytest.mark.parametrize("layout", ["expert_major", "compact"])
@pytest.mark.parametrize("world", [2, 3])
def test_all_ranks_grow_although_one_alone_needs_it(ranks: Pools, layout: str, world: int) -> None:
    steps = [[4] * world, [MANY, *[4] * (world - 1)], [0] * world, [*[3] * (world - 1), 2 * MANY]]
    by_rank = ranks.run(_grow, world, layout, steps, timeout_secs=100)
    assert all(sizes == by_rank[0] for sizes in by_rank)
    first, larger, same, largest = by_rank[0]
    assert first == START_BYTES
    assert START_BYTES < larger == same < largest


def _exact(group: dist.ProcessGroup) -> None:
    """The exact combine brings every row home, so it needs more than the dispatch before it."""
    with open_buffer(group, "intranode") as buffer:
        num_tokens = START_BYTES // (4 * HIDDEN) // 2
        x, idx = _inputs(num_tokens, buffer.rank)
        out = moe_ep.dispatch(buffer, x, idx, num_experts=4, alignment=8)
        before = _slot_bytes(buffer)
        y = moe_ep.combine(buffer, out.x, out.handle, exact=True)
        buffer.check()
        assert _slot_bytes(buffer) > before
        assert_same_bits(y, 2 * x, "y")


def test_the_exact_combine_grows(ranks: Pools) -> None:
    ranks.run(_exact, 2)


def _pending(group: dist.ProcessGroup) -> None:
    """A forward whose backward comes after a growth, and an old handle used again after it."""
    with open_buffer(group, "intranode") as buffer:
        x, idx = _inputs(5 + buffer.rank, buffer.rank)
        x.requires_grad_()
        out = moe_ep.dispatch(buffer, x, idx, num_experts=4)
        y = moe_ep.combine(buffer, out.x, out.handle)
        _round_trip(buffer, MANY if buffer.rank == 1 else 7)
        y.backward(torch.ones_like(y))
        assert x.grad is not None
        assert_same_bits(x.grad, torch.full_like(x, 2.0), "dx of a forward before the growth")
        again = moe_ep.combine(buffer, out.x.detach(), out.handle)
        assert_same_bits(again, 2 * x.detach(), "combine with a handle from before the growth")
        buffer.check()


def test_a_backward_that_waits_through_a_growth_is_right(ranks: Pools) -> None:
    ranks.run(_pending, 2)


def _does_not_fit(group: dist.ProcessGroup) -> tuple[tuple[bool, ...], tuple[type[BaseException] | None, str]]:
    """A plan without a host wait whose ids alone fill a slot, on rank 1 only; then the same after one call with."""
    with open_buffer(group, "intranode") as buffer:
        num_tokens = START_BYTES // 4 // 64 + 1 if buffer.rank == 1 else 4
        idx = torch.full((num_tokens, 64), -1, device="cuda")
        idx[:4] = 0
        x = torch.ones(num_tokens, 8, device="cuda")
        arguments = {"num_experts": 2, "layout": "compact"}
        # Brings kernels and tables to the GPU, for which a later call would wait while it is busy.
        out = moe_ep.dispatch(buffer, x[:4], idx[:4], **arguments, max_rows=16)
        moe_ep.combine(buffer, out.x, out.handle)
        torch.cuda.synchronize()
        keep_busy(2_000)  # so that combine is called before dispatch has failed
        out = moe_ep.dispatch(buffer, x, idx, **arguments, max_rows=16)
        y = moe_ep.combine(buffer, out.x, out.handle)
        torch.cuda.synchronize()
        seen = caught(buffer.check)
        nan = bool(out.x.isnan().all()), bool(y.isnan().all())
        moe_ep.dispatch(buffer, x, idx, **arguments)
        out = moe_ep.dispatch(buffer, x, idx, **arguments, max_rows=16)
        y = moe_ep.combine(buffer, out.x, out.handle)
        buffer.check()
        assert float(y.sum()) == 4 * 8
        assert float(out.x.sum()) == (8 * 8 if buffer.rank == 0 else 0)
        return nan, seen


def test_a_call_without_a_host_wait_says_that_it_cannot_grow(ranks: Pools) -> None:
    for nan, (kind, text) in ranks.run(_does_not_fit, 2):
        assert nan == (True, True)
        assert kind is RuntimeError
        assert f"dispatch needs more memory than the buffer's {START_BYTES} bytes a slot" in text
        assert "Run it once without max_rows, or give Buffer a larger num_nvl_bytes." in text


def _asked_for(group: dist.ProcessGroup) -> int:
    with open_buffer(group, "intranode", num_nvl_bytes=8 * START_BYTES) as buffer:
        _round_trip(buffer, MANY)
        return _slot_bytes(buffer)


def test_num_nvl_bytes_is_what_both_slots_hold_at_first(ranks: Pools) -> None:
    assert ranks.run(_asked_for, 2) == [4 * START_BYTES] * 2
