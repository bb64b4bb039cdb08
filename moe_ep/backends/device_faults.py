"""What the device reports of calls inside a node, as errors: verdicts, time limits, faults that nobody waited for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NoReturn

from moe_ep._native.exchange import Answer
from moe_ep.backends.base import DispatchRequest
from moe_ep.backends.header import CALLS, ERRORS, OPERATIONS, disagreement
from moe_ep.backends.node_header import GOES_ON_WORD, HEADER_WORDS, STATUS_WORD, Words, header_of, unpack
from moe_ep.backends.node_memory import NodeMemory
from moe_ep.backends.plan import bad_id_sentence
from moe_ep.errors import ConfigError, EPTimeoutError

GO, REFUSE, DISAGREE, GROW, FAILED = range(5)
_PHASES = (
    "be done with an earlier call",  # its slot is needed again
    "come to the call",
    "publish its rows",
    "finish its own part",
    "go on: it gave the call up",
    "send its rows of a round",
    "take the rows of a round that this rank sent",
    "come to the call",
)
_BETWEEN_NODES = 5  # from this phase on the peer is the rank of the own rail in a node, by the node's number
_SLICE_SECS = 0.5  # of a wait, so that an interrupt is seen
_NUM_VALUES = 8  # of a fault; behind those of a refusal there are headers
TEXT_SECS = 2.0  # how long to look for the reason of a rank that refused


class DeviceFaults:
    """Reads the mapped record of one rank's exchange; see `HostRecord` in csrc/exchange/exchange.h.

    Attributes:
        dead: after a time limit, why nothing is started any more.
    """

    def __init__(self, memory: NodeMemory) -> None:
        self._memory = memory
        self._exchange = memory.exchange
        self.dead: str | None = None
        self._seen: list[tuple[str, list[int]]] = []  # of earlier calls, met while a later one was answered
        self._told: tuple[int, int] | None = None  # generation and epoch of the refusal that `take` told last

    @property
    def is_dead(self) -> bool:
        return self.dead is not None

    def raise_if_dead(self, operation: str) -> None:
        if self.dead is not None:
            raise EPTimeoutError(f"{operation} was not started: {self.dead}")

    def stop(self, sentence: str) -> None:
        """Nothing is started any more until `forget`, because of what the sentence says."""
        self.dead = sentence

    def forget(self) -> None:
        self.dead = self._told = None
        self._seen.clear()

    def await_answer(self, operation: str, question: int, limit_secs: float) -> Answer:
        """What the device answers to a call whose host waits; raises where a limit passed."""
        waited_secs = 0.0
        while (answer := self._exchange.wait_answer(question, _SLICE_SECS)) is None:
            waited_secs += _SLICE_SECS
            if waited_secs > limit_secs:
                self._die(
                    f"{operation} on rank {self._own} has not begun on the device after {limit_secs:g} s: other work "
                    "holds it. Look for a kernel on this GPU that waits for something."
                )
        if answer[0] == FAILED:
            self._raise_timeout(operation)
        return answer

    def was_told(self, operation: str, question: int, limit_secs: float) -> bool:
        """Whether a call, whose answer it waits for, was refused and `take` has said so already."""
        verdict, epoch, _, _, _ = self.await_answer(operation, question, limit_secs)
        return verdict != GO and self._told == (self._memory.generation, epoch)

    def verdict(
        self,
        operation: str,
        question: int,
        limit_secs: float,
        request: DispatchRequest | None,
        join_rows: Callable[[Exception], None],
    ) -> Answer:
        """An answer whose verdict is GO or GROW; raises what any other means.

        `join_rows` is called with the error first where some rank did not wait, and has begun to move the rows.
        """
        answer = self.await_answer(operation, question, limit_secs)
        verdict, epoch, bad_slot, bad_id, _ = answer
        if verdict == GO:
            return answer
        headers = self._headers()
        if verdict == GROW and not _some_go_on(headers):
            return answer
        self._take_quietly()
        own = None if request is None else self._own_refusal(headers, request, bad_slot, bad_id)
        if own is not None:
            self.leave_reason(str(own))
        error = self._error(operation, verdict, epoch, headers, own)
        if _some_go_on(headers):
            join_rows(error)
        raise error from own

    def refused(self, operation: str, error: Exception, join_rows: Callable[[Exception], None]) -> NoReturn:
        """Raises this rank's own refusal, which the device has answered, as the other ranks raise it."""
        headers, epoch = self._headers(), self._exchange.answer()[1]
        self.leave_reason(str(error))
        if len(self._memory.group_ranks) == 1:
            raise error
        as_others = self._error(operation, REFUSE, epoch, headers, error)
        if _some_go_on(headers):
            join_rows(as_others)
        raise as_others from error

    def leave_reason(self, text: str) -> None:
        """Tells the others why this rank refused the call that was answered last."""
        self._memory.leave_text(self._reason_name(self._exchange.answer()[1]), text)
        self._take_quietly()

    def some_go_on_with(self, operation: str) -> bool:
        """Whether some rank came to the call that was answered last along a handle, so that its host does not wait."""
        headers = [header_of(words) for words in self._headers()]
        return any(header.operation == OPERATIONS.index(operation) and header.layout >= 0 for header in headers)

    def needs(self, word: int) -> list[int]:
        """What each rank announced in a word of its header in the call that was answered last."""
        self._take_quietly()
        return [words[word] for words in self._headers()]

    def take(self) -> list[str]:
        """Sentences for calls without a host wait; a time limit is raised."""
        if not self._seen and not self._exchange.has_fault():
            return []
        faults, self._seen = [*self._seen, *self._exchange.take_faults()], []
        sentences = []
        for name, values in faults:
            if name == "timeout":
                self._raise_timeout(CALLS[values[5]] if 0 <= values[5] < len(CALLS) else "a call")
            elif name == "refused":
                verdict, epoch, num_more = values[:3]
                self._told = self._memory.generation, epoch
                sentences.append(str(self._error("a call", verdict, epoch, _by_rank(values[_NUM_VALUES:]))))
                sentences += _also_refused(num_more)
            elif name == "refusals":
                sentences += _also_refused(values[0])
            elif name == "overflow":
                sentences.append(
                    f"dispatch received {values[0]} rows on EP rank {self._memory.rank}, max_rows is {values[1]}; its "
                    f"outputs are NaN. Give max_rows of at least {values[0]}, or leave it out."
                )
            elif name == "low_latency":
                sentences.append(low_latency_sentence(values))
            else:
                flat, value, num_topk, num_experts = values[:4]
                sentences.append(bad_id_sentence(*divmod(flat, num_topk), value, num_experts))
        return sentences

    @property
    def _own(self) -> int:
        return self._memory.ranks[self._memory.rank]

    def _own_refusal(
        self, headers: Sequence[Words], request: DispatchRequest, bad_slot: int, bad_id: int
    ) -> Exception | None:
        if headers[self._memory.rank][STATUS_WORD] != ERRORS.index(ValueError) or bad_slot < 0:
            return None
        place = divmod(bad_slot, request.topk_idx.shape[1])
        return ValueError(bad_id_sentence(*place, bad_id, request.placement.num_experts))

    def _headers(self) -> list[Words]:
        return unpack(self._exchange.headers(len(self._memory.ranks)), len(self._memory.ranks))

    def _error(
        self, operation: str, verdict: int, epoch: int, words: Sequence[Words], own: Exception | None = None
    ) -> Exception:
        """`own`: why this rank refused the call, if it did."""
        own_operation = header_of(words[self._memory.rank]).operation
        if operation == "a call" and 0 <= own_operation < len(OPERATIONS):
            operation = OPERATIONS[own_operation]
        sentence = self._difference(verdict, words)
        if sentence is not None:
            return ConfigError(f"{operation}: {sentence}")
        if verdict == GROW:
            return RuntimeError(
                f"{operation} needs more memory than the buffer's {self._exchange.slot_bytes} bytes a slot on some "
                "rank, and a call without a host wait cannot grow it; its outputs are NaN. Run it once without "
                "max_rows, or give Buffer a larger num_nvl_bytes."
            )
        refuser = self._refuser(words)
        if refuser is None:  # of another version, say
            return RuntimeError(f"{operation} was refused: see the logs of all ranks.")
        place, status = refuser
        kind = ERRORS[status] or RuntimeError
        if own is not None and place == self._place:
            return kind(f"EP rank {place} refused {operation}: {own}")
        text = self._reason_of(place, epoch, words) or "see its log"
        return kind(f"EP rank {place} refused {operation}: {text}")

    @property
    def _place(self) -> int:
        """Of this rank in the EP group."""
        return self._memory.rank

    def _difference(self, verdict: int, words: Sequence[Words]) -> str | None:
        return disagreement([header_of(row) for row in words]) if verdict == DISAGREE else None

    def _refuser(self, words: Sequence[Words]) -> tuple[int, int] | None:
        """The first rank that refuses, by its place in the EP group, and its status."""
        statuses = enumerate(row[STATUS_WORD] for row in words)
        return next(((place, status) for place, status in statuses if 0 < status < len(ERRORS)), None)

    def _reason_of(self, place: int, epoch: int, words: Sequence[Words]) -> str | None:
        """What the rank at `place` says of a call that it refused."""
        return self._memory.texts(self._reason_name(epoch), TEXT_SECS, place)

    def _reason_name(self, epoch: int) -> str:
        return f"reason/{self._memory.generation}/{epoch}"

    def _take_quietly(self) -> None:
        """The refusal of the call that was answered last is raised at once and not reported again; what other calls
        left is, by `take`.
        """
        answered = self._exchange.answer()[1]
        for name, values in self._exchange.take_faults():
            if name == "refused" and values[1] == answered:
                name, values = "refusals", values[2:3]
            if name != "timeout":  # which the record keeps
                self._seen.append((name, values))

    def _raise_timeout(self, operation: str) -> NoReturn:
        values = next((values for name, values in self._exchange.take_faults() if name == "timeout"), None)
        if values is None:
            self._die(f"{operation} on rank {self._own} was given up, as an earlier call was.")
        peer, phase, epoch, expected, seen = values[:5]
        who = f"rank {self._memory.ranks[peer]}" if 0 <= peer < len(self._memory.ranks) else "this rank itself"
        if phase >= _BETWEEN_NODES:  # nodes stand one after the other, and are as large as this one
            place = peer * len(self._memory.ranks) + self._memory.rank
            who = f"rank {self._memory.group_ranks[place]}, of this rail in node {peer},"
        group = list(self._memory.group_ranks)
        self._die(
            f"{operation} on rank {self._own} of the EP group of ranks {group} failed at its limit of "
            f"{self._memory.timeout_secs:g} s: {who} did not {_PHASES[phase]} (call {epoch} of generation "
            f"{self._memory.generation}, flag {seen:#x} where {expected:#x} was expected). Look at its log; where all "
            "ranks live, Buffer.reset() on every one makes the buffer usable again."
        )

    def _die(self, sentence: str) -> NoReturn:
        self.stop(sentence)
        raise EPTimeoutError(sentence)


