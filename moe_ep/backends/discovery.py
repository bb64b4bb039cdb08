"""How the ranks of a group find out which of them share a node."""

from __future__ import annotations

import json
import socket
from dataclasses import asdict

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from moe_ep.backends.meeting import meet
from moe_ep.backends.node_memory import Gathering, host_id
from moe_ep.topology import RankFacts, Topology, topology_of


def discover(group: dist.ProcessGroup | None, ranks_per_node: int | None, timeout_secs: float) -> Topology:
    """The topology of `group`, by its hosts or by `ranks_per_node`. Collective over the group.

    Raises:
        ConfigError: the same sentence on every rank, where `topology_of` refuses.
        EPTimeoutError: a rank did not come within the limit.
    """
    facts = RankFacts(host_id(), socket.gethostname(), ranks_per_node)
    if group is None or dist.get_world_size(group) == 1:
        return topology_of([facts])
    ranks, rank = dist.get_process_group_ranks(group), dist.get_rank(group)
    base = c10d.PrefixStore("moe_ep/topology/" + "-".join(map(str, ranks)), c10d._get_default_store())
    number = meet(base, ranks, rank, timeout_secs)
    gathering = Gathering(c10d.PrefixStore(str(number), base), ranks, rank)
    texts = gathering.all("topology", json.dumps(asdict(facts)), timeout_secs)
    return topology_of([RankFacts(**json.loads(text)) for text in texts])
