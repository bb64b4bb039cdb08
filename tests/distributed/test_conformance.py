"""The conformance suite, for every backend of `BACKENDS`."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.distributed as dist

from tests.distributed.conformance import check_routing
from tests.helpers.ranks import WORLD_SIZES, Pools
from tests.helpers.routing import ROUTINGS, TOKEN_COUNTS

BACKENDS = ("torch",)
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def _every_routing(group: dist.ProcessGroup, backend: str, layout: str, dtype: torch.dtype) -> int:
    num_checks = 0
    for routing, tokens in itertools.product(ROUTINGS, TOKEN_COUNTS):
        for alignment in (1, 4):
            check_routing(group, backend, layout, dtype, routing, tokens, alignment)
            num_checks += 1
    return num_checks


def _int32_and_exact(group: dist.ProcessGroup, backend: str) -> None:
    for routing in ROUTINGS:
        check_routing(group, backend, "compact", torch.bfloat16, routing, "ragged", 1, idx_dtype=torch.int32)
        check_routing(
            group, backend, "expert_major", torch.bfloat16, routing, "ragged", 4, idx_dtype=torch.int32, exact=True
        )


@pytest.mark.parametrize("world", WORLD_SIZES)
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))
@pytest.mark.parametrize("layout", ["compact", "expert_major"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_rows_sums_and_gradients_are_those_of_the_loops(
    ranks: Pools, backend: str, layout: str, dtype: torch.dtype, world: int
) -> None:
    done = ranks.run(_every_routing, world, backend, layout, dtype, timeout_secs=120)
    assert done == [len(ROUTINGS) * len(TOKEN_COUNTS) * 2] * world


@pytest.mark.parametrize("world", WORLD_SIZES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_int32_ids_and_exact_sums_meet_the_loops_too(ranks: Pools, backend: str, world: int) -> None:
    ranks.run(_int32_and_exact, world, backend)
