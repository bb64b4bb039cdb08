"""Ranks that NVSHMEM can begin in: a process each, which can begin it once."""

from __future__ import annotations

import importlib.util

import pytest
import torch

from tests.helpers.ranks import Pool


def nvshmem_pool() -> Pool:
    """Two ranks, one on each GPU; skips the test where NVSHMEM, its extension or a GPU is missing."""
    for name in ("nvshmem", "cuda"):
        if importlib.util.find_spec(name) is None:
            pytest.skip(f"needs NVSHMEM for Python (nvshmem4py-cu13), and {name} is missing")
    if importlib.util.find_spec("moe_ep._C_nvshmem") is None:
        pytest.skip("needs moe_ep._C_nvshmem, which this install was made without: build it where the wheel is")
    if torch.cuda.device_count() < 2:
        pytest.skip(f"needs a GPU for each of two ranks, and there is {torch.cuda.device_count()}")
    return Pool(2, on_cuda=True)
