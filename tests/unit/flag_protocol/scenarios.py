"""The scenarios in which the protocol must hold, and the changes that must break it."""

from __future__ import annotations

from dataclasses import dataclass, replace

from tests.unit.flag_protocol.rules import CACHED, FIRST, Call, Input, Rules, Scenario

IN_PLACE, CACHED_IN_PLACE = Call(host_wait=True, registered=True), Call(host_wait=False, registered=True)
LOW_LATENCY = Call(host_wait=True, push=True)
PLACES = (IN_PLACE, CACHED_IN_PLACE, IN_PLACE)
TWO = (FIRST, CACHED)

_INPUTS: dict[str, dict[tuple[int, int], Input]] = {
    "refuse in call 0": {(0, 1): "refuse"},
    "refuse in call 1": {(1, 1): "refuse"},
    "refuse in call 2": {(2, 1): "refuse"},
    "refuse in every call, each another rank": {(0, 1): "refuse", (1, 0): "refuse", (2, 1): "refuse"},
    "another operation in call 1": {(1, 1): "other operation"},
    "no memory after the verdict of call 0": {(0, 1): "no memory"},
    "growth in call 0": {(0, 1): "grow"},
    "growth in call 2, both": {(2, 0): "grow", (2, 1): "grow"},
    "growth in a cached call": {(1, 1): "grow"},
    "growth and refusal": {(0, 0): "grow", (0, 1): "refuse", (2, 0): "grow"},
}


def _quick() -> dict[str, Scenario]:
    found: dict[str, Scenario] = {}
    for world in (2, 3):
        w = f"W={world}"
        found |= {
            f"{w}, healthy": Scenario(world),
            f"{w}, caller's memory": Scenario(world, PLACES),
            f"{w}, one call ahead": Scenario(world, (FIRST,) * 3, ahead=1),
            f"{w}, low latency": Scenario(world, (LOW_LATENCY,) * 3),
            f"{w}, low latency, one call ahead": Scenario(world, (LOW_LATENCY,) * 3, ahead=1),
            f"{w}, reset while healthy": Scenario(world, TWO, reset=True),
        }
        found |= {f"{w}, {name}": Scenario(world, inputs=inputs) for name, inputs in _INPUTS.items()}
        died = Scenario(world, timeouts="last", mortal=1)
        found |= {
            f"{w}, a rank dies": died,
            f"{w}, a rank dies, caller's memory": replace(died, calls=PLACES),
            f"{w}, a rank dies, another refuses": replace(died, inputs={(1, 0): "refuse"}),
            f"{w}, a rank dies, growth and reset": replace(died, calls=TWO, inputs={(0, 1): "grow"}, reset=True),
        }
    late = Scenario(2, timeouts="any")
    growth = replace(late, calls=(FIRST,), inputs={(0, 1): "grow"}, reset=True, after=(FIRST,))
    return found | {
        "W=2, healthy, every interleaving": Scenario(2, full=True),
        "W=2, healthy, 2 blocks": Scenario(2, blocks=2),
        "W=2, growth with a receive outstanding": Scenario(2, (FIRST,) * 3, ahead=1, inputs={(1, 1): "grow"}),
        "W=2, late": late,
        "W=2, late, every interleaving": replace(late, full=True),
        "W=2, late, 2 blocks, 2 calls": replace(late, blocks=2, calls=TWO),
        "W=2, late, caller's memory": replace(late, calls=PLACES),
        "W=2, late, caller's memory, one call ahead": replace(late, calls=(IN_PLACE,) * 3, ahead=1),
        "W=2, late, one call ahead": replace(late, calls=(FIRST,) * 3, ahead=1),
        "W=2, late, low latency, one call ahead": replace(late, calls=(LOW_LATENCY,) * 3, ahead=1),
        "W=2, late, another refuses": replace(late, inputs={(1, 0): "refuse"}),
        "W=2, late and dies": replace(late, calls=PLACES, mortal=1),
        "W=2, late, reset": replace(late, reset=True),
        "W=2, late, growth, reset": growth,
        "W=2, late, reset that times out, reset": replace(growth, inputs={}, quiet_era=2),
        "W=3, late": replace(late, world=3),
    }


def _slow() -> dict[str, Scenario]:
    late = Scenario(3, timeouts="any")
    growth = replace(late, calls=(FIRST,), inputs={(0, 1): "grow"}, reset=True, after=(FIRST,))
    died = Scenario(3, timeouts="last", mortal=1)
    return {
        "W=3, healthy, every interleaving": Scenario(3, full=True),
        "W=3, healthy, 2 blocks": Scenario(3, blocks=2),
        "W=2, late, 2 blocks": replace(late, world=2, blocks=2),
        "W=2, late, growth, reset that times out, reset": replace(growth, world=2, quiet_era=2),
        "W=3, late, caller's memory": replace(late, calls=PLACES),
        "W=3, late, one call ahead, 2 calls": replace(late, calls=(FIRST,) * 2, ahead=1),
        "W=3, late, another refuses": replace(late, inputs={(1, 0): "refuse"}),
        "W=3, late and dies, 2 calls": replace(late, calls=TWO, mortal=1),
        "W=3, late, 2 calls, reset": replace(late, calls=TWO, reset=True),
        "W=3, late, growth, reset": growth,
        "W=3, a rank dies, 2 blocks": replace(died, blocks=2),
        "W=3, a rank dies, every interleaving": replace(died, full=True),
    }


