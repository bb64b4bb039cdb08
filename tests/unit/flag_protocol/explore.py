"""Breadth-first search over every reachable state."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol, TypeVar

from tests.unit.flag_protocol.state import Violation

S = TypeVar("S")


class System(Protocol[S]):
    """What can be explored. Steps and `is_final` raise `Violation` where a property does not hold."""

    def initial(self) -> S: ...

    def steps(self, state: S) -> list[tuple[str, S | Violation]]: ...

    def is_final(self, state: S) -> bool: ...


@dataclass
class Result:
    """What the search found: the kinds of violation, each with the shortest way to it."""

    num_states: int = 0
    num_steps: int = 0
    finals: set[object] = field(default_factory=set)
    violations: dict[str, list[str]] = field(default_factory=dict)

    def __str__(self) -> str:
        """The traces, a step a line."""
        lines = [f"{self.num_states} states"]
        for name, trace in self.violations.items():
            lines += ["", f"{name}:", *trace]
        return "\n".join(lines)


def explore(system: System[S], limit: int = 2_000_000) -> Result:
    """Visits every state. A state that has no step and is not final is a violation, and so is a run without an end."""
    start = system.initial()
    number = {start: 0}
    states = [start]
    origins: list[tuple[int, str]] = [(-1, "")]  # per state: the one before it on the shortest way, and the step
    after: list[list[int]] = []
    result = Result()
    for i, state in enumerate(states):  # grows while it is walked
        steps = system.steps(state)
        result.num_steps += len(steps)
        successors = []
        for text, following in steps:
            if isinstance(following, Violation):
                result.violations.setdefault(following.name, [*_trace(origins, i), text, f"  {following}"])
                continue
            found = number.setdefault(following, len(states))
            if found == len(states):
                states.append(following)
                origins.append((i, text))
            successors.append(found)
        after.append(successors)
        if not steps:
            _check_end(system, state, _trace(origins, i), result)
        assert len(states) <= limit, f"more than {limit} states"
    result.num_states = len(states)
    if not _every_run_ends(after):
        result.violations["endless"] = ["a run comes back to a state that it has been in"]
    return result


def _check_end(system: System[S], state: S, trace: list[str], result: Result) -> None:
    try:
        if system.is_final(state):
            result.finals.add(state)
        else:
            result.violations.setdefault("stuck", trace)
    except Violation as violation:
        result.violations.setdefault(violation.name, [*trace, f"  {violation}"])


def _trace(origins: list[tuple[int, str]], i: int) -> list[str]:
    trace = []
    while i > 0:
        i, text = origins[i]
        trace.append(text)
    return trace[::-1]


def _every_run_ends(after: list[list[int]]) -> bool:
    """Whether the graph has no cycle: states are taken away that nothing leads to, until none is left."""
    incoming = [0] * len(after)
    for successors in after:
        for s in successors:
            incoming[s] += 1
    free = [s for s, n in enumerate(incoming) if n == 0]
    taken = 0
    while free:
        taken += 1
        for s in after[free.pop()]:
            incoming[s] -= 1
            if incoming[s] == 0:
                free.append(s)
    return taken == len(after)
