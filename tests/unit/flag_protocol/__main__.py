"""Prints what each scenario and each mutation explores: `python -m tests.unit.flag_protocol [--slow] [name ...]`.

With names, also the shortest way to each violation.
"""

from __future__ import annotations

import sys
import time

from tests.unit.flag_protocol.explore import explore
from tests.unit.flag_protocol.machine import Machine
from tests.unit.flag_protocol.rules import Rules, Scenario
from tests.unit.flag_protocol.scenarios import MUTATIONS, QUICK, SLOW


def _run(name: str, scenario: Scenario, rules: Rules, details: bool) -> None:
    began = time.process_time()
    result = explore(Machine(scenario, rules))
    secs = time.process_time() - began
    found = ", ".join(sorted(result.violations)) or "-"
    counts = f"{result.num_states:9}{result.num_steps:9}{len(result.finals):6}"
    sys.stdout.write(f"{name:62}{counts}{secs:7.1f} s  {found}\n")
    if details:
        sys.stdout.write(f"{result}\n")
    sys.stdout.flush()


def main(arguments: list[str]) -> None:
    """Runs the scenarios of those names, or all quick ones and the mutations (and with --slow the others)."""
    names = [argument for argument in arguments if argument != "--slow"]
    runs = [(name, scenario, Rules()) for name, scenario in (QUICK | SLOW).items() if name in names or not names]
    runs = [run for run in runs if names or "--slow" in arguments or run[0] in QUICK]
    runs += [(m.name, m.scenario, m.rules) for m in MUTATIONS if m.name in names or not names]
    sys.stdout.write(f"{'scenario':62}{'states':>9}{'steps':>9}{'ends':>6}{'CPU':>9}  violations\n")
    for name, scenario, rules in runs:
        _run(name, scenario, rules, bool(names))


if __name__ == "__main__":
    main(sys.argv[1:])
