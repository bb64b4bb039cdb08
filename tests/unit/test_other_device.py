"""A buffer runs on the device that was current when it was made, whichever is current later."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from moe_ep.backends.intranode import IntranodeBackend
from moe_ep.buffer import Buffer
from tests.helpers.fake_exchange import FakeNode
from tests.unit.node_helpers import construct

ROOT = Path(__file__).parents[2]
SOURCES = ("exchange/host.cpp", "low_latency/memory.cpp", "low_latency/memory_ipc.cpp", "internode/rail.cpp")


def _cuda_headers() -> Path | None:
    """The folder of the toolkit's headers, which are all that is needed of it."""
    home = os.environ.get("CUDA_HOME")
    nvcc = shutil.which("nvcc")
    homes = [Path(home)] if home else [] if nvcc is None else [Path(nvcc).resolve().parents[1]]
    folders = [folder / "include" for folder in (*homes, Path("/usr/local/cuda"))]
    return next((folder for folder in folders if (folder / "cuda_runtime_api.h").exists()), None)


@pytest.mark.timeout(300)
def test_no_call_of_the_runtime_depends_on_which_device_is_current(tmp_path: Path) -> None:
    headers, compiler = _cuda_headers(), shutil.which("c++")
    if headers is None or compiler is None:
        pytest.skip("a C++ compiler and the headers of the CUDA toolkit are needed")
    program = tmp_path / "other_device"
    sources = [ROOT / "tests/unit/other_device.cpp", *(ROOT / "csrc" / name for name in SOURCES)]
    flags = ["-std=c++17", "-O0", f"-I{ROOT / 'csrc'}", f"-isystem{headers}"]
    subprocess.run([compiler, *flags, *map(str, sources), "-o", str(program)], check=True, timeout=240)
    done = subprocess.run([str(program)], capture_output=True, text=True, timeout=30, check=False)
    assert (done.stdout, done.returncode) == ("", 0)


def test_what_a_buffer_hands_out_lies_on_its_device(monkeypatch: pytest.MonkeyPatch) -> None:
    (backend,) = construct(FakeNode().install(monkeypatch))
    assert isinstance(backend, IntranodeBackend)
    backend._device = torch.device("cuda", 3)
    buffer = Buffer.__new__(Buffer)
    buffer._backend = backend
    assert buffer._device() == torch.device("cuda", 3)
