"""How ranks meet on a store before they share a group, and agree on a number that no other meeting had."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent import futures
from functools import partial
from typing import TypeVar

from torch.distributed.distributed_c10d import Store

from moe_ep.errors import EPTimeoutError

_POLL_SECS = 0.001
STORE_SECS = 2.0  # over the limit of a meeting, for the answers of the store
STORE_KEEPER = "the process that keeps it (global rank 0, or the launcher of the first node)"

Answer = TypeVar("Answer")


def within(limit_secs: float, ask: Callable[[], Answer]) -> Answer:
    """`ask()`, which talks to a store, on a thread of its own.

    A stopped process keeps its connections, and torch's client waits for the answer of such a store without a limit.

    Raises:
        EPTimeoutError: no answer within `limit_secs`. What `ask` raises passes.
    """
    future: futures.Future[Answer] = futures.Future()

    def work() -> None:
        try:
            future.set_result(ask())
        except Exception as error:  # noqa: BLE001 (raised again on the thread that waits)
            future.set_exception(error)

    threading.Thread(target=work, name="moe_ep store", daemon=True).start()
    try:
        return future.result(limit_secs)
    except futures.TimeoutError as error:
        raise EPTimeoutError(f"the store did not answer for {limit_secs:g} s") from error


def name_ranks(ranks: Sequence[int]) -> str:
    """ "rank 1", or "ranks 0, 2"."""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def meet(store: Store, ranks: Sequence[int], rank: int, limit_secs: float) -> int:
    """Waits on `store` until all of a group are here: `ranks` are its global ranks, `rank` this one's place in it.

    Each rank lays down a ticket; rank 0 answers every ticket with the number of the meeting once all lie there. A rank
    that gives up takes its ticket back (it leaves 0), so the next meeting starts clean, whoever missed this one.

    Returns:
        The number of the meeting, the same on every rank.

    Raises:
        EPTimeoutError: not all came within `limit_secs`, and who did not; or the store is gone.
    """
    group = f"the EP group of ranks {list(ranks)}"
    try:
        number, missing = within(limit_secs + STORE_SECS, partial(_meet, store, len(ranks), rank, limit_secs))
    except RuntimeError as error:
        raise EPTimeoutError(
            f"{group} could not meet, because the store does not answer: {STORE_KEEPER} has ended or is stopped. "
            f"({error})"
        ) from error
    if missing:
        raise EPTimeoutError(
            f"{group} did not meet within {limit_secs:g} s: {name_ranks([ranks[peer] for peer in missing])} did not "
            "take part. Every rank must construct its Buffer, and call reset(), together."
        )
    return number


def _meet(store: Store, size: int, rank: int, limit_secs: float) -> tuple[int, list[int]]:
    """The number of the meeting and nobody, or 0 and those who are missing."""
    ticket = store.add(f"tickets-of-{rank}", 1)
    answer, deadline = f"answer-{rank}-{ticket}", time.monotonic() + limit_secs
    store.set(f"here-{rank}", str(ticket))
    while not store.check([answer]):
        if rank == 0 and all(tickets := _lying(store, size)):
            number = store.add("meetings", 1)
            for peer, theirs in enumerate(tickets):
                store.set(f"here-{peer}", "0")
                store.set(f"answer-{peer}-{theirs}", str(number))
        elif time.monotonic() > deadline:
            missing = [peer for peer, theirs in enumerate(_lying(store, size)) if not theirs]
            # Not if a later meeting of this rank has begun: the store may have slept for long.
            store.compare_set(f"here-{rank}", str(ticket), "0")
            return 0, missing or [0]  # all lie there: rank 0 has not answered
        else:
            time.sleep(_POLL_SECS)
    return int(store.get(answer)), []


def meet_survivors(store: Store, places: Sequence[int], place: int, note: int, patience_secs: float) -> dict[int, int]:
    """Meets whoever of a group comes: `places` are asked, `place` is this rank's. One store a meeting.

    The first to come decides who was there: at once when all are, after `patience_secs` otherwise.

    Returns:
        By place, the number that each who came laid down (`note`); the same on every rank. A rank that came after the
        decision is not among them.

    Raises:
        EPTimeoutError: the rank that decides, or the store, is gone.
    """
    try:
        ask = partial(_meet_survivors, store, places, place, note, patience_secs)
        return within(2 * patience_secs + STORE_SECS, ask)
    except RuntimeError as error:
        raise EPTimeoutError(
            f"the ranks that are left of the EP group could not meet: {STORE_KEEPER}, or the rank that decides who is "
            f"left, has ended or is stopped. ({error})"
        ) from error


def _meet_survivors(store: Store, places: Sequence[int], place: int, note: int, patience_secs: float) -> dict[int, int]:
    store.set(f"note-{place}", str(note))
    decides, began = store.add("arrived", 1) == 1, time.monotonic()
    while not store.check(["came"]):
        waited_secs = time.monotonic() - began
        there = [peer for peer in places if store.check([f"note-{peer}"])] if decides else []
        if decides and (waited_secs > patience_secs or len(there) == len(places)):
            store.set("came", " ".join(map(str, there)))
        elif waited_secs > 2 * patience_secs:
            raise EPTimeoutError(f"no decision within {2 * patience_secs:g} s")
        else:
            time.sleep(_POLL_SECS)
    return {int(peer): int(store.get(f"note-{peer}")) for peer in store.get("came").decode().split()}


def _lying(store: Store, size: int) -> list[int]:
    """The ticket of every rank, 0 where none lies."""
    keys = [f"here-{rank}" for rank in range(size)]
    return [int(store.get(key)) if store.check([key]) else 0 for key in keys]
