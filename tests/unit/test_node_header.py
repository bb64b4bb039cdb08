"""The header of a call inside a node: what goes into its 32 words comes out again, and lies where csrc looks for it."""

from __future__ import annotations

import re
import struct
from dataclasses import fields, replace
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from moe_ep.backends import node_calls
from moe_ep.backends.device_faults import _STATUS_WORD
from moe_ep.backends.header import ERRORS, OK, OPERATIONS, Header, disagreement, status_of
from moe_ep.backends.node_calls import DOES_NOT_FIT, NEED_WORD, NodeCalls
from moe_ep.errors import ConfigError, EPTimeoutError

CSRC = (Path(__file__).parents[2] / "csrc" / "exchange.h").read_text()
# What must be alike on all ranks; a generation is in the tag of every flag.
MATCH = [field.name for field in fields(Header)]
MATCH = [name for name in MATCH[: MATCH.index("placement") + 1] if name != "generation"]


def constant(name: str) -> int:
    found = re.search(rf"constexpr \w+ {name} = (\d+);", CSRC)
    assert found is not None, f"csrc/exchange.h has no {name}"
    return int(found[1])


def pack(
    header: Header,
    status: int = OK,
    need_bytes: int = 0,
    offsets: tuple[int, int] = (0, 0),
    places: tuple[int, ...] = (),
) -> tuple[tuple[int, ...], int]:
    calls = cast(NodeCalls, SimpleNamespace(_num_calls=0))
    raw, num_match = NodeCalls._pack(calls, header, status, need_bytes, offsets, places)
    assert calls._num_calls == 1
    return struct.unpack("32q", raw), num_match


def header_of(operation: str) -> Header:
    """Every field has a value of its own, large and negative ones among them."""
    return Header(
        operation=OPERATIONS.index(operation),
        handle=2**62 - 7,
        hidden=7168,
        num_topk=8,
        num_experts=256,
        dtype=2,
        weights_dtype=-1,
        layout=1,
        alignment=128,
        exact=1,
        grad_enabled=0,
        placement=2**62 - 9,
        x_needs_grad=1,
        weights_need_grad=0,
        num_tokens=4097,
    )


@pytest.mark.parametrize("operation", OPERATIONS)
def test_every_field_that_must_match_makes_the_round_trip(operation: str) -> None:
    header = header_of(operation)
    words, num_match = pack(header, status=3)
    assert num_match == len(MATCH)
    back = Header.of_words(words, words[_STATUS_WORD])
    assert {name: getattr(back, name) for name in MATCH} == {name: getattr(header, name) for name in MATCH}
    assert back.status == 3
    assert Header.of_words(header.match_words(), 3) == back


@pytest.mark.parametrize("name", MATCH)
def test_a_difference_in_any_field_lies_in_the_words_that_are_compared(name: str) -> None:
    header = header_of("combine")
    changed = replace(header, **{name: int(getattr(header, name)) + 1})  # type: ignore[arg-type]
    (words, num_match), (others, _) = pack(header), pack(changed)
    assert words[:num_match] != others[:num_match]
    assert words[num_match:] == others[num_match:]
    sentence = disagreement([Header.of_words(row, OK) for row in (words, others)])
    assert sentence is not None
    assert sentence == disagreement([header, changed])


def test_each_ranks_own_words_lie_where_the_kernels_look_for_them() -> None:
    assert node_calls._PLACES_WORD == constant("kRegisteredWord")
    assert constant("kHeaderWords") == 32
    header = header_of("dispatch")
    words, num_match = pack(header, DOES_NOT_FIT, 12345, (256, 512), (3, 64, 128, 192, 16))
    assert num_match <= constant("kOverflowedWord")
    assert words[constant("kOverflowedWord")] == 0, "the device says so itself"
    registered = constant("kRegisteredWord")
    assert words[registered : registered + 5] == (3, 64, 128, 192, 16)
    assert words[NEED_WORD] == 12345
    assert (words[constant("kFirstOffsetWord")], words[constant("kSecondOffsetWord")]) == (256, 512)
    assert words[constant("kStatusWord")] == constant("kDoesNotFit") == DOES_NOT_FIT
    assert words[constant("kXNeedsGradWord")] == 1
    assert words[constant("kWeightsNeedGradWord")] == 0
    assert words[constant("kTokensWord")] == 4097
    one_kind, _ = pack(header, places=(1, 0, 32))
    assert one_kind[registered : NEED_WORD + 1] == (1, 0, 32, 0, 0, 0)


def test_no_error_travels_as_fine_or_as_one_that_does_not_fit() -> None:
    errors = [ValueError("a"), TypeError("a"), ConfigError("a"), RuntimeError("a"), EPTimeoutError("a"), KeyError("a")]
    statuses = [status_of(error) for error in errors]
    assert all(OK < status < min(len(ERRORS), DOES_NOT_FIT) for status in statuses)
    assert [ERRORS[status] for status in statuses[:4]] == [ValueError, TypeError, ConfigError, RuntimeError]
