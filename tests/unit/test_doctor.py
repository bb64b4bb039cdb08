"""What each check of `moe-ep doctor` says about a machine, and what it tells people to do."""

from __future__ import annotations

from pathlib import Path

import pytest

from moe_ep.doctor import hardware, packages, software
from moe_ep.doctor.environment import SETTINGS, Setting, environment
from moe_ep.doctor.finding import Finding
from moe_ep.doctor.machine import Gpu, Machine
from moe_ep.doctor.report import Check
from tests.unit.fake_machine import H200, LINKS, LIST, NVCC, FakeMachine, laptop, links_of, make_kernels

RECIPES = ("blockwise", "current", "delayed", "mxfp8")
TWO = {LIST: "GPU 0: x\nGPU 1: x\n"}
A100 = Gpu("NVIDIA A100", (8, 0), 80 << 30)
L40 = Gpu("NVIDIA L40", (8, 9), 48 << 30)


def only(check: Check, machine: Machine) -> Finding:
    (finding,) = check(machine)
    return finding


@pytest.mark.parametrize(
    ("check", "sentence"),
    [
        (software.package, "0.1.0 from /site/moe_ep"),
        (software.pytorch, "2.11.0+cu130, built for CUDA 13.0"),
        (software.collectives, "gloo, NCCL 2.28.9"),
        (hardware.gpu, "2 x NVIDIA H200, compute capability 9.0, 140 GiB; driver 570.86"),
        (hardware.kernels, "built for sm_80, sm_90a, sm_100a, which is this GPU"),
        (hardware.peers, "every GPU reaches every other"),
        (hardware.ipc, "other processes can open memory of this GPU"),
        (hardware.nvlink, "18 x 26.562 GB/s in each direction, 478 GB/s a GPU"),
        (software.nvcc, "13.0 at /usr/local/cuda/bin/nvcc"),
        (
            packages.transformer_engine,
            "2.20.2 serves blockwise, current, delayed; not mxfp8: it needs compute capability 10.0",
        ),
        (packages.megatron, "0.19.2, of 0.16 to 0.19 that are known: --spec and flex both work"),
        (packages.nvshmem, "nvshmem4py-cu13 0.4.1; the kernels between nodes are built"),
        (packages.network, "2 cards (mlx5_0, mlx5_1) for 2 GPUs, service level 0, NVSHMEM_IB_SL sets another"),
        (packages.deep_ep, "1.2.1 is installed; install() hides it, where it is called before the first import"),
        (environment, "nothing is set that is known to hurt"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_machine_with_everything_is_ok(check: Check, sentence: str) -> None:
    found = only(check, FakeMachine())
    assert (found.state, found.sentence) == ("ok", sentence)


@pytest.mark.parametrize(
    ("check", "machine", "state", "sentence", "fix"),
    [
        (software.pytorch, FakeMachine(torch="2.5.1"), "broken", "2.5.1 is older than 2.6", "torch>=2.6"),
        (software.collectives, FakeMachine(collectives={"gloo"}), "missing", "no nccl", "pytorch.org"),
        (software.collectives, laptop(collectives=set()), "missing", "no gloo", "pytorch.org"),
        (hardware.gpu, laptop(), "missing", "nvidia-smi lists none", "none is needed on CPU"),
        (hardware.gpu, laptop(outputs=TWO), "missing", "lists 2, but this PyTorch is built for the CPU", "for CUDA"),
        (
            hardware.gpu,
            FakeMachine(found_gpus=[], cuda_says="the driver is too old"),
            "broken",
            "driver 570.86 lists 2, but PyTorch says: the driver is too old",
            "a driver that serves this CUDA release",
        ),
        (hardware.kernels, laptop(), "missing", "pure Python", "MOE_EP_BUILD_CUDA=1 pip install ."),
        (
            hardware.kernels,
            FakeMachine(extension=ImportError("undefined symbol")),
            "broken",
            "undefined symbol",
            "again",
        ),
        (
            hardware.kernels,
            FakeMachine(extension=make_kernels(lacking="can_reach")),
            "broken",
            "older than the Python beside it: it has no can_reach",
            "build it again",
        ),
        (
            hardware.kernels,
            FakeMachine(extension=make_kernels("sm_100a")),
            "broken",
            "built for sm_100a, but this GPU is sm_90a",
            "MOE_EP_CUDA_ARCHS=sm_90a",
        ),
        (
            hardware.kernels,
            FakeMachine(extension=make_kernels("sm_80")),
            "warning",
            "translated by the driver for this GPU, sm_90a",
            "MOE_EP_CUDA_ARCHS=sm_90a",
        ),
        (
            hardware.kernels,
            FakeMachine(extension=make_kernels("sm_90a"), found_gpus=[H200, A100]),
            "broken",
            "but this GPU is sm_80",
            "MOE_EP_CUDA_ARCHS=sm_80",
        ),
        (
            hardware.peers,
            FakeMachine(apart={(0, 1), (1, 0)}),
            "missing",
            "no access to the memory of a peer from GPU 0 to 1, 1 to 0",
            "NVLink between them",
        ),
        (
            hardware.peers,
            FakeMachine(found_gpus=[L40]),
            "warning",
            "sees 1 of 2 GPUs",
            "let every rank see all GPUs, and choose by LOCAL_RANK",
        ),
        (hardware.ipc, FakeMachine(extension=make_kernels(ipc="not supported")), "broken", "not supported", "torch"),
        (
            hardware.nvlink,
            FakeMachine(outputs={LINKS: links_of(2, 18, 2)}),
            "warning",
            "1 GPUs with 16 x 26.562 GB/s; 1 GPUs with 18 x 26.562 GB/s; 2 links inactive",
            "fabric manager",
        ),
        (hardware.nvlink, FakeMachine(outputs={LINKS: links_of(2, 0)}), "missing", "no GPU has an active", "topo -m"),
        (software.nvcc, laptop(), "missing", "none on PATH or in /usr/local/cuda", "CUDA_HOME"),
        (
            software.nvcc,
            laptop(environ={"CUDA_HOME": "/opt/cuda"}),
            "missing",
            "there is none in CUDA_HOME=/opt/cuda",
            "only building the kernels needs it",
        ),
        (software.nvcc, FakeMachine(outputs={NVCC: "release 11.8, V11"}), "broken", "11.8 at", "12.0 or newer"),
        (software.nvcc, FakeMachine(outputs={}), "broken", "does not name a release", "again"),
        (
            packages.transformer_engine,
            laptop(),
            "missing",
            "gemm=cublas (Hopper) and gemm=plain",
            "--no-build-isolation",
        ),
        (
            packages.transformer_engine,
            laptop(versions={"transformer-engine": "2.9.0"}, obstacles=dict.fromkeys(RECIPES, "it needs a GPU")),
            "missing",
            "2.9.0 serves no recipe: it needs a GPU",
            "moe.fp8.gemm to plain",
        ),
        (
            packages.transformer_engine,
            FakeMachine(obstacles=dict.fromkeys(RECIPES, "it does not load")),
            "broken",
            "2.20.2 serves no recipe: it does not load",
            "transformer-engine[pytorch]",
        ),
        (packages.megatron, laptop(), "missing", "not installed", "megatron-core>=0.16,<0.20"),
        (
            packages.megatron,
            FakeMachine(load_error=ImportError("megatron-core 0.20.0 is installed; 0.16 to 0.19 are known")),
            "broken",
            "megatron-core 0.20.0 is installed",
            "megatron-core>=0.16,<0.20",
        ),
        (packages.nvshmem, laptop(), "missing", "only kernels between nodes need it", "nothing inside a node"),
        (
            packages.nvshmem,
            laptop(versions={"nvidia-nvshmem-cu13": "3.4.5"}),
            "missing",
            "nvidia-nvshmem-cu13 3.4.5 without nvshmem4py",
            "pip install nvshmem4py-cu13",
        ),
        (
            packages.nvshmem,
            laptop(versions={"nvshmem4py-cu13": "0.4.1"}),
            "missing",
            "nvshmem4py-cu13 0.4.1, but this install was made without it",
            "this package again, where nvcc is",
        ),
        (packages.network, FakeMachine(cards=[]), "missing", "NVSHMEM stays on this machine", "none is needed on one"),
        (
            packages.network,
            FakeMachine({"NVSHMEM_IB_SL": "3"}, cards=["mlx5_0"]),
            "warning",
            "1 cards (mlx5_0) for 2 GPUs, service level 3: GPUs share a card's bandwidth",
            "one card a GPU",
        ),
        (
            software.package,
            FakeMachine(where=Path("/src/moe_ep")),
            "warning",
            "/src/moe_ep runs, and hides the installed one at /site/moe_ep",
            "run from another folder",
        ),
    ],
)
def test_what_is_not_well_is_said_with_its_fix(
    check: Check, machine: FakeMachine, state: str, sentence: str, fix: str
) -> None:
    found = only(check, machine)
    assert found.state == state
    assert sentence in found.sentence
    assert fix in found.fix


@pytest.mark.parametrize("check", [hardware.peers, hardware.ipc, hardware.nvlink, packages.network])
def test_without_a_gpu_nothing_is_said_about_links(check: Check) -> None:
    assert check(laptop()) == []


def test_one_gpu_needs_no_link_and_no_peer() -> None:
    alone = FakeMachine(found_gpus=[A100], outputs={LIST: "GPU 0: x\n", LINKS: links_of(1, 0)})
    assert only(hardware.peers, alone) == Finding("GPU peers", "ok", "one GPU, which has none")
    assert only(hardware.nvlink, alone) == Finding("NVLink", "ok", "none, and one GPU that would use it")


@pytest.mark.parametrize(
    ("archs", "capability", "served"),
    [
        (["sm_90a"], (9, 0), "native"),
        (["sm_90a"], (10, 0), None),
        (["sm_80"], (8, 0), "native"),
        (["sm_80"], (8, 9), "native"),
        (["sm_86"], (8, 0), None),
        (["sm_80", "sm_90a"], (10, 0), "translated"),
        (["sm_100f"], (10, 3), "native"),
        (["sm_100a"], (10, 3), None),
        (["sm_120"], (12, 1), "native"),
        (["none"], (9, 0), None),
    ],
)
def test_code_serves_the_gpus_that_nvidia_says(archs: list[str], capability: tuple[int, int], served: object) -> None:
    assert hardware.how_served(archs, capability) == served


@pytest.mark.parametrize("setting", SETTINGS, ids=lambda setting: setting.name)
def test_a_setting_that_hurts_is_named_with_its_value_and_fix(setting: Setting) -> None:
    value = setting.values[0] if setting.values else "1"
    found = only(environment, FakeMachine({setting.name: value}))
    assert found.state == "warning"
    assert found.sentence.startswith(f"{setting.name}={value}: ")
    assert found.fix == setting.fix


def test_a_setting_at_a_harmless_value_is_not_named() -> None:
    harmless = {"CUDA_DEVICE_MAX_CONNECTIONS": "32", "CUDA_LAUNCH_BLOCKING": "0", "TORCH_DISTRIBUTED_DEBUG": "INFO"}
    assert only(environment, FakeMachine(harmless)).sentence == "nothing is set that is known to hurt"


def test_other_settings_of_transformer_engine_are_listed() -> None:
    found = only(environment, FakeMachine({"NVTE_FLASH_ATTN": "0"}))
    assert found.state == "ok"
    assert found.sentence.startswith("NVTE_FLASH_ATTN=0: ")


def test_this_machine_answers_every_check() -> None:
    machine = Machine()
    assert only(software.python, machine).state == "ok"
    assert machine.output("no-such-command-anywhere") is None
    assert machine.output("false") is None
    assert machine.version("no-such-distribution") is None
    assert not machine.has_module("no_such_module")
    assert (machine.home() / "buffer.py").exists()
    assert machine.has_collectives("gloo")


def test_this_machine_finds_nvcc_where_setup_does(tmp_path: Path) -> None:
    nvcc = tmp_path / "bin" / "nvcc"
    assert Machine({"CUDA_HOME": str(tmp_path)}).nvcc() is None
    nvcc.parent.mkdir()
    nvcc.write_text("#!/bin/sh\necho release 13.0,\n")
    nvcc.chmod(0o755)
    machine = Machine({"CUDA_HOME": str(tmp_path)})
    assert only(software.nvcc, machine) == Finding("nvcc", "ok", f"13.0 at {nvcc}")
