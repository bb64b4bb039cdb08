"""The autograd pair: frozen inputs, unused outputs, strides, recompute, second backwards. The cases A01 to A11."""

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
    dense_values,
    join,
    loss_of,
    make_case,
    open_buffer,
    random_case,
    run_case,
    scale_moe,
    setups,
    share,
    with_recompute,
)

E02 = make_case(
    x=[[10, 11, 12], [20, 21]],
    idx=[[[0], [1], [0]], [[1], [1]]],
    weights=[[[1], [1], [1]], [[1], [1]]],
    num_experts=4,
    hidden=16,
)
W03 = make_case(x=[[[1, 2, 3, 4]], []], idx=[[[0, 3]], []], weights=[[[0.6, 0.4]], []], num_experts=4)


# case A01
@setups(1, 2, 4)
def test_frozen_inputs_do_not_keep_the_experts_from_their_gradients(ranks: Pools, setup: Setup) -> None:
    for frozen in (replace(setup, x_needs_grad=False), replace(setup, x_needs_grad=False, weights_need_grad=False)):
        outcome = run_case(ranks, E02, frozen)
        assert_values(outcome.ds, [352, 832, 0, 0])
        assert outcome.dx is None
        assert (outcome.dw is None) == (not frozen.weights_need_grad)


# case A01
@setups(1, 2, 4)
def test_frozen_experts_do_not_keep_the_inputs_from_their_gradients(ranks: Pools, setup: Setup) -> None:
    outcome = run_case(ranks, E02, replace(setup, scale_needs_grad=False))
    assert_values(outcome.dx, [1, 2, 1, 2, 2])
    assert outcome.ds is None


def unlike_ranks(group: dist.ProcessGroup, case: Case, setup: Setup, free_rank: int) -> dict[str, Tensor | None]:
    """Only `free_rank` has inputs and experts that need a gradient."""
    free = dist.get_rank(group) == free_rank
    with open_buffer(group, setup.backend) as buffer:
        own = share(case, group, replace(setup, x_needs_grad=free, weights_need_grad=free, scale_needs_grad=free))
        y, _ = scale_moe(buffer, own, setup)
        loss_of(y, own.dy).backward()
        return {"dx": own.x.grad, "dw": own.weights.grad, "ds": own.scale.grad}


# case A01
@pytest.mark.parametrize("free_rank", [0, 1])
@setups(2, 4)
def test_ranks_that_differ_in_what_needs_a_gradient_do_not_hang(ranks: Pools, setup: Setup, free_rank: int) -> None:
    case = random_case([3, 4], num_experts=4, num_topk=3, hidden=4)
    tokens = case.tokens_of(setup.world)
    mine = slice(sum(tokens[:free_rank]), sum(tokens[: free_rank + 1]))
    wanted = dense_values(case)
    for rank, grads in enumerate(ranks.run(unlike_ranks, setup.world, case, setup, free_rank)):
        if rank == free_rank:
            assert_values(grads["dx"], wanted["dx"][mine], rtol=1e-5)
            assert_values(grads["dw"], wanted["dw"][mine], rtol=1e-5)
            assert_values(grads["ds"], wanted["ds"][case.experts_of(rank, setup.world)], rtol=1e-5)
        else:
            assert grads == {"dx": None, "dw": None, "ds": None}


def use_outputs(group: dist.ProcessGroup, case: Case, setup: Setup, used: list[str]) -> tuple[Tensor | None, ...]:
    """(dx, dw) of a loss on what dispatch gave, in which this rank uses "rows", "weights", "both" or "neither".

    Each slot counts (global expert id + 1) times, in rows and in weights.
    """
    with open_buffer(group, setup.backend) as buffer:
        own = share(case, group, setup)
        out = moe_ep.dispatch(buffer, own.x, own.idx, own.weights, num_experts=case.num_experts, layout=setup.layout)
        assert out.topk_weights is not None
        first = case.experts_of(buffer.rank, setup.world)[0]
        factor = torch.where(out.topk_idx >= 0, out.topk_idx + first + 1, 0).float()
        row_factor = factor if factor.dim() == 1 else factor.sum(dim=1)
        use = used[buffer.rank % len(used)]
        loss = torch.zeros((), requires_grad=True) * 1.0  # another branch of the loss
        if use in ("rows", "both"):
            loss = loss + (out.x * row_factor.unsqueeze(1)).sum()
        if use in ("weights", "both"):
            loss = loss + (out.topk_weights * factor).sum()
        loss.backward()
        dist.all_reduce(torch.ones(1), group=group)
        return own.x.grad, own.weights.grad


