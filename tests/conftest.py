from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.ranks import Pools


@pytest.fixture(scope="session")
def ranks() -> Iterator[Pools]:
    """Runs a module-level function on W gloo ranks: `ranks.run(function, world, *args)`."""
    pools = Pools()
    yield pools
    pools.close()
