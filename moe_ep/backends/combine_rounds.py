"""How a combine inside a node is cut where its staging would be larger than a slot has to be.

Each round is a call over an ascending range of every rank's tokens; csrc/intranode/rounds.h says where they are cut.
All ranks have to come to one number of rounds, from what all of them know.
"""

from __future__ import annotations

from typing import NamedTuple

from moe_ep.backends.node_route import Staging

ROWS_A_TOKEN = 2  # that a slot has for the tokens of the rank with the most


class CombineRounds(NamedTuple):
    """What a combine is told of its rounds.

    Attributes:
        number: of them; 1 for an ordinary call.
        slot_rows: that a slot holds.
        need_rows: that this rank puts into its slot at once, at most; 0 where only the device knows.
    """

    number: int
    slot_rows: int
    need_rows: int


ONE_ROUND = CombineRounds(1, 0, 0)  # of a call that says for itself what it needs


def rows_of_slot(slot_bytes: int, row_bytes: int) -> int:
    """Rows that a slot holds."""
    return slot_bytes // row_bytes


def rows_to_make_room_for(staging: Staging) -> int:
    """Rows that a slot has to hold for a combine: all, or two a token, but no fewer than one of every peer.

    A move has at most one a token. It makes the same room, so that the combine of its rows finds it, also in a graph.
    """
    return min(staging.most, max(ROWS_A_TOKEN * staging.most_tokens, len(staging.rank_tokens) - 1))


def rounds_of(staging: Staging, world: int, slot_rows: int) -> CombineRounds:
    """The rounds of a combine, alike on all ranks of a node.

    Args:
        staging: of the route. Where only the device knows the counts, nobody knows the others' tokens. Then there are
            as many rounds as `ROWS_A_TOKEN` rows for each of T tokens need at any T of W^2 / 2 or more, and the device
            makes one of them do where that is enough. That there are rounds follows from this rank's `max_rows`; a
            call on which ranks differ in that is refused.
        world: ranks of the node.
        slot_rows: that a slot holds, no fewer than `rows_to_make_room_for`.
    """
    if max(staging.most, staging.for_peers) <= slot_rows or world - 1 <= ROWS_A_TOKEN:
        return CombineRounds(1, slot_rows, staging.for_peers)
    if not staging.rank_tokens:
        return CombineRounds(-(-world // ROWS_A_TOKEN), slot_rows, 0)
    number = max(2, -(-(sum(staging.rank_tokens) - min(staging.rank_tokens)) // slot_rows))
    while (need_rows := _most_staged(staging.rank_tokens, number)) > slot_rows:
        number += 1
    return CombineRounds(number, slot_rows, need_rows)


def _most_staged(rank_tokens: tuple[int, ...], number: int) -> int:
    """Rows for the peers in one of so many rounds, if every token goes everywhere, on the rank that has the most."""
    tokens = [-(-num_tokens // number) for num_tokens in rank_tokens]
    return sum(tokens) - min(tokens)