QUICK, SLOW = _quick(), _slow()


@dataclass(frozen=True)
class Mutation:
    """The protocol with a rule changed, the scenario, and the violations found in it (empty: none)."""

    name: str
    rules: Rules
    scenario: Scenario
    violations: frozenset[str]


def _mutations() -> list[Mutation]:
    plain, places, late = Scenario(2), Scenario(2, PLACES), Scenario(2, timeouts="any")
    ahead = Scenario(2, (FIRST,) * 3, ahead=1)
    refused = _INPUTS["refuse in call 0"]
    alone, grown = _INPUTS["no memory after the verdict of call 0"], _INPUTS["growth in call 0"]
    outstanding = QUICK["W=2, growth with a receive outstanding"]
    reset, growth = replace(late, reset=True), replace(plain, inputs=grown)
    late_growth = replace(late, calls=(FIRST,), inputs=grown, reset=True, after=(FIRST,))
    dying_growth = QUICK["W=3, a rank dies, growth and reset"]
    one_and_reset = replace(reset, calls=(FIRST,), blocks=2, after=(FIRST,))
    twice = replace(late_growth, inputs={}, quiet_era=2)
    late_places = replace(late, calls=PLACES)
    goes_on = {"failure_is_final": False, "abort_before_event": False}

    def change(name: str, scenario: Scenario, violations: str, **rules: object) -> Mutation:
        if scenario.blocks == 1 and scenario.world == 2:
            scenario = replace(scenario, full=True)
        names = frozenset(name.strip() for name in violations.split(",") if name)
        return Mutation(name, replace(Rules(), **rules), scenario, names)  # type: ignore[arg-type]

    return [
        change("no wait for done(e-2), one call ahead", ahead, "wrong rows, stuck", done_before_rewrite=False),
        change("one slot instead of two", plain, "wrong rows, stuck", parity=False),
        change("flag before its rows", plain, "wrong rows", rows_before_flag=False),
        change("one chunk flag for both slots, compared by ==", plain, "stuck", flags="word, equal"),
        change("the first idle block posts done", replace(places, blocks=2), "wrong rows", last_block_posts_done=False),
        change("no done after a refusal", replace(ahead, inputs=refused), "stuck", done_after_refusal=False),
        change("no done after an error of its own", replace(places, inputs=alone), "stuck", done_after_own_error=False),
        change("a chunk's waiters before its publisher", plain, "stuck", publish_first=False),
        change("two numberings of the chunks", plain, "stuck", one_numbering=False),
        change("a refusing rank sends no header", replace(plain, inputs=refused), "stuck", refusal_sends_header=False),
        change("one source's header", Scenario(3, inputs=refused), "split verdict", all_headers=False),
        change("caller's memory without every done(e)", places, "wrong rows", done_before_event=False),
        change("a rank that fails posts no abort", late_places, "wrong rows", abort_before_event=False),
        change("a reader looks for no abort", late_places, "wrong rows", abort_checked=False),
        change("calls go on after a timeout, no abort", late, "split verdict", **goes_on),
        change("no generation in the tag, reset", reset, "old flag", generation_in_tag=False),
        change("no generation in the tag, growth", growth, "old flag", generation_in_tag=False),
        change("a new generation waits for done of the old one", reset, "stuck", fresh_slots_are_free=False),
        change("epochs go on after reset", reset, "stuck", epoch_restarts=False),
        change("a generation of one's own, growth", late_growth, "wrong rows, stuck", generation_agreed=False),
        change("a generation of one's own, reset", twice, "wrong rows, stuck", generation_agreed=False),
        change("no synchronise, growth", replace(growth, blocks=2), "closed segment", synchronise=False),
        change("no synchronise, reset", one_and_reset, "wrong rows, stuck", synchronise=False),
        change("growth keeps the tag", growth, "wrong rows, closed segment, endless", growth_new_generation=False),
        change("growth with a receive outstanding", outstanding, "stuck", growth_only_when_idle=False),
        change("no barrier between close and free", growth, "closed segment", barrier_before_free=False),
        change("no barrier between allocate and open", growth, "closed segment", barrier_before_open=False),
        change("barriers without names", late_growth, "closed segment, stuck", barriers_named=False),
        change("reset keeps mappings that a growth closed", late_growth, "closed segment", reset_reopens=False),
        change("reset clears the flags", reset, "stuck", control_block_kept=False),
        change("three receives outstanding", replace(ahead, ahead=2), "stuck"),
        change("three receives outstanding, low latency", replace(ahead, calls=(LOW_LATENCY,) * 3, ahead=2), "stuck"),
        # Rules that are not needed where they stand alone.
        change("no wait for done(e-2), in order", plain, "", done_before_rewrite=False),
        change("no wait for done(e-2), in order, W=3", replace(plain, world=3), "", done_before_rewrite=False),
        change("no wait for done(e-2), in order, late", late, "", done_before_rewrite=False),
        change("one chunk flag for both slots, compared by >=", late, "", flags="word"),
        change("calls go on after a timeout, with aborts", late, "", failure_is_final=False),
        change("no barrier before close", late_growth, "", barrier_before_close=False),
        change("no barrier before close, W=3", replace(growth, world=3), "", barrier_before_close=False),
        change("no barrier before close, a rank dies", dying_growth, "", barrier_before_close=False),
    ]


MUTATIONS = _mutations()
