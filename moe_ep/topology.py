"""Which ranks share a node, and which form a rail.

A node is the ranks that reach one another directly; unless told otherwise, the ranks on one host. A rail is the ranks
with the same index inside their nodes: only they talk to each other between nodes. Ranks here are places in the EP
group. The ranks of a node stand one after the other, so that ascending ranks are ascending nodes too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Literal

from moe_ep.errors import ConfigError

HopChoice = Literal["auto", "torch", "ipc", "nvshmem"]  # what carries rows between nodes


@dataclass(frozen=True)
class RankFacts:
    """What a rank tells the others of itself.

    Attributes:
        host: names its machine as long as that runs.
        hostname: of the machine, for sentences.
        ranks_per_node: what its caller asked for, or None.
    """

    host: str
    hostname: str
    ranks_per_node: int | None


@dataclass(frozen=True)
class Topology:
    """Nodes of equal size, in rank order.

    Example: W = 6 ranks, 3 a node: the nodes are ranks 0-2 and 3-5, the rails (0, 3), (1, 4) and (2, 5).

    Attributes:
        world_size: W.
        ranks_per_node: a divisor of W.
        is_one_host: whether all ranks are on one machine, nodes or not.
    """

    world_size: int
    ranks_per_node: int
    is_one_host: bool = field(default=True, compare=False)

    @property
    def num_nodes(self) -> int:
        return self.world_size // self.ranks_per_node

    def node_of(self, rank: int) -> int:
        return rank // self.ranks_per_node

    def rail_of(self, rank: int) -> int:
        """The rank's index inside its node."""
        return rank % self.ranks_per_node

    def rank_at(self, node: int, rail: int) -> int:
        return node * self.ranks_per_node + rail

    def ranks_of(self, node: int) -> range:
        """Ascending."""
        return range(self.rank_at(node, 0), self.rank_at(node + 1, 0))


def topology_of(facts: Sequence[RankFacts]) -> Topology:
    """The topology of a group; the same answer, or the same sentence, wherever it is worked out.

    Args:
        facts: of all ranks, in rank order.

    Raises:
        ConfigError: ranks ask for different things, or for nodes that do not come out even; nobody asks and the hosts
            hold unequal numbers of ranks, or the ranks of a host do not stand together.
    """
    world, asked = len(facts), facts[0].ranks_per_node
    other = next((rank for rank, fact in enumerate(facts) if fact.ranks_per_node != asked), None)
    if other is not None:
        raise ConfigError(
            f"ranks_per_node is {asked} on EP rank 0 and {facts[other].ranks_per_node} on EP rank {other}; give every "
            "rank the same number, or none."
        )
    is_one_host = len({fact.host for fact in facts}) == 1
    if asked is None:
        return Topology(world, _ranks_per_host(facts), is_one_host)
    if asked < 1 or world % asked:
        raise ConfigError(
            f"ranks_per_node is {asked}, but the EP group has {world} ranks; give a divisor of {world}, or leave it "
            "out to go by hosts."
        )
    return Topology(world, asked, is_one_host)


def _ranks_per_host(facts: Sequence[RankFacts]) -> int:
    runs = [list(run) for _, run in groupby(range(len(facts)), key=lambda rank: facts[rank].host)]
    if len(runs) != len({fact.host for fact in facts}):
        shown = ", ".join(f"{facts[run[0]].hostname}: {_span(run)}" for run in runs[:8])
        raise ConfigError(
            f"the EP ranks of a host do not stand one after the other ({shown}{', ...' if runs[8:] else ''}); number "
            "the ranks host by host (Slurm: --distribution=block), or use backend='torch'."
        )
    sizes = [len(run) for run in runs]
    least, most = sizes.index(min(sizes)), sizes.index(max(sizes))
    if sizes[least] != sizes[most]:
        raise ConfigError(
            f"the hosts hold unequal numbers of EP ranks: {facts[runs[most][0]].hostname} has {sizes[most]} and "
            f"{facts[runs[least][0]].hostname} has {sizes[least]}. Start as many on each, or give ranks_per_node (a "
            "number that divides both, 1 always does), or use backend='torch'."
        )
    return sizes[0]


def _span(run: Sequence[int]) -> str:
    return str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}"
