"""Megatron's MoE layer with our dispatcher beside the same layer with its alltoall dispatcher, on four ranks.

Outputs, the gradients of tokens, router, experts and shared expert, and the router's counters.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.helpers import megatron_jobs as jobs
from tests.helpers.ranks import Pools

RTOL = 1e-5  # float32
EP2_DP2, EP4, TP2_EP2_ETP2, TP2_EP2 = (1, 2, 1), (1, 4, 1), (2, 2, 2), (2, 2, 1)
LAYOUTS = {"ep2_dp2": EP2_DP2, "tp2_ep2_etp2": TP2_EP2_ETP2, "tp2_ep2_etp1": TP2_EP2}
SIGMOID = {"moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True}
CASES: dict[str, dict[str, Any]] = {
    "dropless": {},
    "groups_and_expert_bias": {
        **SIGMOID, "moe_router_topk": 4, "moe_router_num_groups": 4, "moe_router_group_topk": 2,
        "moe_router_topk_scaling_factor": 2.5, "moe_router_load_balancing_type": "seq_aux_loss",
    },
    "capacity": {"moe_expert_capacity_factor": 0.6},
    "capacity_padded": {"moe_expert_capacity_factor": 1.5, "moe_pad_expert_input_to_capacity": True},
    "recompute": {**SIGMOID, "recompute_granularity": "selective", "recompute_modules": ["moe"]},
    "shared_expert": {"moe_shared_expert_intermediate_size": 16},
    "shared_expert_overlapped": {"moe_shared_expert_intermediate_size": 16, "moe_shared_expert_overlap": True},
}  # fmt: skip
ONLY_OURS = {"capacity_padded", "shared_expert_overlapped"}  # what Megatron refuses with DeepEP


def run(ranks: Pools, *arguments: Any, **more: Any) -> None:
    per_rank = ranks.run(jobs.compare, 4, *arguments, *more.values(), timeout_secs=60)
    apart = [(name, worst, rank) for rank, found in enumerate(per_rank) for name, worst in found if worst > RTOL]
    assert not apart, f"(tensor, relative departure from alltoall, rank): {apart}"


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("case", CASES)
def test_the_layer_does_what_it_does_with_alltoall(megatron_ranks: Pools, case: str, layout: jobs.Layout) -> None:
    run(megatron_ranks, layout, "moe_ep", CASES[case])


@pytest.mark.parametrize("case", sorted(CASES.keys() - ONLY_OURS))
def test_the_unchanged_flex_dispatcher_on_our_deep_ep_does_the_same(megatron_ranks: Pools, case: str) -> None:
    run(megatron_ranks, TP2_EP2 if case == "capacity" else EP2_DP2, "deep_ep-api", CASES[case])


@pytest.mark.parametrize("kind", ["alltoall", "allgather", "flex"])
def test_every_dispatcher_type_is_answered_by_ours(megatron_ranks: Pools, kind: str) -> None:
    run(megatron_ranks, EP4, "moe_ep", {}, {"moe_token_dispatcher_type": kind})
