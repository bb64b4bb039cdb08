"""The rings of the kernels in random order of steps: nothing is read, or told of, before or after its time.

The race checker of CUDA does not follow barriers in shared memory that lanes of a warp use for each other, so these
models stand in for it: warps as coroutines, the copy engine as events that come in any order.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.unit.rings.copies import play_copies
from tests.unit.rings.steps import StuckError, WrongDataError
from tests.unit.rings.sums import play_sums


@pytest.mark.parametrize("kinds", ["added", "copied", "both"])
def test_every_warp_reads_every_term_once_and_in_its_time(kinds: str) -> None:
    for seed in range(40):
        memory = play_sums(seed, kinds)
        assert memory.done == memory.expected(), f"seed {seed}"


def test_every_row_is_stored_from_its_own_stage_and_told_of_when_it_is_written() -> None:
    for seed in range(100):
        memory = play_copies(seed)
        assert sorted(memory.posted) == sorted({batch.ticket for batch in memory.batches if batch.posts})
        stored = [piece for stores in memory.stores for _, piece in stores.pieces[: stores.num_read]]
        assert sorted(stored) == [piece for batch in memory.batches for piece in memory.pieces_of(batch)], (
            f"seed {seed}"
        )


def num_failed(error: type[AssertionError], play: Callable[[int], object], num_seeds: int = 60) -> int:
    found = 0
    for seed in range(num_seeds):
        try:
            play(seed)
        except error:
            found += 1
        except AssertionError:
            continue
    return found


def test_the_models_find_a_warp_that_begins_before_the_others_have_passed() -> None:
    assert num_failed(WrongDataError, lambda seed: play_sums(seed, waits_for_others=False)) > 0
    assert num_failed(WrongDataError, lambda seed: play_copies(seed, takes_turns=False)) > 0


def test_the_models_find_a_ring_that_is_too_small() -> None:
    assert num_failed(StuckError, lambda seed: play_sums(seed, too_many=1)) > 0
    assert num_failed(StuckError, lambda seed: play_copies(seed, num_stages=2)) > 0
