"""Zero tokens, empty experts, ragged counts: the cases E01 to E07."""

from __future__ import annotations

import random
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import moe_ep
from moe_ep.reference import dense_moe
from tests.helpers.ranks import Pools
from tests.helpers.scale_experts import (
    BACKENDS,
    Case,
    Setup,
    assert_values,
    leave_nans_behind,
    loss_of,
    make_case,
    open_buffer,
    run_case,
    scale_moe,
    setups,
    share,
    uninitialised_is_nan,
)

E02 = make_case(
    x=[[10, 11, 12], [20, 21]],
    idx=[[[0], [1], [0]], [[1], [1]]],
    weights=[[[1], [1], [1]], [[1], [1]]],
    num_experts=4,
    hidden=16,
)


# case E01
@setups(1, 2, 4)
def test_a_rank_without_tokens_stays_in_the_exchange(ranks: Pools, setup: Setup) -> None:
    case = make_case(
        x=[[3], [], [], []], idx=[[[1, 6]], [], [], []], weights=[[[0.25, 0.75]], [], [], []], num_experts=8, hidden=16
    )
    outcome = run_case(ranks, case, setup)
    assert_values(outcome.y, 17.25)
    assert_values(outcome.dx, 5.75)
    assert_values(outcome.dw, [[96, 336]])
    assert_values(outcome.ds, [0, 12, 0, 0, 0, 0, 36, 0])
    for part in outcome.by_rank[1:]:
        assert part["y"].shape == part["dx"].shape == (0, 16)
        assert part["dw"].shape == (0, 2)
        assert part["ds"] is not None


def backward_hooks_fired(group: dist.ProcessGroup, case: Case, setup: Setup) -> tuple[int, int]:
    """(rows received, calls of the hook on this rank's expert parameter)."""
    with open_buffer(group, setup.backend) as buffer:
        own = share(case, group, setup)
        calls: list[Tensor] = []
        own.scale.register_hook(calls.append)
        y, out = scale_moe(buffer, own, setup)
        loss_of(y, own.dy).backward()
        return out.x.shape[0], len(calls)


# case E02
@setups(1, 2, 4)
def test_a_rank_whose_experts_receive_nothing_joins_the_backward(ranks: Pools, setup: Setup) -> None:
    outcome = run_case(ranks, E02, setup)
    assert_values(outcome.y, [10, 22, 12, 40, 42])
    assert_values(outcome.dw, [[160], [352], [192], [640], [672]])
    assert_values(outcome.ds, [352, 832, 0, 0])
    hooks = ranks.run(backward_hooks_fired, setup.world, E02, setup)
    assert [calls for _, calls in hooks] == [1] * setup.world
    if setup.world == 2:
        assert hooks == [(5, 1), (0, 1)]


def three_adamw_steps(group: dist.ProcessGroup, case: Case, setup: Setup) -> list[tuple[Tensor, Tensor]]:
    """(gradient, parameter) of this rank's experts after each step."""
    with open_buffer(group, setup.backend) as buffer:
        own = share(case, group, setup)
        optimizer = torch.optim.AdamW([own.scale], lr=0.1, weight_decay=0.1)
        seen = []
        for _ in range(3):
            optimizer.zero_grad()
            y, _ = scale_moe(buffer, own, setup)
            loss_of(y, own.dy).backward()
            optimizer.step()
            assert own.scale.grad is not None
            seen.append((own.scale.grad.clone(), own.scale.detach().clone()))
        return seen


# case E03
@setups(1, 2, 4)
def test_an_unrouted_expert_gets_zero_gradients_and_its_weight_decay(ranks: Pools, setup: Setup) -> None:
    case = make_case(
        x=[[1, 2], [3]], idx=[[[0], [0]], [[0]]], weights=[[[1], [0.5]], [[1]]], num_experts=2, scale=[1.0, 4.0]
    )
    by_rank = ranks.run(three_adamw_steps, setup.world, case, setup)
    alone = ranks.run(three_adamw_steps, 1, case, setup)[0]
    for step in range(3):
        gradient = torch.cat([seen[step][0] for seen in by_rank])
        parameter = torch.cat([seen[step][1] for seen in by_rank])
        assert_values(gradient, [20, 0])
        assert_values(parameter[1], 4.0 * 0.99 ** (step + 1))
        assert_values(parameter, alone[step][1])


# case E05
@setups(1, 2, 3, 4)
def test_ragged_and_odd_token_counts_give_every_token_its_row(ranks: Pools, setup: Setup) -> None:
    num_tokens = [5, 3, 0, 7]
    case = make_case(
        x=[[10 * (rank + 1) + token for token in range(count)] for rank, count in enumerate(num_tokens)],
        idx=[[[(rank + token) % 4] for token in range(count)] for rank, count in enumerate(num_tokens)],
        weights=[[[1]] * count for count in num_tokens],
        num_experts=4,
        hidden=1,
    )
    outcome = run_case(ranks, case, setup)
    assert_values(outcome.y, [10, 22, 36, 52, 14, 40, 63, 88, 160, 41, 84, 129, 176, 45, 92])
    assert_values(outcome.ds, [110, 119, 76, 119])
    assert outcome.counts == [4, 4, 3, 4]
    if setup.world == 4:
        assert outcome.num_rows == [4, 4, 3, 4]


