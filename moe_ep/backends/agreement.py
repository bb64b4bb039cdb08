"""How the ranks agree before a payload moves, and what happens to a rank that fails after they did."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

from moe_ep.backends.header import ERRORS, OK, OPERATIONS, Header, disagreement, status_of
from moe_ep.backends.meeting import name_ranks
from moe_ep.backends.private_group import PrivateGroup
from moe_ep.errors import ConfigError, EPTimeoutError


class Agreement:
    """Exchanges headers over a group, or over nothing where a rank is alone.

    Args:
        group: of at least two ranks, or None.
    """

    def __init__(self, group: PrivateGroup | None) -> None:
        self._group = group
        self.size = 1 if group is None else group.size

    def exchange(self, header: Header, refusal: Exception | None) -> list[Header]:
        """All ranks' headers, or the same error on all ranks. `refusal` is this rank's own reason to refuse."""
        header = replace(header, row_counts=header.row_counts or (0,) * self.size)
        if self._group is None:
            if refusal is not None:
                raise refusal
            return [header]
        operation = OPERATIONS[header.operation]
        status = OK if refusal is None else status_of(refusal)
        header = replace(header, status=status, generation=self._group.generation)
        headers = Header.read(self._group.all_to_all_host(header.for_peers(), operation))
        members = self._group.members
        absent = replace(
            header, status=OK, x_needs_grad=0, weights_need_grad=0, routing=0, num_tokens=0, row_counts=(0,) * self.size
        )
        headers = [peer if rank in members else absent for rank, peer in enumerate(headers)]
        refusing = [rank for rank, peer in enumerate(headers) if peer.status != OK]
        if refusing:
            texts = self._group.exchange_text("" if refusal is None else str(refusal), operation)
            rank = refusing[0]
            kind = ERRORS[headers[rank].status] or RuntimeError
            raise kind(f"EP rank {rank} refused {operation}: {texts[rank]}") from refusal
        sentence = disagreement(headers)
        if sentence is not None:
            raise ConfigError(f"{operation}: {sentence}")
        return headers

    def refusal_of(self, *row_counts: Sequence[int]) -> Exception | None:
        """What to say to a call that wants rows moved to or from ranks that take no part any more."""
        members = range(self.size) if self._group is None else self._group.members
        gone = sorted({rank for counts in row_counts for rank, num in enumerate(counts) if num and rank not in members})
        if not gone:
            return None
        return RuntimeError(
            f"the call moves rows to or from EP {name_ranks(gone)}, which the low-latency calls left out; "
            "where all ranks live, call reset() on every one."
        )

    @contextmanager
    def committed(self, operation: str) -> Iterator[None]:
        """Past the headers the other ranks count on this one: if it fails now, the group carries nothing more."""
        try:
            yield
        except Exception as error:
            if self._group is not None and not isinstance(error, EPTimeoutError):
                self._group.break_off(f"{operation} failed on this rank after the ranks had agreed on it: {error}")
            raise
