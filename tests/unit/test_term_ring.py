"""The rings of csrc/intranode/term_ring.cuh in random order of steps: nothing is read before or after its time.

The race checker of CUDA does not follow barriers in shared memory that lanes of a warp use for each other, so this
model stands in for it: warps as coroutines, the copy engine as events that come in any order.
"""

from __future__ import annotations

import random

import pytest

from tests.unit.term_ring.memory import NUM_ADDERS, Memory, Piece, Ticket, WrongDataError
from tests.unit.term_ring.warps import Steps, add, fetch, look_up, send


class StuckError(AssertionError):
    """Every warp waits, and nothing is under way."""


def make_tickets(g: random.Random, num_stages: int, kinds: str, most: int) -> list[Ticket]:
    tickets = []
    for _ in range(g.randint(1, 14)):
        num_rows = g.choice((0, 0, 1, 2, 3, 5, 9))
        is_copied = kinds == "copied" or (kinds == "both" and g.random() < 0.5)
        choices = g.choice((range(most + 1), (most,), (0,), (1,), (0, 1, most - 1, most)))
        counts = tuple(1 if is_copied else g.choice(choices) for _ in range(num_rows))
        tickets.append(Ticket(is_copied, counts))
    return tickets


def run(seed: int, kinds: str = "both", too_many: int = 0, waits_for_others: bool = True) -> Memory:
    """One order of steps.

    Args:
        seed: of sizes, tickets and order.
        kinds: of tickets: "added", "copied" or "both".
        too_many: terms of a row beyond what the ring holds.
        waits_for_others: as the kernels do. False: a warp begins rows at once after those that were not for it.
    """
    g = random.Random(seed)
    num_stages = g.randint(3, 8)
    tickets = make_tickets(g, num_stages, kinds, num_stages + too_many)
    memory = Memory(num_stages, num_stages + g.choice((0, 0, 1, 3)), g.randint(1, 4), tickets)
    warps = [look_up(memory), fetch(memory), send(memory, waits_for_others)]
    warps += [add(memory, waits_for_others) for _ in range(NUM_ADDERS)]
    paces = {warp: g.choice((0.05, 0.3, 1, 1, 3)) for warp in warps}
    load_pace, store_pace = g.choice((0.1, 1, 3)), g.choice((0.1, 1, 3))
    waiting: set[Steps] = set()  # since anything happened
    while warps:
        events = [load_pace * bool(memory.loads), store_pace * (memory.num_read < len(memory.stores))]
        if len(waiting) == len(warps) and not any(events):
            raise StuckError(f"seed {seed}: {len(warps)} warps wait for ever")
        chosen = g.choices([*warps, "load", "store"], [*(paces[warp] for warp in warps), *events])[0]
        if isinstance(chosen, str):
            waiting.clear()
            if chosen == "load":
                memory.load(g.randrange(len(memory.loads)))
            else:
                memory.store()
        else:
            step = next(chosen, None)
            if step is None:
                warps.remove(chosen)
            if step:
                waiting.add(chosen)
            else:
                waiting.clear()
    return memory


def expected(memory: Memory) -> dict[Piece, int]:
    """Every adding warp reads all terms of a sum; the engine reads a copied row once."""
    return {
        Piece(number, row, piece, term): 1 if ticket.is_copied else NUM_ADDERS
        for number, ticket in enumerate(memory.tickets)
        for row, count in enumerate(ticket.counts)
        for piece in range(memory.pieces_a_row)
        for term in range(count)
    }


@pytest.mark.parametrize("kinds", ["added", "copied", "both"])
def test_every_warp_reads_every_term_once_and_in_its_time(kinds: str) -> None:
    for seed in range(40):
        memory = run(seed, kinds)
        assert memory.done == expected(memory), f"seed {seed}"


def failures(error: type[AssertionError], num_seeds: int, **how: int) -> int:
    num_failed = 0
    for seed in range(num_seeds):
        try:
            run(seed, **how)  # type: ignore[arg-type]
        except error:
            num_failed += 1
        except AssertionError:
            continue
    return num_failed


def test_the_model_finds_a_warp_that_begins_before_the_others_have_passed() -> None:
    assert failures(WrongDataError, 60, waits_for_others=False) > 0


def test_the_model_finds_a_ring_that_is_too_small_for_a_row() -> None:
    assert failures(StuckError, 60, too_many=1) > 0
