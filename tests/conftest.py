from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from hypothesis import settings

from tests.helpers.ranks import Pools

# In CI the same examples every time, and no limit on one of them: a loaded machine is slow. At home new ones each run.
settings.register_profile("ci", derandomize=True, database=None, deadline=None)
if os.environ.get("CI"):
    settings.load_profile("ci")


@pytest.fixture(scope="session")
def ranks() -> Iterator[Pools]:
    """Runs a module-level function on W gloo ranks: `ranks.run(function, world, *args)`."""
    pools = Pools()
    yield pools
    pools.close()
