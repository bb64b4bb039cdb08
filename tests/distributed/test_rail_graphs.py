"""Calls between nodes that a CUDA graph captures: it reads their memory at every replay, whichever kernels run."""

from __future__ import annotations

import gc
import weakref
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import moe_ep
from tests.helpers.played_kernels import played
from tests.helpers.ranks import Pools

ROOMY = 1 << 16  # bytes of a rail
CALLS = ["combine", "dispatch", "weights' gradient"]


def _call(buffer: moe_ep.Buffer, call: str, handle: Any, rows: torch.Tensor, x: torch.Tensor) -> None:
    if call == "combine":  # straight: no kernel inside the node runs
        buffer.backend.open_combine(handle, rows, None, exact=False, needs_grad=False)
        buffer.backend.combine(handle, rows, None, False)
    elif call == "dispatch":
        buffer.backend.open_dispatch(handle, x)
        buffer.backend.dispatch(handle, x)
    else:
        buffer.backend.dispatch_backward(handle, rows, torch.ones(rows.shape[0], handle.num_topk))


def _captured(group: dist.ProcessGroup, call: str) -> tuple[int, bool]:
    """How often a reset behind a captured call waits for the whole device; whether what the graph reads is kept where
    the handle's routes are worked out anew.
    """
    world = dist.get_world_size(group)
    with played(group, 1, ROOMY), moe_ep.Buffer(group, backend="internode", hop="ipc", ranks_per_node=1) as buffer:
        x = torch.randn(12, 8, requires_grad=True)
        weights = torch.rand(12, 2, requires_grad=True)
        idx = torch.arange(24).view(12, 2) % world
        out = moe_ep.dispatch(buffer, x, idx, weights, num_experts=world, layout="compact")
        rows = out.x.detach()
        with torch.no_grad():
            _call(buffer, call, out.handle, rows, x)  # outside first, as a capture wants it
            with mock.patch.object(torch.cuda, "is_current_stream_capturing", return_value=True):
                _call(buffer, call, out.handle, rows, x)
        with mock.patch.object(torch.cuda, "synchronize") as synchronize:
            buffer.reset()
        prepared = out.handle.prepared
        read = [weakref.ref(routes) for routes in prepared["internode/rounds"]]
        if call == "weights' gradient":
            read.append(weakref.ref(prepared["internode/not-here"]))
        prepared.clear()
        with torch.no_grad():
            _call(buffer, call, out.handle, rows, x)
        gc.collect()
        return synchronize.call_count, all(one() is not None for one in read)


@pytest.mark.parametrize("call", CALLS)
def test_a_captured_call_is_waited_for_and_what_it_reads_is_kept(ranks: Pools, call: str) -> None:
    for num_waits, is_kept in ranks.run(_captured, 2, call):
        assert num_waits > 0
        assert is_kept
