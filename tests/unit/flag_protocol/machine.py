"""All steps of a state: of blocks, hosts, timeouts, death; and what must hold at the end."""

from __future__ import annotations

from tests.unit.flag_protocol.device import POSTS, WAITS
from tests.unit.flag_protocol.hosts import WAITING, Hosts, Step, put
from tests.unit.flag_protocol.state import IDLE, Block, Rank, State, Violation

OVER = ("end", "stopped")  # phases of a host that has nothing left to do


class Machine(Hosts):
    """The transition system that `explore.py` walks."""

    def initial(self) -> State:
        """All ranks at their first call, every mapping open."""
        world = self.scenario.world
        rank = Rank(blocks=(IDLE,) * self.scenario.blocks, maps=(0,) * world)
        state = State((rank,) * world, self.memory.empty)
        for r in range(world):
            state = self.settled(state, r, rank, state.memory)
        return state

    def steps(self, state: State) -> list[Step]:
        """Every step that some rank can take; only those of one block where they commute with all steps of others.

        Why that is enough: a post (header, chunk flag, done) only ever releases waits, and a wait that is released
        stays so, for its word is rewritten only after the waiter's own done. So such a step can be moved before any
        steps of other ranks without changing what they do; a rank's timeout or death is explored beside it. Aborts
        and arrivals at a reset are not posts in this sense: there, absence is looked at.
        """
        steps: list[Step] = []
        for r, rank in enumerate(state.ranks):
            if not rank.alive:
                continue
            for block in sorted(set(rank.blocks) - {IDLE}):
                own, commutes = self._block_steps(state, r, block)
                if commutes and not self.scenario.full:
                    return own + self._death(state)
                steps += own
            steps += self.host_steps(state, r)
            if rank.phase in WAITING and self._may_give_up(rank):
                steps += self.host_timeout(state, r)
        if not steps and self.scenario.timeouts == "last":
            steps = [step for r in range(len(state.ranks)) for step in self._timeouts(state, r)]
        return steps + self._death(state)

    def is_final(self, state: State) -> bool:
        """Nothing is left to do for any rank that lives; checks the outcomes if so."""
        if not all(rank.phase in OVER for rank in state.ranks):
            return False
        for r, rank in enumerate(state.ranks):
            quiet = self.scenario.timeouts == "never" or rank.era >= self.scenario.quiet_era
            if quiet and self.scenario.mortal is None and rank.outcomes != self._expected(r, rank):
                raise Violation("wrong outcome", f"rank {r} ends with {rank.outcomes}")
        return True

    def _expected(self, r: int, rank: Rank) -> tuple[str, ...]:
        """The outcomes where no wait times out."""
        found: list[str] = []
        for i, call in enumerate(self.calls(rank.era)):
            inputs = [None if rank.era else self.scenario.inputs.get((i, q)) for q in range(self.scenario.world)]
            can_grow = call.host_wait and not self.scenario.ahead
            refused = {"refuse", "other operation"} | (set() if can_grow else {"grow"})
            found.append("refused" if refused & set(inputs) else "alone" if inputs[r] == "no memory" else "complete")
        return tuple(found)

    # -- blocks ---------------------------------------------------------------------------------------------------

    def _block_steps(self, state: State, r: int, block: Block) -> tuple[list[Step], bool]:
        """The steps of a block, and whether they commute with all steps of others."""
        rank = state.ranks[r]
        what = self.program(r, rank, block[0])[block[1]][0]
        step: Step | None = None
        try:
            moved = self.step(state, r, block)
            if moved is not None:
                step = (f"rank {r}: {moved[0]}", self.settled(state, r, moved[1], moved[2]))
        except Violation as violation:
            step = (f"rank {r}: {what}", violation)
        steps = [] if step is None else [step]
        if self._may_time_out(rank.era):
            steps += self._block_timeout(state, r, block)
        alone = len(rank.blocks) == 1 or self.scenario.timeouts != "any"  # no sibling that times out meanwhile
        commutes = step is not None and rank.phase == "run" and (what in POSTS or (what in WAITS and alone))
        return steps, commutes

    def _block_timeout(self, state: State, r: int, block: Block) -> list[Step]:
        rank = self.timeout(state, r, block)
        if rank is None:
            return []
        what = self.program(r, state.ranks[r], block[0])[block[1]][0]
        text = f"rank {r}: times out at {what}"
        try:
            return [(text, self.settled(state, r, rank, state.memory))]
        except Violation as violation:
            return [(text, violation)]

    # -- timeouts and death ---------------------------------------------------------------------------------------

    def _may_time_out(self, era: int) -> bool:
        return self.scenario.timeouts == "any" and era < self.scenario.quiet_era

    def _may_give_up(self, rank: Rank) -> bool:
        """A barrier. A rank gives up the first one of a reset once; without this bound it could try for ever."""
        again = rank.phase == "wait 1" and rank.round == rank.gave_up
        return self._may_time_out(rank.round or rank.era) and not again

    def _timeouts(self, state: State, r: int) -> list[Step]:
        rank = state.ranks[r]
        steps = [step for block in set(rank.blocks) - {IDLE} for step in self._block_timeout(state, r, block)]
        return steps + (self.host_timeout(state, r) if rank.phase in WAITING else [])

    def _death(self, state: State) -> list[Step]:
        """A dead rank's memory stays as it was, and can still be read."""
        r = self.scenario.mortal
        if r is None or not state.ranks[r].alive or state.ranks[r].phase in OVER:
            return []
        dead = Rank(alive=False, phase="stopped", segment=state.ranks[r].segment)
        return [(f"rank {r}: dies", put(state, r, dead))]
