"""The processes of a run: who they are, on which device, and which of them share or replicate experts."""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import timedelta
from typing import Literal

import torch
import torch.distributed as dist

from moe_ep import ConfigError


@dataclass(frozen=True)
class Ranks:
    """This process among all.

    Attributes:
        rank, num_ranks: place in the world, and its size.
        device: where this rank computes.
        world: all ranks; None for a process that was started alone.
        ep_group: the ranks that share the experts with this one; None where this rank holds all of them.
        expert_group: the ranks that hold the same experts as this one; None where nobody else does.
    """

    rank: int
    num_ranks: int
    device: torch.device
    world: dist.ProcessGroup | None
    ep_group: dist.ProcessGroup | None
    expert_group: dist.ProcessGroup | None

    def barrier(self) -> None:
        """Waits for all ranks."""
        if self.world is not None:
            dist.barrier(self.world)

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sums `tensor` in place over all ranks and returns it."""
        if self.world is not None:
            dist.all_reduce(tensor, group=self.world)
        return tensor


def world_size() -> int:
    """The number of ranks that the launcher announced; 1 without a launcher."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def choose_device(setting: Literal["auto", "cpu", "cuda"]) -> torch.device:
    """The device of this rank: its own GPU, or the CPU.

    Raises:
        ConfigError: a GPU was asked for and there is none for this rank.
    """
    if setting == "cpu" or (setting == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if local_rank >= num_gpus:
        raise ConfigError(
            f"train.device is {setting}, but rank {local_rank} of this machine finds {num_gpus} GPUs; start at most "
            "one rank per GPU, or set train.device to cpu."
        )
    return torch.device("cuda", local_rank)


def start_ranks(device: torch.device, ep_size: int | Literal["auto"], timeout_secs: float) -> Ranks:
    """Joins the process group if a launcher started this process, and makes the groups of a smaller EP size.

    Ranks [i * ep_size, (i + 1) * ep_size) share the experts; every ep_size-th rank holds the same ones.
    """
    num_ranks = world_size()
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if "WORLD_SIZE" not in os.environ:
        return Ranks(0, 1, device, None, None, None)
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, timeout=timedelta(seconds=timeout_secs))
    rank, world = dist.get_rank(), dist.group.WORLD
    size = num_ranks if ep_size == "auto" else ep_size
    if size == num_ranks:
        return Ranks(rank, num_ranks, device, world, world, None)
    ep_groups = [dist.new_group(list(range(first, first + size))) for first in range(0, num_ranks, size)]
    expert_groups = [dist.new_group(list(range(place, num_ranks, size))) for place in range(size)]
    return Ranks(rank, num_ranks, device, world, ep_groups[rank // size], expert_groups[rank % size])


def stop_ranks(ranks: Ranks) -> None:
    """Leaves the process group, after a run that went well."""
    if ranks.world is not None:
        dist.destroy_process_group()
