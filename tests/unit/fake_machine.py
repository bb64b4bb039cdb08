"""A machine whose answers a test chooses: two H200 with everything installed, unless it says otherwise."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from moe_ep._native import NativeKernels
from moe_ep._native.exchange import NativeExchange
from moe_ep.doctor.machine import Gpu, Machine

H200 = Gpu("NVIDIA H200", (9, 0), 140 << 30)
LIST, DRIVER, LINKS = (
    "nvidia-smi -L",
    "nvidia-smi --query-gpu=driver_version --format=csv,noheader",
    "nvidia-smi nvlink -s",
)
NVCC = "/usr/local/cuda/bin/nvcc --version"


def links_of(num_gpus: int, num_links: int, num_idle: int = 0) -> str:
    """What `nvidia-smi nvlink -s` prints; idle links are those of the first GPU."""
    lines = []
    for gpu in range(num_gpus):
        lines.append(f"GPU {gpu}: NVIDIA H200 (UUID: GPU-{gpu})")
        idle = num_idle if gpu == 0 else 0
        lines += [f"\t Link {link}: {'<inactive>' if link < idle else '26.562 GB/s'}" for link in range(num_links)]
    return "\n".join(lines) + "\n"


def make_kernels(archs: str = "sm_80+sm_90a+sm_100a", lacking: str = "", ipc: str = "") -> Any:
    """An extension: `lacking` is a function that it does not have, `ipc` what offering memory raises."""

    def export_control(self: object) -> bytes:
        if ipc:
            raise RuntimeError(ipc)
        return b""

    exchange = {name: None for name, _ in inspect.getmembers(NativeExchange, inspect.isfunction)}
    exchange |= {"export_control": export_control, "__init__": lambda self, **arguments: None}
    functions = {name: None for name, _ in inspect.getmembers(NativeKernels, inspect.isfunction) if name[0] != "_"}
    functions |= {"Exchange": type("Exchange", (), exchange), "cuda_archs": archs}
    functions.pop(lacking, None)
    return SimpleNamespace(**functions)


class FakeMachine(Machine):
    """Answers from its attributes, which a test changes."""

    def __init__(self, environ: Mapping[str, str] | None = None, **answers: Any) -> None:
        super().__init__(environ or {})
        self.outputs: dict[str, str] = {
            LIST: "GPU 0: NVIDIA H200 (UUID: a)\nGPU 1: NVIDIA H200 (UUID: b)\n",
            DRIVER: "570.86\n570.86\n",
            LINKS: links_of(2, 18),
            NVCC: "Cuda compilation tools, release 13.0, V13.0.88\n",
        }
        self.found_gpus = [H200, H200]
        self.extension: Any = make_kernels()
        self.versions = {
            "moe-ep": "0.1.0",
            "transformer-engine": "2.20.2",
            "megatron-core": "0.19.2",
            "nvshmem4py-cu13": "0.4.1",
            "moe_ep._C_nvshmem": "",
            "deep_ep": "1.2.1",
        }
        self.cards = ["mlx5_0", "mlx5_1"]
        self.obstacles: dict[str, str] = {"mxfp8": "it needs compute capability 10.0"}
        self.load_error: Exception | None = None
        self.torch, self.cuda, self.cuda_says = "2.11.0+cu130", "13.0", ""
        self.nvcc_path: str | None = "/usr/local/cuda/bin/nvcc"
        self.apart: set[tuple[int, int]] = set()
        self.collectives = {"gloo", "nccl"}
        self.where, self.installed = Path("/site/moe_ep"), Path("/site/moe_ep")
        assert set(answers) <= set(vars(self)), f"no such answer: {answers}"
        vars(self).update(answers)

    def output(self, *command: str) -> str | None:
        return self.outputs.get(" ".join(command))

    def nvcc(self) -> str | None:
        return self.nvcc_path

    def version(self, distribution: str) -> str | None:
        return self.versions.get(distribution)

    def home(self) -> Path:
        return self.where

    def installed_home(self) -> Path | None:
        return self.installed

    def rdma_cards(self) -> list[str]:
        return self.cards

    def has_module(self, name: str) -> bool:
        return name in self.versions

    def load(self, name: str) -> None:
        if self.load_error is not None:
            raise self.load_error

    def kernels(self) -> NativeKernels | None:
        if isinstance(self.extension, Exception):
            raise self.extension
        found: NativeKernels | None = self.extension
        return found

    def recipe_obstacle(self, recipe: str) -> str | None:
        return self.obstacles.get(recipe)

    def torch_version(self) -> str:
        return self.torch

    def torch_cuda(self) -> str | None:
        return self.cuda

    def gpus(self) -> list[Gpu]:
        return self.found_gpus

    def cuda_error(self) -> str:
        return self.cuda_says

    def reaches(self, gpu: int, peer: int) -> bool:
        return (gpu, peer) not in self.apart

    def has_collectives(self, name: str) -> bool:
        return name in self.collectives

    def nccl_version(self) -> str:
        return "2.28.9"


def laptop(environ: Mapping[str, str] | None = None, **answers: Any) -> FakeMachine:
    """A machine without a GPU and with nothing but PyTorch for the CPU."""
    bare: dict[str, Any] = {
        "outputs": {},
        "found_gpus": [],
        "extension": None,
        "versions": {},
        "cards": [],
        "obstacles": {},
        "torch": "2.13.0+cpu",
        "cuda": None,
        "nvcc_path": None,
        "collectives": {"gloo"},
        "installed": None,
    }
    return FakeMachine(environ, **{**bare, **answers})
