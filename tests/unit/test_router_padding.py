"""Padding tokens: no expert, no weight, no gradient, no count."""

from __future__ import annotations

import math

import pytest
import torch

from tests.unit.router_helpers import logit_router


@pytest.mark.parametrize("filler", [0.0, 3.0, math.nan, math.inf])
def test_padding_changes_nothing_for_the_other_tokens(filler: float) -> None:
    """Case B05: ids, weights, gradients, counts and losses equal those of the tokens alone, whatever padding holds."""
    options = {
        "topk": 2, "aux_loss_coef": 0.3, "seq_aux_loss_coef": 0.2, "global_aux_loss_coef": 0.1, "z_loss_coef": 0.01,
    }  # fmt: skip
    torch.manual_seed(0)
    valid = torch.randn(3, 4)
    pull = torch.tensor([[1.0, 2.0], [0.5, -1.0], [2.0, 0.0]])
    alone = logit_router(4, **options)
    x_alone = valid.clone().requires_grad_()
    ids_alone, weights_alone = alone(x_alone)
    (weights_alone * pull).sum().backward()

    padded = logit_router(4, **options)
    x = torch.full((5, 4), filler)
    rows = [0, 2, 4]
    x[rows] = valid
    x.requires_grad_()
    mask = torch.tensor([False, True, False, True, False])
    ids, weights = padded(x, mask)
    (weights[rows] * pull).sum().backward()

    assert torch.equal(ids[rows], ids_alone)
    assert (ids[mask] == -1).all()
    assert torch.equal(weights[rows], weights_alone)
    assert (weights[mask] == 0).all()
    assert x.grad is not None
    assert x_alone.grad is not None
    assert (x.grad[mask] == 0).all()
    torch.testing.assert_close(x.grad[rows], x_alone.grad)
    torch.testing.assert_close(padded.weight.grad, alone.weight.grad)
    assert torch.equal(padded.last_counts, alone.last_counts)
    assert torch.equal(padded.tokens_per_expert, alone.tokens_per_expert)
    for name, value in alone.last_losses.items():
        torch.testing.assert_close(padded.last_losses[name], value)


def test_a_batch_of_padding_has_zero_loss_and_zero_gradients() -> None:
    """Case B05, the extreme: no NaN from a division by no tokens."""
    router = logit_router(
        4, topk=2, normalize=True, aux_loss_coef=1.0, seq_aux_loss_coef=1.0, global_aux_loss_coef=1.0, z_loss_coef=1.0,
        capacity_factor=1.0,
    )  # fmt: skip
    x = torch.randn(3, 4, requires_grad=True)
    ids, weights = router(x, torch.ones(3, dtype=torch.bool), torch.tensor([7, 7, -2]))
    assert (ids == -1).all()
    assert (weights == 0).all()
    weights.sum().backward()
    assert all(value.item() == 0.0 for value in router.last_losses.values())
    assert len(router.last_losses) == 4
    assert x.grad is not None
    assert router.weight.grad is not None
    assert (x.grad == 0).all()
    assert (router.weight.grad == 0).all()
    assert router.tokens_per_expert.tolist() == [0, 0, 0, 0]
