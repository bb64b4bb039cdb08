"""The ring of csrc/intranode/move_bulk.cu: rows that are stored to their places, a batch a storing warp in turn."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from tests.unit.rings.steps import Barrier, Engine, Steps, WrongDataError, play, wait

NUM_BATCHES, NUM_ROWS, STORES_BEHIND = 3, 4, 2  # as there


@dataclass(frozen=True, order=True)
class Piece:
    batch: int  # number of it among all
    row: int
    piece: int


@dataclass(frozen=True)
class Batch:
    """Rows, of which some are wanted; of a ticket, whose flag is posted behind all its batches, or not."""

    number: int
    ticket: int
    is_wanted: tuple[bool, ...]
    posts: bool
    num_batches: int  # of the ticket
    is_first: bool


@dataclass(frozen=True)
class Planned:
    batch: Batch | None  # None: nothing comes any more
    first_piece: int
    publication: int


@dataclass
class Stores:
    """Of a storing warp: the engine reads them in their order, and writes them later, in that order too."""

    pieces: list[tuple[int, Piece]] = field(default_factory=list)  # stage and what it must hold
    num_read: int = 0
    num_written: int = 0


class Memory:
    def __init__(self, num_stages: int, pieces_a_row: int, batches: list[Batch]) -> None:
        self.num_stages, self.pieces_a_row, self.batches = num_stages, pieces_a_row, batches
        self.full = [Barrier(1) for _ in range(num_stages)]
        self.empty = [Barrier(1) for _ in range(num_stages)]
        self.batch_full = [Barrier(1) for _ in range(NUM_BATCHES)]
        self.batch_empty = [Barrier(2) for _ in range(NUM_BATCHES)]
        self.turn = [Barrier(1) for _ in range(NUM_BATCHES)]
        self.num_unwritten = [0] * NUM_BATCHES
        self.planned: list[Planned | None] = [None] * NUM_BATCHES
        self.stages: list[Piece | None] = [None] * num_stages
        self.loads: list[tuple[int, Piece]] = []  # under way, in no order
        self.stores = [Stores() for _ in range(NUM_BATCHES)]
        self.written: set[Piece] = set()
        self.posted: list[int] = []  # tickets

    def pieces_of(self, batch: Batch) -> list[Piece]:
        rows = [row for row, is_wanted in enumerate(batch.is_wanted) if is_wanted]
        return [Piece(batch.number, row, piece) for row in rows for piece in range(self.pieces_a_row)]

    def load(self, which: int) -> None:
        stage, piece = self.loads.pop(which)
        self.stages[stage] = piece
        self.full[stage].complete(1)

    def read(self, stores: Stores) -> None:
        stage, piece = stores.pieces[stores.num_read]
        if self.stages[stage] != piece:
            raise WrongDataError(f"stage {stage} holds {self.stages[stage]} in place of {piece}")
        stores.num_read += 1

    def write(self, stores: Stores) -> None:
        self.written.add(stores.pieces[stores.num_written][1])
        stores.num_written += 1

    def post(self, ticket: int) -> None:
        missing = [p for b in self.batches if b.ticket == ticket for p in self.pieces_of(b) if p not in self.written]
        if missing:
            raise WrongDataError(f"ticket {ticket} is told of before {missing} are written")
        self.posted.append(ticket)


def plan(m: Memory) -> Steps:
    num_pieces = publication = 0
    for number, batch in enumerate([*m.batches, *[None] * NUM_BATCHES]):
        slot = number % NUM_BATCHES
        yield from wait(m.batch_empty[slot], (number // NUM_BATCHES + 1) % 2)
        if batch is not None and batch.posts and batch.is_first:
            publication = (publication + 1) % NUM_BATCHES
            m.num_unwritten[publication] = batch.num_batches
        m.planned[slot] = Planned(batch, num_pieces, publication)
        yield False
        m.batch_full[slot].arrive()
        num_pieces += len(m.pieces_of(batch)) if batch is not None else 0


def load(m: Memory) -> Steps:
    position = 0
    for number in range(len(m.batches)):
        slot = number % NUM_BATCHES
        yield from wait(m.batch_full[slot], number // NUM_BATCHES % 2)
        planned = m.planned[slot]
        assert planned is not None
        if planned.batch != m.batches[number]:
            raise WrongDataError(f"the batch is {planned.batch} in place of number {number}")
        for piece in m.pieces_of(m.batches[number]):
            stage = position % m.num_stages
            yield from wait(m.empty[stage], (position // m.num_stages + 1) % 2)
            m.full[stage].expect(1)
            m.loads.append((stage, piece))
            position += 1
        m.batch_empty[slot].arrive()


def store(m: Memory, slot: int, takes_turns: bool) -> Steps:
    stores = m.stores[slot]
    for use in range(len(m.batches) + 1):
        yield from wait(m.batch_full[slot], use % 2)
        planned = m.planned[slot]
        assert planned is not None
        batch = planned.batch
        if batch is None:
            return
        if batch.number != use * NUM_BATCHES + slot:
            raise WrongDataError(f"the batch is number {batch.number} in place of {use * NUM_BATCHES + slot}")
        if takes_turns:
            yield from wait(m.turn[slot], (use + 1) % 2 if slot == 0 else use % 2)
        position = released = planned.first_piece
        for piece in m.pieces_of(batch):
            stage = position % m.num_stages
            yield from wait(m.full[stage], position // m.num_stages % 2)
            stores.pieces.append((stage, piece))
            position += 1
            if position - released > STORES_BEHIND:
                while stores.num_read < len(stores.pieces) - STORES_BEHIND:
                    yield True
                m.empty[released % m.num_stages].arrive()
                released += 1
        m.turn[(slot + 1) % NUM_BATCHES].arrive()
        yield False
        while stores.num_read < len(stores.pieces):
            yield True
        for number in range(released, position):
            m.empty[number % m.num_stages].arrive()
        yield False
        if batch.posts:
            while stores.num_written < len(stores.pieces):
                yield True
            m.num_unwritten[planned.publication] -= 1
            if m.num_unwritten[planned.publication] == 0:
                m.post(batch.ticket)
        m.batch_empty[slot].arrive()
        yield False


def make_batches(g: random.Random) -> list[Batch]:
    batches: list[Batch] = []
    share = g.choice((0.0, 0.3, 0.8, 1.0))  # of rows that are wanted
    for ticket in range(g.randint(1, 12)):
        posts, num_rows = g.random() < 0.5, g.choice((0, 1, 3, 4, 8, 11))
        num_batches = max(1, -(-num_rows // NUM_ROWS))
        for i in range(num_batches):
            here = range(i * NUM_ROWS, min((i + 1) * NUM_ROWS, num_rows))
            is_wanted = tuple(g.random() < share for _ in here)
            batches.append(Batch(len(batches), ticket, is_wanted, posts, num_batches, i == 0))
    return batches


def play_copies(seed: int, num_stages: int | None = None, takes_turns: bool = True) -> Memory:
    """One order of steps.

    Args:
        seed: of sizes, rows and order.
        num_stages: of the ring; None for any number that the kernel may have.
        takes_turns: as the kernel does. False: a batch begins at once, before all pieces of the one before have come.
    """
    g = random.Random(seed)
    m = Memory(num_stages or g.randint(STORES_BEHIND + 1, 8), g.randint(1, 3), make_batches(g))
    warps = [plan(m), load(m), *(store(m, slot, takes_turns) for slot in range(NUM_BATCHES))]
    engines = [Engine(lambda: bool(m.loads), lambda: m.load(g.randrange(len(m.loads))))]
    for stores in m.stores:
        engines.append(Engine(lambda s=stores: s.num_read < len(s.pieces), lambda s=stores: m.read(s)))
        engines.append(Engine(lambda s=stores: s.num_written < s.num_read, lambda s=stores: m.write(s)))
    play(g, warps, engines)
    return m
