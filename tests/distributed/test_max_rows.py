"""dispatch(max_rows=): a fixed number of rows without a host wait; faults are kept and raised later, on every rank."""

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
    apply_experts,
    assert_values,
    assert_works,
    caught,
    loss_of,
    make_case,
    open_buffer,
    random_case,
    scale_moe,
    settle,
    setups,
    share,
)

# Tokens 0 and 1 on rank 0, tokens 2 and 3 on rank 1: at W = 2 rank 1 receives 3 rows, at W = 4 rank 2 receives 2.
SKEWED = make_case(
    x=[[1, 2], [3, 4]], idx=[[[0], [2]], [[3], [2]]], weights=[[[0.5], [1]], [[1], [0.5]]], num_experts=4
)
TOO_FEW = {1: 3, 2: 2, 4: 1}  # max_rows that overflows on one rank only
FULL_RANK = {1: (0, 4), 2: (1, 3), 4: (2, 2)}  # the rank that overflows, and the rows that it receives


def with_and_without(group: dist.ProcessGroup, case: Case, setup: Setup, spare: int) -> list[dict[str, Any]]:
    """The same step without max_rows and with `spare + rank` rows more than come."""
    steps = []
    with open_buffer(group, setup.backend) as buffer:
        max_rows: int | None = None
        for _ in range(2):
            own = share(case, group, setup)
            y, out = scale_moe(buffer, own, setup, max_rows=max_rows)
            loss_of(y, own.dy).backward()
            settle(setup)
            buffer.check()
            assert out.topk_weights is not None
            step = {
                "tensors": {"y": y.detach(), "dx": own.x.grad, "dw": own.weights.grad, "ds": own.scale.grad},
                "out": (out.x.detach(), out.topk_idx, out.topk_weights.detach()),
                "counts": (out.expert_counts, out.expert_offsets),
                "lists": [out.tokens_per_expert, out.real_tokens_per_expert],
            }
            steps.append(step)
            max_rows = out.x.shape[0] + (spare + buffer.rank if spare else 0)
    return steps


@pytest.mark.parametrize("alignment", [1, 4])
@pytest.mark.parametrize("spare", [0, 5])
@setups(1, 2, 4)
def test_enough_rows_change_no_value(ranks: Pools, setup: Setup, spare: int, alignment: int) -> None:
    assert_enough(ranks, setup, spare, alignment)


def assert_enough(ranks: Pools, setup: Setup, spare: int, alignment: int) -> None:
    case = random_case([5, 4], num_experts=4, num_topk=2, hidden=4)
    results = ranks.run(with_and_without, setup.world, case, replace(setup, alignment=alignment), spare)
    for rank, (free, fixed) in enumerate(results):
        for name, value in free["tensors"].items():
            assert torch.equal(value, fixed["tensors"][name]), name
        for one, other in zip(free["counts"], fixed["counts"], strict=True):
            assert torch.equal(one, other)
        counts, offsets = fixed["counts"]
        assert counts.dtype == offsets.dtype == torch.int32
        assert counts.tolist() == free["lists"][1]
        assert offsets.diff().tolist() == free["lists"][0]
        assert fixed["lists"] == [None, None]
        num_rows = free["out"][0].shape[0]
        assert fixed["out"][0].shape[0] == num_rows + (spare + rank if spare else 0)
        for one, other, padding in zip(free["out"], fixed["out"], (0, -1, 0), strict=True):
            assert torch.equal(one, other[:num_rows])
            assert bool((other[num_rows:] == padding).all())


