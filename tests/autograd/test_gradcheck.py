"""float64 gradcheck of the whole exchange, and the adjoint identities."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import moe_ep
from tests.helpers.ranks import WORLD_SIZES, Pools
from tests.helpers.routing import ROUTINGS, make_inputs

BACKENDS = ("torch",)
LAYOUTS = ("compact", "expert_major")
NUM_EXPERTS = 5


def _exchange(
    buffer: moe_ep.Buffer, layout: str, x: Tensor, idx: Tensor, weights: Tensor, scale: Tensor, exact: bool = False
) -> Tensor:
    """y = combine(experts(dispatch(x))) with the nonlinear experts f_e(v) = tanh(scale_e * v)."""
    out = moe_ep.dispatch(buffer, x, idx, weights, num_experts=NUM_EXPERTS, layout=layout, alignment=2)
    local = scale[list(buffer.placement(NUM_EXPERTS).experts_of(buffer.rank))]
    if layout == "expert_major":
        # Padding (id -1) meets expert 0 of an empty-safe table; its weight is 0 and combine leaves it out.
        per_row = torch.cat([local, local.new_zeros(1)])[out.topk_idx]
        return moe_ep.combine(buffer, torch.tanh(per_row.unsqueeze(1) * out.x), out.handle, out.topk_weights, exact)
    assert out.topk_weights is not None
    rows = torch.zeros_like(out.x)
    table = torch.cat([local, local.new_zeros(1)])
    for slot in range(idx.shape[1]):
        per_row = table[out.topk_idx[:, slot]]
        rows = rows + out.topk_weights[:, slot : slot + 1] * torch.tanh(per_row.unsqueeze(1) * out.x)
    return moe_ep.combine(buffer, rows, out.handle)


def _gradcheck_one_rank(layout: str, routing: str, exact: bool) -> None:
    x, idx, weights = make_inputs(routing, "equal", 1, 3, 3, NUM_EXPERTS, torch.float64)[0]
    scale = torch.linspace(0.5, 1.5, NUM_EXPERTS, dtype=torch.float64)
    with moe_ep.Buffer() as buffer:
        assert torch.autograd.gradcheck(
            lambda x, w, s: _exchange(buffer, layout, x, idx, w, s, exact),
            (x.requires_grad_(), weights.requires_grad_(), scale.requires_grad_()),
        )


@pytest.mark.parametrize("routing", list(ROUTINGS))
@pytest.mark.parametrize(("layout", "exact"), [("compact", False), ("expert_major", False), ("expert_major", True)])
def test_gradcheck_of_x_weights_and_experts_in_float64(layout: str, exact: bool, routing: str) -> None:
    _gradcheck_one_rank(layout, routing, exact)


def _numeric_gradient(group: dist.ProcessGroup, backend: str, layout: str) -> None:
    """Central differences over the inputs of every rank in turn; all ranks compute, the owner compares.

    The loss of rank r is (r + 1) * <c, y> with c not constant, so that a gradient which forgets the other ranks, or
    takes its own upstream gradient for theirs, is seen.
    """
    world, rank = dist.get_world_size(group), dist.get_rank(group)
    inputs = make_inputs("duplicates", "ragged", world, 2, 2, NUM_EXPERTS, torch.float64, seed=3)
    x, idx, weights = inputs[rank]
    scale = torch.linspace(0.5, 1.5, NUM_EXPERTS, dtype=torch.float64)
    c = torch.linspace(-1, 2, x.numel(), dtype=torch.float64).reshape(x.shape)
    with moe_ep.Buffer(group, backend=backend, timeout_secs=20) as buffer:

        def total_loss(x: Tensor, weights: Tensor) -> Tensor:
            loss = (rank + 1) * (_exchange(buffer, layout, x, idx, weights, scale) * c).sum()
            dist.all_reduce(loss, group=group)
            return loss

        x_leaf, w_leaf = x.clone().requires_grad_(), weights.clone().requires_grad_()
        ((rank + 1) * (_exchange(buffer, layout, x_leaf, idx, w_leaf, scale) * c).sum()).backward()
        eps = 1e-6
        with torch.no_grad():
            for owner in range(world):
                for place, leaf in ((0, x_leaf), (2, w_leaf)):
                    for i in range(inputs[owner][place].numel()):
                        moved = []
                        for step in (eps, -eps):
                            own = [x.clone(), idx, weights.clone()]
                            if owner == rank:
                                own[place].view(-1)[i] += step
                            moved.append(total_loss(own[0], own[2]))
                        if owner == rank:
                            assert leaf.grad is not None
                            numeric = float(moved[0] - moved[1]) / (2 * eps)
                            assert abs(numeric - float(leaf.grad.view(-1)[i])) <= 1e-6 * max(1.0, abs(numeric))


@pytest.mark.parametrize("world", [2, 3, 4])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_gradients_equal_central_differences_of_the_sum_of_all_losses(
    ranks: Pools, backend: str, layout: str, world: int
) -> None:
    ranks.run(_numeric_gradient, world, backend, layout, timeout_secs=90)


def _adjoint(group: dist.ProcessGroup, backend: str, layout: str, routing: str) -> None:
    world, rank = dist.get_world_size(group), dist.get_rank(group)
    num_experts = 2 * world + 1
    x, idx, weights = make_inputs(routing, "ragged", world, 4, 3, num_experts, torch.float64)[rank]
    with moe_ep.Buffer(group, backend=backend, timeout_secs=20) as buffer:
        out = moe_ep.dispatch(buffer, x, idx, weights, num_experts=num_experts, layout=layout, alignment=3)
        assert out.topk_weights is not None
        g = torch.Generator().manual_seed(rank)
        rows = torch.randn(out.x.shape, generator=g, dtype=torch.float64)
        home = moe_ep.combine(buffer, rows, out.handle)
        sides = torch.stack([(out.x * rows).sum(), (x * home).sum()])
        # The weights: <send(w), v> = <w, back(v)>, where back is the backward of send.
        leaf = weights.clone().requires_grad_()
        sent = moe_ep.dispatch(buffer, x, idx, leaf, num_experts=num_experts, layout=layout).topk_weights
        assert sent is not None
        v = torch.randn(sent.shape, generator=g, dtype=torch.float64)
        sent.backward(v)
        assert leaf.grad is not None
        sides = torch.cat([sides, torch.stack([(sent.detach() * v).sum(), (weights * leaf.grad).sum()])])
        dist.all_reduce(sides, group=group)
        torch.testing.assert_close(sides[0], sides[1], rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(sides[2], sides[3], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("world", WORLD_SIZES)
@pytest.mark.parametrize("routing", list(ROUTINGS))
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_dispatch_and_combine_are_adjoint(ranks: Pools, backend: str, layout: str, routing: str, world: int) -> None:
    ranks.run(_adjoint, world, backend, layout, routing)
