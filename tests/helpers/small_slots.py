"""Slots that look small, so that small combines take many rounds. Nothing in the kernels knows of it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

from moe_ep.backends import combine_rounds
from moe_ep.backends.combine_rounds import CombineRounds
from moe_ep.backends.node_route import Staging


@contextmanager
def slots_of(num_rows: int) -> Iterator[list[int]]:
    """A slot holds so many rows, as far as combines of this process know; how many rounds each of them takes."""
    numbers: list[int] = []
    rounds_of = combine_rounds.rounds_of

    def noting(staging: Staging, world: int, slot_rows: int) -> CombineRounds:
        rounds = rounds_of(staging, world, slot_rows)
        numbers.append(rounds.number)
        return rounds

    with (
        mock.patch.object(combine_rounds, "rows_of_slot", return_value=num_rows),
        mock.patch.object(combine_rounds, "rounds_of", noting),
    ):
        yield numbers