def overflow(group: dist.ProcessGroup, case: Case, setup: Setup, max_rows: int) -> dict[str, Any]:
    """An overflow that check() reports before the step goes on."""
    with open_buffer(group, setup.backend) as buffer:
        own = share(case, group, setup)
        arguments = {"num_experts": 4, "layout": setup.layout, "max_rows": max_rows}
        out = moe_ep.dispatch(buffer, own.x, own.idx, own.weights, **arguments)
        settle(setup)
        first, second = caught(buffer.check), caught(buffer.check)
        rows = apply_experts(out, own.scale)
        weights = out.topk_weights if setup.layout == "expert_major" else None
        y = moe_ep.combine(buffer, rows, out.handle, topk_weights=weights, exact=setup.exact)
        y.sum().backward()
        assert_works(buffer, group, setup)
        nans = {
            name: value.isnan().all(dim=1) for name, value in (("y", y), ("dx", own.x.grad), ("dw", own.weights.grad))
        }
        return {"first": first, "second": second, "rows": out.x.detach(), "row_weights": out.topk_weights, "nans": nans}


@setups(1, 2, 4)
def test_too_few_rows_give_nan_and_check_says_so(ranks: Pools, setup: Setup) -> None:
    assert_too_few(ranks, setup)


@setups(1, 2, 4, layouts=["expert_major"])
def test_too_few_rows_give_nan_in_the_exact_combine(ranks: Pools, setup: Setup) -> None:
    assert_too_few(ranks, replace(setup, exact=True))


def assert_too_few(ranks: Pools, setup: Setup) -> None:
    """The rows of the rank that overflows are lost, and so is every token that needs one of them."""
    max_rows, (full, num_rows) = TOO_FEW[setup.world], FULL_RANK[setup.world]
    results = ranks.run(overflow, setup.world, SKEWED, setup, max_rows)
    for rank, seen in enumerate(results):
        assert seen["rows"].shape == (max_rows, 4)
        assert bool(seen["rows"].isnan().all()) == (rank == full)
        assert bool(seen["row_weights"].isnan().all()) == (rank == full)
        assert seen["second"] == (None, "")
        if rank != full:
            assert seen["first"] == (None, "")
            assert not bool(seen["rows"].isnan().any())
    kind, text = results[full]["first"]
    assert kind is RuntimeError
    assert f"received {num_rows} rows on EP rank {full}, max_rows is {max_rows}" in text
    owner = [rank for rank in range(setup.world) for _ in SKEWED.experts_of(rank, setup.world)]
    lost = [owner[expert] == full for expert in SKEWED.idx[:, 0].tolist()]
    for name in ("y", "dx", "dw"):
        assert torch.cat([seen["nans"][name] for seen in results]).tolist() == lost, name


def next_calls(group: dist.ProcessGroup, case: Case, setup: Setup, max_rows: int, following: str) -> list[Any]:
    """What the two calls after a faulty dispatch raise, without a check() between."""
    with open_buffer(group, setup.backend) as buffer:
        own = share(case, group, setup)
        arguments = {"num_experts": 4, "layout": setup.layout}
        out = moe_ep.dispatch(buffer, own.x, own.idx, own.weights, max_rows=max_rows, **arguments)

        settle(setup)

        def call() -> Tensor:
            if following == "combine":
                return moe_ep.combine(buffer, out.x, out.handle)
            good = torch.zeros_like(own.idx)
            return moe_ep.dispatch(buffer, own.x, good, own.weights, **arguments).x

        seen = [caught(call), caught(call), caught(buffer.check)]
        assert_works(buffer, group, setup)
        return seen


@pytest.mark.parametrize("following", ["dispatch", "combine"])
@setups(1, 2, 4)
def test_the_next_call_after_an_overflow_raises_on_every_rank_once(ranks: Pools, setup: Setup, following: str) -> None:
    max_rows, (full, num_rows) = TOO_FEW[setup.world], FULL_RANK[setup.world]
    for first, second, check in ranks.run(next_calls, setup.world, SKEWED, setup, max_rows, following):
        assert first[0] is RuntimeError
        assert f"received {num_rows} rows on EP rank {full}, max_rows is {max_rows}" in first[1]
        assert second == check == (None, "")


