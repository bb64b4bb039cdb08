"""Python, this package, PyTorch, its collectives, and nvcc."""

from __future__ import annotations

import platform
import re

from moe_ep.doctor.finding import Finding
from moe_ep.doctor.machine import Machine

_OLDEST_TORCH = (2, 6)
_OLDEST_NVCC = (12, 0)


def _pair(version: str) -> tuple[int, int]:
    found = re.match(r"(\d+)\.(\d+)", version)
    return (int(found[1]), int(found[2])) if found else (0, 0)


def python(machine: Machine) -> list[Finding]:
    """An older Python than 3.10 would not have come here."""
    return [Finding("Python", "ok", f"{platform.python_version()} on {platform.system()} {platform.machine()}")]


def package(machine: Machine) -> list[Finding]:
    """Which copy runs: in a folder with the sources, `python -m` takes those before what is installed."""
    home, installed = machine.home(), machine.installed_home()
    if installed is not None and installed != home:
        sentence = f"the copy at {home} runs, and hides the installed one at {installed} with its kernels"
        return [Finding("moe_ep", "warning", sentence, "run from another folder, or install it with --editable")]
    return [Finding("moe_ep", "ok", f"{machine.version('moe-ep') or 'not installed, run'} from {home}")]


def pytorch(machine: Machine) -> list[Finding]:
    version, cuda = machine.torch_version(), machine.torch_cuda()
    if _pair(version) < _OLDEST_TORCH:
        return [Finding("PyTorch", "broken", f"{version} is older than 2.6", 'pip install "torch>=2.6"')]
    return [Finding("PyTorch", "ok", f"{version}, built for {'the CPU alone' if cuda is None else f'CUDA {cuda}'}")]


def collectives(machine: Machine) -> list[Finding]:
    """gloo moves rows on CPU and lets ranks meet; NCCL moves them between GPUs that do not reach each other."""
    wants = ["gloo", "nccl"] if machine.gpus() else ["gloo"]
    lacking = [name for name in wants if not machine.has_collectives(name)]
    if lacking:
        names = " and ".join(lacking)
        return [
            Finding(
                "collectives",
                "missing",
                f"this PyTorch has no {names}: backend='torch' cannot move rows",
                "install a PyTorch release from pytorch.org, or build it with USE_DISTRIBUTED=1",
            )
        ]
    nccl = f", NCCL {machine.nccl_version()}" if "nccl" in wants else ""
    return [Finding("collectives", "ok", f"gloo{nccl}")]


def nvcc(machine: Machine) -> list[Finding]:
    """Only a build needs it."""
    path, home = machine.nvcc(), machine.environ.get("CUDA_HOME")
    toolkit = "install the CUDA toolkit, 12.0 or newer"
    if path is None:
        where = f"in CUDA_HOME={home}" if home else "on PATH or in /usr/local/cuda"
        fix = f"{toolkit}, or set CUDA_HOME to it; only building the kernels needs it"
        return [Finding("nvcc", "missing", f"there is none {where}", fix)]
    release = re.search(r"release (\d+\.\d+)", machine.output(path, "--version") or "")
    if release is None:
        return [Finding("nvcc", "broken", f"{path} --version does not name a release", f"{toolkit}, again")]
    if _pair(release[1]) < _OLDEST_NVCC:
        return [Finding("nvcc", "broken", f"{release[1]} at {path} is older than 12.0", toolkit)]
    return [Finding("nvcc", "ok", f"{release[1]} at {path}")]
