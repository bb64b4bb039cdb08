"""Precision, dtypes, dirty memory and odd hidden sizes: the cases N01, N02 (functional part), N03, N05 and N09.

N07 (row * hidden past 2^31 elements) needs about 10 GB of GPU memory and belongs to the suites of the CUDA backends;
N04 and N08 are cases of the router.
"""

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
    BACKENDS,
    Case,
    Setup,
    assert_values,
    assert_works,
    caught,
    collect,
    dense_values,
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


# case N01
@pytest.mark.parametrize("big", [0, 3, 7])
@setups(1, 2, 4, 8)
def test_combine_adds_bfloat16_rows_in_float32(ranks: Pools, setup: Setup, big: int) -> None:
    case = make_case(
        x=[[1]],
        idx=[[list(range(8))]],
        weights=[[[1] * 8]],
        num_experts=8,
        scale=[256.0 if expert == big else 1.0 for expert in range(8)],
        dtype=torch.bfloat16,
    )
    # The exact sum is 263; a rank's own partial sum may be rounded first, but nothing is added in bfloat16 (256).
    outcome = run_case(ranks, case, setup)
    allowed = {264.0} if setup.world == 8 else {262.0, 264.0}
    assert set(outcome.y.flatten().tolist()) <= allowed
    assert outcome.dx is not None
    assert set(outcome.dx.flatten().tolist()) <= allowed
    if setup.layout == "expert_major":
        exact = run_case(ranks, case, replace(setup, exact=True))
        assert set(exact.y.flatten().tolist()) == {264.0}


def under_autocast(
    group: dist.ProcessGroup, case: Case, setup: Setup, dtype: torch.dtype, backward_inside: bool
) -> dict[str, Any]:
    """Linear experts (scale times the unit matrix, float32 parameters) whose products autocast does in bfloat16."""
    with open_buffer(group, setup.backend) as buffer:
        own = share(case, group, setup)
        x = own.x.detach().to(dtype).requires_grad_()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = moe_ep.dispatch(
                buffer, x, own.idx, own.weights, num_experts=case.num_experts, layout=setup.layout, alignment=2
            )
            assert out.topk_weights is not None
            matrices = own.scale.view(-1, 1, 1) * torch.eye(x.shape[1])
            results = [out.x @ matrix for matrix in matrices]
            if setup.layout == "expert_major":
                assert out.tokens_per_expert is not None
                parts = torch.split(torch.arange(out.x.shape[0]), out.tokens_per_expert)
                rows = torch.cat([result[part] for result, part in zip(results, parts, strict=True)])
                y = moe_ep.combine(buffer, rows, out.handle, topk_weights=out.topk_weights)
            else:
                local = [(out.topk_weights * (out.topk_idx == e)).sum(dim=1) for e in range(len(results))]
                total = sum(weight.unsqueeze(1) * rows for weight, rows in zip(local, results, strict=True))
                y = moe_ep.combine(buffer, torch.as_tensor(total).to(torch.bfloat16), out.handle)
            loss = y.sum()
            if backward_inside:
                loss.backward()
        if not backward_inside:
            loss.backward()
        return {**collect(y, replace(own, x=x), out), "y": y.detach()}