def bad_id(group: dist.ProcessGroup, case: Case, setup: Setup) -> tuple[Any, Tensor]:
    with open_buffer(group, setup.backend) as buffer:
        own = share(case, group, setup)
        arguments = {"num_experts": 4, "layout": setup.layout, "max_rows": 8}
        out = moe_ep.dispatch(buffer, own.x, own.idx, own.weights, **arguments)
        settle(setup)
        seen = caught(buffer.check)
        buffer.check()
        rows = apply_experts(out, own.scale)
        weights = out.topk_weights if setup.layout == "expert_major" else None
        y = moe_ep.combine(buffer, rows, out.handle, topk_weights=weights)
        assert_works(buffer, group, setup)
        return seen, y.detach()


# case I04
@pytest.mark.parametrize("value", [4, 2**32])
@setups(1, 2, 4)
def test_a_bad_id_counts_as_no_expert_and_check_says_so(ranks: Pools, setup: Setup, value: int) -> None:
    assert_bad_id_counts_as_none(ranks, setup, value)


def assert_bad_id_counts_as_none(ranks: Pools, setup: Setup, value: int) -> None:
    case = make_case(
        x=[[1, 2], [3, 4]],
        idx=[[[0, 1], [value, 2]], [[3, 0], [2, 1]]],
        weights=[[[0.5, 1], [1, 0.5]]] * 2,
        num_experts=4,
    )
    results = ranks.run(bad_id, setup.world, case, setup)
    assert_values(torch.cat([y for _, y in results]), [2.5, 3, 9, 16])
    place = sum(case.tokens_of(setup.world)[:1])  # the bad token is the second one
    bad_rank, token = (0, 1) if place > 1 else (1, 0)
    for rank, (seen, _) in enumerate(results):
        if rank != bad_rank:
            assert seen == (None, "")
            continue
        assert seen[0] is RuntimeError
        assert f"topk_idx[{token}, 0] is {value}" in seen[1]
        assert "[-1, 4)" in seen[1]


# case I04
@pytest.mark.parametrize("following", ["dispatch", "combine"])
@setups(1, 2, 4)
def test_the_next_call_after_a_bad_id_raises_on_every_rank_once(ranks: Pools, setup: Setup, following: str) -> None:
    idx = SKEWED.idx.clone()
    idx[0, 0] = 4
    for first, second, check in ranks.run(next_calls, setup.world, replace(SKEWED, idx=idx), setup, 8, following):
        assert first[0] is RuntimeError
        assert "topk_idx[0, 0] is 4" in first[1]
        assert setup.world == 1 or "rank 0" in first[1]
        assert second == check == (None, "")


def nothing_received(group: dist.ProcessGroup, setup: Setup) -> tuple[int, list[float]]:
    """Rank 0 owns every expert that is named; the others give max_rows=0."""
    with open_buffer(group, setup.backend) as buffer:
        max_rows = 3 * setup.world if buffer.rank == 0 else 0
        x, idx = torch.full((3, 4), 2.0, device=setup.device), torch.zeros(3, 1, device=setup.device).long()
        out = moe_ep.dispatch(buffer, x, idx, num_experts=4, layout=setup.layout, max_rows=max_rows)
        y = moe_ep.combine(buffer, out.x, out.handle)
        buffer.check()
        return out.x.shape[0], y.flatten().tolist()


@setups(1, 2, 4)
def test_a_rank_that_receives_nothing_may_ask_for_no_rows(ranks: Pools, setup: Setup) -> None:
    for rank, (num_rows, y) in enumerate(ranks.run(nothing_received, setup.world, setup)):
        assert num_rows == (0 if rank else 3 * setup.world)
        assert y == [2.0] * 12


def test_after_an_overflow_the_offsets_end_where_the_rows_do() -> None:
    """A grouped GEMM takes its ranges from them and checks no bound."""
    with moe_ep.Buffer() as buffer:
        idx = torch.tensor([[0], [1], [1], [2]])
        out = moe_ep.dispatch(buffer, torch.ones(4, 8), idx, num_experts=3, max_rows=2)
        assert out.expert_offsets.tolist() == [0, 1, 2, 2]
        assert out.expert_counts.tolist() == [1, 2, 1]
        assert "max_rows is 2" in caught(buffer.check)[1]
