"""Hypothesis looks for a routing that breaks the contract: any counts, K, E, duplicates, holes, layout, alignment."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.distributed.conformance import HIDDEN, Inputs, check_round_trip
from tests.helpers.ranks import Pools

BACKENDS = ("torch",)


@st.composite
def routed_inputs(draw: st.DrawFn, world: int) -> tuple[Inputs, int]:
    """Inputs of every rank and the number of experts."""
    num_experts = draw(st.integers(1, 9))
    num_topk = draw(st.integers(1, 6))
    dtype = draw(st.sampled_from([torch.float32, torch.bfloat16]))
    inputs: Inputs = []
    for _ in range(world):
        slots = st.lists(st.integers(-1, num_experts - 1), min_size=num_topk, max_size=num_topk)
        ids = draw(st.lists(slots, max_size=6))
        idx = torch.tensor(ids, dtype=torch.int64).reshape(len(ids), num_topk)
        g = torch.Generator().manual_seed(draw(st.integers(0, 2**16)))
        x = torch.randn(len(ids), HIDDEN, generator=g).to(dtype)
        inputs.append((x, idx, torch.rand(len(ids), num_topk, generator=g)))
    return inputs, num_experts


def _check(
    group: Any, backend: str, layout: str, inputs: Inputs, num_experts: int, alignment: int, exact: bool
) -> None:
    check_round_trip(group, backend, layout, inputs, num_experts, alignment, exact=exact)


@pytest.mark.parametrize("world", [1, 3])
@pytest.mark.parametrize("backend", BACKENDS)
def test_any_routing_meets_the_loops(ranks: Pools, backend: str, world: int) -> None:
    @settings(
        max_examples=60, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow], database=None
    )
    @given(
        routed=routed_inputs(world),
        layout=st.sampled_from(["compact", "expert_major"]),
        alignment=st.sampled_from([1, 2, 5]),
        exact=st.booleans(),
    )
    def check(routed: tuple[Inputs, int], layout: str, alignment: int, exact: bool) -> None:
        inputs, num_experts = routed
        ranks.run(_check, world, backend, layout, inputs, num_experts, alignment, exact and layout == "expert_major")

    check()
