"""What the device reports of a call inside a node, as sentences: who waited for whom, who refused, what did not fit."""

from __future__ import annotations

import struct
from dataclasses import replace
from typing import Any, cast

import pytest
import torch

from moe_ep._native.exchange import Answer
from moe_ep.backends.base import DispatchRequest
from moe_ep.backends.device_faults import DISAGREE, FAILED, GO, GROW, REFUSE, DeviceFaults
from moe_ep.backends.header import ERRORS, OPERATIONS, Header
from moe_ep.backends.node_header import NEED_WORD, pack
from moe_ep.backends.node_memory import NodeMemory
from moe_ep.errors import ConfigError, EPTimeoutError
from moe_ep.placement import ExpertPlacement
from tests.helpers.scale_experts import caught

RANKS = (4, 5, 6)
OWN = 1
EPOCH, GENERATION = 17, 3
PLENTY_SECS = 100.0


class Record:
    """The mapped record of one rank, and the texts that ranks have left."""

    slot_bytes = 16 << 20

    def __init__(self, ranks: tuple[int, ...] = RANKS, rank: int = OWN) -> None:
        self.ranks = self.group_ranks = ranks
        self.rank, self.generation, self.timeout_secs = rank, GENERATION, 2.5
        self.exchange = self
        self.verdict, self.bad = GO, (-1, 0)
        self.sent = [words(Header()) for _ in ranks]
        self.faults: list[tuple[str, list[int]]] = []
        self.left: dict[tuple[str, int], str] = {}
        self.num_slices = 0  # of waiting, before there is an answer
        self.joined: list[Exception] = []  # errors with which the rows behind a plan were refused

    def wait_answer(self, question: int, limit_secs: float) -> Answer | None:
        self.num_slices -= 1
        return self.answer() if self.num_slices < 0 else None

    def answer(self) -> Answer:
        return self.verdict, EPOCH, *self.bad, (0, 0, False, False, (), (), ())

    def headers(self, size: int) -> bytes:
        assert size == len(self.ranks)
        return b"".join(self.sent)

    def has_fault(self) -> bool:
        return bool(self.faults)

    def take_faults(self) -> list[tuple[str, list[int]]]:
        taken = list(self.faults)
        self.faults = [fault for fault in taken if fault[0] == "timeout"]
        return taken

    def join_rows(self, error: Exception) -> None:
        self.joined.append(error)

    def texts(self, name: str, limit_secs: float, rank: int) -> str | None:
        return self.left.get((name, rank))

    def leave_text(self, name: str, text: str) -> None:
        self.left[name, self.rank] = text


def words(header: Header, status: int = 0, need_bytes: int = 0, goes_on: bool = False) -> bytes:
    return pack(header, status, need_bytes, goes_on)


def header(operation: str, **changes: Any) -> Header:
    return Header(operation=OPERATIONS.index(operation), **changes)


def faults_of(record: Record) -> DeviceFaults:
    return DeviceFaults(cast(NodeMemory, record))


def fault(name: str, *values: int) -> tuple[str, list[int]]:
    return name, [*values, *[0] * (8 - len(values))]


def refused(record: Record, verdict: int, epoch: int = EPOCH, num_more: int = 0) -> tuple[str, list[int]]:
    """The first refusal since the last look, with the headers that the ranks sent."""
    name, values = fault("refused", verdict, epoch, num_more)
    return name, values + [word for sent in record.sent for word in struct.unpack("32q", sent)]


def asked(record: Record, operation: str, request: DispatchRequest | None = None) -> tuple[Any, str]:
    """What a call whose host waits raises."""
    return caught(lambda: faults_of(record).verdict(operation, 1, PLENTY_SECS, request, record.join_rows))


def dispatch_request(num_topk: int = 2, num_experts: int = 8) -> DispatchRequest:
    return DispatchRequest(
        x=torch.zeros(4, 8),
        topk_idx=torch.zeros(4, num_topk, dtype=torch.int64),
        topk_weights=None,
        placement=ExpertPlacement.balanced(num_experts, len(RANKS)),
        layout="compact",
        alignment=1,
        max_rows=None,
        num_channels=1,
        x_needs_grad=False,
        weights_need_grad=False,
    )


# -- time limits --------------------------------------------------------------------------------------------------

