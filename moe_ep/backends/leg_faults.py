"""What the device reports of calls between nodes: who refused one, wherever it is, and on what two ranks differ.

A rank hears of its rail what the ranks of it say, and its node hears it from that rank: the headers of the openings in
the record are those of the node, each with what its sender has heard (csrc/internode/rail.h).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

from moe_ep.backends.device_faults import DISAGREE, TEXT_SECS, DeviceFaults
from moe_ep.backends.header import ERRORS, Header, disagreement, match_field
from moe_ep.backends.node_header import (
    DIFFERS_ELSEWHERE,
    ELSEWHERE_VALUE_WORD,
    OPENING_WORD,
    STATUS_WORD,
    Words,
    elsewhere_of,
    header_of,
)
from moe_ep.backends.node_memory import NodeMemory


class Reasons(Protocol):
    """Where the ranks of the EP group leave for each other why they refused an opening."""

    def leave_reason(self, opening: int, text: str) -> None: ...

    def reason(self, opening: int, place: int, limit_secs: float) -> str | None:
        """What the rank at `place` left, or None if nothing within the limit."""


class LegFaults(DeviceFaults):
    """`DeviceFaults` of one rank's exchange inside its node, of which others are opened for the whole EP group.

    Attributes:
        reasons: None where there is one node.
    """

    def __init__(self, memory: NodeMemory) -> None:
        super().__init__(memory)
        self.reasons: Reasons | None = None
        self._first = memory.group_ranks.index(memory.ranks[0])  # place of the node's first rank

    def leave_reason(self, text: str) -> None:
        opening = self._headers()[self._memory.rank][OPENING_WORD]
        if self.reasons is None or opening == 0:
            super().leave_reason(text)
            return
        self.reasons.leave_reason(opening, text)
        self._take_quietly()

    @property
    def _place(self) -> int:
        return self._first + self._memory.rank

    def _refuser(self, words: Sequence[Words]) -> tuple[int, int] | None:
        refusing = [(self._heard(number, row), row[STATUS_WORD]) for number, row in enumerate(words)]
        return min((one for one in refusing if 0 < one[1] < len(ERRORS)), default=None)

    def _reason_of(self, place: int, epoch: int, words: Sequence[Words]) -> str | None:
        opening = words[self._memory.rank][OPENING_WORD]
        if self.reasons is None or opening == 0:
            return super()._reason_of(place - self._first, epoch, words)
        return self.reasons.reason(opening, place, TEXT_SECS)

    def _difference(self, verdict: int, words: Sequence[Words]) -> str | None:
        if verdict != DISAGREE and (self._refuser(words) is not None):
            return None
        headers: dict[int, Header] = {}
        for number, row in enumerate(words):
            own = header_of(row)
            headers[self._first + number] = own
            if row[STATUS_WORD] == DIFFERS_ELSEWHERE:  # alike up to there
                other = {match_field(elsewhere_of(row)[1]): row[ELSEWHERE_VALUE_WORD]}
                headers[self._heard(number, row)] = replace(own, **other)  # type: ignore[arg-type]
        places = sorted(headers)
        return disagreement([headers[place] for place in places], places)

    def _heard(self, number: int, row: Words) -> int:
        """The place of the rank that the header of rank `number` of the node speaks of: its own, or another node's."""
        node, _ = elsewhere_of(row)
        return self._first + number if node == 0 else (node - 1) * len(self._memory.ranks) + number
