"""The header of a call inside a node: 32 words, and where the host looks for what; see csrc/exchange/exchange.h."""

from __future__ import annotations

import struct
from collections.abc import Sequence

from moe_ep.backends.header import OK, Header

OPENING_WORD = 15  # of the header that opens a call between nodes: its number, set by the device; 0 in all others
ELSEWHERE_WORD, ELSEWHERE_VALUE_WORD = 16, 17  # see `elsewhere_of`; what stands in the word that differs there
ELSEWHERE_FIELD_SHIFT = 16
GOES_ON_WORD = 18  # this rank's host does not wait for the verdict: it has started the rows behind a plan
NEED_WORD = 25  # bytes that this rank puts into its slot
STATUS_WORD = 28
DOES_NOT_FIT = 100  # status of a rank that needs more bytes than a slot has; the call itself finds out
DIFFERS_ELSEWHERE = 101  # of one that differs from the rank of its rail in another node
HEADER_WORDS = 32
_WORDS = struct.Struct(f"{HEADER_WORDS}q")
_BEFORE_GOES_ON = (0,) * (GOES_ON_WORD - OPENING_WORD - 1)
_BEFORE_NEED = (0,) * (NEED_WORD - GOES_ON_WORD - 1)
_OFFSETS = (0, 0)

Words = tuple[int, ...]


def pack(header: Header, status: int = OK, need_bytes: int = 0, goes_on: bool = False, opens: bool = False) -> bytes:
    """The words of a call; the first `NUM_MATCH_WORDS` must be alike on all ranks.

    Args:
        header: of the call.
        status: OK, or the number of an error class.
        need_bytes: what this rank puts into its slot.
        goes_on: whether this rank's host has started the next call without a look at the verdict.
        opens: whether it opens a call between nodes.
    """
    return _WORDS.pack(
        *header.match_words(),
        opens,
        *_BEFORE_GOES_ON,
        goes_on,
        *_BEFORE_NEED,
        need_bytes,
        *_OFFSETS,
        status,
        header.x_needs_grad,
        header.weights_need_grad,
        header.num_tokens,
    )


def unpack(raw: bytes, num_ranks: int) -> list[Words]:
    """The words of each rank's header."""
    return [_WORDS.unpack_from(raw, rank * _WORDS.size) for rank in range(num_ranks)]


def elsewhere_of(words: Sequence[int]) -> tuple[int, int]:
    """What the header that opens a call between nodes says of the sender's rail.

    Returns:
        1 + the node whose rank there refuses or differs, 0 for none; the number of the match word that differs.
    """
    return words[ELSEWHERE_WORD] & (1 << ELSEWHERE_FIELD_SHIFT) - 1, words[ELSEWHERE_WORD] >> ELSEWHERE_FIELD_SHIFT


def header_of(words: Sequence[int]) -> Header:
    """What must be alike, and the status."""
    return Header.of_words(words, words[STATUS_WORD])