# case E05
@pytest.mark.parametrize("count", [5, 6, 4095])
@setups(1, 2, 4)
def test_equal_but_unaligned_token_counts_work(ranks: Pools, setup: Setup, count: int) -> None:
    token = torch.arange(2 * count)
    case = Case(
        x=(token % 251).float().unsqueeze(1),
        idx=(token * 7 % 5 % 4).unsqueeze(1),
        weights=torch.ones(2 * count, 1),
        dy=None,
        num_tokens=(count, count),
        num_experts=4,
        scale=torch.arange(1.0, 5.0),
        bias=None,
    )
    outcome = run_case(ranks, case, setup)
    expert = case.idx[:, 0]
    assert_values(outcome.y, (token % 251) * (expert + 1))
    assert_values(outcome.dx, expert + 1)
    assert_values(outcome.ds, torch.bincount(expert, weights=(token % 251).double(), minlength=4))
    assert outcome.counts == torch.bincount(expert, minlength=4).tolist()


def linear_experts_twice(group: dist.ProcessGroup, backend: str, experts: list[int]) -> list[dict[str, Any]]:
    """Forward and backward, twice, of real linear experts; token t of all ranks goes to `experts[t]` (K = 1)."""
    rank, world = dist.get_rank(group), dist.get_world_size(group)
    random_ = torch.Generator().manual_seed(3)
    x = torch.rand(len(experts), 8, generator=random_)
    weights = torch.rand(len(experts), 1, generator=random_)
    matrices = torch.rand(5, 8, 8, generator=random_)
    own = torch.arange(len(experts)).tensor_split(world)[rank]
    mine = torch.arange(5).tensor_split(world)[rank]
    results = []
    with open_buffer(group, backend) as buffer, uninitialised_is_nan():
        for _ in range(2):
            leaves = [part.clone().requires_grad_() for part in (x[own], weights[own], matrices[mine])]
            leave_nans_behind()
            idx = torch.tensor(experts)[own].unsqueeze(1)
            out = moe_ep.dispatch(buffer, leaves[0], idx, leaves[1], num_experts=5)
            assert out.tokens_per_expert is not None
            parts = torch.split(out.x, out.tokens_per_expert)
            rows = [part @ matrix for part, matrix in zip(parts, leaves[2], strict=True)]
            leave_nans_behind()
            y = moe_ep.combine(buffer, torch.cat(rows), out.handle, topk_weights=out.topk_weights)
            y.sum().backward()
            results.append({"y": y.detach(), "grads": [leaf.grad for leaf in leaves]})
    return results


# case E06
@pytest.mark.parametrize("num_rows", [[0, 3, 0, 2, 0], [2, 0, 0, 0, 3], [0, 0, 5, 0, 0]])
@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize("backend", BACKENDS)
def test_empty_experts_in_any_place_give_exact_zeros(
    ranks: Pools, backend: str, world: int, num_rows: list[int]
) -> None:
    experts = [expert for expert, count in enumerate(num_rows) for _ in range(count)]
    random_ = torch.Generator().manual_seed(3)
    x = torch.rand(5, 8, generator=random_).double().requires_grad_()
    weights = torch.rand(5, 1, generator=random_).double().requires_grad_()
    matrices = torch.rand(5, 8, 8, generator=random_).double().requires_grad_()
    wanted = dense_moe(
        x, torch.tensor(experts).unsqueeze(1), weights, [lambda v, m=matrix: v @ m for matrix in matrices]
    )
    wanted.sum().backward()
    by_rank = ranks.run(linear_experts_twice, world, backend, experts)
    for run in range(2):
        assert_values(torch.cat([results[run]["y"] for results in by_rank]), wanted.detach(), rtol=1e-5)
        for place, leaf in enumerate((x, weights, matrices)):
            gradient = torch.cat([results[run]["grads"][place] for results in by_rank])
            assert_values(gradient, leaf.grad, rtol=1e-5)
            if place == 2:
                assert all(bool((gradient[e] == 0).all()) for e, count in enumerate(num_rows) if count == 0)


def alternate(group: dist.ProcessGroup, here: Case, swapped: Case, setup: Setup, num_alternations: int) -> list[Tensor]:
    """y of every call; rank 1 comes up to 20 ms late to each."""
    delay = random.Random(11)
    outputs = []
    with open_buffer(group, setup.backend) as buffer:
        for _ in range(num_alternations):
            for case in (here, swapped):
                if buffer.rank == 1:
                    time.sleep(delay.uniform(0, 0.02))
                y, _ = scale_moe(buffer, share(case, group, setup), setup)
                outputs.append(y.detach())
    return outputs


# case E07
@setups(1, 2, 4)
def test_calls_in_which_nothing_crosses_ranks_do_not_run_apart(ranks: Pools, setup: Setup) -> None:
    half = [[[0.5, 0.5], [0.5, 0.5]], [[0.5, 0.5], [0.5, 0.5]]]
    near, far = [[[0, 1], [0, 1]], [[2, 3], [2, 3]]], [[[2, 3], [2, 3]], [[0, 1], [0, 1]]]
    here = make_case(x=[[1, 2], [3, 4]], idx=near, weights=half, num_experts=4)
    swapped = make_case(x=[[1, 2], [3, 4]], idx=far, weights=half, num_experts=4)
    num_alternations = 100 if (setup.world, setup.layout) == (2, "expert_major") else 5
    by_rank = ranks.run(alternate, setup.world, here, swapped, setup, num_alternations)
    for call, outputs in enumerate(zip(*by_rank, strict=True)):
        assert_values(torch.cat(outputs), [3.5, 7, 4.5, 6] if call % 2 else [1.5, 3, 10.5, 14])
