"""Ranks on the GPUs at hand for all tests of this folder; without a GPU those marked gpu are skipped."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

from tests.helpers.ranks import Pools

_SAID = pytest.StashKey[list[str]]()


@pytest.fixture(scope="session")
def say(pytestconfig: pytest.Config) -> Callable[[str], None]:
    """Takes lines that are printed once, behind the tests: what they ran on."""
    return pytestconfig.stash.setdefault(_SAID, []).append


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    for line in dict.fromkeys(config.stash.get(_SAID, [])):
        terminalreporter.write_line(line)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs a CUDA GPU, and PyTorch finds none"))


@pytest.fixture(scope="session")
def ranks() -> Iterator[Pools]:
    """Runs a module-level function on W gloo ranks that share the GPUs: `ranks.run(function, world, *args)`."""
    pools = Pools(on_cuda=True)
    yield pools
    pools.close()