def low_latency_sentence(values: Sequence[int]) -> str:
    """What a low-latency call without a host wait has found: kind, operation, three numbers.

    The kinds are in csrc/low_latency/low_latency.h.
    """
    kind, operation, a, b, c = values[:5]
    call = CALLS[operation]
    if kind == 0:
        return (
            f"{call}: topk_idx of this rank names an expert (number {a} in the order of ranks) {b} times, but "
            f"num_max_dispatch_tokens_per_rank is {c}; the rows above were not sent, and the sums of their tokens are "
            "NaN. Name an expert once a token, or raise it on every rank."
        )
    if kind == 1:
        return (
            f"{call}: EP rank {a} is in another call than this rank, or disagrees on M, H, K, E, what travels or "
            "expert_placement; nothing was received, and sums are NaN. Give every rank the same values and call the "
            "operations in the same order; Buffer.reset() on every rank makes the buffer usable again."
        )
    return (
        f"{call}: EP rank {a} refused the call, see its log; nothing was received, and sums are NaN. Ranks that have "
        "begun further calls need Buffer.reset() on every rank."
    )


def _by_rank(numbers: Sequence[int]) -> list[Words]:
    """The headers behind the numbers of a refusal."""
    return [tuple(numbers[first : first + HEADER_WORDS]) for first in range(0, len(numbers), HEADER_WORDS)]


def _also_refused(num_calls: int) -> list[str]:
    """Of how many calls nothing more than their number is known."""
    if num_calls == 0:
        return []
    calls = "One more call was" if num_calls == 1 else f"{num_calls} more calls were"
    return [f"{calls} refused before this rank looked: see the logs of all ranks."]


def _some_go_on(headers: Sequence[Words]) -> bool:
    """Whether some rank's host did not wait for the verdict."""
    return any(words[GOES_ON_WORD] for words in headers)