PHASES = {
    0: "be done with an earlier call",
    1: "come to the call",
    2: "publish its rows",
    3: "finish its own part",
    4: "go on: it gave the call up",
}


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("operation", OPERATIONS)
def test_a_time_limit_says_who_waited_for_whom_in_which_phase(operation: str, phase: int) -> None:
    record = Record()
    record.verdict = FAILED
    record.faults = [fault("timeout", 2, phase, EPOCH, 0x300000012, 0x300000011, OPERATIONS.index(operation))]
    expected = (
        f"{operation} on rank 5 of the EP group of ranks [4, 5, 6] failed at its limit of 2.5 s: rank 6 did not "
        f"{PHASES[phase]} (call 17 of generation 3, flag 0x300000011 where 0x300000012 was expected). Look at its log; "
        "where all ranks live, Buffer.reset() on every one makes the buffer usable again."
    )
    assert asked(record, operation) == (EPTimeoutError, expected)
    # The same where no host waited: the sentence comes with the next look at the record.
    assert caught(faults_of(record).take) == (EPTimeoutError, expected)


def test_a_time_limit_inside_a_rank_names_itself() -> None:
    record = Record()
    record.faults = [fault("timeout", -1, 3, EPOCH, 2, 1, 0)]
    kind, text = caught(faults_of(record).take)
    assert kind is EPTimeoutError
    assert "this rank itself did not finish its own part" in text


def test_a_time_limit_of_an_unknown_operation_is_one_of_a_call() -> None:
    record = Record()
    record.faults = [fault("timeout", 0, 1, EPOCH, 2, 1, 99)]
    kind, text = caught(faults_of(record).take)
    assert kind is EPTimeoutError
    assert text.startswith("a call on rank 5")


def test_a_call_behind_one_that_failed_says_so() -> None:
    record = Record()
    record.verdict = FAILED
    expected = "dispatch on rank 5 was given up, as an earlier call was."
    assert asked(record, "dispatch") == (EPTimeoutError, expected)


def test_nothing_is_started_after_a_time_limit_until_it_is_forgotten() -> None:
    record = Record()
    faults = faults_of(record)
    faults.raise_if_dead("combine")
    record.faults = [fault("timeout", 0, 1, EPOCH, 2, 1, 0)]
    _, first = caught(faults.take)
    assert caught(lambda: faults.raise_if_dead("combine")) == (EPTimeoutError, f"combine was not started: {first}")
    faults.forget()
    faults.raise_if_dead("combine")


def test_a_device_that_other_work_holds_is_reported_after_the_hosts_limit() -> None:
    record = Record()
    record.num_slices = 10**6
    faults = faults_of(record)
    kind, text = caught(lambda: faults.await_answer("dispatch", 1, 2.0))
    assert kind is EPTimeoutError
    assert text == (
        "dispatch on rank 5 has not begun on the device after 2 s: other work holds it. Look for a kernel on this GPU "
        "that waits for something."
    )
    assert 10**6 - record.num_slices == 5, "in slices of 0.5 s, so that an interrupt is seen"
    with pytest.raises(EPTimeoutError, match="combine was not started: dispatch on rank 5 has not begun"):
        faults.raise_if_dead("combine")


def test_an_answer_within_the_limit_is_taken() -> None:
    record = Record()
    record.num_slices = 3
    record.verdict = GROW
    assert faults_of(record).verdict("dispatch", 1, 2.0, None, record.join_rows)[0] == GROW


# -- refusals -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ERRORS[1:])
def test_a_refusal_of_another_rank_is_its_error_with_its_reason(kind: type[Exception]) -> None:
    record = Record()
    record.verdict = REFUSE
    record.sent[2] = words(header("combine"), ERRORS.index(kind))
    record.left[f"reason/{GENERATION}/{EPOCH}", 2] = "rows is a list; give a torch.Tensor."
    expected = "EP rank 2 refused combine: rows is a list; give a torch.Tensor."
    assert asked(record, "combine") == (kind, expected)
    assert record.faults == []


def test_a_refusal_without_a_reason_points_to_the_log() -> None:
    record = Record()
    record.verdict = REFUSE
    record.sent[0] = words(header("dispatch"), 1)
    record.left[f"reason/{GENERATION}/{EPOCH - 1}", 0] = "of an earlier call"
    assert asked(record, "dispatch") == (ValueError, "EP rank 0 refused dispatch: see its log")


def test_of_two_refusals_all_ranks_give_the_lowest_ranks() -> None:
    record = Record()
    record.verdict = REFUSE
    record.sent[1] = words(header("dispatch"), 2)
    record.sent[2] = words(header("dispatch"), 1)
    record.left[f"reason/{GENERATION}/{EPOCH}", 1] = "first"
    record.left[f"reason/{GENERATION}/{EPOCH}", 2] = "second"
    for rank in range(3):
        record.rank = rank
        assert asked(record, "dispatch") == (TypeError, "EP rank 1 refused dispatch: first")


