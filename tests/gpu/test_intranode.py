"""The kernels inside a node: the conformance suite of the portable backend, on ranks that share the GPUs there are."""

from __future__ import annotations

import itertools
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import moe_ep
from moe_ep._native import require
from tests.distributed.conformance import check_routing
from tests.helpers.ranks import Pools
from tests.helpers.routing import ROUTINGS, TOKEN_COUNTS
from tests.helpers.scale_experts import open_buffer

pytestmark = pytest.mark.gpu
WORLDS = (1, 2, 4, 8)
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def _without_copy_engine(group: dist.ProcessGroup, layout: str, dtype: torch.dtype) -> int:
    """As on a GPU before sm_90: rows travel through registers, 16 bytes a thread."""
    with mock.patch.object(require(), "has_bulk_copies", return_value=False):
        return _every_routing(group, layout, dtype, 4, torch.int64, False)


def _every_routing(
    group: dist.ProcessGroup, layout: str, dtype: torch.dtype, alignment: int, idx: torch.dtype, exact: bool
) -> int:
    num_checks = 0
    for routing, tokens in itertools.product(ROUTINGS, TOKEN_COUNTS):
        check_routing(group, "intranode", layout, dtype, routing, tokens, alignment, idx, exact, device="cuda")
        num_checks += 1
    return num_checks


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", ["compact", "expert_major"])
@pytest.mark.parametrize("world", WORLDS)
def test_rows_sums_and_gradients_are_those_of_the_loops(
    ranks: Pools, layout: str, dtype: torch.dtype, world: int
) -> None:
    args = (layout, dtype, 4, torch.int64, False)
    assert ranks.run(_every_routing, world, *args, timeout_secs=200) == [len(ROUTINGS) * len(TOKEN_COUNTS)] * world


@pytest.mark.parametrize("world", WORLDS)
def test_int32_ids_without_padding(ranks: Pools, world: int) -> None:
    args = ("expert_major", torch.bfloat16, 1, torch.int32, False)
    assert ranks.run(_every_routing, world, *args, timeout_secs=200) == [len(ROUTINGS) * len(TOKEN_COUNTS)] * world


@pytest.mark.parametrize("world", WORLDS)
def test_exact_combine_adds_the_slots_in_order(ranks: Pools, world: int) -> None:
    args = ("expert_major", torch.bfloat16, 4, torch.int64, True)
    assert ranks.run(_every_routing, world, *args, timeout_secs=200) == [len(ROUTINGS) * len(TOKEN_COUNTS)] * world


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", ["compact", "expert_major"])
@pytest.mark.parametrize("world", [1, 2, 4])
def test_the_path_of_older_gpus_gives_the_same_bits(ranks: Pools, world: int, layout: str, dtype: torch.dtype) -> None:
    num_checks = len(ROUTINGS) * len(TOKEN_COUNTS)
    assert ranks.run(_without_copy_engine, world, layout, dtype, timeout_secs=200) == [num_checks] * world


def _most_experts(group: dist.ProcessGroup) -> tuple[bool, bool]:
    """Ids spread over as many experts as the kernels count; small integers, so that sums are exact."""
    with open_buffer(group, "intranode") as buffer:
        num_local = require().max_local_experts
        num_experts, num_tokens = num_local * buffer.group_size, 3000 + buffer.rank
        flat = torch.arange(num_tokens * 4, device="cuda") * 7919 + 13 * buffer.rank
        x = torch.arange(num_tokens * 8, device="cuda").view(-1, 8).remainder(97).float()
        out = moe_ep.dispatch(buffer, x, flat.remainder(num_experts).view(-1, 4), num_experts=num_experts)
        local = torch.arange(num_local, dtype=torch.int64, device="cuda")
        is_sorted = torch.equal(out.topk_idx, local.repeat_interleave(out.expert_counts.long()))
        return is_sorted, torch.equal(moe_ep.combine(buffer, out.x, out.handle), 4 * x)


@pytest.mark.parametrize("world", [1, 4])
def test_a_rank_counts_as_many_experts_as_it_says(ranks: Pools, world: int) -> None:
    assert ranks.run(_most_experts, world, timeout_secs=100) == [(True, True)] * world
