"""Without Megatron-Core the package imports, and what needs it says so."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
WITHOUT = "import sys; sys.modules['megatron'] = None\n"


def run(code: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60)


def test_the_package_needs_no_megatron() -> None:
    ran = run(WITHOUT + "import moe_ep.integrations.deep_ep; assert 'moe_ep.integrations.megatron' not in sys.modules")
    assert ran.returncode == 0, ran.stderr


def test_the_integration_says_which_versions_it_needs() -> None:
    ran = run(WITHOUT + "import moe_ep.integrations.megatron")
    assert ran.returncode == 1
    assert "moe_ep.integrations.megatron needs megatron-core 0.16 to 0.19, which could not be imported" in ran.stderr
