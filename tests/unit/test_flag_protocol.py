"""The flag protocol of docs/protocol.md holds in every reachable state, and breaks without each of its rules."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from tests.unit.flag_protocol.explore import Result, explore
from tests.unit.flag_protocol.machine import Machine
from tests.unit.flag_protocol.rules import CACHED, FIRST, Rules, Scenario, Timeouts
from tests.unit.flag_protocol.scenarios import IN_PLACE, MUTATIONS, QUICK, SLOW, Mutation
from tests.unit.flag_protocol.state import Block, Rank, State, Word

PAGE = Path(__file__).resolve().parents[2] / "docs" / "protocol.md"


def _explored(scenario: Scenario, rules: Rules | None = None) -> Result:
    return explore(Machine(scenario, rules or Rules()))


def _documented(name: str) -> tuple[str, ...]:
    """The cells of a row of the page's tables, after its name."""
    rows = [[cell.strip() for cell in line.strip("| \n").split("|")] for line in PAGE.read_text().splitlines()]
    found = [tuple(row[1:]) for row in rows if row[0] == name]
    assert len(found) == 1, f"docs/protocol.md has {len(found)} rows called {name!r}"
    return found[0]


def _check(name: str, scenario: Scenario) -> None:
    result = _explored(scenario)
    assert not result.violations, str(result)
    counts = (result.num_states, result.num_steps, len(result.finals))
    assert _documented(name) == tuple(f"{n:,}" for n in counts)


@pytest.mark.parametrize("name", QUICK)
def test_no_reachable_state_waits_for_ever_or_reads_wrong_rows(name: str) -> None:
    # cases T05 (growth), P05 (a rank dies), P07 (ranks disagree)
    _check(name, QUICK[name])


@pytest.mark.slow(ci=True)
@pytest.mark.parametrize("name", SLOW)
def test_nor_does_one_of_the_larger_scenarios(name: str) -> None:
    # cases T05 (growth), P05 (a rank dies), P07 (ranks disagree)
    _check(name, SLOW[name])


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name)
def test_without_this_rule_the_search_finds(mutation: Mutation) -> None:
    result = _explored(mutation.scenario, mutation.rules)
    assert set(result.violations) == mutation.violations, str(result)
    assert _documented(mutation.name)[-1] == (", ".join(sorted(mutation.violations)) or "nothing")


def test_every_rule_has_a_mutation() -> None:
    changed = {
        field for m in MUTATIONS for field in vars(Rules()) if getattr(m.rules, field) != getattr(Rules(), field)
    }
    assert changed == set(vars(Rules()))


REDUCED = {
    "late": Scenario(2, timeouts="any"),
    "late, caller's memory": Scenario(2, (IN_PLACE, CACHED), timeouts="any"),
    "late, one call ahead": Scenario(2, (FIRST,) * 3, ahead=1, timeouts="any"),
    "late, 2 blocks": Scenario(2, (FIRST,), blocks=2, timeouts="any"),
    "late and dies": Scenario(2, timeouts="any", mortal=1),
    "late, growth, reset": QUICK["W=2, late, growth, reset"],
    "a rank dies": Scenario(3, (FIRST, CACHED), timeouts="last", mortal=1),
}


@pytest.mark.parametrize("name", REDUCED)
def test_leaving_out_interleavings_that_commute_changes_no_end(name: str) -> None:
    few, all_ = _explored(REDUCED[name]), _explored(replace(REDUCED[name], full=True))
    assert few.finals == all_.finals
    assert few.num_states < all_.num_states
    assert not all_.violations, str(all_)


def _outcomes(result: Result) -> set[tuple[tuple[str, ...], ...]]:
    finals = [state for state in result.finals if isinstance(state, State)]
    return {tuple(rank.outcomes for rank in state.ranks if rank.alive) for state in finals}


@pytest.mark.parametrize("name", ["W=2, late", "W=3, a rank dies"])
def test_a_late_or_dead_rank_can_split_the_verdict_of_one_call_but_not_of_two(name: str) -> None:
    outcomes = _outcomes(_explored(QUICK[name]))
    lengths = [[len([o for o in rank if o != "timeout"]) for rank in ranks] for ranks in outcomes]
    # Two live ranks differ on call 0, which has a host wait: no protocol without a further round trip can avoid it.
    assert any(min(done) == 0 and max(done) == 1 for done in lengths)
    assert all(max(done) - min(done) <= 1 for done in lengths)
    assert any(min(done) == 3 for done in lengths), "there is also an end where all complete"


class _Watched(Machine):
    """Notes whether a block ever finds a slot that is not free."""

    blocked = False

    def step(self, state: State, r: int, block: Block) -> tuple[str, Rank, tuple[Word, ...]] | None:
        step = super().step(state, r, block)
        at = self.program(r, state.ranks[r], block[0])[block[1]][0]
        self.blocked |= step is None and at == "slot free?"
        return step


@pytest.mark.parametrize(("ahead", "blocks"), [(0, False), (1, True)])
@pytest.mark.parametrize("timeouts", ["never", "any"])
def test_the_wait_for_done_of_two_calls_ago_blocks_only_where_calls_are_published_ahead(
    ahead: int, blocks: bool, timeouts: Timeouts
) -> None:
    machine = _Watched(Scenario(2, (FIRST,) * 3, ahead=ahead, timeouts=timeouts, full=True), Rules())
    assert not explore(machine).violations
    assert machine.blocked == blocks


class _Ring:
    """Three states that lead to each other."""

    def initial(self) -> int:
        return 0

    def steps(self, state: int) -> list[tuple[str, int]]:
        return [("on", (state + 1) % 3)]

    def is_final(self, state: int) -> bool:
        return False


def test_the_search_finds_a_run_without_an_end() -> None:
    assert set(explore(_Ring()).violations) == {"endless"}  # type: ignore[arg-type]


def test_the_page_names_every_scenario_and_no_other() -> None:
    text = PAGE.read_text()
    rows = set(re.findall(r"^\| (W=\d[^|]*?) \|", text, re.MULTILINE))
    assert rows == set(QUICK | SLOW)
