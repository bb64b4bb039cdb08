"""Warps as coroutines, barriers in shared memory, and an order of steps in which the copy engine takes part."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

Steps = Iterator[bool]  # of a warp, which yields wherever another may run, and True where it waits


class WrongDataError(AssertionError):
    """A warp or the copy engine has read what is not meant for it, or told of what is not there yet."""


class StuckError(AssertionError):
    """Every warp waits, and nothing is under way."""


@dataclass
class Barrier:
    """An mbarrier: a phase ends when all have arrived and all bytes have come."""

    arrivals: int
    phase: int = 0
    missing: int = field(init=False)
    num_bytes: int = 0

    def __post_init__(self) -> None:
        self.missing = self.arrivals

    def arrive(self, count: int = 1) -> None:
        self.missing -= count
        assert self.missing >= 0, "more arrivals than the barrier is made for"
        self._end_phase()

    def expect(self, num_bytes: int) -> None:
        self.num_bytes += num_bytes
        self.arrive()

    def complete(self, num_bytes: int) -> None:
        self.num_bytes -= num_bytes
        self._end_phase()

    def is_over(self, parity: int) -> bool:
        """All that a wait knows: whether the phase of this parity is not the one in hand."""
        return self.phase % 2 != parity

    def _end_phase(self) -> None:
        if self.missing == 0 and self.num_bytes == 0:
            self.phase += 1
            self.missing = self.arrivals


def wait(barrier: Barrier, parity: int) -> Steps:
    yield False  # whatever this warp has done before may end the waits of others
    while not barrier.is_over(parity):
        yield True


class Engine(NamedTuple):
    """Something that the copy engine may do next."""

    is_ready: Callable[[], bool]
    go_on: Callable[[], None]


def play(g: random.Random, warps: Sequence[Steps], engines: Sequence[Engine]) -> None:
    """Lets warps and engine take steps in a random order, each at a pace of its own, until every warp has ended.

    Raises:
        StuckError: they never will.
    """
    left = list(warps)
    paces = {warp: g.choice((0.05, 0.3, 1, 1, 3)) for warp in left}
    engine_paces = [g.choice((0.1, 1, 3)) for _ in engines]
    waiting: set[Steps] = set()  # since anything happened
    while left:
        ready = [pace * engine.is_ready() for pace, engine in zip(engine_paces, engines, strict=True)]
        if len(waiting) == len(left) and not any(ready):
            raise StuckError(f"{len(left)} warps wait for ever")
        chosen = g.choices([*left, *engines], [*(paces[warp] for warp in left), *ready])[0]
        if isinstance(chosen, Engine):
            chosen.go_on()
            waiting.clear()
            continue
        step = next(chosen, None)
        if step is None:
            left.remove(chosen)
        if step:
            waiting.add(chosen)
        else:
            waiting.clear()
