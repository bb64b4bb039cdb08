"""Ranks as processes: started here, one a rank, or by torchrun; several may share a GPU.

NCCL refuses two ranks on one GPU, so the group is gloo then; where every rank has a GPU of its own it is both.
"""

from __future__ import annotations

import datetime
import multiprocessing
import os
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

GROUP_SECS = 300  # other ranks wait this long for one that, say, measures the ceiling
POLL_SECS = 0.1


@dataclass(frozen=True)
class World:
    """This rank, and what it runs on."""

    rank: int
    size: int
    device: torch.device
    gpus: int  # GPUs that the ranks use; 0 on CPU
    has_nccl: bool

    @property
    def group(self) -> dist.ProcessGroup:
        group = dist.group.WORLD
        assert group is not None
        return group

    def meet(self) -> None:
        """A barrier of the hosts."""
        dist.all_reduce(torch.zeros(1), group=self.group)

    def slowest(self, values: list[float]) -> list[float]:
        """The largest of each value over the ranks."""
        most = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(most, op=dist.ReduceOp.MAX, group=self.group)
        return [float(value) for value in most]

    def agree(self, value: bool) -> bool:
        """What rank 0 says."""
        said = torch.tensor([int(value)])
        dist.broadcast(said, src=0, group=self.group)
        return bool(said)


def under_torchrun() -> bool:
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def _join(rank: int, size: int, device: str, init_method: str) -> World:
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    num_gpus = min(size, torch.cuda.device_count()) if device == "cuda" else 0
    has_nccl = num_gpus == size and dist.is_nccl_available()
    place = torch.device("cpu")
    if device == "cuda":
        local = int(os.environ.get("LOCAL_RANK", rank)) if under_torchrun() else rank
        place = torch.device("cuda", local % num_gpus)
        torch.cuda.set_device(place)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if has_nccl else "gloo",
        init_method=init_method,
        rank=rank,
        world_size=size,
        timeout=datetime.timedelta(seconds=GROUP_SECS),
    )
    return World(rank, size, place, num_gpus, has_nccl)


def _serve(
    rank: int, size: int, device: str, init_method: str, function: Callable[..., None], args: tuple[Any, ...]
) -> None:
    world = _join(rank, size, device, init_method)
    function(world, *args)
    world.meet()
    dist.destroy_process_group()


def run(function: Callable[..., None], size: int, device: str, *args: Any) -> None:
    """`function(world, *args)` on every rank. Under torchrun this process is one of them and `size` is not used.

    Raises:
        SystemExit: there is no such device, or a rank failed; then the others are ended.
    """
    if device == "cuda" and not torch.cuda.is_available():
        raise SystemExit("--device cuda was given, but PyTorch finds no CUDA device; use --device cpu.")
    if under_torchrun():
        _serve(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), device, "env://", function, args)
        return
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        init_method = f"tcp://127.0.0.1:{probe.getsockname()[1]}"
    context = multiprocessing.get_context("spawn")
    ranks = [
        context.Process(target=_serve, args=(rank, size, device, init_method, function, args)) for rank in range(size)
    ]
    for process in ranks:
        process.start()
    while any(process.is_alive() for process in ranks) and not any(process.exitcode for process in ranks):
        time.sleep(POLL_SECS)
    failed = {rank: process.exitcode for rank, process in enumerate(ranks) if process.exitcode}
    for process in ranks:
        if failed and process.is_alive():
            process.join(timeout=5)  # it may be about to say why it fails too
            process.kill()
        process.join()
    if failed:
        print(f"ranks failed, with these exit codes: {failed}", file=sys.stderr)
        raise SystemExit(1)
