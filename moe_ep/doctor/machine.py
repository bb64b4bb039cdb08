"""What the checks ask the machine, in one place, so that a test can answer instead."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import os
import shutil
import subprocess
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from moe_ep import _native
from moe_ep._native import NativeKernels
from moe_ep.integrations import transformer_engine

_COMMAND_SECS = 20.0  # nvidia-smi takes seconds where the driver is not kept loaded


@dataclass(frozen=True)
class Gpu:
    """A GPU that torch can use; `capability` is its compute capability."""

    name: str
    capability: tuple[int, int]
    memory_bytes: int


class Machine:
    """This machine and this process.

    Attributes:
        environ: the environment variables.
    """

    def __init__(self, environ: Mapping[str, str] | None = None) -> None:
        self.environ = os.environ if environ is None else environ

    def output(self, *command: str) -> str | None:
        """What a command prints; None where it does not exist, fails or does not end."""
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=_COMMAND_SECS, check=True)
        except (OSError, subprocess.SubprocessError):
            return None
        return done.stdout

    def nvcc(self) -> str | None:
        """Where setup.py finds nvcc: in CUDA_HOME if that is set, else on PATH, else in the usual folder."""
        home = self.environ.get("CUDA_HOME")
        places = [f"{home}/bin/nvcc"] if home else [shutil.which("nvcc"), "/usr/local/cuda/bin/nvcc"]
        return next((place for place in places if place and os.access(place, os.X_OK)), None)

    def rdma_cards(self) -> list[str]:
        """Devices of InfiniBand or RoCE, by name."""
        folder = Path("/sys/class/infiniband")
        return sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []

    # -- Python packages ----------------------------------------------------------------------------------------------

    def version(self, distribution: str) -> str | None:
        """The installed version, None where it is not installed."""
        try:
            return importlib.metadata.version(distribution)
        except importlib.metadata.PackageNotFoundError:
            return None

    def home(self) -> Path:
        """The folder of the package that runs."""
        return Path(_native.__file__).resolve().parents[1]

    def installed_home(self) -> Path | None:
        """The folder of the installed package; None where it is not installed, or by a link to its sources."""
        try:
            folder = Path(str(importlib.metadata.distribution("moe-ep").locate_file("moe_ep"))).resolve()
        except importlib.metadata.PackageNotFoundError:
            return None
        return folder if folder.is_dir() else None

    def has_module(self, name: str) -> bool:
        """Whether `import name` would find something; nothing is imported."""
        return importlib.util.find_spec(name) is not None

    def load(self, name: str) -> None:
        """Imports a module, without the warnings that it gives on the way."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            importlib.import_module(name)

    def kernels(self) -> NativeKernels | None:
        """The extension, None where there is none; one that does not load raises its ImportError."""
        return _native.load()

    def recipe_obstacle(self, recipe: str) -> str | None:
        """Why an FP8 recipe cannot run in Transformer Engine here, None if it can."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return transformer_engine.why_unavailable(recipe)

    # -- torch and the GPUs -------------------------------------------------------------------------------------------

    def torch_version(self) -> str:
        return str(torch.__version__)

    def torch_cuda(self) -> str | None:
        """The CUDA release that torch was built for, None in a build for the CPU."""
        return torch.version.cuda

    def gpus(self) -> list[Gpu]:
        """The GPUs that torch can use in this process."""
        if not torch.cuda.is_available():
            return []
        found = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
        return [Gpu(gpu.name, (gpu.major, gpu.minor), gpu.total_memory) for gpu in found]

    def cuda_error(self) -> str:
        """Why torch cannot use a GPU, in its own words; empty if it can."""
        try:
            torch.cuda.init()  # type: ignore[no-untyped-call]
        except (RuntimeError, AssertionError) as error:
            return (str(error).splitlines() or [type(error).__name__])[0]
        return ""

    def reaches(self, gpu: int, peer: int) -> bool:
        """Whether kernels on one GPU read the memory of another."""
        return torch.cuda.can_device_access_peer(gpu, peer)

    def has_collectives(self, name: str) -> bool:
        """Whether torch.distributed has "gloo" or "nccl"."""
        if not dist.is_available():
            return False
        return dist.is_gloo_available() if name == "gloo" else dist.is_nccl_available()

    def nccl_version(self) -> str:
        return ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
