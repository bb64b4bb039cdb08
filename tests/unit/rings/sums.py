"""The ring of csrc/intranode/term_ring.cuh: terms on their way to a sum, or rows that are copied, through one team."""

from __future__ import annotations

import random
from collections.abc import Generator
from dataclasses import dataclass

from tests.unit.rings.steps import Barrier, Engine, Steps, WrongDataError, play, wait

NUM_ADDERS, NUM_TICKETS, NUM_ITEMS, NUM_DESCRIBED = 4, 4, 8, 4  # as there


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

    def expected(self) -> dict[Piece, int]:
        """Every adding warp reads all terms of a sum; the engine reads a copied row once."""
        return {
            Piece(number, row, piece, term): 1 if ticket.is_copied else NUM_ADDERS
            for number, ticket in enumerate(self.tickets)
            for row, count in enumerate(ticket.counts)
            for piece in range(self.pieces_a_row)
            for term in range(count)
        }


def look_up(m: Memory) -> Steps:
    num_tickets = num_items = num_pieces = num_terms = 0
    for number in [*range(len(m.tickets)), None]:
        place = num_tickets % NUM_TICKETS
        yield from wait(m.ticket_empty[place], (num_tickets // NUM_TICKETS + 1) % 2)
        m.begins[place] = Begin(number, num_items, num_pieces, num_terms)
        m.ticket_full[place].arrive()
        num_tickets += 1
        if number is None:
            return
        ticket = m.tickets[number]
        if ticket.is_copied:
            num_pieces += len(ticket.counts) * m.pieces_a_row
            num_terms += len(ticket.counts) * m.pieces_a_row
            continue
        for first in range(0, len(ticket.counts), NUM_DESCRIBED):
            rows = range(first, min(first + NUM_DESCRIBED, len(ticket.counts)))
            items = [(num_items + i) % NUM_ITEMS for i in range(len(rows))]
            for i, item in enumerate(items):
                yield from wait(m.item_empty[item], ((num_items + i) // NUM_ITEMS + 1) % 2)
            for row, item in zip(rows, items, strict=True):
                m.items[item] = (number, row)
                yield False
                num_pieces += m.pieces_a_row if ticket.counts[row] > 0 else 0
                num_terms += m.pieces_a_row * ticket.counts[row]
            for item in items:
                m.item_full[item].arrive()
            num_items += len(rows)


class Warp:
    """Where a warp stands that is told of tickets."""

    def __init__(self, memory: Memory, waits_for_others: bool = True) -> None:
        self.m, self.waits_for_others = memory, waits_for_others
        self.stage = self.parity = self.num_items = self.num_pieces = self.num_tickets = 0
        self.ticket: int | None = None
        self.had_last = True

    def get_ticket(self) -> Steps:
        place = self.num_tickets % NUM_TICKETS
        yield from wait(self.m.ticket_full[place], self.num_tickets // NUM_TICKETS % 2)
        begin = self.m.begins[place]
        assert begin is not None
        self.ticket, self.num_items, self.num_pieces = begin.ticket, begin.num_items, begin.num_pieces
        self.stage = begin.num_terms % self.m.num_stages
        self.parity = begin.num_terms // self.m.num_stages % 2

    def begin_rows(self, for_me: bool) -> Steps:
        if for_me and not self.had_last and self.waits_for_others:
            yield from self.wait_passed(self.num_tickets - 1)
        self.had_last = for_me

    def begin_ticket(self, copies: bool) -> Generator[bool, None, Ticket | None]:
        """The next ticket, whose rows are for this warp where they are copied and it copies, or neither."""
        yield from self.get_ticket()
        if self.ticket is None:
            return None
        ticket = self.m.tickets[self.ticket]
        yield from self.begin_rows(ticket.is_copied == copies)
        return ticket

    def wait_passed(self, number: int) -> Steps:
        yield from wait(self.m.passed[number % NUM_TICKETS], number // NUM_TICKETS % 2)

    def pass_rows(self) -> None:
        self.m.passed[self.num_tickets % NUM_TICKETS].arrive()

    def release_ticket(self) -> None:
        self.m.ticket_empty[self.num_tickets % NUM_TICKETS].arrive()
        self.num_tickets += 1

    def next_item(self, row: int) -> Steps:
        place = self.num_items % NUM_ITEMS
        yield from wait(self.m.item_full[place], self.num_items // NUM_ITEMS % 2)
        if self.m.items[place] != (self.ticket, row):
            raise WrongDataError(f"the item is {self.m.items[place]} in place of {(self.ticket, row)}")

    def release_item(self) -> None:
        self.m.item_empty[self.num_items % NUM_ITEMS].arrive()
        self.num_items += 1

    def full(self) -> Barrier:
        return self.m.full[self.num_pieces % self.m.num_full]

    def wait_piece(self) -> Steps:
        yield from wait(self.full(), self.num_pieces // self.m.num_full % 2)

    def stage_of(self, term: int) -> tuple[int, int]:
        """The stage of a term, and the parity of the use before."""
        wraps = self.stage + term >= self.m.num_stages
        return (self.stage + term) % self.m.num_stages, self.parity ^ (0 if wraps else 1)

    def skip_piece(self, count: int) -> None:
        self.num_pieces += count > 0
        self.stage += count
        if self.stage >= self.m.num_stages:
            self.stage -= self.m.num_stages
            self.parity ^= 1


def fetch(m: Memory) -> Steps:
    warp = Warp(m)
    while True:
        yield from warp.get_ticket()
        if warp.ticket is None:
            return
        ticket = m.tickets[warp.ticket]
        for row, count in enumerate(ticket.counts):
            if not ticket.is_copied:
                yield from warp.next_item(row)
            for piece in range(m.pieces_a_row if count > 0 else 0):
                yield from wait(m.empty[warp.stage_of(0)[0]], warp.stage_of(0)[1])
                warp.full().expect(count)
                waiting = list(range(count))
                while waiting:  # whose stage is free sets out, whether or not others wait
                    for term in list(waiting):
                        stage, parity = warp.stage_of(term)
                        if m.empty[stage].is_over(parity):
                            m.loads.append((stage, Piece(warp.ticket, row, piece, term), warp.full()))
                            waiting.remove(term)
                        yield False
                    if waiting:
                        stage, parity = warp.stage_of(waiting[0])
                        yield from wait(m.empty[stage], parity)
                warp.skip_piece(count)
            if not ticket.is_copied:
                warp.release_item()
        warp.release_ticket()


def add(m: Memory, waits_for_others: bool) -> Steps:
    warp = Warp(m, waits_for_others)
    while (ticket := (yield from warp.begin_ticket(copies=False))) is not None:
        for row, count in enumerate(() if ticket.is_copied else ticket.counts):
            yield from warp.next_item(row)
            for piece in range(m.pieces_a_row if count > 0 else 0):
                yield from warp.wait_piece()
                for term in range(count):
                    m.read(warp.stage_of(term)[0], Piece(warp.ticket, row, piece, term))
                    yield False
                for term in range(count):
                    m.empty[warp.stage_of(term)[0]].arrive()
                warp.skip_piece(count)
            warp.release_item()
        warp.pass_rows()
        yield False
        warp.release_ticket()


def send(m: Memory, waits_for_others: bool) -> Steps:
    warp = Warp(m, waits_for_others)
    while (ticket := (yield from warp.begin_ticket(copies=True))) is not None:
        unread = -1
        for row in range(len(ticket.counts) if ticket.is_copied else 0):
            for piece in range(m.pieces_a_row):
                yield from warp.wait_piece()
                m.stores.append((warp.stage, Piece(warp.ticket, row, piece, 0)))
                if unread >= 0:
                    while m.num_read < len(m.stores) - 1:
                        yield True
                    m.empty[unread].arrive(NUM_ADDERS)
                unread = warp.stage
                warp.skip_piece(1)
        warp.pass_rows()
        yield False
        if unread >= 0:
            while m.num_read < len(m.stores):
                yield True
            m.empty[unread].arrive(NUM_ADDERS)
        if not ticket.is_copied:  # a flag is posted when the sums are written
            yield from warp.wait_passed(warp.num_tickets)
        warp.release_ticket()


def make_tickets(g: random.Random, kinds: str, most: int) -> list[Ticket]:
    tickets = []
    for _ in range(g.randint(1, 14)):
        num_rows = g.choice((0, 0, 1, 2, 3, 5, 9))
        is_copied = kinds == "copied" or (kinds == "both" and g.random() < 0.5)
        choices = g.choice((range(most + 1), (most,), (0,), (1,), (0, 1, most - 1, most)))
        tickets.append(Ticket(is_copied, tuple(1 if is_copied else g.choice(choices) for _ in range(num_rows))))
    return tickets


def play_sums(seed: int, kinds: str = "both", too_many: int = 0, waits_for_others: bool = True) -> Memory:
    """One order of steps.

    Args:
        seed: of sizes, tickets and order.
        kinds: of tickets: "added", "copied" or "both".
        too_many: terms of a row beyond what the ring holds.
        waits_for_others: as the kernels do. False: a warp begins rows at once after those that were not for it.
    """
    g = random.Random(seed)
    num_stages = g.randint(3, 8)
    tickets = make_tickets(g, kinds, num_stages + too_many)
    m = Memory(num_stages, num_stages + g.choice((0, 0, 1, 3)), g.randint(1, 4), tickets)
    warps = [look_up(m), fetch(m), send(m, waits_for_others)]
    warps += [add(m, waits_for_others) for _ in range(NUM_ADDERS)]
    loads = Engine(lambda: bool(m.loads), lambda: m.load(g.randrange(len(m.loads))))
    stores = Engine(lambda: m.num_read < len(m.stores), m.store)
    play(g, warps, [loads, stores])
    return m
