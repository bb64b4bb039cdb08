"""Ranks over gloo find their nodes together, and refuse together."""

from __future__ import annotations

from unittest import mock

import pytest
import torch.distributed as dist

from moe_ep.backends import discovery
from moe_ep.errors import ConfigError
from tests.helpers.ranks import Pools


def _found(group: dist.ProcessGroup, hosts: str, asked: list[int | None]) -> tuple[int, int] | str:
    """(nodes, ranks a node), or the sentence; this rank runs on the machine that its letter of `hosts` names."""
    rank = dist.get_rank(group)
    with (
        mock.patch.object(discovery, "host_id", return_value=f"boot-{hosts[rank]}"),
        mock.patch("socket.gethostname", return_value=f"node-{hosts[rank]}"),
    ):
        try:
            topology = discovery.discover(group, asked[rank], timeout_secs=20)
        except ConfigError as error:
            return str(error)
    return topology.num_nodes, topology.ranks_per_node


@pytest.mark.parametrize(
    ("hosts", "asked", "found"),
    [("a", None, (1, 1)), ("aabb", None, (2, 2)), ("abc", None, (3, 1)), ("aaaa", 1, (4, 1)), ("aaaa", 2, (2, 2))],
)
def test_all_ranks_find_the_same_nodes(ranks: Pools, hosts: str, asked: int | None, found: tuple[int, int]) -> None:
    world = len(hosts)
    assert ranks.run(_found, world, hosts, [asked] * world) == [found] * world


@pytest.mark.parametrize(
    ("hosts", "asked", "words"),
    [
        ("aaab", [None] * 4, "node-a has 3 and node-b has 1"),
        ("abab", [None] * 4, "do not stand one after the other"),
        ("aabb", [2, 2, 2, 4], "2 on EP rank 0 and 4 on EP rank 3"),
        ("abc", [2] * 3, "ranks_per_node is 2, but the EP group has 3 ranks"),
    ],
)
def test_all_ranks_refuse_with_one_sentence(ranks: Pools, hosts: str, asked: list[int | None], words: str) -> None:
    sentences = ranks.run(_found, len(hosts), hosts, asked)
    assert len(set(sentences)) == 1
    assert words in sentences[0]