# case A03
@pytest.mark.parametrize("used", [["rows"], ["weights"], ["neither"], ["rows", "weights"], ["both", "rows"]])
@setups(1, 2, 4)
def test_an_unused_output_of_dispatch_counts_as_zero(ranks: Pools, setup: Setup, used: list[str]) -> None:
    case = random_case([3, 3], num_experts=4, num_topk=2, hidden=4)
    grads = ranks.run(use_outputs, setup.world, case, setup, used)
    if used == ["neither"]:
        assert grads == [(None, None)] * setup.world
        return
    dx, dw = (torch.cat([grad[place] for grad in grads]) for place in (0, 1))
    owner = [rank for rank in range(setup.world) for _ in case.experts_of(rank, setup.world)]
    use_of_slot = [[used[owner[expert] % len(used)] for expert in slots] for slots in case.idx.tolist()]
    in_rows, in_weights = (
        torch.tensor([[use in (name, "both") for use in slots] for slots in use_of_slot])
        for name in ("rows", "weights")
    )
    assert_values(dx, ((case.idx + 1) * in_rows).sum(dim=1))
    assert_values(dw, (case.idx + 1) * in_weights)


def transposed_x(group: dist.ProcessGroup, case: Case, setup: Setup) -> list[Tensor | None]:
    with open_buffer(group, setup.backend) as buffer:
        own = share(case, group, setup)
        y, _ = scale_moe(buffer, own, setup)
        loss_of(y, own.dy).backward()
        base = own.x.detach().t().contiguous().requires_grad_()
        turned, _ = scale_moe(buffer, replace(own, x=base.t()), setup)
        assert base.shape[1] <= 1 or not base.t().is_contiguous()
        loss_of(turned, own.dy).backward()
        return [y.detach(), turned.detach(), own.x.grad, base.grad]


# case A04
@setups(1, 2, 4)
def test_x_may_be_transposed(ranks: Pools, setup: Setup) -> None:
    case = random_case([5, 5], num_experts=4, num_topk=2, hidden=16)
    for y, turned, dx, dbase in ranks.run(transposed_x, setup.world, case, setup):
        assert torch.equal(y, turned)
        assert dbase.shape == (16, y.shape[0])
        assert torch.equal(dx, dbase.t())


def strided_gradients(group: dist.ProcessGroup, case: Case, setup: Setup) -> list[list[Tensor | None]]:
    """(dx, dw, ds) of three losses whose dy is not packed, each followed by the same with dy packed."""
    results = []
    with open_buffer(group, setup.backend) as buffer:
        num_tokens = share(case, group, setup).x.shape[0]
        factor = torch.rand(16, num_tokens, generator=torch.Generator().manual_seed(5))
        packed = {
            "expanded": torch.ones(num_tokens, 16),
            "transposed": factor.t().contiguous(),
            "every second row": (torch.arange(num_tokens) % 2 == 0).float().unsqueeze(1).repeat(1, 16),
        }
        for name, dy in packed.items():
            for is_packed in (False, True):
                own = share(case, group, setup)
                y, _ = scale_moe(buffer, own, setup)
                if is_packed:
                    y.backward(dy)
                else:
                    losses = {
                        "expanded": y.sum(),
                        "transposed": (y.t() * factor).sum(),
                        "every second row": y[::2].sum(),
                    }
                    losses[name].backward()
                results.append([own.x.grad, own.weights.grad, own.scale.grad])
    return results


# case A05
@setups(1, 2, 4)
def test_the_incoming_gradient_may_have_any_strides(ranks: Pools, setup: Setup) -> None:
    case = random_case([5, 5], num_experts=4, num_topk=2, hidden=16)
    for results in ranks.run(strided_gradients, setup.world, case, setup):
        for strided, packed in zip(results[::2], results[1::2], strict=True):
            assert all(torch.equal(one, other) for one, other in zip(strided, packed, strict=True))


A06 = make_case(
    x=[[1, 2], [2, 3]],
    idx=[[[0, 3], [1, 2]], [[0, 3], [1, 2]]],
    weights=[[[0.5, 0.5], [0.25, 0.75]]] * 2,
    num_experts=4,
    hidden=1,
)


