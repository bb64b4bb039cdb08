"""Ranks that NVSHMEM can begin in: a process each, which can begin it once."""

from __future__ import annotations

import pytest

from moe_ep.backends.nvshmem_world import why_no_nvshmem
from tests.helpers.ranks import Pool


def nvshmem_pool(size: int) -> Pool:
    """`size` ranks on the GPUs at hand, several on one where there are fewer; skips where NVSHMEM or its extension is
    missing."""
    obstacle = why_no_nvshmem()
    if obstacle:
        pytest.skip(f"needs NVSHMEM: {obstacle}")
    return Pool(size, on_cuda=True)
