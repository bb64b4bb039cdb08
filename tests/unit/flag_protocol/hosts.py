"""The host of a rank: launches, the end of a call, growth and reset."""

from __future__ import annotations

from collections.abc import Callable

from tests.unit.flag_protocol.device import Device, replaced
from tests.unit.flag_protocol.rules import CHUNKS
from tests.unit.flag_protocol.state import EMPTY, EPILOGUE, IDLE, Arrival, Kernel, Rank, State, Violation, Word

Step = tuple[str, "State | Violation"]
WAITING = ("wait 1", "wait 2", "wait 3")  # phases of a host in a barrier


class Hosts(Device):
    """Phases of a host: launch, run (a kernel), event, end, stopped; in growth and reset arrive, wait, close, free."""

    # -- launches and ends; all of it is local to the rank --------------------------------------------------------

    def settled(self, state: State, r: int, rank: Rank, memory: tuple[Word, ...]) -> State:
        """After a step of rank `r`: idle blocks take tickets, a kernel that ended gives way to what comes next.

        A block that took its ticket later would be one that is slow to begin it.
        """
        if rank.kernel is not None and IDLE in rank.blocks:
            rank = self._taken(r, rank)
            if all(block == IDLE for block in rank.blocks):
                rank = self._kernel_ended(r, rank)
        while rank.phase == "launch" and rank.kernel is None:
            rank, memory = self._launched(r, rank, memory)
        if len(rank.outcomes) > len(state.ranks[r].outcomes):
            self._check_verdicts(state, r, rank)
        return put(state, r, rank, memory)

    def _taken(self, r: int, rank: Rank) -> Rank:
        """Blocks without a ticket take the next ones; the last block takes the epilogue."""
        if rank.failed or rank.kernel is None:
            return rank
        count = len(self.tickets_of(r, rank))
        blocks, ticket = list(rank.blocks), rank.ticket
        for i, block in enumerate(blocks):
            if block == IDLE and ticket < count:
                blocks[i] = (ticket, 0)
                ticket += 1
        last = all(block == IDLE for block in blocks) or not self.rules.last_block_posts_done
        if ticket == count and last and IDLE in blocks:
            ticket += 1
            if self.program(r, rank, EPILOGUE):
                blocks[blocks.index(IDLE)] = (EPILOGUE, 0)
        return rank._replace(blocks=tuple(sorted(blocks)), ticket=ticket)

    def _launched(self, r: int, rank: Rank, memory: tuple[Word, ...]) -> tuple[Rank, tuple[Word, ...]]:
        """The host launches the next kernel of its schedule."""
        kind, i = self.schedule(rank)[rank.item]
        call, meets = self.calls(rank.era)[i], self.input_of(r, rank.era, i, rank.segment > 0)
        if rank.item == 0:
            rank = rank._replace(verdicts=("",) * len(self.calls(rank.era)))
        if not self.rules.refusal_sends_header and meets == "refuse":
            skipped = rank._replace(item=rank.item + (kind == "front"))
            return self._ended(skipped, i, "refused"), memory
        if kind != "pull":
            rank = rank._replace(verdicts=replaced(rank.verdicts, i, "go" if call.push else ""))
            if call.registered:  # the caller wrote its tensor before
                memory = self._rewritten(r, rank, i, memory, (rank.gen, rank.origin + i))
        if kind == "pull" and meets == "no memory" and rank.verdicts[i] == "go":
            kind = "leave"
        own = sum(1 << (r * len(CHUNKS) + chunk) for chunk in CHUNKS)  # its own rows do not travel
        kernel = Kernel(kind, rank.gen, rank.origin + i, i, rank.era, rank.maps)
        rank = rank._replace(failed=False, spoiled=False, got=own, phase="run", kernel=kernel, ticket=0)
        rank = self._taken(r, rank)
        return (self._kernel_ended(r, rank) if all(block == IDLE for block in rank.blocks) else rank), memory

    def _rewritten(self, r: int, rank: Rank, i: int, memory: tuple[Word, ...], word: Word) -> tuple[Word, ...]:
        """The caller writes the tensor that it gave, or will give, to call `i`."""
        for chunk in CHUNKS:
            memory = replaced(memory, self.memory.at["user", r, (rank.origin + i) % 2, chunk], word)
        return memory

    def _kernel_ended(self, r: int, rank: Rank) -> Rank:
        """The last block has left: what the host does next."""
        assert rank.kernel is not None
        kind, i = rank.kernel.kind, rank.kernel.call
        rank = rank._replace(kernel=None, blocks=(IDLE,) * len(rank.blocks), ticket=0)
        if rank.phase != "run":  # the host went on without waiting
            return rank
        if rank.failed:
            outcome = "timeout"
        elif kind == "front":
            if rank.verdicts[i] == "grow":
                return rank._replace(phase="arrive 1")
            return rank._replace(phase="launch", item=rank.item + 1)
        elif rank.verdicts[i] == "refuse":
            outcome = "refused"
        else:
            outcome = "alone" if kind == "leave" else "complete"
            if outcome == "complete":
                self._check_complete(r, rank, i)
        if self.calls(rank.era)[i].registered:
            return rank._replace(phase="event", outcome=outcome)
        return self._ended(rank, i, outcome)

    def _ended(self, rank: Rank, i: int, outcome: str) -> Rank:
        """The call is over for its caller."""
        verdicts = replaced(rank.verdicts, i, "") if rank.verdicts and rank.kernel is None else rank.verdicts
        outcomes = (*rank.outcomes, outcome)
        rank = rank._replace(outcomes=outcomes, verdicts=verdicts, outcome="", got=0, spoiled=False, item=rank.item + 1)
        if rank.failed and not self.rules.failure_is_final:  # on to the next call
            while rank.item < len(self.schedule(rank)) and self.schedule(rank)[rank.item][1] == i:
                rank = rank._replace(item=rank.item + 1)
            rank = rank._replace(failed=rank.item == len(self.schedule(rank)))
        if rank.item < len(self.schedule(rank)) and not rank.failed:
            return rank._replace(phase="launch")
        rank = rank._replace(verdicts=rank.verdicts if rank.kernel else (), item=0)
        if self.scenario.reset and rank.era < self.scenario.quiet_era:
            return rank._replace(phase="arrive 1", round=-1)
        return rank._replace(phase="stopped" if rank.failed else "end")

    # -- properties -----------------------------------------------------------------------------------------------

    def _check_complete(self, r: int, rank: Rank, i: int) -> None:
        if rank.spoiled:
            raise Violation("wrong rows", f"rank {r} completes call {i} with rows that their owner had rewritten")
        if self.rules.all_headers and rank.got != self.all_got:
            raise Violation("wrong rows", f"rank {r} completes call {i} with a chunk missing")

    def _check_verdicts(self, state: State, r: int, rank: Rank) -> None:
        """Nobody completes what another refused, nor a later call than one that another gave up.

        With calls published ahead, their number is added: what was published can still be pulled.
        """
        for q, other in enumerate(state.ranks):
            if q == r or not other.alive or other.era != rank.era:
                continue
            text = f"rank {r}: {rank.outcomes}, rank {q}: {other.outcomes}"
            for mine, theirs in zip(rank.outcomes, other.outcomes, strict=False):
                if "refused" in (mine, theirs) and not {mine, theirs} <= {"refused", "timeout"}:
                    raise Violation("split verdict", text)
            for one, two in ((rank.outcomes, other.outcomes), (other.outcomes, rank.outcomes)):
                later = one.index("timeout") + 1 + self.scenario.ahead if "timeout" in one else len(two)
                if any(outcome != "timeout" for outcome in two[later:]):
                    raise Violation("split verdict", text)

    # -- growth and reset -----------------------------------------------------------------------------------------

    def host_steps(self, state: State, r: int) -> list[Step]:
        """What the host of rank `r` can do besides waiting for its kernel."""
        rank = state.ranks[r]
        if rank.phase == "run":
            return self._runs_ahead(state, r)
        if rank.phase == "event":
            i = self.schedule(rank)[rank.item][1]
            memory, ended = self._rewritten(r, rank, i, state.memory, EMPTY), self._ended(rank, i, rank.outcome)
            if rank.failed:  # what it gave to the other call in flight is in its hands again too
                memory = self._rewritten(r, rank, i + 1, memory, EMPTY)
            return [_step(f"rank {r}: the caller rewrites its tensor", lambda: self.settled(state, r, ended, memory))]
        if rank.phase.startswith("arrive"):
            return self._arrived(state, r)
        if rank.phase == "close":
            maps = tuple(rank.segment if s == r else -1 for s in range(self.scenario.world))
            after = rank._replace(maps=maps, phase="arrive 2" if self.rules.barrier_before_free else "free")
            return [(f"rank {r}: closes", put(state, r, after))]
        if rank.phase == "free":
            return [_step(f"rank {r}: frees and allocates", lambda: self._reallocated(state, r))]
        if rank.phase == "open":
            return [_step(f"rank {r}: opens", lambda: self._opened(state, r, rank.gen + 1))]
        if rank.phase in WAITING:
            arrived = [arrival for arrival in state.arrivals if arrival[0] == self.barrier(rank)]
            if len(arrived) == self.scenario.world:
                return [_step(f"rank {r}: passes {self.barrier(rank)}", lambda: self._passed(state, r, arrived))]
        return []

    def _runs_ahead(self, state: State, r: int) -> list[Step]:
        """Without the rule: the host goes on as soon as it knows enough, while a block still runs."""
        rank = state.ranks[r]
        if self.rules.synchronise or rank.kernel is None:
            return []
        if rank.failed:
            ended = self._ended(rank, rank.kernel.call, "timeout")
            return [_step(f"rank {r}: host raises", lambda: self.settled(state, r, ended, state.memory))]
        if rank.kernel.kind == "front" and rank.verdicts[rank.kernel.call] == "grow":
            return [(f"rank {r}: host grows", put(state, r, rank._replace(phase="arrive 1")))]
        return []

    def barrier(self, rank: Rank) -> tuple[object, ...]:
        """The name under which ranks meet. A rank joins the lowest round of reset that is not complete."""
        if not self.rules.barriers_named:
            return ("any", rank.barriers)
        step = int(rank.phase[-1])
        return ("reset", rank.round, step) if rank.round else ("growth", rank.era, rank.gen, rank.item, step)

    def _arrived(self, state: State, r: int) -> list[Step]:
        rank = state.ranks[r]
        step = int(rank.phase[-1])
        if rank.round == -1:  # the lowest round that not all have joined, read from the store
            lowest = 1
            while sum(arrival[0] == ("reset", lowest, 1) for arrival in state.arrivals) == self.scenario.world:
                lowest += 1
            rank = rank._replace(round=lowest)
        if step == 1 and not rank.round and not self.rules.barrier_before_close:
            return [(f"rank {r}: grows", put(state, r, rank._replace(phase="close")))]
        named = self.rules.barriers_named
        rank = rank._replace(phase=f"wait {step}", barriers=rank.barriers + (not named))
        word = (self.barrier(rank), r, rank.gen, -1 not in rank.maps)
        known = any(arrival[:2] == word[:2] for arrival in state.arrivals)
        arrivals = state.arrivals if known else state.arrivals | {word}
        return [(f"rank {r}: at barrier {word[0]}", put(state, r, rank)._replace(arrivals=arrivals))]

    def _passed(self, state: State, r: int, arrived: list[Arrival]) -> State:
        rank = state.ranks[r]
        gen = (max(arrival[2] for arrival in arrived) if self.rules.generation_agreed else rank.gen) + 1
        if rank.phase == "wait 1":
            intact = all(arrival[3] for arrival in arrived) or not self.rules.reset_reopens
            if rank.round and intact:
                return self._new_generation(state, r, rank, gen)
            return put(state, r, rank._replace(phase="close"))
        if rank.phase == "wait 2":
            return put(state, r, rank._replace(phase="free"))
        return self._opened(state, r, gen)

    def _opened(self, state: State, r: int, gen: int) -> State:
        maps = tuple(other.segment for other in state.ranks)
        return self._new_generation(state, r, state.ranks[r]._replace(maps=maps), gen)

    def _reallocated(self, state: State, r: int) -> State:
        rank = state.ranks[r]
        for q, other in enumerate(state.ranks):
            if q != r and other.alive and other.maps[r] == rank.segment:
                raise Violation("closed segment", f"rank {r} frees its segment while rank {q} has it open")
        if rank.segment == 3:
            raise Violation("endless", f"rank {r} grows again and again")
        version = rank.segment + 1
        memory = tuple(EMPTY if i in self.memory.in_segment[r] else word for i, word in enumerate(state.memory))
        phase = "arrive 3" if self.rules.barrier_before_open else "open"
        rank = rank._replace(segment=version, maps=replaced(rank.maps, r, version), phase=phase)
        return put(state, r, rank, memory)

    def _new_generation(self, state: State, r: int, rank: Rank, gen: int) -> State:
        """The end of growth (the same call again) or of reset (the calls that come after)."""
        memory = state.memory
        if not self.rules.control_block_kept:
            memory = tuple(EMPTY if i in self.memory.in_control[r] else word for i, word in enumerate(memory))
        if rank.round:
            origin = 0 if self.rules.epoch_restarts else rank.origin + len(rank.outcomes)
            rank = rank._replace(era=rank.round, round=0, item=0, outcomes=(), failed=False, gen=gen, origin=origin)
        elif self.rules.growth_new_generation:
            rank = rank._replace(gen=gen, origin=-self.schedule(rank)[rank.item][1])
        if self.rules.generation_in_tag and self.rules.synchronise:
            # No kernel of an older generation runs, and every comparison calls all older words unequal.
            memory = tuple(EMPTY if word[0] < rank.gen else word for word in memory)
        return self.settled(state, r, rank._replace(phase="launch"), memory)

    def host_timeout(self, state: State, r: int) -> list[Step]:
        """The host gives up a barrier; in the barrier of a reset it then calls reset again."""
        rank = state.ranks[r]
        text = f"rank {r}: times out at {self.barrier(rank)}"
        if not rank.round:
            ended = self._ended(rank._replace(failed=True), self.schedule(rank)[rank.item][1], "timeout")
            return [_step(text, lambda: self.settled(state, r, ended, state.memory))]
        again = self.scenario.timeouts == "any"
        phase, after = ("arrive 1", -1) if again else ("stopped", 0)
        return [(text, put(state, r, rank._replace(phase=phase, round=after, gave_up=rank.round)))]


def put(state: State, r: int, rank: Rank, memory: tuple[Word, ...] | None = None) -> State:
    """The state with another rank `r`, and other memory if given."""
    return State(replaced(state.ranks, r, rank), state.memory if memory is None else memory, state.arrivals)


def _step(text: str, make: Callable[[], State]) -> Step:
    try:
        return text, make()
    except Violation as violation:
        return text, violation
