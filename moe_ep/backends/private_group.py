"""The library's own collectives on an EP group, with a limit on every wait.

A `torch.distributed` group is dead after one timeout, so the library never risks the caller's: it opens a private
one over the same ranks and can open the next after a failure. The private group is built straight on the store, not
with `new_group`: that derives the name of a group from its ranks and the groups now alive, so two ranks that close
their buffers at different moments would wait for each other under different names.
"""

from __future__ import annotations

import ctypes
import os
import time
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d as c10d

from moe_ep.backends.meeting import STORE_KEEPER, STORE_SECS, meet, meet_survivors, name_ranks, within
from moe_ep.errors import EPTimeoutError

_TEXT_BYTES = 2048  # of an error sentence that travels to the other ranks
_BLAME_SECS = 2.0  # how long a rank that timed out waits to hear which others did
_WATCHDOG_SECS = 60.0  # NCCL's own limit lies this far behind ours: its watchdog ends the process, we raise


class PrivateGroup:
    """All-to-all, all-reduce and text exchange over the ranks of one process group.

    Args:
        group: the caller's group, of at least two ranks.
        timeout_secs: limit of every wait. Past it, or when a connection breaks, `EPTimeoutError` is raised, and
            every later call raises it at once until `reopen`.
        on_host: go through the host, also with tensors of a GPU, whatever the caller's group carries.
    """

    def __init__(self, group: dist.ProcessGroup, timeout_secs: float, on_host: bool = False) -> None:
        self.ranks = tuple(dist.get_process_group_ranks(group))
        self.rank = dist.get_rank(group)
        self.generation = 0
        self.timeout_secs = timeout_secs
        self.uses_cuda = not on_host and "nccl" in str(dist.get_backend_config(group))
        self._dead: str | None = None
        self._closed: str | None = None
        self._num_calls = 0
        self.members = tuple(range(len(self.ranks)))  # places of the ranks that take part
        self._num_shrinks = 0
        name = "moe_ep/" + "-".join(str(rank) for rank in self.ranks)
        store = c10d.PrefixStore(name, c10d._get_default_store())
        self._store = c10d.PrefixStore(str(meet(store, self.ranks, self.rank, timeout_secs)), store)
        self._group = self._open(self._era())
        itself = weakref.ref(self)  # Python keeps what is registered for ever; this keeps no group alive
        os.register_at_fork(after_in_child=lambda: _leave_to_parent(itself()))

    @property
    def size(self) -> int:
        return len(self.ranks)

    def _era(self) -> str:
        """Names what happens on the store between two openings of the group."""
        return f"generation-{self.generation}/shrink-{self._num_shrinks}"

    def _open(self, name: str) -> Any:  # ProcessGroupGloo or ProcessGroupNCCL; torch ships no stubs for their methods
        store = c10d.PrefixStore(name, self._store)
        place, size = self.members.index(self.rank), len(self.members)
        timeout = timedelta(seconds=self.timeout_secs)
        try:
            if self.uses_cuda:
                options = dist.ProcessGroupNCCL.Options()
                options._timeout = timeout + timedelta(seconds=_WATCHDOG_SECS)
                return dist.ProcessGroupNCCL(store, place, size, options)
            connect = partial(dist.ProcessGroupGloo, store, place, size, timeout)
            return within(self.timeout_secs + STORE_SECS, connect)
        except (RuntimeError, ValueError) as error:
            self._dead = (
                f"opening the EP group of ranks {list(self.ranks)} did not end within {self.timeout_secs:g} s; every "
                f"rank must construct its Buffer, and call reset(), together. ({_first_line(error)})"
            )
            raise EPTimeoutError(self._dead) from error

    def reopen(self) -> None:
        """Meets the other ranks on a fresh group and raises the generation. Collective."""
        if self._closed is not None:
            raise RuntimeError(f"reset was not started: {self._closed}.")
        # Another rank may still wait in a call, and then find out who is missing, before it comes here.
        self.generation = meet(self._store, self.ranks, self.rank, 2 * self.timeout_secs + _BLAME_SECS)
        self.members, self._num_shrinks = tuple(range(self.size)), 0
        self._group = self._open(self._era())
        self._dead = None
        self._num_calls = 0  # the ranks have made different numbers of calls, and name their notes by them
        self._run("reset", lambda: self._group.barrier(dist.BarrierOptions()))

    def shrink(self, note: int) -> dict[int, int]:
        """Goes on with those of the ranks that come, after a failed call. Collective over those that live.

        Ranks keep their places; nothing is exchanged with the places that are not in `members` any more.

        Returns:
            By place, the `note` of each rank that came.

        Raises:
            EPTimeoutError: they went on without this rank, or the store is lost.
        """
        if self.rank not in self.members:
            raise EPTimeoutError(f"{self._dead}. Call Buffer.reset() on every rank first.")
        self._num_shrinks += 1
        store = c10d.PrefixStore(f"{self._era()}/meeting", self._store)
        # Another rank may still wait in a call, and then find out who is missing, before it comes here.
        patience_secs = 2 * self.timeout_secs + _BLAME_SECS + STORE_SECS
        notes = meet_survivors(store, self.members, self.rank, note, patience_secs)
        self.members, self._num_calls = tuple(sorted(notes)), 0
        if self.rank not in notes:
            self._dead = (
                f"{name_ranks([self.ranks[rank] for rank in self.members])} of the EP group of ranks "
                f"{list(self.ranks)} went on without rank {self.ranks[self.rank]}, which came too late"
            )
            raise EPTimeoutError(f"{self._dead}. Where all ranks live, call Buffer.reset() on every one.")
        self._group = self._open(self._era())
        self._dead = None
        return notes

    def break_off(self, reason: str) -> None:
        """Bars the group: the next exchange of this rank would meet the rest of an older one on the others."""
        self._dead = reason

    def close(self) -> None:
        """Lets the group go without talking to anyone."""
        self._closed = "the buffer is closed. Close it after the last backward"
        self._group = None

    # -- collectives ----------------------------------------------------------------------------------------------

    def all_to_all(
        self,
        send: Tensor,
        what: str,
        send_counts: Sequence[int],
        recv_counts: Sequence[int],
        host_waits: bool = False,
    ) -> Tensor:
        """Sends `send_counts[r]` rows of `send` (ordered by rank) to each rank r; returns the rows received.

        Any dtype travels: the rows go as bytes. On CUDA the current stream waits for them, the host only if told to;
        where the group goes through the host, that waits always.
        Counts to and from ranks that take no part are 0.
        """
        num_out = [send_counts[rank] for rank in self.members]
        num_in = [recv_counts[rank] for rank in self.members]
        device = send.device
        send = (send if self.uses_cuda else send.cpu()).contiguous()
        out = send.new_empty(sum(recv_counts), *send.shape[1:])
        rows_out, rows_in = _as_bytes(out), _as_bytes(send)
        options = dist.AllToAllOptions()
        options.timeout = timedelta(seconds=self.timeout_secs)
        self._run(
            what,
            lambda: self._group.alltoall_base(rows_out, rows_in, num_in, num_out, options),
            host_waits,
        )
        return out.to(device)

    def all_to_all_host(self, table: Tensor, what: str) -> Tensor:
        """One row of a small CPU table to each rank; the host waits for the rows of the others.

        The row from a rank that takes no part is zero.
        """
        device = torch.device("cuda", torch.cuda.current_device()) if self.uses_cuda else torch.device("cpu")
        members = list(self.members)
        one_each = [int(rank in members) for rank in range(self.size)]
        received = torch.zeros_like(table)
        received[members] = self.all_to_all(table[members].to(device), what, one_each, one_each, host_waits=True).cpu()
        return received

    def all_reduce(self, tensor: Tensor, what: str) -> Tensor:
        """Sums in place over the ranks."""
        options = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp(dist.ReduceOp.SUM)
        carried = tensor if self.uses_cuda else tensor.cpu()
        self._run(what, lambda: self._group.allreduce([carried], options))
        return tensor if carried is tensor else tensor.copy_(carried)

    def exchange_text(self, text: str, what: str) -> list[str]:
        """Every rank's text (cut at 2048 bytes), in rank order."""
        raw = text.encode()[:_TEXT_BYTES]
        row = torch.zeros(_TEXT_BYTES, dtype=torch.uint8)
        row[: len(raw)] = torch.frombuffer(bytearray(raw), dtype=torch.uint8) if raw else row[:0]
        table = self.all_to_all_host(row.repeat(self.size, 1), what)
        return [bytes(line.tolist()).rstrip(b"\0").decode(errors="ignore") for line in table]

    # -- waiting --------------------------------------------------------------------------------------------------

    def _run(self, what: str, start: Callable[[], dist.Work], host_waits: bool = False) -> None:
        if self._closed is not None:
            raise RuntimeError(f"{what} was not started: {self._closed}.")
        if self._dead is not None:
            raise EPTimeoutError(f"{what} was not started: {self._dead}. Call Buffer.reset() on every rank first.")
        self._num_calls += 1
        began = time.monotonic()
        try:
            work = start()
            if self.uses_cuda:
                work.wait()  # orders the current stream; the host goes on
                if host_waits:
                    self._poll(work)
            else:
                work.wait(timedelta(seconds=self.timeout_secs))
        except RuntimeError as error:
            self._dead = self._sentence(what, time.monotonic() - began, error)
            raise EPTimeoutError(self._dead) from error

    def _poll(self, work: dist.Work) -> None:
        """Waits on the host for NCCL, whose own wait knows no limit; past it, frees the device from the collective."""
        deadline = time.monotonic() + self.timeout_secs
        while not work.is_completed():
            if time.monotonic() > deadline:
                self._group.abort()
                raise RuntimeError(f"NCCL did not complete within {self.timeout_secs:g} s")
            time.sleep(0)

    def _sentence(self, what: str, waited_secs: float, error: RuntimeError) -> str:
        missing = self._missing_ranks()
        if missing is None:
            who = f"the store does not answer, so {STORE_KEEPER} has ended or is stopped. Look at its log"
        elif missing:
            who = f"{name_ranks(missing)} did not take part. Look at {'their logs' if len(missing) > 1 else 'its log'}"
        else:
            who = "no rank is missing: the others had given up on this call, or a connection broke. Look at their logs"
        return (
            f"{what} on rank {self.ranks[self.rank]} of the EP group of ranks {list(self.ranks)} failed after "
            f"{waited_secs:.1f} s (limit {self.timeout_secs:g} s): {who}; where all "
            f"ranks live, Buffer.reset() on every one makes the buffer usable again. ({_first_line(error)})"
        )

    def _missing_ranks(self) -> list[int] | None:
        """Global ranks that did not fail in this same exchange, as far as the store said before it was gone.

        Every rank that fails leaves a note on the store, and looks for those of the others for a while.
        """
        found: list[int] | None = None

        def note(rank: int) -> str:
            return f"{self._era()}/failed-{self._num_calls}-{rank}"

        def look() -> None:
            nonlocal found
            self._store.set(note(self.rank), "1")
            deadline = time.monotonic() + _BLAME_SECS
            missing = [rank for rank in self.members if rank != self.rank]
            while missing and time.monotonic() < deadline:
                missing = [rank for rank in missing if not self._store.check([note(rank)])]
                found = [self.ranks[rank] for rank in missing]
                time.sleep(0.05)

        try:
            within(_BLAME_SECS + STORE_SECS, look)
        except RuntimeError:  # the store is gone: what is known by now must do
            pass
        return found


def _leave_to_parent(group: PrivateGroup | None) -> None:
    """In a forked child (a data worker, say) the connections of `group` are the parent's, its threads are missing."""
    if group is not None and group._group is not None:
        group._closed = "this process was forked from the rank that the buffer belongs to. Use it there only"
        # One reference too many: the destructor would wait for the threads.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(group._group))


def _as_bytes(rows: Tensor) -> Tensor:
    """[R, ...] as [R, bytes] uint8 over the same memory."""
    width = rows[0].numel() if rows.shape[0] else 1
    if rows.numel() == 0:
        return torch.empty(rows.shape[0], 1, dtype=torch.uint8, device=rows.device)
    return rows.view(rows.shape[0], width).view(torch.uint8)


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__
