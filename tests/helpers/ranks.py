"""Runs a function on W ranks: a pool of processes (gloo, or NCCL with a GPU each) that lives as long as the session.

Starting a process costs seconds, so the processes stay and every test borrows the first W of them. A test that passes
its time limit, or kills a rank, costs its pool: the next test gets a new one.
"""

from __future__ import annotations

import copy
import datetime
import io
import multiprocessing
import os
import pickle
import socket
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist

import moe_ep

WORLD_SIZES = (1, 2, 3, 4, 8)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class RankFailure(AssertionError):
    """A rank raised; the text holds every failed rank's traceback."""


class _Results(pickle.Pickler):
    """Tensors of a GPU arrive on the CPU: ranks on different GPUs can be compared, and the test needs no GPU itself."""

    def reducer_override(self, thing: object) -> Any:
        if isinstance(thing, torch.Tensor) and thing.is_cuda:
            return copy.copy, (thing.detach().cpu(),)
        return NotImplemented


def _pickled(result: object) -> bytes:
    target = io.BytesIO()
    _Results(target).dump(result)
    return target.getvalue()


def _serve(pipe: Connection, rank: int, size: int, port: int, backend: str, on_cuda: bool) -> None:
    torch.set_num_threads(1)
    if on_cuda:
        num_gpus = torch.cuda.device_count()
        torch.cuda.set_device(rank % num_gpus)
        # Together the ranks of a GPU must stay below its SMs, those of test files that run at the same time too: where
        # half of one exchange and half of another hold all SMs, both wait until their limit.
        num_sms = torch.cuda.get_device_properties(rank % num_gpus).multi_processor_count
        num_beside = size * int(os.environ.get("GPU_JOBS", "1"))
        moe_ep.Buffer.set_num_sms(max(1, min(12, (num_sms - 4) * num_gpus // num_beside)))
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    timeout = datetime.timedelta(seconds=60)
    dist.init_process_group(backend, init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=size, timeout=timeout)
    groups = {world: dist.new_group(list(range(world))) for world in sorted({*WORLD_SIZES, size}) if world <= size}
    while True:
        try:
            function, world, args = pickle.loads(pipe.recv_bytes())
        except EOFError:
            return
        try:
            torch.manual_seed(0)
            result, error = function(groups[world], *args), None
        except BaseException:  # the pool must survive whatever a test does, and report it
            result, error = None, traceback.format_exc()
        pipe.send_bytes(_pickled((result, error)))


class Pool:
    """`size` processes in one world; `on_cuda` ranks share the GPUs there are."""

    def __init__(self, size: int, backend: str = "gloo", on_cuda: bool = False) -> None:
        self.size, on_cuda = size, on_cuda or backend == "nccl"
        context = multiprocessing.get_context("spawn")
        port = free_port()
        self.pipes: list[Connection] = []
        self.processes = []
        for rank in range(size):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs, rank, size, port, backend, on_cuda), daemon=True)
            process.start()
            theirs.close()
            self.pipes.append(ours)
            self.processes.append(process)

    def run(self, function: Callable[..., Any], world: int, args: tuple[Any, ...], timeout_secs: float) -> list[Any]:
        job = pickle.dumps((function, world, args))
        for pipe in self.pipes[:world]:
            pipe.send_bytes(job)
        deadline = time.monotonic() + timeout_secs
        results, errors = [], []
        for rank, pipe in enumerate(self.pipes[:world]):
            if not pipe.poll(max(0.0, deadline - time.monotonic())):
                errors.append(f"rank {rank} did not end within {timeout_secs:g} s")
                continue
            try:
                result, error = pickle.loads(pipe.recv_bytes())
            except EOFError:
                result, error = None, "the process died"
            results.append(result)
            if error is not None:
                errors.append(f"rank {rank}:\n{error}")
        if errors:
            self.close()
            raise RankFailure("\n".join(errors))
        return results

    def close(self) -> None:
        for process in self.processes:
            process.kill()
        self.processes = []


class Pools:
    """The pool for a world size: one of 4 processes, one of 8 once a test asks for more, or as many as it asks for."""

    def __init__(self, on_cuda: bool = False) -> None:
        self._pools: dict[int, Pool] = {}
        self._on_cuda = on_cuda

    def run(self, function: Callable[..., Any], world: int, *args: Any, timeout_secs: float = 60.0) -> list[Any]:
        """`function(group, *args)` on ranks 0..world-1; their results in rank order.

        Raises:
            RankFailure: a rank raised or was too slow.
        """
        size = 4 if world <= 4 else max(8, world)
        pool = self._pools.get(size)
        if pool is None or not pool.processes:
            pool = self._pools[size] = Pool(size, on_cuda=self._on_cuda)
            timeout_secs += 60.0  # the processes have to start
        return pool.run(function, world, args, timeout_secs)

    def close(self) -> None:
        for pool in self._pools.values():
            pool.close()