# case A06
@setups(1, 2, 4)
def test_recompute_changes_no_gradient(ranks: Pools, setup: Setup) -> None:
    outcomes = [
        run_case(ranks, A06, replace(setup, recompute=recompute))
        for recompute in ("none", "non-reentrant", "reentrant")
    ]
    assert_values(outcomes[0].dx, [2.5, 2.75, 2.5, 2.75])
    assert_values(outcomes[0].dw, [[1, 4], [4, 6], [2, 8], [6, 9]])
    assert_values(outcomes[0].ds, [1.5, 1.25, 3.75, 1.5])
    for outcome in outcomes[1:]:
        for name in ("y", "dx", "dw", "ds"):
            assert torch.equal(getattr(outcomes[0], name), getattr(outcome, name)), name


def nested_layers(group: dist.ProcessGroup, case: Case, setup: Setup) -> dict[str, Any]:
    """Two layers one after the other, each recomputed, inside a block that is recomputed."""
    with open_buffer(group, setup.backend) as buffer:
        own = share(case, group, setup)
        given: list[moe_ep.DispatchOutput] = []

        def layer(x: Tensor, weights: Tensor) -> Tensor:
            y, out = scale_moe(buffer, replace(own, x=x, weights=weights), setup)
            given.append(out)
            return y

        def block(x: Tensor, weights: Tensor) -> Tensor:
            middle = with_recompute(setup.recompute, layer, x, weights)
            return with_recompute(setup.recompute, layer, middle, weights)

        y = with_recompute(setup.recompute, block, own.x, own.weights)
        loss_of(y, own.dy).backward()
        collected = collect(y, own, given[0])
        given.clear()  # the layer, which the graph holds to run it again, would hold the graph
        return collected


# case A06
@setups(1, 2, 4)
def test_nested_recompute_changes_no_gradient(ranks: Pools, setup: Setup) -> None:
    outcomes = [
        join(ranks.run(nested_layers, setup.world, A06, replace(setup, recompute=recompute)))
        for recompute in ("none", "non-reentrant", "reentrant")
    ]
    assert_values(outcomes[0].y, [6.25, 15.125, 12.5, 22.6875])
    assert_values(outcomes[0].dx, [6.25, 7.5625, 6.25, 7.5625])
    for outcome in outcomes[1:]:
        for name in ("y", "dx", "dw", "ds"):
            assert torch.equal(getattr(outcomes[0], name), getattr(outcome, name)), name


def backward_three_times(group: dist.ProcessGroup, case: Case, setup: Setup) -> tuple[dict[str, Any], Any]:
    with open_buffer(group, setup.backend) as buffer:
        own = share(case, group, setup)
        y, out = scale_moe(buffer, own, setup)
        loss = loss_of(y, own.dy)
        loss.backward(retain_graph=True)
        loss.backward()
        result = collect(y, own, out)
        third = caught(loss.backward)
        assert_works(buffer, group, setup)
        return result, third


# case A08
@setups(1, 2, 4)
def test_a_second_backward_over_a_kept_graph_doubles_and_a_third_raises(ranks: Pools, setup: Setup) -> None:
    results = ranks.run(backward_three_times, setup.world, W03, setup)
    outcome = join([result for result, _ in results])
    assert_values(outcome.dw, [[20, 80]])
    assert_values(outcome.dx, 4.4)
    assert_values(outcome.ds, [12, 0, 0, 8])
    for _, (kind, text) in results:
        assert kind is RuntimeError
        assert "backward through the graph a second time" in text


def double_backward(group: dist.ProcessGroup, case: Case, setup: Setup, name: str) -> Any:
    with open_buffer(group, setup.backend) as buffer:
        own = share(case, group, setup)
        y, _ = scale_moe(buffer, own, setup)
        leaf = own.x if name == "x" else own.weights
        (gradient,) = torch.autograd.grad(y.sum(), leaf, create_graph=True)
        penalty = gradient.square().sum()
        seen = [
            caught(lambda: torch.autograd.grad(penalty, own.scale, allow_unused=False, retain_graph=True)),
            caught(lambda: torch.autograd.grad(penalty, own.scale, allow_unused=True, retain_graph=True)),
            caught(penalty.backward),
        ]
        assert_works(buffer, group, setup)
        return gradient.detach(), seen


