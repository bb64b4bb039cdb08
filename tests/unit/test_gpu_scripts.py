"""`make test-gpu`, `make bench-gpu` and what they are made of, on a machine without a GPU."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPTS = ROOT / "scripts"
TOOLS = ("bash", "mktemp", "mkdir", "rm", "timeout", "tail", "cat", "sh", "make", "sort", "awk", "dirname", "env")


@pytest.fixture
def tools(tmp_path: Path) -> Path:
    """A PATH that has the usual tools, and nothing of NVIDIA."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in TOOLS:
        found = shutil.which(name)
        if found is None:
            pytest.skip(f"needs {name}")
        (folder / name).symlink_to(found)
    return folder


def call(tools: Path, *command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    variables = {"PATH": str(tools), "HOME": os.environ.get("HOME", "/"), **environment}
    return subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, text=True, timeout=60, check=False)


def script(tools: Path, name: str, text: str) -> None:
    (tools / name).write_text(f"#!/usr/bin/env bash\n{text}\n")
    (tools / name).chmod(0o755)


def test_without_the_daemon_a_command_runs_without_mps_and_its_exit_code_stays(tools: Path) -> None:
    ran = call(tools, str(SCRIPTS / "with_mps.sh"), "bash", "-c", "echo ran; exit 7")
    assert (ran.returncode, ran.stdout) == (7, "ran\n")
    assert "nvidia-cuda-mps-control is not on PATH" in ran.stderr


def test_without_a_command_it_says_how_to_call_it(tools: Path) -> None:
    ran = call(tools, str(SCRIPTS / "with_mps.sh"))
    assert ran.returncode == 2
    assert "with_mps.sh COMMAND" in ran.stderr


DAEMON = 'if [ "$1" = -d ]; then echo began >> "$LOG"; else cat >> "$LOG"; fi'


@pytest.mark.parametrize("ends", ["exit 3", "kill -TERM $PPID; sleep 20"])
def test_the_daemon_is_told_to_quit_whatever_the_end(tools: Path, tmp_path: Path, ends: str) -> None:
    log = tmp_path / "log"
    script(tools, "nvidia-cuda-mps-control", DAEMON)
    script(tools, "python3", "exit 0")
    (tools / "sleep").symlink_to(str(shutil.which("sleep")))
    command = f"echo $CUDA_MPS_PIPE_DIRECTORY; {ends}"
    ran = call(tools, str(SCRIPTS / "with_mps.sh"), "bash", "-c", command, LOG=str(log), TMPDIR=str(tmp_path))
    assert ran.returncode == (3 if ends == "exit 3" else 143)
    assert "MPS serves" in ran.stderr
    assert log.read_text() == "began\nquit\n"
    assert not Path(ran.stdout.splitlines()[0]).exists()


def test_a_daemon_that_does_not_serve_is_told_to_quit_and_the_command_runs_without_it(
    tools: Path, tmp_path: Path
) -> None:
    log = tmp_path / "log"
    script(tools, "nvidia-cuda-mps-control", DAEMON)
    script(tools, "python3", "echo no device >&2; exit 1")
    command = 'echo "folder:${CUDA_MPS_PIPE_DIRECTORY:-none}"'
    ran = call(tools, str(SCRIPTS / "with_mps.sh"), "bash", "-c", command, LOG=str(log))
    assert (ran.returncode, ran.stdout) == (0, "folder:none\n")
    assert "MPS does not serve here (no device)" in ran.stderr
    assert log.read_text() == "began\nquit\n"


@pytest.mark.parametrize(("target", "said"), [("test-gpu", "nothing counts as passed"), ("bench-gpu", "Nothing was")])
def test_without_a_gpu_the_targets_say_what_they_need_and_count_nothing(tools: Path, target: str, said: str) -> None:
    (tools / "getconf").symlink_to(str(shutil.which("getconf")))
    ran = call(tools, "make", target)
    assert ran.returncode == 0, ran.stderr
    assert "needs" in ran.stdout
    assert said in ran.stdout


def test_without_compute_sanitizer_nothing_is_checked_and_it_says_so(tools: Path) -> None:
    if Path("/usr/local/cuda/bin/compute-sanitizer").exists():
        pytest.skip("compute-sanitizer is installed where the script looks")
    (tools / "ls").symlink_to(str(shutil.which("ls")))
    ran = call(tools, str(SCRIPTS / "sanitize.sh"))
    assert ran.returncode == 0, ran.stderr
    assert "Nothing was checked" in ran.stdout


def report(path: Path, **counts: int) -> str:
    attributes = " ".join(f'{name}="{number}"' for name, number in counts.items())
    path.write_text(f"<testsuites><testsuite {attributes}></testsuite></testsuites>")
    return str(path)


def test_the_count_adds_up_both_passes_and_a_pass_that_died_is_a_failure(tmp_path: Path) -> None:
    shared = report(tmp_path / "a.xml", tests=10, skipped=2, failures=1, errors=0)
    alone = report(tmp_path / "b.xml", tests=3, skipped=0, failures=0, errors=0)
    skipped = report(tmp_path / "c.xml", tests=5, skipped=5, failures=0, errors=0)

    def count(*reports: str) -> tuple[int, str]:
        command = [sys.executable, str(SCRIPTS / "count_tests.py"), *reports]
        ran = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
        return ran.returncode, ran.stdout

    assert count(shared, alone) == (1, "test-gpu: 10 tests passed, 1 failed, 2 skipped.\n")
    assert count(alone) == (0, "test-gpu: 3 tests passed, 0 failed, 0 skipped.\n")
    assert count(alone, str(tmp_path / "none.xml"))[0] == 1
    code, said = count(skipped)
    assert code == 1
    assert "nothing counts as passed" in said
