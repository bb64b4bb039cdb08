"""The state: what each rank's host and blocks are at, and the memory that the ranks read of one another."""

from __future__ import annotations

from typing import NamedTuple

from tests.unit.flag_protocol.rules import CHUNKS

Word = tuple[int, ...]  # begins with (generation, epoch)
EMPTY: Word = (-1, -1)  # never written, or of an older generation: no comparison tells these apart
STATUS = {"": 0, "refuse": 1, "grow": 2}  # the last word of a header

Block = tuple[int, int]  # (ticket, instruction)
IDLE: Block = (-1, 0)
EPILOGUE, ABORT = -2, -3  # tickets of the last block, and of a block that tells the peers of a failure


class Kernel(NamedTuple):
    """A launch; generation, epoch and pointers are those that its blocks read at its start."""

    kind: str  # "front" (headers, publish), "pull", "whole" (both), "leave" (done alone)
    gen: int
    epoch: int
    call: int
    era: int
    maps: tuple[int, ...]


class Rank(NamedTuple):
    """A process: host (`phase`), its stream (`kernel`, one at a time), the resident blocks."""

    alive: bool = True
    era: int = 0  # the round of reset() that it passed last
    gen: int = 0
    origin: int = 0  # the epoch of call 0; that of call k is k later
    item: int = 0  # of the schedule
    phase: str = "launch"
    kernel: Kernel | None = None
    ticket: int = 0  # the next one
    blocks: tuple[Block, ...] = (IDLE,)
    verdicts: tuple[str, ...] = ()  # of each call in flight
    failed: bool = False  # the record that the host reads
    spoiled: bool = False  # a pull from a caller's memory found something else there
    got: int = 0  # bit per (source, chunk) pulled in this call
    outcome: str = ""  # of the call whose event is about to fire
    outcomes: tuple[str, ...] = ()  # of the calls of this era
    maps: tuple[int, ...] = ()  # per rank: the segment version that is open here, -1 closed
    segment: int = 0  # version of the own segment
    round: int = 0  # of reset, while in it (-1: not known yet)
    gave_up: int = -1  # the round of reset that it timed out of last
    barriers: int = 0  # host barriers entered (counted only where barriers have no names)


Arrival = tuple[tuple[object, ...], int, int, bool]  # (barrier, rank, its generation, its mappings are intact)


class State(NamedTuple):
    """All of it."""

    ranks: tuple[Rank, ...]
    memory: tuple[Word, ...]
    arrivals: frozenset[Arrival] = frozenset()


class Violation(Exception):
    """A property does not hold. `name` is one of docs/protocol.md's, the text says where."""

    def __init__(self, name: str, text: str) -> None:
        super().__init__(f"{name}: {text}")
        self.name = name


class Memory:
    """Where each word lies in `State.memory`. The first rank of an argument list owns the word.

    Control block: `header`, `flag`, `done`, `abort`. Segment (can grow): `mail` (lists of tokens, or rows pushed by a
    low-latency peer), `stage` (rows). `user` is a tensor of the caller that peers read in place, one for each of two
    calls in flight.
    """

    def __init__(self, world: int, push: bool) -> None:
        self.world = world
        peers = [(r, s) for r in range(world) for s in range(world) if s != r]
        names: list[tuple[object, ...]] = []
        for parity in (0, 1):
            names += [("header", r, s, parity) for r, s in peers]
            names += [("mail", r, s, parity) for r, s in peers]
            names += [("flag", r, s, chunk, parity) for r, s in peers for chunk in CHUNKS]
            names += [("stage", r, parity, chunk) for r in range(world) for chunk in CHUNKS]
            names += [("user", r, parity, chunk) for r in range(world) for chunk in CHUNKS]
            names += [("inbox", r, s, parity, chunk) for r, s in peers for chunk in CHUNKS if push]
        names += [("done", r, s) for r, s in peers]
        names += [("abort", r, s) for r, s in peers]
        self.at = {name: i for i, name in enumerate(names)}
        self.empty: tuple[Word, ...] = (EMPTY,) * len(names)
        self.in_segment = [self._owned(names, r, "mail", "stage", "inbox") for r in range(world)]
        self.in_control = [self._owned(names, r, "header", "flag", "done", "abort") for r in range(world)]
        self.peers = [tuple((r + i) % world for i in range(1, world)) for r in range(world)]  # alike from every rank

    @staticmethod
    def _owned(names: list[tuple[object, ...]], r: int, *kinds: str) -> frozenset[int]:
        return frozenset(i for i, name in enumerate(names) if name[0] in kinds and name[1] == r)
