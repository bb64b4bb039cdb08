"""`examples/megatron_pretrain.py`: Megatron's model, optimizer and schedule with three dispatchers, one curve."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
RTOL = 1e-5

if importlib.util.find_spec("megatron") is None:
    pytest.skip("Megatron-Core is not installed: pip install --no-deps 'megatron-core>=0.16,<0.17' tqdm packaging",
                allow_module_level=True)  # fmt: skip


def pretrain(folder: Path, *arguments: str, limit_secs: float = 110) -> subprocess.CompletedProcess[str]:
    """As a user starts it, on CPU, into `folder`."""
    left_out = ("WORLD_SIZE", "RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    environment = {name: value for name, value in os.environ.items() if name not in left_out}
    environment |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "MOE_EP_EXAMPLE_LIMIT_SECS": str(limit_secs - 5)}
    command = [sys.executable, str(ROOT / "examples" / "megatron_pretrain.py"), "--device", "cpu"]
    settings = ["--set", f"train.run_dir={folder}"]
    return subprocess.run(
        [*command, *settings, *arguments],
        env=environment,
        capture_output=True,
        text=True,
        timeout=limit_secs,
        check=False,
    )


def curves(folder: Path) -> dict[str, dict[str, list[float]]]:
    found: dict[str, dict[str, list[float]]] = json.loads((folder / "curves.json").read_text())
    return found


def check(folder: Path, num_steps: int, ran: subprocess.CompletedProcess[str]) -> None:
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "All three agree." in ran.stdout
    found = curves(folder)
    assert set(found) == {"alltoall", "moe_ep", "deep_ep-api"}
    for what in ("losses", "grad_norms"):
        wanted = found["alltoall"][what]
        assert len(wanted) == num_steps
        assert min(wanted) > 0
        for name in ("moe_ep", "deep_ep-api"):
            assert found[name][what] == pytest.approx(wanted, rel=RTOL)


def test_three_dispatchers_train_alike(tmp_path: Path) -> None:
    check(tmp_path, 4, pretrain(tmp_path, "--set", "train.steps=4", "--set", "train.warmup_steps=2"))


@pytest.mark.slow(ci=True)
@pytest.mark.timeout(150)
def test_three_dispatchers_train_alike_over_50_steps_and_learn(tmp_path: Path) -> None:
    ran = pretrain(tmp_path, limit_secs=140)
    check(tmp_path, 50, ran)
    losses = curves(tmp_path)["moe_ep"]["losses"]
    assert losses[-1] < 0.6 * losses[0]
    assert len(re.findall(r"loss \d\.\d+ -> \d\.\d+", ran.stdout)) == 3


@pytest.mark.slow(ci=True)
def test_one_dispatcher_is_chosen_by_a_flag(tmp_path: Path) -> None:
    ran = pretrain(tmp_path, "--dispatcher", "moe_ep", "--set", "train.steps=2", "--set", "train.warmup_steps=1")
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert set(curves(tmp_path)) == {"moe_ep"}
