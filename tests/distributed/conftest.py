from __future__ import annotations

import importlib.util
from collections.abc import Iterator

import pytest

from tests.ranks import Pools


@pytest.fixture(scope="session")
def megatron_ranks() -> Iterator[Pools]:
    """As `ranks`, in processes that only the Megatron tests use: they stand in for torch.cuda where there is no GPU."""
    if importlib.util.find_spec("megatron") is None:
        pytest.skip("Megatron-Core is not installed: pip install --no-deps 'megatron-core>=0.16,<0.17' tqdm packaging")
    pools = Pools()
    yield pools
    pools.close()
