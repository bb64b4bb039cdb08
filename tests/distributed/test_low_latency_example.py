"""`examples/low_latency_decode.py` on CPU: both loops choose the same tokens, and say how fast."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("world", [1, 2])
def test_both_loops_choose_the_same_tokens(world: int) -> None:
    left_out = ("WORLD_SIZE", "RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    environment = {name: value for name, value in os.environ.items() if name not in left_out}
    environment |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={world}"] if world > 1 else []
    command = [sys.executable, *torchrun, str(ROOT / "examples" / "low_latency_decode.py"), "--steps", "2"]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=110, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert f"{world} ranks, 2 steps, backend torch" in ended.stdout
    assert len(re.findall(r"^(?:plain|overlapped): +[\d,]+ tokens/s$", ended.stdout, re.MULTILINE)) == 2
    assert "Both chose the same tokens." in ended.stdout
