"""Ranks that may die: worlds of fresh processes that run a function, and what came of every process.

`run_worlds` starts one launcher. It imports torch once and forks the ranks of all worlds, so
that many worlds can wait for their time limits side by side. A rank leaves through the ordinary end of the interpreter,
unless the function ends it. Whoever is not gone at the deadline is killed and counts as stuck.
"""

from __future__ import annotations

import datetime
import gc
import os
import pickle
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

ROOT = Path(__file__).resolve().parents[2]
START_SECS = 60.0  # for all ranks to import, fork and meet
POLL_SECS = 0.005


@dataclass(frozen=True)
class World:
    """`function(Rank, *args)` on `size` fresh ranks of a world of their own; rank 0 keeps the store.

    Args:
        name: of the world in `run_worlds`' answer.
        function: a function at the top of a module, so that the launcher finds it by name.
        size: number of ranks.
        args: more arguments of the function.
    """

    name: str
    function: Callable[..., None]
    size: int = 2
    args: tuple[Any, ...] = ()


@dataclass(frozen=True)
class Rank:
    """What the function of a world learns about its process."""

    rank: int
    size: int
    folder: Path

    @property
    def group(self) -> dist.ProcessGroup:
        """All ranks of the world."""
        assert dist.group.WORLD is not None
        return dist.group.WORLD

    def fault_happens(self) -> None:
        """Starts the clock of `Ended`; the rank at fault calls it."""
        (self.folder / "fault").write_text(str(time.time()))

    @contextmanager
    def noting_errors(self) -> Iterator[None]:
        """Stops the clock of `Ended.raised_secs` when an exception passes."""
        try:
            yield
        except Exception:
            (self.folder / f"{self.rank}.raised").write_text(str(time.time()))
            raise


@dataclass(frozen=True)
class Ended:
    """How a process ended.

    Attributes:
        code: exit code; negative for a signal.
        text: what it printed.
        stuck: it had to be killed.
        raised_secs, secs: from the fault to its error and to its end; None where there was none.
    """

    code: int
    text: str
    stuck: bool
    raised_secs: float | None
    secs: float | None

    @property
    def last_line(self) -> str:
        lines = self.text.strip().splitlines()
        return lines[-1] if lines else ""


def run_worlds(worlds: Sequence[World], limit_secs: float = 60.0, num_at_once: int = 8) -> dict[str, list[Ended]]:
    """The end of every rank, by the name of its world, in rank order.

    Args:
        worlds: what to run; their names differ.
        limit_secs: after it a rank that still runs is killed.
        num_at_once: worlds that run side by side.
    """
    batches = [worlds[start : start + num_at_once] for start in range(0, len(worlds), num_at_once)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    with tempfile.TemporaryDirectory() as scratch:
        launcher = subprocess.run(
            [sys.executable, "-c", "from tests.helpers import faults; faults.launch()"],
            input=pickle.dumps((batches, limit_secs, Path(scratch))),
            capture_output=True,
            cwd=ROOT,
            env=environment,
            timeout=limit_secs * len(batches) + START_SECS,
            check=False,
        )
    assert launcher.returncode == 0, launcher.stderr.decode()
    answer: dict[str, list[Ended]] = pickle.loads(launcher.stdout)
    return answer


# -- in the launcher --------------------------------------------------------------------------------------------------


def launch() -> None:
    """Reads worlds from stdin, forks their ranks, and writes to stdout how they ended."""
    batches, limit_secs, scratch = pickle.loads(sys.stdin.buffer.read())
    gc.freeze()  # what was imported stays shared: a fork that collects it at its end copies all of its memory first
    results: dict[str, list[Ended]] = {}
    for worlds in batches:
        results |= _run_batch(worlds, limit_secs, scratch)
    sys.stdout.buffer.write(pickle.dumps(results))


def _run_batch(worlds: Sequence[World], limit_secs: float, scratch: Path) -> dict[str, list[Ended]]:
    places: dict[int, tuple[str, int]] = {}  # by process
    for world in worlds:
        (scratch / world.name).mkdir()
        with socket.create_server(("127.0.0.1", 0), backlog=64) as listener:
            for rank in range(world.size):
                pid = os.fork()
                if pid == 0:
                    _be_rank(world, rank, scratch / world.name, listener)
                places[pid] = (world.name, rank)
    ended_at, codes, stuck = _wait(places, time.monotonic() + limit_secs)
    results: dict[str, list[Ended]] = {world.name: [] for world in worlds}
    for pid, (name, rank) in places.items():
        fault, raised = _time_in(scratch / name / "fault"), _time_in(scratch / name / f"{rank}.raised")
        results[name].append(
            Ended(
                code=codes[pid],
                text=(scratch / name / f"{rank}.log").read_text(),
                stuck=pid in stuck,
                raised_secs=None if fault is None or raised is None else raised - fault,
                secs=None if fault is None else ended_at[pid] - fault,
            )
        )
    return results


def _time_in(file: Path) -> float | None:
    return float(file.read_text()) if file.exists() else None


def _wait(places: dict[int, tuple[str, int]], deadline: float) -> tuple[dict[int, float], dict[int, int], set[int]]:
    """Of every process: when it ended, its exit code; and those that had to be killed."""
    ended_at: dict[int, float] = {}
    codes: dict[int, int] = {}
    stopped: set[int] = set()
    stuck: set[int] = set()
    while len(codes) < len(places):
        pid, status = os.waitpid(-1, os.WNOHANG | os.WUNTRACED)
        if pid and os.WIFSTOPPED(status):
            stopped.add(pid)
        elif pid:
            ended_at[pid], codes[pid] = time.time(), os.waitstatus_to_exitcode(status)
        else:
            living = places.keys() - codes.keys()
            for sleeper in stopped & living:
                # A rank that stopped goes on when it is the last of its world, to see what it says then.
                if all(places[other][0] != places[sleeper][0] or other == sleeper for other in living):
                    os.kill(sleeper, signal.SIGCONT)
                    stopped.discard(sleeper)
            if time.monotonic() > deadline:
                stuck |= living
                for late in living:
                    os.kill(late, signal.SIGKILL)
                deadline = float("inf")
            time.sleep(POLL_SECS)
    return ended_at, codes, stuck


def _be_rank(world: World, rank: int, folder: Path, listener: socket.socket) -> None:
    """The life of a rank; ends the process."""
    log = os.open(folder / f"{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    torch.set_num_threads(1)
    port = listener.getsockname()[1]
    # The listener goes to the store of rank 0; a copy elsewhere would keep the port open when rank 0 is dead.
    master = listener.detach() if rank == 0 else listener.close()
    store = dist.TCPStore(
        "127.0.0.1", port, world.size, is_master=rank == 0, wait_for_workers=False, master_listen_fd=master
    )
    timeout = datetime.timedelta(seconds=START_SECS)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world.size, timeout=timeout)
    world.function(Rank(rank, world.size, folder), *world.args)
    sys.exit(0)
