"""What is explored: the rules of the protocol, one field each, and the scenarios that they are tried in."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

CHUNKS = (0, 1)


@dataclass(frozen=True)
class Rules:
    """The rules of docs/protocol.md, under its numbers. Every field is right as it stands; a mutation changes one."""

    # Slots (1-4)
    done_before_rewrite: bool = True  # slot e mod 2 is written only after every peer's done(e-2)
    parity: bool = True  # two slots in alternation
    rows_before_flag: bool = True  # the flag of a chunk is posted after its rows
    flags: Literal["slot", "word", "word, equal"] = "slot"  # chunk flags: in the slot; or one word, >= (or ==) e
    # Done (5-7)
    last_block_posts_done: bool = True  # done(e) when every block has left its tickets
    done_after_refusal: bool = True  # done(e) is posted on the way out of a refused call too
    done_after_own_error: bool = True  # and by a rank that fails alone after the verdict (no memory for its output)
    # Tickets (8, 9)
    publish_first: bool = True  # the ticket that publishes a chunk precedes those that wait for it
    one_numbering: bool = True  # chunks are numbered alike on all ranks
    # Verdicts (10, 11)
    refusal_sends_header: bool = True
    all_headers: bool = True  # a rank waits for every peer's header, not only for those that send it rows
    # The caller's memory (12, 13)
    done_before_event: bool = True  # peers read the caller's memory: wait for every done(e) before the event
    abort_before_event: bool = True  # a rank that fails says so to all peers before its event fires ...
    abort_checked: bool = True  # ... and a reader looks for that after its last pull
    # Failures (14)
    failure_is_final: bool = True  # after a timeout every later call of the generation leaves at once
    # Generations (15-19)
    generation_in_tag: bool = True
    fresh_slots_are_free: bool = True  # epochs 0 and 1 of a generation wait for no done
    epoch_restarts: bool = True  # reset sets the epoch to 0 on every rank
    generation_agreed: bool = True  # the new generation is the highest of all ranks + 1, not one's own + 1
    synchronise: bool = True  # growth and reset wait for their own kernels first
    # Growth and reset (20-27)
    growth_new_generation: bool = True  # the call that grew runs again under a new tag
    growth_only_when_idle: bool = True  # with a receive outstanding, growth is a refusal
    barrier_before_close: bool = True
    barrier_before_free: bool = True
    barrier_before_open: bool = True  # the exchange of handles
    barriers_named: bool = True  # a barrier of growth never meets one of reset
    reset_reopens: bool = True  # reset rebuilds the mappings where a growth ended half-way
    control_block_kept: bool = True  # nobody clears flags: a peer that is ahead may have posted already


@dataclass(frozen=True)
class Call:
    """One operation: with a wait of the host for the headers (a first dispatch) or without (cached, combine)."""

    host_wait: bool
    registered: bool = False  # peers read the caller's memory instead of staging
    push: bool = False  # low latency: rows are pushed into the receiver's slot, and there is no header


FIRST, CACHED = Call(host_wait=True), Call(host_wait=False)
Timeouts = Literal["never", "last", "any"]
# What a rank meets in a call, besides an ordinary input.
Input = Literal["refuse", "grow", "other operation", "no memory"]
Schedule = tuple[tuple[str, int], ...]  # launches in stream order: (kind of kernel, call)


@dataclass(frozen=True)
class Scenario:
    """Ranks, the calls that each makes, and what goes wrong.

    `timeouts`: "never": no wait ends but by its flag, so a state without a successor is a deadlock; "last": a wait ends
    by timeout when nothing else in the whole system can move; "any": at any moment, so every rank may be late by any
    amount. After `quiet_era` resets no wait times out any more: from there everything must complete.
    """

    world: int
    calls: tuple[Call, ...] = (FIRST, CACHED, FIRST)
    blocks: int = 1
    ahead: int = 0  # so many later calls are published before a call is pulled (its receive hook runs late)
    timeouts: Timeouts = "never"
    inputs: dict[tuple[int, int], Input] = field(default_factory=dict)  # (call, rank) -> what it meets
    mortal: int | None = None  # this rank may die before any of its steps
    reset: bool = False  # every rank calls reset() after its calls, or after its failure, then makes the calls `after`
    after: tuple[Call, ...] = (FIRST, CACHED)
    quiet_era: int = 1
    full: bool = False  # explore every interleaving; otherwise steps that commute with all others go first

    def schedule(self, calls: tuple[Call, ...]) -> Schedule:
        """The launches of a rank: two for a call with a host wait or a hook, one for any other."""
        launches: list[tuple[str, int]] = []
        if not self.ahead:
            for i, call in enumerate(calls):
                launches += [("front", i), ("pull", i)] if call.host_wait else [("whole", i)]
            return tuple(launches)
        for i in range(len(calls) + self.ahead):
            launches += [("front", i)] if i < len(calls) else []
            launches += [("pull", i - self.ahead)] if i >= self.ahead else []
        return tuple(launches)
