"""Shared memory of a team: barriers, and what is handed on from warp to warp, with what every place holds."""

from __future__ import annotations

from dataclasses import dataclass, field

NUM_ADDERS, NUM_TICKETS, NUM_ITEMS, NUM_DESCRIBED = 4, 4, 8, 4  # as in csrc/intranode/term_ring.cuh


class WrongDataError(AssertionError):
    """A warp has read what is not meant for it."""


@dataclass(frozen=True)
class Ticket:
    """Rows, each of so many terms; those that are copied have one."""

    is_copied: bool
    counts: tuple[int, ...]


@dataclass(frozen=True)
class Piece:
    """Of one term of a row."""

    ticket: int
    row: int
    piece: int
    term: int


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


@dataclass(frozen=True)
class Begin:
    ticket: int | None
    num_items: int
    num_pieces: int
    num_terms: int


class Memory:
    """`num_full` barriers for pieces serve `num_stages` stages."""

    def __init__(self, num_stages: int, num_full: int, pieces_a_row: int, tickets: list[Ticket]) -> None:
        self.num_stages, self.num_full = num_stages, num_full
        self.pieces_a_row, self.tickets = pieces_a_row, tickets
        self.full = [Barrier(1) for _ in range(num_full)]
        self.empty = [Barrier(NUM_ADDERS) for _ in range(num_stages)]
        self.item_full = [Barrier(1) for _ in range(NUM_ITEMS)]
        self.item_empty = [Barrier(NUM_ADDERS + 1) for _ in range(NUM_ITEMS)]
        self.ticket_full = [Barrier(1) for _ in range(NUM_TICKETS)]
        self.ticket_empty = [Barrier(NUM_ADDERS + 2) for _ in range(NUM_TICKETS)]
        self.passed = [Barrier(NUM_ADDERS + 1) for _ in range(NUM_TICKETS)]
        self.begins: list[Begin | None] = [None] * NUM_TICKETS
        self.items: list[tuple[int, int] | None] = [None] * NUM_ITEMS  # ticket and row
        self.stages: list[Piece | None] = [None] * num_stages
        self.loads: list[tuple[int, Piece, Barrier]] = []  # under way, in no order
        self.stores: list[tuple[int, Piece]] = []  # the engine reads these stages, in their order
        self.num_read = 0  # stores that have been read
        self.done: dict[Piece, int] = {}  # how often a piece was added or stored

    def load(self, which: int) -> None:
        stage, piece, barrier = self.loads.pop(which)
        self.stages[stage] = piece
        barrier.complete(1)

    def store(self) -> None:
        stage, piece = self.stores[self.num_read]
        self.read(stage, piece)
        self.num_read += 1

    def read(self, stage: int, piece: Piece) -> None:
        if self.stages[stage] != piece:
            raise WrongDataError(f"stage {stage} holds {self.stages[stage]} in place of {piece}")
        self.done[piece] = self.done.get(piece, 0) + 1
