"""Expert ids: unused slots, widths, views, ids out of range, several on one rank. The cases I01 to I07."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import moe_ep
from tests.helpers.ranks import Pools
from tests.helpers.scale_experts import (
    Case,
    Setup,
    assert_values,
    assert_works,
    caught,
    collect,
    join,
    leave_nans_behind,
    loss_of,
    make_case,
    open_buffer,
    random_case,
    run_case,
    scale_moe,
    setups,
    share,
    uninitialised_is_nan,
)


# case I01
@pytest.mark.parametrize("place", [0, 1, 2])
@setups(1, 2, 4)
def test_an_unused_slot_is_left_out_wherever_it_stands(ranks: Pools, setup: Setup, place: int) -> None:
    used = [(2, 0.5, 48.0), (0, 0.2, 16.0)]
    slots = [*used[:place], (-1, 0.3, 0.0), *used[place:]]
    case = make_case(
        x=[[4], []], idx=[[[s[0] for s in slots]], []], weights=[[[s[1] for s in slots]], []], num_experts=4
    )
    outcome = run_case(ranks, case, setup)
    assert_values(outcome.y, 6.8)
    assert_values(outcome.dx, 1.7)
    assert_values(outcome.dw, [[s[2] for s in slots]])
    assert_values(outcome.ds, [3.2, 0, 8, 0])
    assert outcome.counts == [1, 0, 1, 0]


def on_dirty_memory(group: dist.ProcessGroup, case: Case, setup: Setup) -> dict[str, Any]:
    with open_buffer(group, setup.backend) as buffer, uninitialised_is_nan():
        own = share(case, group, setup)
        leave_nans_behind()
        y, out = scale_moe(buffer, own, setup)
        leave_nans_behind()
        loss_of(y, own.dy).backward()
        return collect(y, own, out)


# case I02
@setups(1, 2, 4)
def test_a_token_without_an_expert_gives_exactly_zero(ranks: Pools, setup: Setup) -> None:
    case = make_case(
        x=[[5, 2], []], idx=[[[-1, -1], [1, 3]], []], weights=[[[0.7, 0.3], [0.5, 0.5]], []], num_experts=4
    )
    outcome = join(ranks.run(on_dirty_memory, setup.world, case, setup))
    assert_values(outcome.y, [0, 6])
    assert_values(outcome.dx, [0, 3])
    assert_values(outcome.dw, [[0, 0], [16, 32]])
    assert_values(outcome.ds, [0, 4, 0, 4])


# case I02
@pytest.mark.parametrize("num_tokens", [1, 3])
@setups(1, 2, 4)
def test_a_rank_whose_tokens_all_lack_an_expert_gives_zeros(ranks: Pools, setup: Setup, num_tokens: int) -> None:
    others = setup.world - 1
    case = make_case(
        x=[[5] * num_tokens] + [[2]] * others,
        idx=[[[-1, -1]] * num_tokens] + [[[1, 3]]] * others,
        weights=[[[0.7, 0.3]] * num_tokens] + [[[0.5, 0.5]]] * others,
        num_experts=4,
    )
    outcome = join(ranks.run(on_dirty_memory, setup.world, case, setup))
    assert_values(outcome.y, [0] * num_tokens + [6] * others)
    assert_values(outcome.dx, [0] * num_tokens + [3] * others)
    assert_values(outcome.dw, [[0, 0]] * num_tokens + [[16, 32]] * others)
    assert_values(outcome.ds, [0, 4 * others, 0, 4 * others])


def both_widths(group: dist.ProcessGroup, case: Case, setup: Setup) -> list[dict[str, Any]]:
    """The same call with int64 and with int32 ids, and the ids that it wrote."""
    results = []
    with open_buffer(group, setup.backend) as buffer, uninitialised_is_nan():
        for dtype in (torch.int64, torch.int32):
            own = share(case, group, setup)
            own = replace(own, idx=own.idx.to(dtype))
            leave_nans_behind()
            y, out = scale_moe(buffer, own, setup)
            loss_of(y, own.dy).backward()
            assert out.topk_idx.dtype == dtype
            results.append({**collect(y, own, out), "ids": out.topk_idx.long()})
    return results


# case I03
@setups(1, 2, 4)
def test_int32_and_int64_ids_give_the_same_bits(ranks: Pools, setup: Setup) -> None:
    case = random_case([128, 128], num_experts=64, num_topk=6, hidden=8)
    by_rank = ranks.run(both_widths, setup.world, case, setup)
    for wide, narrow in by_rank:
        for name in ("y", "dx", "dw", "ds", "ids"):
            assert torch.equal(wide[name], narrow[name]), name
        assert wide["counts"] == narrow["counts"]
        assert -1 <= int(wide["ids"].min())
        assert int(wide["ids"].max()) < 64 // setup.world
        if setup.layout == "expert_major":
            wanted = torch.repeat_interleave(torch.arange(64 // setup.world), torch.tensor(wide["counts"]))
            assert torch.equal(wide["ids"], wanted)
    wide = join([results[0] for results in by_rank])
    assert sum(wide.counts) == 1536
    assert wide.counts == torch.bincount(case.idx.reshape(-1), minlength=64).tolist()


def with_ids(group: dist.ProcessGroup, setup: Setup, ids: Tensor) -> tuple[type[BaseException] | None, str]:
    """What a call raises here when the last rank gives `ids` [2, 2] and the others good ones; then a good call."""
    with open_buffer(group, setup.backend) as buffer:
        last = buffer.rank == setup.world - 1
        topk_idx = ids if last else torch.tensor([[0, 1], [2, 3]])
        x, weights = torch.ones(2, 4), torch.full((2, 2), 0.5)
        seen = caught(lambda: moe_ep.dispatch(buffer, x, topk_idx, weights, num_experts=8, layout=setup.layout))
        assert_works(buffer, group, setup)
        return seen


# case I03
@pytest.mark.parametrize("dtype", [torch.float32, torch.bool, torch.int16])
@setups(1, 2, 4)
def test_ids_of_another_dtype_are_a_type_error_on_every_rank(ranks: Pools, setup: Setup, dtype: torch.dtype) -> None:
    for kind, text in ranks.run(with_ids, setup.world, setup, torch.tensor([[0, 1], [1, 0]]).to(dtype)):
        assert kind is TypeError
        assert str(dtype) in text
        assert "int64, int32" in text


# case I04
@pytest.mark.parametrize("row", [[8, 0], [-2, 1], [4294967296, 1], [4294967299, 1]])
@setups(1, 2, 4)
def test_an_id_out_of_range_raises_on_every_rank(ranks: Pools, setup: Setup, row: list[int]) -> None:
    seen = ranks.run(with_ids, setup.world, setup, torch.tensor([[0, 1], row]))
    for kind, text in seen:
        assert kind is ValueError
        assert f"topk_idx[1, 0] is {row[0]}" in text
        assert "[-1, 8)" in text
        assert setup.world == 1 or f"rank {setup.world - 1}" in text


def views_and_copies(group: dist.ProcessGroup, case: Case, setup: Setup) -> dict[str, list[Tensor]]:
    """y, dx and dw for ids and weights that are packed, every second column, or transposed and offset."""
    results: dict[str, list[Tensor]] = {}
    with open_buffer(group, setup.backend) as buffer:
        own = share(case, group, setup)
        num_tokens, num_topk = own.idx.shape
        noise_idx = torch.full((num_tokens, 2 * num_topk), 10**12)
        noise_idx[:, ::2] = own.idx
        noise_weights = torch.full((num_tokens, 2 * num_topk), float("nan"))
        noise_weights[:, ::2] = own.weights.detach()
        columns = noise_weights.requires_grad_()
        turned_idx = torch.cat([torch.full((1, num_tokens), -7), own.idx.t()])
        turned = torch.cat([torch.full((1, num_tokens), 9.0), own.weights.detach().t()]).requires_grad_()
        ways = {
            "packed": (own.idx, own.weights, own.weights),
            "columns": (noise_idx[:, ::2], columns[:, ::2], columns),
            "transposed": (turned_idx[1:].t(), turned[1:].t(), turned),
        }
        for name, (idx, weights, base) in ways.items():
            if weights is not base:
                weights.retain_grad()
            fresh = replace(own, x=own.x.detach().clone().requires_grad_(), idx=idx, weights=weights)
            y, _ = scale_moe(buffer, fresh, setup)
            loss_of(y, own.dy).backward()
            assert fresh.x.grad is not None
            assert weights.grad is not None
            assert base.grad is not None
            results[name] = [y.detach(), fresh.x.grad, weights.grad, base.grad]
    return results


# case I06
@setups(1, 2, 4)
def test_ids_and_weights_may_be_views(ranks: Pools, setup: Setup) -> None:
    case = random_case([33, 33], num_experts=16, num_topk=4, hidden=8)
    for results in ranks.run(views_and_copies, setup.world, case, setup):
        y, dx, dw, _ = results["packed"]
        assert dw.shape[1] == 4
        for name in ("columns", "transposed"):
            for wanted, given in zip((y, dx, dw), results[name], strict=False):
                assert torch.equal(wanted, given), name
        columns, turned = results["columns"][3], results["transposed"][3]
        assert torch.equal(columns[:, ::2], dw)
        assert bool((columns[:, 1::2] == 0).all())
        assert torch.equal(turned[1:].t(), dw)
        assert bool((turned[0] == 0).all())


# case I07
@setups(1, 2, 4)
def test_all_experts_of_a_token_on_one_rank_all_count(ranks: Pools, setup: Setup) -> None:
    weights = [0.1, 0.2, 0.3, 0.4]
    alone = make_case(x=[[10], []], idx=[[[4, 5, 6, 7]], []], weights=[[weights], []], num_experts=8)
    outcome = run_case(ranks, alone, setup)
    assert_values(outcome.y, 70)
    assert_values(outcome.dx, 7)
    assert_values(outcome.dw, [[200, 240, 280, 320]])
    assert outcome.counts == [0, 0, 0, 0, 1, 1, 1, 1]

    mixed = make_case(
        x=[[10, 10], []], idx=[[[4, 5, 6, 7], [0, 4, 5, 1]], []], weights=[[weights] * 2, []], num_experts=8
    )
    outcome = run_case(ranks, mixed, setup)
    assert_values(outcome.y, [70, 37])
    assert_values(outcome.dx, [7, 3.7])
    assert_values(outcome.dw, [[200, 240, 280, 320], [40, 200, 240, 80]])
    assert outcome.counts == [1, 1, 0, 0, 2, 2, 1, 1]
    if setup.world == 2:
        assert outcome.num_rows == ([1, 2] if setup.layout == "compact" else [2, 6])