def test_a_rank_that_refuses_leaves_its_reason_and_raises_like_the_others() -> None:
    record = Record()
    record.verdict = REFUSE
    record.sent[OWN] = words(header("combine"), 1)
    record.faults = [refused(record, REFUSE)]
    own = ValueError("rows has 3 rows, the handle 4.")
    assert caught(lambda: faults_of(record).refused("combine", own, record.join_rows)) == (
        ValueError,
        f"EP rank 1 refused combine: {own}",
    )
    assert record.left == {(f"reason/{GENERATION}/{EPOCH}", OWN): str(own)}
    assert record.faults == [], "it is not reported a second time"


def test_a_rank_alone_raises_its_own_error() -> None:
    record = Record((0,), 0)
    record.sent = [words(header("dispatch"), 1)]
    own = ValueError("x is too long.")
    with pytest.raises(ValueError, match="x is too long") as raised:
        faults_of(record).refused("dispatch", own, record.join_rows)
    assert raised.value is own


BAD_ID = (
    "topk_idx[2, 1] is 8; an id must lie in [-1, 8) (num_experts = 8, -1 = no expert). Check the router that made it."
)


def test_a_bad_id_on_this_rank_is_told_to_the_others() -> None:
    record = Record()
    record.verdict, record.bad = REFUSE, (2 * 2 + 1, 8)
    record.sent[OWN] = words(header("dispatch"), 1)
    assert asked(record, "dispatch", dispatch_request()) == (ValueError, f"EP rank 1 refused dispatch: {BAD_ID}")
    record.rank, record.bad = 0, (-1, 0)
    assert asked(record, "dispatch", dispatch_request()) == (ValueError, f"EP rank 1 refused dispatch: {BAD_ID}")


def test_bad_ids_of_an_earlier_call_are_not_taken_for_this_ones() -> None:
    """The record keeps slot and id of the newest bad one; this rank's status says whether it is of this call."""
    record = Record()
    record.verdict, record.bad = REFUSE, (5, 8)
    record.sent[2] = words(header("dispatch"), 3)
    record.left[f"reason/{GENERATION}/{EPOCH}", 2] = "theirs"
    assert asked(record, "dispatch", dispatch_request()) == (ConfigError, "EP rank 2 refused dispatch: theirs")
    assert (f"reason/{GENERATION}/{EPOCH}", OWN) not in record.left


# -- disagreement -------------------------------------------------------------------------------------------------

