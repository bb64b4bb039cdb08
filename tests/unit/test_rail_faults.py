"""What is said of a wait between nodes that came to its limit: who, in which node, and in which hop."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from moe_ep.backends.device_faults import DeviceFaults
from moe_ep.backends.header import OPERATIONS
from moe_ep.errors import EPTimeoutError

# Eight ranks, two a node; this is the second one of the second node.
GROUP = tuple(range(10, 18))


def _sentence(phase: int, peer: int) -> str:
    values = [peer, phase, 6, 0x100000007, 0x100000005, OPERATIONS.index("combine"), 0, 0]
    exchange: Any = SimpleNamespace(has_fault=lambda: True, take_faults=lambda: [("timeout", values)])
    memory: Any = SimpleNamespace(
        exchange=exchange, ranks=GROUP[2:4], rank=1, group_ranks=GROUP, timeout_secs=4.0, generation=1
    )
    with pytest.raises(EPTimeoutError) as caught:
        DeviceFaults(memory).take()
    return str(caught.value)


@pytest.mark.parametrize(
    ("phase", "what"),
    [(5, "send its rows of a round"), (6, "take the rows of a round that this rank sent"), (7, "come to the call")],
)
def test_a_wait_between_nodes_names_the_rank_its_node_and_the_hop(phase: int, what: str) -> None:
    expected = (
        "combine on rank 13 of the EP group of ranks [10, 11, 12, 13, 14, 15, 16, 17] failed at its limit of 4 s: "
    )
    assert f"{expected}rank 17, of this rail in node 3, did not {what}" in _sentence(phase, 3)


def test_a_wait_inside_the_node_names_its_rank_alone() -> None:
    assert ": rank 12 did not publish its rows (" in _sentence(2, 0)
