"""DDP and FSDP2 around layers on the kernels, W = 2: five steps end where one process with the whole batch ends.

The dense parameters travel by NCCL where each rank has a GPU, by gloo where two share one. FSDP2 needs NCCL: over gloo
PyTorch 2.11 ends in a segmentation fault when it gathers a sharded CUDA parameter.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.distributed.test_wrappers_ddp import check_against_one_process, train_in_ddp
from tests.distributed.test_wrappers_fsdp import (
    assert_stored,
    gathered_in_bfloat16,
    save_and_load,
    stored,
    train_in_fsdp,
)
from tests.helpers.ranks import Pool

pytestmark = pytest.mark.gpu
BACKEND = "intranode"
RTOL = 1e-9  # CUDA and CPU round exponentials differently
PASSES = pytest.mark.parametrize(("num_passes", "recompute"), [(1, False), (2, False), (2, True)])
EP_SIZE = pytest.mark.parametrize("ep_size", [2, 1])
LIMIT_SECS = 100
NEEDS_NCCL = pytest.mark.skipif(
    torch.cuda.device_count() == 1, reason="FSDP2 gathers CUDA parameters over NCCL, which needs a GPU for each rank"
)


@pytest.fixture(scope="module")
def pair() -> Iterator[Pool]:
    pool = Pool(2, "nccl" if torch.cuda.device_count() > 1 else "gloo", on_cuda=True)
    yield pool
    pool.close()


@EP_SIZE
@PASSES
def test_five_steps_in_ddp_equal_one_process(pair: Pool, ep_size: int, num_passes: int, recompute: bool) -> None:
    """Cases L01, L03, L04 and, by bias steps under accumulation and selective recompute, B01."""
    arguments = (ep_size, num_passes, recompute, BACKEND)
    check_against_one_process(pair.run(train_in_ddp, 2, arguments, LIMIT_SECS), RTOL)


@NEEDS_NCCL
@EP_SIZE
@PASSES
def test_five_steps_in_fsdp2_equal_one_process(pair: Pool, ep_size: int, num_passes: int, recompute: bool) -> None:
    """Cases L01, L03, L04 and, by bias steps under accumulation and selective recompute, B01."""
    arguments = (ep_size, num_passes, recompute, BACKEND)
    check_against_one_process(pair.run(train_in_fsdp, 2, arguments, LIMIT_SECS), RTOL)


@NEEDS_NCCL
@EP_SIZE
def test_a_shard_saves_and_loads_its_experts_under_their_global_ids(pair: Pool, ep_size: int) -> None:  # case M01
    pair.run(save_and_load, 2, (ep_size, BACKEND), LIMIT_SECS)


@NEEDS_NCCL
def test_a_stored_state_dict_loads_at_another_ep_size(pair: Pool, tmp_path: Path) -> None:  # case M01
    assert_stored(pair.run(stored, 2, (tmp_path, (2, 1), BACKEND), LIMIT_SECS))


@NEEDS_NCCL
def test_parameters_may_be_gathered_in_bfloat16(pair: Pool) -> None:
    pair.run(gathered_in_bfloat16, 2, (BACKEND,), LIMIT_SECS)
