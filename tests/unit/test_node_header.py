"""The header of a call inside a node: what goes into its 32 words comes out again, and lies where csrc looks for it."""

from __future__ import annotations

import re
import struct
from dataclasses import fields, replace
from pathlib import Path

import pytest

from moe_ep.backends.header import ERRORS, NUM_MATCH_WORDS, OK, OPERATIONS, Header, disagreement, status_of
from moe_ep.backends.node_header import (
    DIFFERS_ELSEWHERE,
    DOES_NOT_FIT,
    ELSEWHERE_FIELD_SHIFT,
    ELSEWHERE_VALUE_WORD,
    ELSEWHERE_WORD,
    GOES_ON_WORD,
    NEED_WORD,
    OPENING_WORD,
    STATUS_WORD,
    header_of,
    pack,
    unpack,
)
from moe_ep.errors import ConfigError, EPTimeoutError

CSRC = (Path(__file__).parents[2] / "csrc" / "exchange" / "exchange.h").read_text()
# What must be alike on all ranks; a generation is in the tag of every flag.
MATCH = [field.name for field in fields(Header)]
MATCH = [name for name in MATCH[: MATCH.index("rounds") + 1] if name != "generation"]


# What csrc/bindings/intranode.cpp puts over the words that all calls along a handle share.
OF_A_CALL = {
    "operation": "kOperationWord",
    "handle": "kHandleWord",
    "hidden": "kHiddenWord",
    "dtype": "kDtypeWord",
    "weights_dtype": "kWeightsDtypeWord",
    "exact": "kExactWord",
    "rounds": "kRoundsWord",
}


def constant(name: str) -> int:
    found = re.search(rf"constexpr \w+ {name} = (\d+);", CSRC)
    assert found is not None, f"csrc/exchange/exchange.h has no {name}"
    return int(found[1])


OFFSETS = (constant("kFirstOffsetWord"), constant("kSecondOffsetWord"))


def words_of(header: Header, status: int = OK, need_bytes: int = 0, goes_on: bool = False) -> tuple[int, ...]:
    raw = pack(header, status, need_bytes, goes_on)
    assert struct.unpack("32q", raw) == unpack(raw, 1)[0]
    return unpack(raw, 1)[0]


def header_of_call(operation: str) -> Header:
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
    header = header_of_call(operation)
    words = words_of(header, status=3)
    assert len(MATCH) == NUM_MATCH_WORDS
    back = header_of(words)
    assert {name: getattr(back, name) for name in MATCH} == {name: getattr(header, name) for name in MATCH}
    assert back.status == 3
    assert Header.of_words(header.match_words(), 3) == back


@pytest.mark.parametrize("name", MATCH)
def test_a_difference_in_any_field_lies_in_the_words_that_are_compared(name: str) -> None:
    header = header_of_call("combine")
    changed = replace(header, **{name: int(getattr(header, name)) + 1})  # type: ignore[arg-type]
    words, others = words_of(header), words_of(changed)
    assert words[:NUM_MATCH_WORDS] != others[:NUM_MATCH_WORDS]
    assert words[NUM_MATCH_WORDS:] == others[NUM_MATCH_WORDS:]
    sentence = disagreement([Header.of_words(row, OK) for row in (words, others)])
    assert sentence is not None
    assert sentence == disagreement([header, changed])


def test_each_ranks_own_words_lie_where_the_kernels_look_for_them() -> None:
    assert constant("kHeaderWords") == 32
    header = header_of_call("dispatch")
    words = words_of(header, 2, 12345, goes_on=True)
    assert NUM_MATCH_WORDS <= GOES_ON_WORD < constant("kOverflowedWord") < constant("kRegisteredWord")
    assert words[GOES_ON_WORD] == 1
    assert words[constant("kOverflowedWord")] == 0, "the device says so itself"
    assert NEED_WORD == constant("kNeedWord")
    assert words[NEED_WORD] == 12345
    assert words[constant("kStatusWord")] == words[STATUS_WORD] == 2
    assert words[constant("kXNeedsGradWord")] == 1
    assert words[constant("kWeightsNeedGradWord")] == 0
    assert words[constant("kTokensWord")] == 4097
    unset = (*range(NUM_MATCH_WORDS, GOES_ON_WORD), *range(constant("kRegisteredWord"), NEED_WORD), *OFFSETS)
    assert not any(words[place] for place in unset)
    assert constant("kDoesNotFit") == DOES_NOT_FIT


def test_the_words_of_an_opening_lie_behind_those_that_are_compared() -> None:
    places = [OPENING_WORD, ELSEWHERE_WORD, ELSEWHERE_VALUE_WORD]
    names = ["kOpeningWord", "kElsewhereWord", "kElsewhereValueWord"]
    assert places == [constant(name) for name in names] == [*range(NUM_MATCH_WORDS, GOES_ON_WORD)]
    words = unpack(pack(header_of_call("combine"), opens=True), 1)[0]
    assert [words[place] for place in places] == [1, 0, 0], "its number is the device's"
    assert constant("kElsewhereFieldShift") == ELSEWHERE_FIELD_SHIFT
    assert constant("kDiffersElsewhere") == DIFFERS_ELSEWHERE


@pytest.mark.parametrize("name", OF_A_CALL)
def test_words_that_a_call_along_a_handle_sets_by_number_have_that_number(name: str) -> None:
    header, number = Header(), constant(OF_A_CALL[name])
    words, others = words_of(header), words_of(replace(header, **{name: 77}))  # type: ignore[arg-type]
    assert [place for place, (one, other) in enumerate(zip(words, others, strict=True)) if one != other] == [number]


def test_no_error_travels_as_fine_or_as_one_that_does_not_fit() -> None:
    errors = [ValueError("a"), TypeError("a"), ConfigError("a"), RuntimeError("a"), EPTimeoutError("a"), KeyError("a")]
    statuses = [status_of(error) for error in errors]
    assert all(OK < status < min(len(ERRORS), DOES_NOT_FIT) for status in statuses)
    assert [ERRORS[status] for status in statuses[:4]] == [ValueError, TypeError, ConfigError, RuntimeError]
