"""The scripts that start a program on several nodes: what they would start, and what they refuse."""

from __future__ import annotations

import os
import shlex
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROGRAM = ["examples/pretrain.py", "--config", "configs/tiny_cuda.yaml", "--set", "a=b c"]


def _run(*command: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environ = {name: value for name, value in os.environ.items() if not name.startswith("SLURM_")}
    environ |= {"PYTHON": "python3", **variables}
    return subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=30)


def _torchrun(node: int, nodes: int, master: str, gpus: int, port: int) -> list[str]:
    """What one node starts."""
    places = ["--nnodes", str(nodes), "--node-rank", str(node), "--nproc-per-node", str(gpus)]
    address = ["--master-addr", master, "--master-port", str(port)]
    return ["launch_torchrun:", "python3", "-m", "torch.distributed.run", *places, *address, *PROGRAM]


def test_a_dry_run_of_torchrun_prints_the_command_of_the_node() -> None:
    given = ["--nodes", "4", "--node", "3", "--master", "first", "--gpus", "8", "--port", "1234", "--dry-run"]
    done = _run("scripts/launch_torchrun.sh", *given, "--", *PROGRAM)
    assert done.returncode == 0, done.stderr
    assert shlex.split(done.stdout) == _torchrun(3, 4, "first", 8, 1234)


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        (["--nodes", "2", "--node", "0"], "--master is missing"),
        (["--nodes", "2", "--node", "2", "--master", "h"], "--node is 2, but nodes are numbered from 0 to 1"),
        (["--nodes", "two", "--node", "0", "--master", "h"], "--nodes is 'two', not a number"),
        (["--nodes", "2", "--rank", "0"], "--rank is unknown before --"),
        (["--nodes"], "--nodes has no value"),
    ],
)
def test_torchrun_is_refused_with_a_sentence(given: list[str], sentence: str) -> None:
    done = _run("scripts/launch_torchrun.sh", *given, *(["--", *PROGRAM] if len(given) > 1 else []))
    assert done.returncode == 2
    assert sentence in done.stderr
    assert done.stdout == ""


@pytest.fixture
def slurm(tmp_path: Path) -> dict[str, str]:
    """The variables of a job on two nodes, with a stand-in for scontrol, and for srun, which runs all on this one."""
    (tmp_path / "scontrol").write_text('#!/bin/sh\necho "$3" | tr , "\\n"\n')
    (tmp_path / "srun").write_text(
        '#!/bin/sh\nwhile case "$1" in --*) true;; *) false;; esac; do shift; done\n'
        'for node in 0 1; do SLURM_NODEID=$node "$@" || exit; done\n'
    )
    for name in ("scontrol", "srun"):
        (tmp_path / name).chmod(0o755)
    names = {"SLURM_JOB_NODELIST": "red,blue", "SLURM_NNODES": "2", "SLURM_JOB_ID": "77"}
    return {**names, "SLURM_GPUS_ON_NODE": "4", "PATH": f"{tmp_path}:{os.environ['PATH']}"}


def test_a_dry_run_of_slurm_prints_the_command_of_every_node(slurm: dict[str, str]) -> None:
    done = _run("bash", "scripts/launch_slurm.sh", *PROGRAM, DRY_RUN="1", **slurm)
    assert done.returncode == 0, done.stderr
    lines = [shlex.split(line) for line in done.stdout.splitlines()]
    assert lines == [_torchrun(node, 2, "red", 4, 20077) for node in range(2)]


def test_slurm_starts_on_every_node_what_the_dry_run_prints(slurm: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "python").write_text('#!/bin/sh\necho "$SLURM_NODEID" "$OMP_NUM_THREADS" "$@"\n')
    (tmp_path / "python").chmod(0o755)
    slurm |= {"PYTHON": str(tmp_path / "python"), "OMP_NUM_THREADS": "3"}
    done = _run("bash", "scripts/launch_slurm.sh", *PROGRAM, **slurm)
    assert done.returncode == 0, done.stderr
    started = [line for line in done.stdout.splitlines() if not line.startswith("launch_torchrun:")]
    assert [line.split()[:2] for line in started] == [["0", "3"], ["1", "3"]]
    assert all("--master-addr red" in line and line.endswith("--set a=b c") for line in started)


def test_slurm_outside_of_a_job_is_refused_with_a_sentence() -> None:
    done = _run("bash", "scripts/launch_slurm.sh", *PROGRAM)
    assert done.returncode == 2
    assert "SLURM_JOB_NODELIST is not set, so this is no Slurm job" in done.stderr
