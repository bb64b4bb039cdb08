"""A rank that dies or stops in mid-call: the other one says who is missing, and its GPU goes on working.

Without MPS, under which a killed process takes its neighbours along.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

import moe_ep
from tests.distributed.test_timeouts import timed
from tests.gpu.busy import keep_busy
from tests.gpu.test_intranode_faults import BACKEND, GRACE_SECS, LIMIT_SECS, assert_usable, good_call
from tests.helpers.ranks import Pool, RankFailure
from tests.helpers.scale_experts import Setup, assert_works, open_buffer

pytestmark = [pytest.mark.gpu, pytest.mark.no_mps]


@pytest.fixture
def pair() -> Iterator[Pool]:
    pool = Pool(2, on_cuda=True)
    yield pool
    pool.close()


def _die(group: dist.ProcessGroup, when: str) -> None:
    """Rank 1 is killed with a combine in flight: before its kernel has begun, or when it waits for rank 0.

    In the second case its rows are published by then, so rank 0's combine is whole; the one behind it lacks rank 1.
    """
    buffer = open_buffer(group, BACKEND, timeout_secs=LIMIT_SECS)
    out = moe_ep.dispatch(buffer, **good_call())
    torch.cuda.synchronize()
    dist.barrier(group)
    if buffer.rank == 1:
        if when == "before its kernel":
            keep_busy(10_000)
        moe_ep.combine(buffer, out.x, out.handle)
        time.sleep(0.0 if when == "before its kernel" else 1.0)
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(2.0)
    if when == "while it waits":
        y = moe_ep.combine(buffer, out.x, out.handle)
        torch.cuda.synchronize()
        buffer.check()
        assert torch.equal(y, torch.full_like(y, 2.0))
    y = moe_ep.combine(buffer, out.x, out.handle)
    failed = timed(lambda: (torch.cuda.synchronize(), buffer.check()))
    assert failed.kind is moe_ep.EPTimeoutError, failed
    assert "rank 1 did not come to the call" in failed.text, failed.text
    assert failed.waited_secs < LIMIT_SECS + GRACE_SECS
    assert bool(y.isnan().all())
    began = time.monotonic()
    buffer.close()
    assert time.monotonic() - began < GRACE_SECS
    with open_buffer(None, BACKEND) as alone:  # type: ignore[arg-type]
        out = moe_ep.dispatch(alone, **good_call())
        y = moe_ep.combine(alone, out.x, out.handle)
        alone.check()
        assert torch.equal(y, torch.full_like(y, 2.0))


@pytest.mark.parametrize("when", ["before its kernel", "while it waits"])
def test_a_peer_killed_in_mid_call_is_named(pair: Pool, when: str) -> None:
    with pytest.raises(RankFailure) as failure:
        pair.run(_die, 2, (when,), 100)
    assert "rank 1:\nthe process died" in str(failure.value)
    assert "rank 0:" not in str(failure.value), str(failure.value)


def _stop(group: dist.ProcessGroup) -> None:
    """Rank 1 is stopped for longer than the limit; both reset when it goes on."""
    with open_buffer(group, BACKEND, timeout_secs=LIMIT_SECS) as buffer:
        out = moe_ep.dispatch(buffer, **good_call())
        torch.cuda.synchronize()
        dist.barrier(group)
        if buffer.rank == 1:
            wake = subprocess.Popen(["sh", "-c", f"sleep {LIMIT_SECS + 2}; kill -CONT {os.getpid()}"])
            os.kill(os.getpid(), signal.SIGSTOP)
            wake.wait()
        else:
            y = moe_ep.combine(buffer, out.x, out.handle)
            failed = timed(lambda: (torch.cuda.synchronize(), buffer.check()))
            assert failed.kind is moe_ep.EPTimeoutError, failed
            assert "rank 1 did not come to the call" in failed.text
            assert bool(y.isnan().all())
        buffer.reset()
        assert_usable(buffer, group)
        assert_works(buffer, group, Setup(BACKEND, "compact", 2))


def test_a_peer_that_is_stopped_is_named_and_takes_part_again_after_reset(pair: Pool) -> None:
    pair.run(_stop, 2, (), 100)
