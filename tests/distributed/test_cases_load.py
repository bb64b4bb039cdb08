"""Skew: one expert that gets every token, and every expert that gets every token: cases Q01 and Q03."""

from __future__ import annotations

import resource
import sys
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.helpers.ranks import Pools
from tests.helpers.scale_experts import (
    Case,
    Setup,
    assert_values,
    loss_of,
    make_case,
    open_buffer,
    random_case,
    run_case,
    scale_moe,
    setups,
    share,
)

NUM_TOKENS, NUM_EXPERTS = 4096, 8


def value_of(world: int) -> Tensor:
    """The value of every token of `world` ranks."""
    return (torch.arange(NUM_TOKENS) % 32).float().repeat(world)


def all_to_one(world: int, hot: int, hidden: int) -> Case:
    """Every token of every rank goes to expert `hot`."""
    case = random_case([NUM_TOKENS] * world, NUM_EXPERTS, 1, hidden)
    total = NUM_TOKENS * world
    x = value_of(world).unsqueeze(1).repeat(1, hidden)
    return replace(case, x=x, idx=torch.full((total, 1), hot), weights=torch.ones(total, 1))


# case Q01
@pytest.mark.parametrize("hot", [7, 0])
@setups(1, 2)
def test_every_token_to_one_expert_drops_nothing(ranks: Pools, setup: Setup, hot: int) -> None:
    outcome = run_case(ranks, all_to_one(setup.world, hot, 16), setup)
    value, total = value_of(setup.world), NUM_TOKENS * setup.world
    assert_values(outcome.y, (hot + 1) * value)
    assert_values(outcome.dx, torch.full((total,), hot + 1))
    assert_values(outcome.dw, (hot + 1) * 16 * value.unsqueeze(1))
    assert_values(outcome.ds, [float(value.sum()) * 16 if expert == hot else 0 for expert in range(NUM_EXPERTS)])
    owner = hot * setup.world // NUM_EXPERTS
    assert outcome.num_rows == [total if rank == owner else 0 for rank in range(setup.world)]


def peak_in_rows(group: dist.ProcessGroup, setup: Setup, hot: int) -> float:
    """By how many times the bytes of all rows the peak memory of this rank rose in a step."""
    with open_buffer(group, setup.backend) as buffer:
        peaks = []
        for hidden in (4, 512):  # first a small step, so that what is loaded on first use does not count
            own = share(all_to_one(setup.world, hot, hidden), group, setup)
            loss_of(scale_moe(buffer, own, setup)[0], own.dy).backward()
            peaks.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
        return (peaks[1] - peaks[0]) * 1024 / (NUM_TOKENS * setup.world * 512 * 4)


# case Q01
@pytest.mark.skipif(sys.platform != "linux", reason="peak memory is read in KiB, as Linux gives it")
@pytest.mark.parametrize("hot", [7, 0])
@setups(2)
def test_every_token_to_one_expert_needs_memory_for_its_rows_only(ranks: Pools, setup: Setup, hot: int) -> None:
    for peak in ranks.run(peak_in_rows, setup.world, setup, hot):
        assert peak < 12.0  # measured: up to 7.5, the case's own rows and gradients included


# case Q03
@setups(1, 2, 4)
def test_every_expert_may_get_every_token(ranks: Pools, setup: Setup) -> None:
    case = make_case(
        x=[[2, 2, 2], [2, 2, 2]],
        idx=[[[0, 1, 2, 3]] * 3] * 2,
        weights=[[[0.25] * 4] * 3] * 2,
        num_experts=4,
        hidden=16,
    )
    outcome = run_case(ranks, case, setup)
    assert_values(outcome.y, 5.0)
    assert_values(outcome.dx, [2.5] * 6)
    assert_values(outcome.dw, [[32, 64, 96, 128]] * 6)
    assert_values(outcome.ds, [0.25 * 32 * 6] * 4)
    assert outcome.counts == [6] * 4


# case Q03
@pytest.mark.parametrize("experts", [[0, 1, 0, 1, 0, 1], [1] * 6], ids=["spread", "all to one"])
@setups(2)
def test_one_expert_a_rank_and_one_a_token(ranks: Pools, setup: Setup, experts: list[int]) -> None:
    """E = W and K = 1, where sizes for the mean case are smallest."""
    idx = [[[expert] for expert in experts[:3]], [[expert] for expert in experts[3:]]]
    case = make_case(x=[[1, 2, 3], [4, 5, 6]], idx=idx, weights=[[[0.5]] * 3] * 2, num_experts=2)
    outcome = run_case(ranks, case, setup)
    assert_values(outcome.y, [0.5 * (expert + 1) * (token + 1) for token, expert in enumerate(experts)])
    assert_values(outcome.dx, [0.5 * (expert + 1) for expert in experts])
    assert outcome.counts == [experts.count(0), experts.count(1)]