# case N02
@pytest.mark.parametrize("backward_inside", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@setups(1, 2, 4)
def test_autocast_keeps_every_dtype_in_its_place(
    ranks: Pools, setup: Setup, dtype: torch.dtype, backward_inside: bool
) -> None:
    case = make_case(
        x=[[1, 2], [3]], idx=[[[0, 3], [1, 2]], [[3, 0]]], weights=[[[0.5, 2], [1, 4]], [[2, 1]]], num_experts=4
    )
    outcome = join(ranks.run(under_autocast, setup.world, case, setup, dtype, backward_inside))
    wanted = dense_values(case)
    assert outcome.y.dtype == torch.bfloat16
    assert outcome.dx is not None
    assert outcome.dw is not None
    assert outcome.ds is not None
    assert outcome.dx.dtype == dtype
    assert outcome.dw.dtype == outcome.ds.dtype == torch.float32
    for name in ("y", "dx", "dw", "ds"):
        assert_values(getattr(outcome, name), wanted[name])


# case N03
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@setups(1, 2, 4)
def test_every_floating_dtype_travels(ranks: Pools, setup: Setup, dtype: torch.dtype) -> None:
    case = make_case(x=[[8]], idx=[[[1]]], weights=[[[0.5]]], num_experts=2, dtype=dtype)
    outcome = run_case(ranks, case, setup)
    assert outcome.y.dtype == dtype
    assert outcome.dx is not None
    assert outcome.dx.dtype == dtype
    assert outcome.dw is not None
    assert outcome.dw.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert_values(outcome.y, 8, rtol=0)
    assert_values(outcome.dx, 1, rtol=0)
    assert_values(outcome.dw, [[64]], rtol=0)


def integer_rows(group: dist.ProcessGroup, setup: Setup, dtype: torch.dtype, bad_ranks: list[int]) -> Any:
    with open_buffer(group, setup.backend) as buffer:
        x = torch.full((1, 4), 8).to(dtype if buffer.rank in bad_ranks else torch.float32)
        idx, weights = torch.tensor([[1]]), torch.tensor([[0.5]])
        seen = caught(lambda: moe_ep.dispatch(buffer, x, idx, weights, num_experts=2, layout=setup.layout))
        assert_works(buffer, group, setup)
        return seen


# case N03
@pytest.mark.parametrize("dtype", [torch.int32, torch.complex64])
@setups(1, 2, 4)
def test_rows_of_another_dtype_are_a_type_error_on_every_rank(ranks: Pools, setup: Setup, dtype: torch.dtype) -> None:
    for bad_ranks in ([setup.world - 1], list(range(setup.world))):
        for kind, text in ranks.run(integer_rows, setup.world, setup, dtype, bad_ranks):
            assert kind is TypeError
            assert str(dtype) in text
            assert "float64, float32, bfloat16, float16" in text


def three_dirty_steps(group: dist.ProcessGroup, case: Case, setup: Setup) -> list[dict[str, Any]]:
    results = []
    with open_buffer(group, setup.backend) as buffer, uninitialised_is_nan():
        for _ in range(3):
            own = share(case, group, setup)
            leave_nans_behind()
            y, out = scale_moe(buffer, own, setup)
            leave_nans_behind()
            loss_of(y, own.dy).backward()
            padding = out.topk_idx < 0
            if setup.layout == "expert_major":
                assert out.topk_weights is not None
                assert bool((out.x[padding] == 0).all())
                assert bool((out.topk_weights[padding] == 0).all())
            results.append({**collect(y, own, out), "padded": out.tokens_per_expert, "counts": None})
    return results


# case N05
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@setups(1, 2, 4)
def test_padding_holds_no_stale_memory(ranks: Pools, setup: Setup, dtype: torch.dtype) -> None:
    # Expert 1 gets 17 rows, expert 3 none, the others odd numbers; all are padded to a multiple of 16.
    experts = [1] * 17 + [0] * 3 + [2] * 1
    case = random_case([11, 10], num_experts=4, num_topk=1, hidden=8, dtype=dtype)
    case = replace(case, idx=torch.tensor(experts).unsqueeze(1))
    by_rank = ranks.run(three_dirty_steps, setup.world, case, replace(setup, alignment=16))
    unpadded = run_case(ranks, case, setup)
    assert [count for results in by_rank for count in results[0]["padded"]] == [16, 32, 16, 0]
    for step in range(3):
        for name in ("y", "dx", "dw", "ds"):
            value = torch.cat([results[step][name] for results in by_rank])
            assert bool(value.isfinite().all()), name
            assert torch.equal(value, torch.cat([results[0][name] for results in by_rank])), name
            assert torch.equal(value, getattr(unpadded, name)), name


def identity_round_trip(group: dist.ProcessGroup, backend: str, hidden: int) -> tuple[Tensor, Tensor, Tensor | None]:
    """(x, y, dx) with identity experts, weights 1 and K = 1."""
    with open_buffer(group, backend) as buffer:
        token = 3 * buffer.rank + torch.arange(3)
        x = ((token.unsqueeze(1) + torch.arange(hidden)) % 200).bfloat16().requires_grad_()
        idx, weights = (token * 3 % 4).unsqueeze(1), torch.ones(3, 1)
        out = moe_ep.dispatch(buffer, x, idx, weights, num_experts=4)
        y = moe_ep.combine(buffer, out.x, out.handle, topk_weights=out.topk_weights)
        y.backward(x.detach())
        return x.detach(), y.detach(), x.grad


# case N09
@pytest.mark.parametrize("hidden", [2880, 3072, 1536, 3584, 6144])
@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize("backend", BACKENDS)
def test_any_hidden_size_makes_an_exact_round_trip(ranks: Pools, backend: str, world: int, hidden: int) -> None:
    for x, y, dx in ranks.run(identity_round_trip, world, backend, hidden):
        assert torch.equal(x[:, -64:], y[:, -64:])
        assert torch.equal(x, y)
        assert dx is not None
        assert torch.equal(x, dx)
