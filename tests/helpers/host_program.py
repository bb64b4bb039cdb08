"""Programs in C++ that use csrc without a GPU: compiled with the headers of the CUDA toolkit alone, and run."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def run_host_program(sources: Sequence[Path], program: Path, optimize: str) -> tuple[str, int]:
    """What the program prints, and its exit status. Skips where there is no compiler or no toolkit."""
    headers, compiler = _cuda_headers(), shutil.which("c++")
    if headers is None or compiler is None:
        pytest.skip("a C++ compiler and the headers of the CUDA toolkit are needed")
    flags = ["-std=c++17", optimize, f"-I{ROOT / 'csrc'}", f"-isystem{headers}"]
    subprocess.run([compiler, *flags, *map(str, sources), "-o", str(program)], check=True, timeout=240)
    done = subprocess.run([str(program)], capture_output=True, text=True, timeout=120, check=False)
    return done.stdout, done.returncode


def _cuda_headers() -> Path | None:
    """The folder of the toolkit's headers, which are all that is needed of it."""
    home = os.environ.get("CUDA_HOME")
    nvcc = shutil.which("nvcc")
    homes = [Path(home)] if home else [] if nvcc is None else [Path(nvcc).resolve().parents[1]]
    folders = [folder / "include" for folder in (*homes, Path("/usr/local/cuda"))]
    return next((folder for folder in folders if (folder / "cuda_runtime_api.h").exists()), None)
