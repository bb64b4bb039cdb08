"""`moe-ep doctor`: what is asked for decides the exit code; lines, a table and JSON say the same."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from moe_ep import cli
from moe_ep.doctor import report
from moe_ep.doctor.finding import Finding
from moe_ep.doctor.machine import Machine
from tests.unit.fake_machine import FakeMachine, laptop, make_kernels

ROOT = Path(__file__).parents[2]


def run(monkeypatch: pytest.MonkeyPatch, machine: Machine, *arguments: str) -> tuple[int, str]:
    monkeypatch.setattr(cli, "Machine", lambda: machine)
    result = CliRunner().invoke(cli.main, ["doctor", *arguments])
    return result.exit_code, result.output


def test_a_whole_machine_and_a_bare_laptop_are_both_well(monkeypatch: pytest.MonkeyPatch) -> None:
    for machine in (FakeMachine(), laptop()):
        code, output = run(monkeypatch, machine)
        assert code == 0
        assert output.endswith("\nNothing is broken.\n")


def test_one_line_a_finding_with_its_fix(monkeypatch: pytest.MonkeyPatch) -> None:
    _, output = run(monkeypatch, laptop())
    lines = output.splitlines()[:-1]
    findings = report.examine(laptop())
    assert len(lines) == len(findings)
    for line, finding in zip(lines, findings, strict=True):
        assert line.startswith(finding.state)
        assert f"{finding.sentence}." in line
        assert ("Fix: " in line) == (finding.state != "ok")


def test_what_is_asked_for_and_works_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    code, output = run(monkeypatch, FakeMachine(), "--require", "cuda,intranode,te,megatron")
    assert code == 0
    assert output.endswith("\nNothing is broken, and cuda, intranode, te, megatron can work.\n")


@pytest.mark.parametrize(
    ("required", "verdict"),
    [
        ("cuda", "cuda cannot work here: look at GPU and kernels."),
        ("intranode", "intranode cannot work here: look at GPU and kernels."),
        ("te", "te cannot work here: look at Transformer Engine."),
        ("megatron", "megatron cannot work here: look at Megatron-Core."),
    ],
)
def test_what_is_asked_for_and_missing_exits_with_1(
    monkeypatch: pytest.MonkeyPatch, required: str, verdict: str
) -> None:
    code, output = run(monkeypatch, laptop(), "--require", required)
    assert code == 1
    assert output.splitlines()[-1] == verdict


def test_what_is_broken_exits_with_1_also_unasked(monkeypatch: pytest.MonkeyPatch) -> None:
    code, output = run(monkeypatch, FakeMachine(extension=make_kernels("sm_80a")))
    assert code == 1
    assert output.splitlines()[-1] == "Broken: kernels."


def test_a_warning_is_no_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    code, output = run(monkeypatch, FakeMachine({"CUDA_LAUNCH_BLOCKING": "1"}), "--require", "cuda")
    assert code == 0
    assert "warning  environment" in output


def test_an_unknown_requirement_exits_with_2(monkeypatch: pytest.MonkeyPatch) -> None:
    code, output = run(monkeypatch, FakeMachine(), "--require", "cuda,rocm")
    assert code == 2
    assert output == "--require names rocm; it knows cuda, intranode, internode, te, megatron.\n"


def test_json_says_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    code, output = run(monkeypatch, laptop(), "--json", "--require", "te")
    record = json.loads(output)
    assert code == 1
    assert record["well"] is False
    assert record["unmet"] == {"te": ["Transformer Engine"]}
    assert [Finding(**finding) for finding in record["findings"]] == report.examine(laptop())


def test_a_terminal_gets_a_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "200")
    code, output = run(monkeypatch, laptop())
    assert code == 0
    assert "│ Transformer Engine │" in output
    assert '"transformer-engine[pytorch]"' in output, "brackets are no markup"


def test_a_check_that_fails_itself_is_a_finding() -> None:
    def sick(machine: Machine) -> list[Finding]:
        raise OSError("no such device")

    findings = report.examine(laptop(), [sick])
    assert findings == [
        Finding("sick", "broken", "this check failed itself: OSError: no such device", "report it with this line")
    ]


def test_python_m_moe_ep_is_the_command() -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "moe_ep", "doctor", "--json"]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100)
    assert ran.returncode in (0, 1), ran.stderr
    assert {finding["subject"] for finding in json.loads(ran.stdout)["findings"]} >= {"Python", "GPU", "environment"}
