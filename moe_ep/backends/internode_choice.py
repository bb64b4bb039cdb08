"""What carries the rows of backend `internode`: its kernels, with one hop or the other, or torch.distributed."""

from __future__ import annotations

import warnings
from typing import get_args

import torch.distributed as dist

from moe_ep._native import load
from moe_ep.backends.discovery import discover
from moe_ep.backends.internode import InternodeBackend
from moe_ep.backends.internode_kernels import InternodeKernelsBackend
from moe_ep.backends.node_memory import why_unavailable
from moe_ep.backends.nvshmem_world import why_no_nvshmem
from moe_ep.backends.rail_memory import Hop
from moe_ep.errors import ConfigError
from moe_ep.topology import HopChoice, Topology


def make_internode(
    group: dist.ProcessGroup | None, timeout_secs: float, ranks_per_node: int | None, hop: str
) -> InternodeBackend:
    """The backend between nodes. Collective over the group.

    Args:
        group: the EP group, or None for a single rank.
        timeout_secs: limit of every wait.
        ranks_per_node: ranks that make a node, one after the other; None: those on one host.
        hop: what carries rows between nodes. "auto": on a group for CUDA the kernels, over CUDA IPC where all ranks are
            on one host and over NVSHMEM otherwise, or torch.distributed with a warning where they cannot run; on any
            other group torch.distributed.

    Raises:
        ConfigError: nodes of unequal size, a hop that is none or cannot run; the same sentence on every rank.
        EPTimeoutError: a rank did not come.
    """
    if hop not in get_args(HopChoice):
        raise ConfigError(f"hop is {hop!r}; it must be one of {', '.join(get_args(HopChoice))}.")
    topology = discover(group, ranks_per_node, timeout_secs)
    if hop == "torch" or (hop == "auto" and not moves_cuda(group)):
        return InternodeBackend(group, timeout_secs, topology)
    carrier: Hop = "ipc" if hop == "ipc" or (hop == "auto" and topology.is_one_host) else "nvshmem"
    obstacle = _obstacle(group, timeout_secs, topology, carrier)
    if obstacle is None:
        return InternodeKernelsBackend(group, timeout_secs, topology, carrier)
    if hop != "auto":
        raise ConfigError(f"hop is {hop!r}, but {obstacle}; use hop='torch', or 'auto'.")
    warnings.warn(f"backend internode runs on torch.distributed, not on its kernels: {obstacle}.", stacklevel=4)
    return InternodeBackend(group, timeout_secs, topology)


def moves_cuda(group: dist.ProcessGroup | None) -> bool:
    """Whether the group is made for CUDA tensors, which all its ranks see alike."""
    return group is not None and dist.get_world_size(group) > 1 and "nccl" in str(dist.get_backend_config(group))


def _obstacle(group: dist.ProcessGroup | None, timeout_secs: float, topology: Topology, carrier: Hop) -> str | None:
    """Why the kernels cannot run, the same sentence on every rank; None if they can."""
    rank = 0 if group is None else dist.get_rank(group)
    reads = list(topology.ranks_of(topology.node_of(rank)))
    kernels = load()
    obstacle = ""
    if kernels is not None and len(reads) > kernels.max_ranks:
        obstacle = f"a node has {len(reads)} ranks, more than {kernels.max_ranks}"
    if carrier == "ipc":
        reads = list(range(topology.world_size))  # a rail is one rank a node, low latency goes to all
    elif topology.num_nodes > 1:
        obstacle = obstacle or why_no_nvshmem()
    return why_unavailable(group, timeout_secs, reads, obstacle)
