"""Routing weights: applied once, at the right place, in full precision. The cases W01 to W06."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.helpers.ranks import Pools
from tests.helpers.scale_experts import Setup, assert_values, make_case, run_case, setups

W01 = {"x": [[8]], "idx": [[[1]]], "weights": [[[0.5]]]}
W03 = make_case(x=[[[1, 2, 3, 4]], []], idx=[[[0, 3]], []], weights=[[[0.6, 0.4]], []], num_experts=4)


# case W01
@pytest.mark.parametrize("recompute", ["none", "non-reentrant", "reentrant"])
@setups(1, 2, 4)
def test_a_weight_is_applied_once(ranks: Pools, setup: Setup, recompute: str) -> None:
    outcome = run_case(ranks, make_case(**W01, num_experts=2, hidden=4), replace(setup, recompute=recompute))
    assert_values(outcome.y, 8)
    assert_values(outcome.dx, 1)
    assert_values(outcome.dw, [[2 * 8 * 4]])
    assert_values(outcome.ds, [0, 16])


# case W01
@setups(1, 2, 3, 4, layouts=["expert_major"])
def test_a_weight_is_applied_once_in_the_exact_combine(ranks: Pools, setup: Setup) -> None:
    outcome = run_case(ranks, make_case(**W01, num_experts=2, hidden=4), replace(setup, exact=True))
    assert_values(outcome.y, 8)
    assert_values(outcome.dw, [[2 * 8 * 4]])


# case W02
@setups(1, 2, 4)
def test_a_weight_of_zero_is_still_routed(ranks: Pools, setup: Setup) -> None:
    case = make_case(x=[[2], []], idx=[[[0, 3]], []], weights=[[[1.0, 0.0]], []], num_experts=4)
    outcome = run_case(ranks, case, setup)
    assert_values(outcome.y, 2, rtol=0)
    assert_values(outcome.dw, [[8, 32]], rtol=0)
    assert_values(outcome.ds, [8, 0, 0, 0], rtol=0)
    assert outcome.counts == [1, 0, 0, 1]


# case W03
@setups(1, 2, 4)
def test_the_weights_gradient_is_right_in_every_slot(ranks: Pools, setup: Setup) -> None:
    outcome = run_case(ranks, W03, setup)
    assert_values(outcome.y, [[2.2, 4.4, 6.6, 8.8]])
    assert_values(outcome.dx, 2.2)
    assert outcome.dw is not None
    assert outcome.dw.dtype == torch.float32
    assert_values(outcome.dw, [[10, 40]])
    assert_values(outcome.ds, [6, 0, 0, 4])


# case W04
@setups(1, 2, 4)
def test_an_experts_bias_is_added_with_its_weight(ranks: Pools, setup: Setup) -> None:
    case = make_case(
        x=[[0]], idx=[[[0, 1]]], weights=[[[0.25, 0.25]]], num_experts=4, hidden=8, bias=[1.0, 1.0, 1.0, 1.0]
    )
    outcome = run_case(ranks, case, setup)
    assert_values(outcome.y, 0.5)
    assert_values(outcome.db, [2, 2, 0, 0])
    assert_values(outcome.dw, [[8, 8]])


# case W06
@setups(1, 2, 4)
def test_float32_weights_beside_bfloat16_rows_are_not_cut(ranks: Pools, setup: Setup) -> None:
    weight = 1.00390625  # not a bfloat16 number
    case = make_case(
        x=[[65], [65]],
        idx=[[[0, 1, 2, 3]], [[0, 1, 2, 3]]],
        weights=[[[weight] * 4], [[weight] * 4]],
        num_experts=4,
        scale=[1.0] * 4,
        dtype=torch.bfloat16,
    )
    for exact in (False, True) if setup.layout == "expert_major" else (False,):
        outcome = run_case(ranks, case, replace(setup, exact=exact))
        assert outcome.y.dtype == torch.bfloat16
        assert_values(outcome.y, [262, 262], rtol=0)


# case W06
@setups(1, 2, 4)
def test_the_weights_gradient_beside_bfloat16_rows_is_float32(ranks: Pools, setup: Setup) -> None:
    case = make_case(
        x=[[1], [1]],
        idx=[[[0, 3]], [[0, 3]]],
        weights=[[[1, 1]], [[1, 1]]],
        num_experts=4,
        hidden=257,
        scale=[1.0] * 4,
        dtype=torch.bfloat16,
    )
    outcome = run_case(ranks, case, setup)
    assert outcome.dw is not None
    assert outcome.dw.dtype == torch.float32
    assert_values(outcome.dw, [[257, 257], [257, 257]], rtol=0)
