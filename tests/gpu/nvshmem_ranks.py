"""Ranks that NVSHMEM can begin in: a process each, which can begin it once."""

from __future__ import annotations

import importlib.util

import pytest

from tests.helpers.ranks import Pool


def nvshmem_pool(size: int) -> Pool:
    """`size` ranks on the GPUs at hand, several on one where there are fewer; skips where NVSHMEM or its extension is
    missing."""
    for name in ("nvshmem", "cuda"):
        if importlib.util.find_spec(name) is None:
            pytest.skip(f"needs NVSHMEM for Python (nvshmem4py-cu13), and {name} is missing")
    if importlib.util.find_spec("moe_ep._C_nvshmem") is None:
        pytest.skip("needs moe_ep._C_nvshmem, which this install was made without: build it where the wheel is")
    return Pool(size, on_cuda=True)
