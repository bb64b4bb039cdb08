"""The blocks of a rank: the tickets of each kernel, and one step of a block."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache

from tests.unit.flag_protocol.rules import CHUNKS, Call, Input, Rules, Scenario, Schedule
from tests.unit.flag_protocol.state import (
    ABORT,
    EPILOGUE,
    IDLE,
    STATUS,
    Block,
    Kernel,
    Memory,
    Rank,
    State,
    Violation,
    Word,
)

Instruction = tuple[str, int, int]  # what, which peer, which chunk
Ticket = tuple[Instruction, ...]
WAITS = frozenset(("slot free?", "headers?", "verdict?", "flag?", "all done?"))
POSTS = frozenset(("header", "flag", "done"))


class Device:
    """What the blocks do. Host steps are in `hosts.py`."""

    def __init__(self, scenario: Scenario, rules: Rules) -> None:
        self.scenario, self.rules = scenario, rules
        self.memory = Memory(scenario.world, any(call.push for call in scenario.calls))
        self.all_got = (1 << scenario.world * len(CHUNKS)) - 1
        self.schedules = [scenario.schedule(calls) for calls in (scenario.calls, scenario.after)]
        self.tickets = lru_cache(maxsize=None)(self._tickets)
        self.epilogue = lru_cache(maxsize=None)(self._epilogue)

    def calls(self, era: int) -> tuple[Call, ...]:
        """The calls that a rank makes in an era."""
        return self.scenario.after if era else self.scenario.calls

    def schedule(self, rank: Rank) -> Schedule:
        """The launches of the rank's era."""
        return self.schedules[bool(rank.era)]

    def input_of(self, r: int, era: int, call: int, grown: bool) -> Input | None:
        """What rank `r` meets in a call. A rank that has grown fits."""
        found = None if era else self.scenario.inputs.get((call, r))
        return None if found == "grow" and grown else found

    def sources(self, r: int) -> tuple[int, ...]:
        """The ranks whose headers and rows a rank waits for."""
        return self.memory.peers[r] if self.rules.all_headers else self.memory.peers[r][:1]

    # -- programs -------------------------------------------------------------------------------------------------

    def _tickets(self, r: int, kind: str, era: int, i: int, grown: bool, pulls: bool) -> tuple[Ticket, ...]:
        """Tickets in order. Each is a list of instructions; a block waits only for lower tickets, of any rank."""
        call, publishes = self.calls(era)[i], self.input_of(r, era, i, grown) in (None, "no memory")
        peers, chunks = self.memory.peers[r], CHUNKS
        if r % 2 and not self.rules.one_numbering:
            chunks = chunks[::-1]
        headers = tuple(step for p in peers for step in (("slot free?", p, 0), ("header", p, 0)))
        verdict: list[Ticket] = [(("headers?", -1, 0),)]

        def publish(c: int) -> Ticket:
            fill = () if call.registered else (("fill", r, c),)
            flags = tuple(("flag", p, c) for p in peers)
            return (("slot free?", -1, 0), *((fill + flags) if self.rules.rows_before_flag else (flags + fill)))

        def pull(s: int, c: int) -> Ticket:
            return (("verdict?", s, c), ("flag?", s, c), ("read", s, c))

        if kind == "front" and call.push:
            return tuple((("slot free?", p, c), ("push", p, c), ("flag", p, c)) for c in chunks for p in peers)
        if kind == "front":
            return (headers, *(publish(c) for c in chunks if publishes), *verdict)
        if kind != "whole":
            return tuple(pull(s, c) for c in chunks for s in self.sources(r)) if kind == "pull" and pulls else ()
        out = [headers]
        for c in chunks:
            published = [publish(c)] if publishes else []
            pulled = verdict + [pull(s, c) for s in self.sources(r)]
            out += published + pulled if self.rules.publish_first else pulled + published
            verdict = []
        return tuple(out)

    def _epilogue(self, r: int, kind: str, era: int, i: int, verdict: str) -> Ticket:
        """What the last block does."""
        call = self.calls(era)[i]
        done = tuple(("done", p, 0) for p in self.memory.peers[r])
        if kind == "front":
            return ()
        if verdict == "refuse":
            return done if self.rules.done_after_refusal else ()
        if kind == "leave" and not self.rules.done_after_own_error:
            return ()
        look = (("abort?", -1, 0),) if self.rules.abort_checked else ()
        wait = (("all done?", -1, 0),) if call.registered and self.rules.done_before_event else ()
        return look + done + wait

    def program(self, r: int, rank: Rank, ticket: int) -> Ticket:
        """The instructions of a ticket of the running kernel."""
        if ticket == ABORT:
            return tuple(("abort", p, 0) for p in self.memory.peers[r])
        if ticket == EPILOGUE:
            kernel = _kernel(rank)
            return self.epilogue(r, kernel.kind, kernel.era, kernel.call, rank.verdicts[kernel.call])
        return self.tickets_of(r, rank)[ticket]

    def tickets_of(self, r: int, rank: Rank) -> tuple[Ticket, ...]:
        """All tickets of the running kernel."""
        kernel = _kernel(rank)
        pulls = rank.verdicts[kernel.call] == "go"
        return self.tickets(r, kernel.kind, kernel.era, kernel.call, kernel.maps[r] > 0, pulls)

    # -- one step -------------------------------------------------------------------------------------------------

    def step(self, state: State, r: int, block: Block) -> tuple[str, Rank, tuple[Word, ...]] | None:
        """The block's next step; None while its wait is not released."""
        rank, memory = state.ranks[r], state.memory
        program = self.program(r, rank, block[0])
        what, peer, chunk = program[block[1]]
        if what in WAITS:
            if rank.failed:
                return "leaves, a sibling timed out", self.moved(rank, block, IDLE), memory
            if not self._released(state, r, what, peer, chunk):
                return None
            rank = self._with_verdict(state, r) if what == "headers?" else rank
            if what == "verdict?" and rank.verdicts[_kernel(rank).call] != "go":
                return "skips a pull", self.moved(rank, block, IDLE), memory
        elif what == "read":
            rank = self._read(state, r, peer, chunk)
        elif what == "abort?":
            if any(memory[self.memory.at["abort", r, s]][0] == _kernel(rank).gen for s in self.memory.peers[r]):
                return "sees an abort", self._failed(rank, block), memory
        else:
            memory = self._written(state, r, what, peer, chunk)
        to = IDLE if block[1] + 1 == len(program) else (block[0], block[1] + 1)
        return f"{what} {peer} {chunk}", self.moved(rank, block, to), memory

    def timeout(self, state: State, r: int, block: Block) -> Rank | None:
        """The block gives up a wait. Whether the flag has come meanwhile is not looked at again."""
        rank = state.ranks[r]
        what, peer, chunk = self.program(r, rank, block[0])[block[1]]
        if rank.failed or what not in WAITS:
            return None
        if what != "verdict?" and not any(True for _ in self._words(state, r, what, peer, chunk)):
            return None  # a fresh slot: nothing to wait for
        return self._failed(rank, block)

    def _failed(self, rank: Rank, block: Block) -> Rank:
        to = (ABORT, 0) if self.rules.abort_before_event else IDLE
        return self.moved(rank._replace(failed=True), block, to)

    def moved(self, rank: Rank, block: Block, to: Block) -> Rank:
        """The rank with one block moved on. Blocks are alike, so they are kept sorted."""
        if len(rank.blocks) == 1:
            return rank._replace(blocks=(to,))
        blocks = list(rank.blocks)
        blocks[blocks.index(block)] = to
        return rank._replace(blocks=tuple(sorted(blocks)))

    # -- flags ----------------------------------------------------------------------------------------------------

    def _slot(self, epoch: int) -> int:
        return epoch % 2 if self.rules.parity else 0

    def _flag_at(self, r: int, s: int, chunk: int, epoch: int) -> int:
        return self.memory.at["flag", r, s, chunk, self._slot(epoch) if self.rules.flags == "slot" else 0]

    def _words(self, state: State, r: int, what: str, peer: int, chunk: int) -> Iterator[tuple[Word, int, bool]]:
        """The words that a wait looks at: (word, epoch wanted, a later epoch will do)."""
        at, kernel = self.memory.at, _kernel(state.ranks[r])
        gen, epoch = kernel.gen, kernel.epoch
        if what == "slot free?":
            fresh = epoch < 2 and (self.rules.fresh_slots_are_free or gen == 0)
            if self.rules.done_before_rewrite and not fresh:
                for p in self.memory.peers[r] if peer < 0 else (peer,):
                    yield state.memory[at["done", r, p]], epoch - 2, True
        elif what == "headers?":
            for s in self.sources(r):
                yield state.memory[at["header", r, s, self._slot(epoch)]], epoch, False
        elif what == "flag?":
            yield state.memory[self._flag_at(r, peer, chunk, epoch)], epoch, self.rules.flags == "word"
        elif what == "all done?":
            for p in self.memory.peers[r]:
                yield state.memory[at["done", r, p]], epoch, True

    def _released(self, state: State, r: int, what: str, peer: int, chunk: int) -> bool:
        rank, kernel = state.ranks[r], _kernel(state.ranks[r])
        if what == "verdict?":
            return rank.verdicts[kernel.call] != ""
        words = list(self._words(state, r, what, peer, chunk))
        for word, epoch, later in words:
            if self.rules.generation_in_tag and word[0] != kernel.gen:
                return False
            if not (word[1] >= epoch if later else word[1] == epoch):
                return False
        for word, _, _ in words:
            if word[0] != kernel.gen:
                raise Violation("old flag", f"rank {r} in generation {kernel.gen}: {what} was released by {word}")
        return True

    def _with_verdict(self, state: State, r: int) -> Rank:
        """All headers are there: the verdict, which is the same function of the same headers on every rank."""
        rank, kernel = state.ranks[r], _kernel(state.ranks[r])
        slot = self._slot(kernel.epoch)
        headers = [state.memory[self.memory.at["header", r, s, slot]] for s in self.sources(r)]
        headers.append(self._header(r, rank))
        statuses = {header[3] for header in headers}
        verdict = "go"
        if STATUS["refuse"] in statuses or len({header[2] for header in headers}) > 1:
            verdict = "refuse"
        elif STATUS["grow"] in statuses:
            idle = not self.scenario.ahead or not self.rules.growth_only_when_idle
            verdict = "grow" if self.calls(kernel.era)[kernel.call].host_wait and idle else "refuse"
        return rank._replace(verdicts=replaced(rank.verdicts, kernel.call, verdict))

    def _header(self, r: int, rank: Rank) -> Word:
        """(generation, epoch, operation with its geometry, status)"""
        kernel = _kernel(rank)
        meets = self.input_of(r, kernel.era, kernel.call, kernel.maps[r] > 0)
        status = STATUS[meets] if meets in ("refuse", "grow") else 0
        return (kernel.gen, kernel.epoch, int(meets == "other operation"), status)

    # -- rows -----------------------------------------------------------------------------------------------------

    def _written(self, state: State, r: int, what: str, peer: int, chunk: int) -> tuple[Word, ...]:
        """The memory after a header, rows, a chunk flag, a done or an abort."""
        rank, at, memory = state.ranks[r], self.memory.at, state.memory
        gen, epoch = _kernel(rank).gen, _kernel(rank).epoch
        if what == "header":
            self._check_open(state, r, peer)
            memory = replaced(memory, at["mail", peer, r, self._slot(epoch)], (gen, epoch))
            return replaced(memory, at["header", peer, r, self._slot(epoch)], self._header(r, rank))
        if what == "fill":
            self._check_open(state, r, r)
            return replaced(memory, at["stage", r, self._slot(epoch), chunk], (gen, epoch))
        if what == "push":
            self._check_open(state, r, peer)
            return replaced(memory, at["inbox", peer, r, self._slot(epoch), chunk], (gen, epoch))
        if what == "flag":
            return replaced(memory, self._flag_at(peer, r, chunk, epoch), (gen, epoch))
        return replaced(memory, at[what, peer, r], (gen, epoch))

    def _read(self, state: State, r: int, s: int, chunk: int) -> Rank:
        """Takes one chunk: what lies there must be exactly what this call of the source put there."""
        rank, at = state.ranks[r], self.memory.at
        kernel = _kernel(rank)
        call, slot, wanted = self.calls(kernel.era)[kernel.call], self._slot(kernel.epoch), (kernel.gen, kernel.epoch)
        if call.push:
            rows = state.memory[at["inbox", r, s, slot, chunk]]
        else:
            self._check_open(state, r, s)
            mail = state.memory[at["mail", r, s, slot]]
            if mail != wanted:
                raise Violation("wrong rows", f"rank {r} at {wanted} uses the token list of rank {s}: {mail}")
            foreign = ("user", s, kernel.epoch % 2, chunk)
            rows = state.memory[at[foreign if call.registered else ("stage", s, slot, chunk)]]
        if rows != wanted and not call.registered:
            raise Violation("wrong rows", f"rank {r} at {wanted} takes chunk {chunk} of rank {s}: {rows}")
        bit = 1 << (s * len(CHUNKS) + chunk)
        if rank.got & bit:
            raise Violation("wrong rows", f"rank {r} takes chunk {chunk} of rank {s} twice")
        return rank._replace(got=rank.got | bit, spoiled=rank.spoiled or rows != wanted)

    def _check_open(self, state: State, r: int, s: int) -> None:
        if not _kernel(state.ranks[r]).maps[s] == state.ranks[r].maps[s] == state.ranks[s].segment:
            raise Violation("closed segment", f"rank {r} touches the segment of rank {s}, which it has not open")


def _kernel(rank: Rank) -> Kernel:
    assert rank.kernel is not None
    return rank.kernel


def replaced(items: tuple, i: int, item: object) -> tuple:  # type: ignore[type-arg]
    """The tuple with one item replaced."""
    return items[:i] + (item,) + items[i + 1 :]  # noqa: RUF005
