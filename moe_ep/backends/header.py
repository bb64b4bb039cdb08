"""The header that opens every exchange: who I am, what I am about to do, and whether I refuse.

Every rank sends one to every rank, a rank that refuses its input too. So all ranks see all headers and come to the
same verdict: all go on, or all raise the same sentence and none is left waiting.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from operator import attrgetter

import torch
from torch import Tensor

from moe_ep.errors import ConfigError
from moe_ep.handle import LAYOUTS

PROTOCOL = 0x6D6F6501  # "moe", version 1
OPERATIONS = ("dispatch", "dispatch backward", "combine", "combine backward", "all_reduce", "cached dispatch")
CALLS = (*OPERATIONS, "low_latency_dispatch", "low_latency_combine")  # by number; the last two send no header
DTYPES = (
    torch.float64,
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.uint8,
    torch.int8,
)


def dtype_number(dtype: torch.dtype) -> int:
    """What stands for `dtype`: its place in `DTYPES`, or a number made of its size."""
    return DTYPES.index(dtype) if dtype in DTYPES else len(DTYPES) + dtype.itemsize


# Status of a rank: fine, or the class of the error that it raises.
ERRORS: tuple[type[Exception] | None, ...] = (None, ValueError, TypeError, ConfigError, RuntimeError)
OK = 0


def status_of(error: Exception) -> int:
    """The number under which `error` travels: of its own class if listed, of a base class otherwise."""
    if type(error) in ERRORS:
        return ERRORS.index(type(error))
    return next(i for i, kind in enumerate(ERRORS) if kind is not None and isinstance(error, (kind, Exception)))


@dataclass(frozen=True)
class Header:
    """One rank's announcement. It travels as one int64 row: the int fields, then `row_counts`.

    The fields up to `rounds` must be alike on all ranks; the others are each rank's own.
    """

    protocol: int = PROTOCOL
    generation: int = 0
    operation: int = 0
    handle: int = -1
    hidden: int = 0
    num_topk: int = 0
    num_experts: int = 0
    dtype: int = -1
    weights_dtype: int = -1
    layout: int = -1
    alignment: int = 0
    exact: int = 0
    grad_enabled: int = 1
    placement: int = 0
    on_host: int = 0  # the ranks meet on the host in this exchange: it cannot go on by the device alone
    rounds: int = 1  # of a combine inside a node
    status: int = OK
    x_needs_grad: int = 0
    weights_need_grad: int = 0
    lacks_route: int = 0  # the handle has not been along a way that the backend must know
    routing: int = 0
    num_tokens: int = 0
    row_counts: tuple[int, ...] = ()  # compact rows that follow, for each rank

    def match_words(self) -> tuple[int, ...]:
        """The fields that must be alike on all ranks, the operation first."""
        words: tuple[int, ...] = _match_words_of(self)
        return words

    @staticmethod
    def of_words(words: Sequence[int], status: int) -> Header:
        """The inverse of `match_words`."""
        return replace(Header(status=status), **dict(zip(_MATCH_WORDS, words, strict=False)))  # type: ignore[arg-type]

    def for_peers(self) -> Tensor:
        """[W, fields + W] int64: the same row for every rank."""
        row = [*(int(getattr(self, name)) for name in _NUMBERS), *self.row_counts]
        return torch.tensor([row] * len(self.row_counts), dtype=torch.int64)

    @staticmethod
    def read(table: Tensor) -> list[Header]:
        """The headers of all ranks, in rank order."""
        split = len(_NUMBERS)
        return [
            Header(**dict(zip(_NUMBERS, row[:split], strict=True)), row_counts=tuple(row[split:]))
            for row in table.tolist()
        ]


_NUMBERS = tuple(field.name for field in fields(Header) if field.name != "row_counts")
_MUST_MATCH = _NUMBERS[: _NUMBERS.index("rounds") + 1]
_MATCH_WORDS = ("operation", *(name for name in _MUST_MATCH if name not in ("operation", "generation")))
NUM_MATCH_WORDS = len(_MATCH_WORDS)
_match_words_of = attrgetter(*_MATCH_WORDS)
_MEANING = {
    "protocol": "the protocol version",
    "generation": "the generation (how often reset() ran)",
    "operation": "the operation",
    "handle": "the routing of the dispatch that is combined",
    "hidden": "the hidden size H",
    "num_topk": "the slots a token K",
    "num_experts": "num_experts",
    "dtype": "the dtype of the rows",
    "weights_dtype": "the dtype of topk_weights",
    "layout": "the layout",
    "alignment": "the alignment",
    "exact": "exact",
    "grad_enabled": "whether gradients are enabled (torch.no_grad)",
    "placement": "expert_placement",
    "on_host": "whether the handle knows its way between nodes (a pickled or deep copy does not: give all ranks one)",
    "rounds": "the rounds of a combine (which follow from max_rows)",
}


def _spell(name: str, value: int) -> str:
    if name == "operation":
        return OPERATIONS[value] if 0 <= value < len(OPERATIONS) else f"number {value}"
    if name in ("dtype", "weights_dtype"):
        if value >= len(DTYPES):  # int32 or int64, say: told apart by their size
            return f"another of {value - len(DTYPES)} bytes"
        return "none" if value < 0 else str(DTYPES[value])
    if name == "grad_enabled":
        return str(bool(value))
    if name == "on_host":
        return str(not value)
    if name == "layout":
        return LAYOUTS[value] if 0 <= value < len(LAYOUTS) else "none"
    return str(value)


def match_field(number: int) -> str:
    """The name of a field by its number among the match words."""
    return _MATCH_WORDS[number]


def disagreement(headers: Sequence[Header], places: Sequence[int] | None = None) -> str | None:
    """A sentence that names the first setting on which two ranks differ, with both values; None if all agree.

    Args:
        headers: of some ranks or all.
        places: theirs in the EP group, ascending; None for all.
    """
    places = range(len(headers)) if places is None else places
    for name in _MUST_MATCH:
        values = [getattr(header, name) for header in headers]
        other = next((number for number, value in enumerate(values) if value != values[0]), None)
        if other is not None:
            return (
                f"the ranks of the EP group disagree on {_MEANING[name]}: rank {places[0]} has "
                f"{_spell(name, values[0])}, rank {places[other]} has {_spell(name, values[other])}. Give every rank "
                "the same value and call the operations in the same order on every rank."
            )
    return None
