"""The portable backend on CUDA: NCCL between two GPUs, no group on one. The same conformance suite as on CPU."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

import moe_ep
from tests.distributed.conformance import check_routing
from tests.helpers.ranks import Pool
from tests.helpers.routing import ROUTINGS, TOKEN_COUNTS

pytestmark = pytest.mark.gpu
NUM_GPUS = torch.cuda.device_count()
DTYPES = (torch.float32, torch.bfloat16)


@pytest.fixture(scope="module")
def nccl() -> Iterator[Pool]:
    if NUM_GPUS < 2:
        pytest.skip(f"needs 2 CUDA devices, one a rank; this machine has {NUM_GPUS}")
    pool = Pool(2, "nccl")
    yield pool
    pool.close()


def _every_routing(group: dist.ProcessGroup, layout: str, dtype: torch.dtype) -> int:
    num_checks = 0
    for routing, tokens in itertools.product(ROUTINGS, TOKEN_COUNTS):
        check_routing(group, "torch", layout, dtype, routing, tokens, 4, device="cuda")
        num_checks += 1
    return num_checks


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", ["compact", "expert_major"])
@pytest.mark.parametrize("world", [1, 2])
def test_rows_sums_and_gradients_are_those_of_the_loops(
    nccl: Pool, layout: str, dtype: torch.dtype, world: int
) -> None:
    assert nccl.run(_every_routing, world, (layout, dtype), 200) == [len(ROUTINGS) * len(TOKEN_COUNTS)] * world


def _late_rank(group: dist.ProcessGroup) -> float:
    """Rank 1 stays away from one dispatch; rank 0 raises within its limit, and after reset() both go on."""
    rank = dist.get_rank(group)
    buffer = moe_ep.Buffer(group, backend="torch", timeout_secs=6)
    x = torch.ones(3, 8, device="cuda")
    idx = torch.tensor([[0], [1], [1]], device="cuda")
    moe_ep.dispatch(buffer, x, idx, num_experts=2)
    waited = 0.0
    if rank == 0:
        began = time.monotonic()
        with pytest.raises(moe_ep.EPTimeoutError, match="dispatch on rank 0 .* rank 1 did not take part"):
            moe_ep.dispatch(buffer, x, idx, num_experts=2)
        waited = time.monotonic() - began
    else:
        time.sleep(10)
    buffer.reset()
    out = moe_ep.dispatch(buffer, x, idx, num_experts=2)
    assert out.x.shape[0] == (2 if rank == 0 else 4)
    buffer.close()
    return waited


def test_a_rank_that_stays_away_is_named_and_reset_makes_the_buffer_usable(nccl: Pool) -> None:
    assert nccl.run(_late_rank, 2, (), 90)[0] < 6 + 10