SETTINGS: dict[str, tuple[int, int, str]] = {
    "operation": (0, 2, "the operation: rank 0 has dispatch, rank 2 has combine"),
    "protocol": (1, 2, "the protocol version: rank 0 has 1, rank 2 has 2"),
    "handle": (11, 12, "the routing of the dispatch that is combined: rank 0 has 11, rank 2 has 12"),
    "hidden": (64, 128, "the hidden size H: rank 0 has 64, rank 2 has 128"),
    "num_topk": (2, 4, "the slots a token K: rank 0 has 2, rank 2 has 4"),
    "num_experts": (8, 16, "num_experts: rank 0 has 8, rank 2 has 16"),
    "dtype": (1, 2, "the dtype of the rows: rank 0 has torch.float32, rank 2 has torch.bfloat16"),
    "dtype of whole numbers": (
        12,
        16,
        "the dtype of the rows: rank 0 has another of 4 bytes, rank 2 has another of 8 bytes",
    ),
    "weights_dtype": (-1, 1, "the dtype of topk_weights: rank 0 has none, rank 2 has torch.float32"),
    "layout": (0, 1, "the layout: rank 0 has compact, rank 2 has expert_major"),
    "alignment": (1, 128, "the alignment: rank 0 has 1, rank 2 has 128"),
    "exact": (0, 1, "exact: rank 0 has 0, rank 2 has 1"),
    "grad_enabled": (0, 1, "whether gradients are enabled (torch.no_grad): rank 0 has False, rank 2 has True"),
    "placement": (5, 6, "expert_placement: rank 0 has 5, rank 2 has 6"),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_a_disagreement_names_the_setting_and_both_values(name: str) -> None:
    ours, theirs, said = SETTINGS[name]
    name = name.split(" ")[0]
    record = Record()
    record.verdict = DISAGREE
    record.sent = [words(replace(Header(), **{name: value})) for value in (ours, ours, theirs)]  # type: ignore[arg-type]
    kind, text = asked(record, "dispatch")
    assert kind is ConfigError
    assert text == (
        f"dispatch: the ranks of the EP group disagree on {said}. Give every rank the same value and call the "
        "operations in the same order on every rank."
    )


# -- memory -------------------------------------------------------------------------------------------------------


def test_what_each_rank_needs_is_in_the_headers_of_the_call() -> None:
    record = Record()
    record.sent = [words(header("dispatch"), 0, 100 * (rank + 1)) for rank in range(3)]
    record.faults = [refused(record, GROW)]
    assert faults_of(record).needs(NEED_WORD) == [100, 200, 300]
    assert record.faults == []


# -- calls that nobody waited for ---------------------------------------------------------------------------------


def test_without_a_fault_there_is_nothing_to_take() -> None:
    assert faults_of(Record()).take() == []


def test_a_call_that_does_not_fit_says_how_to_make_room() -> None:
    record = Record()
    record.sent = [words(header("combine backward"), 100 * (rank == 2)) for rank in range(3)]
    record.faults = [refused(record, GROW)]
    assert faults_of(record).take() == [
        "combine backward needs more memory than the buffer's 16777216 bytes a slot on some rank, and a call without a "
        "host wait cannot grow it; its outputs are NaN. Run it once without max_rows, or give Buffer a larger "
        "num_nvl_bytes."
    ]
    assert faults_of(record).take() == []


def test_a_refusal_and_a_disagreement_name_the_operation_of_this_ranks_header() -> None:
    record = Record()
    record.sent[0] = words(header("combine", hidden=8))
    record.sent[1] = words(header("cached dispatch", hidden=8))
    record.sent[2] = words(header("combine", hidden=8), 2)
    record.faults = [refused(record, REFUSE)]
    assert faults_of(record).take() == ["EP rank 2 refused cached dispatch: see its log"]
    record.sent[2] = record.sent[0]
    record.faults = [refused(record, DISAGREE)]
    (text,) = faults_of(record).take()
    assert text.startswith("cached dispatch: the ranks of the EP group disagree on the operation: rank 0 has combine,")


ALSO = "One more call was refused before this rank looked: see the logs of all ranks."


@pytest.mark.parametrize(
    ("num_more", "also"), [(0, []), (1, [ALSO]), (3, [ALSO.replace("One more call was", "3 more calls were")])]
)
def test_the_first_refusal_is_told_with_its_reason_and_how_many_came_behind_it(num_more: int, also: list[str]) -> None:
    """What the ranks sent last is of another call, which went well."""
    record = Record()
    record.sent = [words(header("combine"), rank == 2) for rank in range(3)]
    record.left[f"reason/{GENERATION}/{EPOCH - 4}", 2] = "rows has 3 rows, the handle 4."
    record.faults = [refused(record, REFUSE, EPOCH - 4, num_more)]
    record.sent = [words(header("dispatch")) for _ in range(3)]
    assert faults_of(record).take() == ["EP rank 2 refused combine: rows has 3 rows, the handle 4.", *also]


def test_refusals_that_came_while_the_host_took_one_are_counted() -> None:
    record = Record()
    record.faults = [fault("refusals", 1)]
    assert faults_of(record).take() == [ALSO]


def test_a_refusal_that_nobody_waited_for_outlives_one_that_is_raised_at_once() -> None:
    """The record keeps the first one; what the host waited for has headers of its own."""
    record = Record()
    faults = faults_of(record)
    record.sent = [words(header("combine"), rank == 0) for rank in range(3)]
    record.faults = [refused(record, REFUSE, EPOCH - 1, 1)]
    record.verdict = REFUSE
    record.sent = [words(header("dispatch"), 2 * (rank == 2)) for rank in range(3)]
    asked_for = caught(lambda: faults.verdict("dispatch", 1, PLENTY_SECS, None, record.join_rows))
    assert asked_for == (TypeError, "EP rank 2 refused dispatch: see its log")
    assert faults.take() == ["EP rank 0 refused combine: see its log", ALSO]
    assert faults.take() == []


def test_calls_behind_a_refusal_that_is_raised_at_once_are_told_of() -> None:
    record = Record()
    faults = faults_of(record)
    record.verdict = REFUSE
    record.sent[2] = words(header("all_reduce"), 2)
    record.faults = [refused(record, REFUSE, EPOCH, 1)]
    asked_for = caught(lambda: faults.verdict("all_reduce", 1, PLENTY_SECS, None, record.join_rows))
    assert asked_for == (TypeError, "EP rank 2 refused all_reduce: see its log")
    assert faults.take() == [ALSO]
    assert faults.take() == []


@pytest.mark.parametrize("verdict", [REFUSE, DISAGREE])
def test_a_refusal_that_this_version_cannot_read_points_to_the_logs(verdict: int) -> None:
    record = Record()
    record.sent = [words(header("combine"), 77 * (verdict == REFUSE)) for _ in range(3)]
    record.faults = [refused(record, verdict)]
    assert faults_of(record).take() == ["combine was refused: see the logs of all ranks."]
    record.sent[1] = pack(Header(operation=99), 77)
    record.faults = [refused(record, REFUSE)]
    assert faults_of(record).take() == ["a call was refused: see the logs of all ranks."]


# -- dispatches that some ranks do not wait for ---------------------------------------------------------------------


@pytest.mark.parametrize("verdict", [REFUSE, DISAGREE, GROW])
def test_a_rank_that_raises_refuses_the_rows_that_others_have_begun(verdict: int) -> None:
    record = Record()
    record.verdict = verdict
    record.sent[0] = words(header("dispatch", hidden=3 if verdict == DISAGREE else 0), goes_on=True)
    record.sent[2] = words(header("dispatch"), {REFUSE: 2, GROW: 100}.get(verdict, 0))
    kind, text = asked(record, "dispatch")
    assert [(type(error), str(error)) for error in record.joined] == [(kind, text)]
    if verdict == GROW:
        assert "dispatch needs more memory than the buffer's 16777216 bytes a slot on some rank" in text


def test_a_rank_that_refuses_by_itself_refuses_the_rows_that_others_have_begun_too() -> None:
    record = Record()
    record.sent[0] = words(header("dispatch"), goes_on=True)
    record.sent[OWN] = words(header("dispatch"), 1)
    faults = faults_of(record)
    kind, text = caught(lambda: faults.refused("dispatch", ValueError("too large"), record.join_rows))
    assert (kind, text) == (ValueError, "EP rank 1 refused dispatch: too large")
    assert [str(error) for error in record.joined] == [text]


def test_where_all_ranks_wait_nobody_joins_anything() -> None:
    record = Record()
    record.verdict = GROW
    assert faults_of(record).verdict("dispatch", 1, PLENTY_SECS, None, record.join_rows)[0] == GROW
    record.verdict = REFUSE
    record.sent[2] = words(header("dispatch"), 2)
    assert asked(record, "dispatch")[0] is TypeError
    assert record.joined == []


OVERFLOW = (
    "dispatch received 40 rows on EP rank 1, max_rows is 32; its outputs are NaN. Give max_rows of at least 40, or "
    "leave it out."
)


def test_overflow_and_bad_ids_of_one_call_are_both_said() -> None:
    record = Record()
    record.faults = [fault("overflow", 40, 32), fault("bad_idx", 5, 8, 2, 8)]
    assert faults_of(record).take() == [OVERFLOW, BAD_ID]
    assert record.faults == []


@pytest.mark.parametrize("verdict", [REFUSE, DISAGREE, GROW])
def test_faults_of_earlier_calls_outlive_a_later_call_that_is_answered(verdict: int) -> None:
    """A call with max_rows overflows while the host already waits for the next one, which then grows or is refused."""
    record = Record()
    faults = faults_of(record)
    record.verdict = verdict
    record.faults = [refused(record, verdict), fault("overflow", 40, 32), fault("bad_idx", 5, 8, 2, 8)]
    if verdict == GROW:
        faults.needs(NEED_WORD)
    else:
        record.sent[2] = words(header("dispatch", hidden=3), verdict == REFUSE)
        assert caught(lambda: faults.verdict("dispatch", 1, PLENTY_SECS, None, record.join_rows))[0] is not None
    assert faults.take() == [OVERFLOW, BAD_ID]
    assert faults.take() == []


def test_a_reset_forgets_faults_of_earlier_calls() -> None:
    record = Record()
    faults = faults_of(record)
    record.faults = [fault("overflow", 40, 32)]
    faults.needs(NEED_WORD)
    faults.forget()
    assert faults.take() == []


def test_the_names_of_verdicts_are_those_of_the_kernels() -> None:
    assert (GO, REFUSE, DISAGREE, GROW, FAILED) == tuple(range(5))
    assert struct.calcsize("32q") == len(words(Header()))
