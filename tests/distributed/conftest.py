from __future__ import annotations

import importlib.util
from collections.abc import Iterator

import pytest

from tests.helpers.ranks import Pools


@pytest.fixture(scope="module")
def megatron_ranks() -> Iterator[Pools]:
    """As `ranks`, in processes that only the Megatron tests use: they stand in for torch.cuda where there is no GPU.

    They end with the module, because Megatron never gives its groups back: each is a thread of gloo that wakes a
    hundred times a second, and after all cases there are a thousand in a process.
    """
    if importlib.util.find_spec("megatron") is None:
        pytest.skip("Megatron-Core is not installed: pip install --no-deps 'megatron-core>=0.16,<0.17' tqdm packaging")
    pools = Pools()
    yield pools
    pools.close()
