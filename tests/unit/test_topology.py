"""Nodes come from hosts or from `ranks_per_node`; what does not come out even is one sentence, alike on all ranks."""

from __future__ import annotations

import pytest

from moe_ep.errors import ConfigError
from moe_ep.topology import RankFacts, Topology, topology_of


def facts(hosts: str, *asked: int | None) -> list[RankFacts]:
    """A rank for each letter of `hosts`, which names its machine."""
    wishes = asked * len(hosts) if len(asked) == 1 else asked or (None,) * len(hosts)
    return [RankFacts(f"boot-{host}", f"node-{host}", wish) for host, wish in zip(hosts, wishes, strict=True)]


@pytest.mark.parametrize(
    ("hosts", "ranks_per_node"), [("a", 1), ("aaaa", 4), ("aabb", 2), ("aaabbbccc", 3), ("abc", 1)]
)
def test_without_a_wish_a_node_is_a_host(hosts: str, ranks_per_node: int) -> None:
    assert topology_of(facts(hosts)) == Topology(len(hosts), ranks_per_node)


@pytest.mark.parametrize(("hosts", "asked"), [("aaaa", 1), ("aaaa", 2), ("abab", 2), ("aaab", 4), ("aaabbb", 2)])
def test_a_wish_overrides_the_hosts(hosts: str, asked: int) -> None:
    assert topology_of(facts(hosts, asked)) == Topology(len(hosts), asked)


@pytest.mark.parametrize(
    ("hosts", "asked", "sentence"),
    [
        ("aaab", (), "unequal numbers of EP ranks: node-a has 3 and node-b has 1. Start as many on each"),
        ("abbbcc", (), "node-b has 3 and node-a has 1"),
        ("abab", (), r"do not stand one after the other \(node-a: 0, node-b: 1, node-a: 2, node-b: 3\)"),
        ("aabbaa", (), r"\(node-a: 0-1, node-b: 2-3, node-a: 4-5\); number the ranks host by host"),
        ("aabb", (3,), "ranks_per_node is 3, but the EP group has 4 ranks; give a divisor of 4"),
        ("aabb", (0,), "ranks_per_node is 0"),
        ("aabb", (-2,), "ranks_per_node is -2"),
        ("aabb", (2, 2, 1, 2), "ranks_per_node is 2 on EP rank 0 and 1 on EP rank 2; give every rank the same"),
        ("ab", (1, None), "1 on EP rank 0 and None on EP rank 1"),
    ],
)
def test_what_does_not_come_out_even_is_refused(hosts: str, asked: tuple[int | None, ...], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        topology_of(facts(hosts, *asked))


@pytest.mark.parametrize(("world", "ranks_per_node"), [(1, 1), (6, 3), (6, 1), (6, 6), (8, 2)])
def test_every_rank_has_one_node_and_one_rail(world: int, ranks_per_node: int) -> None:
    topology = Topology(world, ranks_per_node)
    places = [(topology.node_of(rank), topology.rail_of(rank)) for rank in range(world)]
    assert sorted(places) == places
    assert [topology.rank_at(*place) for place in places] == list(range(world))
    assert [rank for node in range(topology.num_nodes) for rank in topology.ranks_of(node)] == list(range(world))
