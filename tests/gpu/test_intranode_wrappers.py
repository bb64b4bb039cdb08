"""DDP and FSDP2 around layers on the kernels, W = 2: five steps end where one process with the whole batch ends.

The dense parameters travel by NCCL where each rank has a GPU, by gloo where two share one.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.distributed.test_wrappers_ddp import check_against_one_process, train_in_ddp
from tests.distributed.test_wrappers_fsdp import train_in_fsdp
from tests.ranks import Pool

pytestmark = pytest.mark.gpu
RTOL = 1e-9  # CUDA and CPU round exponentials differently
PASSES = pytest.mark.parametrize(("num_passes", "recompute"), [(1, False), (2, True)])
EP_SIZE = pytest.mark.parametrize("ep_size", [2, 1])


@pytest.fixture(scope="module")
def pair() -> Iterator[Pool]:
    pool = Pool(2, "nccl" if torch.cuda.device_count() > 1 else "gloo", on_cuda=True)
    yield pool
    pool.close()


@EP_SIZE
@PASSES
def test_five_steps_in_ddp_equal_one_process(pair: Pool, ep_size: int, num_passes: int, recompute: bool) -> None:
    """Cases L01, L03, L04 and, by bias steps under accumulation and selective recompute, B01."""
    arguments = (ep_size, num_passes, recompute, "intranode")
    check_against_one_process(pair.run(train_in_ddp, 2, arguments, 100), RTOL)


@EP_SIZE
@PASSES
def test_five_steps_in_fsdp2_equal_one_process(pair: Pool, ep_size: int, num_passes: int, recompute: bool) -> None:
    """Cases L01, L03, L04 and, by bias steps under accumulation and selective recompute, B01."""
    arguments = (ep_size, num_passes, recompute, "intranode")
    check_against_one_process(pair.run(train_in_fsdp, 2, arguments, 100), RTOL)
