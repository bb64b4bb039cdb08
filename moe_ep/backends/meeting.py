"""How ranks meet on a store before they share a group, and agree on a number that no other meeting had."""

from __future__ import annotations

import time
from collections.abc import Sequence

from torch.distributed.distributed_c10d import Store

from moe_ep.errors import EPTimeoutError

_POLL_SECS = 0.001


def meet(store: Store, ranks: Sequence[int], rank: int, limit_secs: float) -> int:
    """Waits on `store` until all of a group are here: `ranks` are its global ranks, `rank` this one's place in it.

    Each rank lays down a ticket; rank 0 answers every ticket with the number of the meeting once all lie there. A rank
    that gives up takes its ticket back (it leaves 0), so the next meeting starts clean, whoever missed this one.

    Returns:
        The number of the meeting, the same on every rank.

    Raises:
        EPTimeoutError: not all came within `limit_secs`; names who did not.
    """
    ticket = store.add(f"tickets-of-{rank}", 1)
    size = len(ranks)
    answer, deadline = f"answer-{rank}-{ticket}", time.monotonic() + limit_secs
    store.set(f"here-{rank}", str(ticket))
    while not store.check([answer]):
        if rank == 0 and all(tickets := _lying(store, size)):
            number = store.add("meetings", 1)
            for peer, theirs in enumerate(tickets):
                store.set(f"here-{peer}", "0")
                store.set(f"answer-{peer}-{theirs}", str(number))
        elif time.monotonic() > deadline:
            missing = [str(peer) for peer, theirs in enumerate(_lying(store, size)) if not theirs]
            store.set(f"here-{rank}", "0")
            raise EPTimeoutError(
                f"the EP group of ranks {list(ranks)} did not meet within {limit_secs:g} s: rank {', '.join(missing)} "
                "did not take part. Every rank must construct its Buffer, and call reset(), together."
            )
        else:
            time.sleep(_POLL_SECS)
    return int(store.get(answer))


def _lying(store: Store, size: int) -> list[int]:
    """The ticket of every rank, 0 where none lies."""
    keys = [f"here-{rank}" for rank in range(size)]
    return [int(store.get(key)) if store.check([key]) else 0 for key in keys]
