"""dispatch(max_rows=) inside a node: no host wait, faults kept and raised later; the cases of the portable tests."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

import moe_ep
from moe_ep.backends.node_calls import START_BYTES
from tests.distributed.test_max_rows import (
    FULL_RANK,
    SKEWED,
    TOO_FEW,
    assert_bad_id_counts_as_none,
    assert_enough,
    assert_too_few,
    next_calls,
    nothing_received,
)
from tests.helpers.ranks import Pools
from tests.helpers.scale_experts import LAYOUTS, Setup, assert_works, caught, open_buffer

pytestmark = pytest.mark.gpu
SETUPS = [Setup("intranode", layout, world) for layout in LAYOUTS for world in (1, 2, 4)]
of_setups = pytest.mark.parametrize("setup", SETUPS, ids=lambda setup: f"{setup.layout}-W{setup.world}")


@pytest.mark.parametrize(("spare", "alignment"), [(0, 1), (5, 4)])
@of_setups
def test_enough_rows_change_no_value(ranks: Pools, setup: Setup, spare: int, alignment: int) -> None:
    assert_enough(ranks, setup, spare, alignment)


@of_setups
def test_too_few_rows_give_nan_and_check_says_so(ranks: Pools, setup: Setup) -> None:
    assert_too_few(ranks, setup)


@pytest.mark.parametrize("world", [1, 2, 4])
def test_too_few_rows_give_nan_in_the_exact_combine(ranks: Pools, world: int) -> None:
    assert_too_few(ranks, Setup("intranode", "expert_major", world, exact=True))


# case I04
@pytest.mark.parametrize("value", [4, 2**32])
@of_setups
def test_a_bad_id_counts_as_no_expert_and_check_says_so(ranks: Pools, setup: Setup, value: int) -> None:
    assert_bad_id_counts_as_none(ranks, setup, value)


# case I04
@pytest.mark.parametrize("fault", ["overflow", "bad id"])
@of_setups
def test_the_next_dispatch_raises_on_every_rank_once(ranks: Pools, setup: Setup, fault: str) -> None:
    full, num_rows = FULL_RANK[setup.world]
    max_rows, case, text = TOO_FEW[setup.world], SKEWED, f"received {num_rows} rows on EP rank {full}"
    if fault == "bad id":
        idx = SKEWED.idx.clone()
        idx[0, 0] = 4
        max_rows, case, text = 8, replace(SKEWED, idx=idx), "topk_idx[0, 0] is 4"
    for first, second, check in ranks.run(next_calls, setup.world, case, setup, max_rows, "dispatch"):
        assert first[0] is RuntimeError
        assert text in first[1]
        assert second == check == (None, "")


@of_setups
def test_a_rank_that_receives_nothing_may_ask_for_no_rows(ranks: Pools, setup: Setup) -> None:
    for rank, (num_rows, y) in enumerate(ranks.run(nothing_received, setup.world, setup)):
        assert num_rows == (0 if rank else 3 * setup.world)
        assert y == [2.0] * 12


def _far_too_few(group: dist.ProcessGroup, layout: str, exact: bool) -> tuple[str, bool, bool, bool]:
    """Far more rows come to rank 0 than `max_rows` and than its slot could hold."""
    with open_buffer(group, "intranode") as buffer:
        hidden = 2048
        num_tokens = START_BYTES // (4 * hidden) - 8
        x = torch.ones(num_tokens, hidden, device="cuda", requires_grad=True)
        idx = torch.zeros(num_tokens, 2, dtype=torch.int64, device="cuda")
        idx[:, 1] = 1
        weights = torch.ones(num_tokens, 2, device="cuda", requires_grad=True)
        out = moe_ep.dispatch(buffer, x, idx, weights, num_experts=4, layout=layout, max_rows=100)
        torch.cuda.synchronize()
        text = caught(buffer.check)[1]
        y = moe_ep.combine(buffer, out.x, out.handle, exact=exact)
        torch.autograd.backward([y, out.topk_weights], [torch.ones_like(y), torch.ones_like(out.topk_weights)])
        torch.cuda.synchronize()
        assert x.grad is not None
        assert weights.grad is not None
        nans = tuple(bool(tensor.isnan().all()) for tensor in (y, x.grad, weights.grad))
        assert_works(buffer, group, Setup("intranode", layout, buffer.group_size))
        return text, nans[0], nans[1], nans[2]


@pytest.mark.parametrize("world", [1, 3])
@pytest.mark.parametrize(("layout", "exact"), [("compact", False), ("expert_major", False), ("expert_major", True)])
def test_an_overflow_writes_no_row_behind_the_memory_that_there_is(
    ranks: Pools, layout: str, exact: bool, world: int
) -> None:
    num_compact = world * (START_BYTES // (4 * 2048) - 8)
    results = ranks.run(_far_too_few, world, layout, exact)
    num_rows = num_compact if layout == "compact" else 2 * num_compact
    assert f"received {num_rows} rows on EP rank 0, max_rows is 100" in results[0][0]
    assert [text for text, *_ in results[1:]] == [""] * (world - 1)
    assert [nans for _, *nans in results] == [[True, True, True]] * world