# case A09
@pytest.mark.parametrize("name", ["x", "weights"])
@setups(1, 2)
def test_differentiating_twice_raises_a_sentence(ranks: Pools, setup: Setup, name: str) -> None:
    case = make_case(x=[[1], []], idx=[[[1]], []], weights=[[[0.5]], []], num_experts=2)
    results = ranks.run(double_backward, setup.world, case, setup, name)
    assert_values(results[0][0], 1 if name == "x" else [[8]])
    for _, seen in results:
        for kind, text in seen:
            assert kind is RuntimeError
            assert "not differentiable twice" in text


def weighted_rows(group: dist.ProcessGroup, case: Case, setup: Setup) -> dict[str, Any]:
    """Rows received, and dx of the loss in which each row counts (global expert id + 1) times."""
    with open_buffer(group, setup.backend) as buffer:
        own = share(case, group, setup)
        out = moe_ep.dispatch(buffer, own.x, own.idx, own.weights, num_experts=case.num_experts, layout=setup.layout)
        experts = torch.tensor([*case.experts_of(buffer.rank, setup.world), -1])
        local = out.topk_idx.reshape(-1)  # K = 1
        (out.x * (experts[local] + 1).unsqueeze(1)).sum().backward()
        return {"rows": out.x.detach(), "expert": experts[local], "dx": own.x.grad}


# case A10
@setups(1, 2, 3)
def test_the_backward_of_an_uneven_exchange_swaps_its_sizes(ranks: Pools, setup: Setup) -> None:
    sent = [[3, 0, 1], [2, 2, 0], [1, 4, 3]]
    case = make_case(
        x=[[100 * rank + i for i in range(sum(row))] for rank, row in enumerate(sent)],
        idx=[[[expert] for expert, count in enumerate(row) for _ in range(count)] for row in sent],
        weights=[[[1]] * sum(row) for row in sent],
        num_experts=3,
    )
    results = ranks.run(weighted_rows, setup.world, case, setup)
    received = {
        expert: torch.cat([own["rows"][own["expert"] == expert, 0] for own in results]).tolist() for expert in range(3)
    }
    assert received[0] == [0, 1, 2, 100, 101, 200]
    assert received[1] == [102, 103, 201, 202, 203, 204]
    assert received[2] == [3, 205, 206, 207]
    if setup.world == 3:
        assert [own["rows"][:, 0].tolist() for own in results] == list(received.values())
    assert_values(torch.cat([own["dx"] for own in results]), [1, 1, 1, 3, 1, 1, 2, 2, 1, 2, 2, 2, 2, 3, 3, 3])


# case A11
@setups(1, 2, 4)
def test_each_ranks_own_gradient_reaches_its_own_tokens(ranks: Pools, setup: Setup) -> None:
    case = make_case(
        x=[[1, 2], [3]],
        idx=[[[0, 1], [1, -1]], [[0, 1]]],
        weights=[[[0.5, 0.5], [1, 0]], [[0.25, 0.75]]],
        dy=[1, 1, 2],
        num_experts=2,
        hidden=1,
    )
    outcome = run_case(ranks, case, setup)
    assert_values(outcome.y, [1.5, 4, 5.25])
    assert_values(outcome.dx, [1.5, 2, 3.5])
    assert_values(outcome.dw, [[1, 2], [4, 0], [6, 12]])
    assert_values(outcome.ds, [2, 7])


def zero_loss(group: dist.ProcessGroup, case: Case, setup: Setup) -> dict[str, Any]:
    """Only rank 0's loss depends on y; the others multiply theirs by 0."""
    with open_buffer(group, setup.backend) as buffer:
        own = share(case, group, setup)
        y, out = scale_moe(buffer, own, setup)
        (y.sum() if buffer.rank == 0 else 0 * y.sum()).backward()
        return collect(y, own, out)


# case A12 (the form with a constant loss is in tests/distributed/test_timeouts.py)
@setups(2, 4)
def test_a_loss_of_zero_times_y_joins_the_backward(ranks: Pools, setup: Setup) -> None:
    others = setup.world - 1
    case = make_case(
        x=[[1, 2], *[[3]] * others],
        idx=[[[0, 1], [1, -1]], *[[[0, 1]]] * others],
        weights=[[[0.5, 0.5], [1, 0]], *[[[0.25, 0.75]]] * others],
        num_experts=2,
        hidden=1,
    )
    outcome = join(ranks.run(zero_loss, setup.world, case, setup))
    assert_values(outcome.dx, [1.5, 2] + [0] * others)
    assert_values(outcome.dw, [[1, 2], [4, 0]] + [[0, 0]] * others)
    assert_values(outcome.ds, [0.5, 2.5])
