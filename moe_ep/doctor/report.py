"""Runs the checks, decides whether what was asked for works, and writes it down."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Sequence

from rich.table import Table
from rich.text import Text

from moe_ep.doctor import hardware, packages, software
from moe_ep.doctor.environment import environment
from moe_ep.doctor.finding import Finding, State
from moe_ep.doctor.machine import Machine

Check = Callable[[Machine], list[Finding]]

CHECKS: tuple[Check, ...] = (
    software.python,
    software.package,
    software.pytorch,
    software.collectives,
    hardware.gpu,
    hardware.kernels,
    hardware.peers,
    hardware.ipc,
    hardware.nvlink,
    software.nvcc,
    packages.transformer_engine,
    packages.megatron,
    packages.nvshmem,
    packages.network,
    packages.deep_ep,
    environment,
)

# What may be asked for, and the subjects that must work for it.
REQUIREMENTS = {
    "cuda": ("PyTorch", "GPU", "kernels"),
    "intranode": ("PyTorch", "GPU", "kernels", "GPU peers", "IPC"),
    "internode": ("PyTorch", "collectives", "GPU", "kernels", "GPU peers", "IPC", "NVSHMEM", "RDMA"),
    "te": ("PyTorch", "Transformer Engine"),
    "megatron": ("PyTorch", "Megatron-Core"),
}

_COLOURS: dict[State, str] = {"ok": "green", "warning": "yellow", "missing": "cyan", "broken": "red"}


def examine(machine: Machine, checks: Sequence[Check] = CHECKS) -> list[Finding]:
    """Everything that is found; a check that fails itself is a finding too."""
    findings = []
    for check in checks:
        try:
            findings += check(machine)
        except Exception as error:  # noqa: BLE001 (a machine that is not well fails in ways that nobody listed)
            sentence = f"this check failed itself: {type(error).__name__}: {error}"
            findings.append(Finding(check.__name__, "broken", sentence, "report it with this line"))
    return findings


def unmet(findings: Sequence[Finding], required: Sequence[str]) -> dict[str, list[str]]:
    """Which of `required` cannot work, and the subjects that stand in its way."""
    ill = {finding.subject for finding in findings if not finding.works}
    blocked = {name: [subject for subject in REQUIREMENTS[name] if subject in ill] for name in required}
    return {name: subjects for name, subjects in blocked.items() if subjects}


def is_well(findings: Sequence[Finding], required: Sequence[str]) -> bool:
    """Whether nothing is broken and all that is required works."""
    return not unmet(findings, required) and all(finding.state != "broken" for finding in findings)


def as_lines(findings: Sequence[Finding]) -> list[str]:
    """One line a finding: state, subject, sentence, fix."""
    width = max(len(finding.subject) for finding in findings)
    return [
        f"{finding.state:<8} {finding.subject:<{width}}  {finding.sentence}."
        + (f" Fix: {finding.fix}." if finding.fix else "")
        for finding in findings
    ]


def as_table(findings: Sequence[Finding]) -> Table:
    """The same for a terminal."""
    table = Table("", "", "found", "fix")
    for finding in findings:
        # Text, because sentences may hold brackets, which rich would take for its markup.
        state = Text(finding.state, _COLOURS[finding.state])
        table.add_row(state, Text(finding.subject), Text(finding.sentence), Text(finding.fix))
    return table


def as_json(findings: Sequence[Finding], required: Sequence[str]) -> str:
    """The same for machines: `well`, `unmet` and the findings."""
    record = {
        "well": is_well(findings, required),
        "unmet": unmet(findings, required),
        "findings": [dataclasses.asdict(finding) for finding in findings],
    }
    return json.dumps(record, indent=2)


def verdict(findings: Sequence[Finding], required: Sequence[str]) -> list[str]:
    """The last lines: what cannot work, or that nothing is broken."""
    lines = [
        f"{name} cannot work here: look at {' and '.join(subjects)}."
        for name, subjects in unmet(findings, required).items()
    ]
    broken = sorted({finding.subject for finding in findings if finding.state == "broken"})
    if broken:
        lines.append(f"Broken: {', '.join(broken)}.")
    if not lines:
        also = f", and {', '.join(required)} can work" if required else ""
        lines.append(f"Nothing is broken{also}.")
    return lines
