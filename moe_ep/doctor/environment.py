"""Environment variables that cost time or change results, as this process has them."""

from __future__ import annotations

from typing import NamedTuple

from moe_ep.doctor.finding import Finding
from moe_ep.doctor.machine import Machine


class Setting(NamedTuple):
    """A variable that hurts where it has one of `values`; None for all but "" and "0"."""

    name: str
    values: tuple[str, ...] | None
    sentence: str
    fix: str


SETTINGS = (
    Setting(
        "CUDA_DEVICE_MAX_CONNECTIONS",
        ("1",),
        "all streams share one queue, so that the exchange does not run beside the experts",
        "unset it, unless Megatron's tensor parallelism asks for 1 on this GPU",
    ),
    Setting(
        "CUDA_LAUNCH_BLOCKING",
        None,
        "the host waits for every kernel, and nothing overlaps",
        "unset it; it is for looking for faults",
    ),
    Setting(
        "NCCL_P2P_DISABLE",
        None,
        "NCCL moves rows through the memory of the host",
        "unset it, unless the links of this machine are at fault",
    ),
    Setting(
        "NVSHMEM_DISABLE_P2P",
        None,
        "NVSHMEM sends through the network what NVLink could carry",
        "unset it, unless the links of this machine are at fault",
    ),
    Setting(
        "NVSHMEM_IBGDA_NIC_HANDLER",
        ("cpu",),
        "NVSHMEM wants gdrcopy for it",
        "set cpu_host_memory, which wants no driver but the GPU's, or gpu",
    ),
    Setting(
        "NVSHMEM_REMOTE_TRANSPORT",
        ("none",),
        "NVSHMEM reaches no other machine",
        "unset it, or set ibrc, ibdevx or libfabric, for a job of several machines",
    ),
    Setting(
        "PYTORCH_NO_CUDA_MEMORY_CACHING",
        None,
        "every allocation of a tensor waits for the GPU",
        "unset it; it is for looking for faults",
    ),
    Setting(
        "TORCH_DISTRIBUTED_DEBUG",
        ("DETAIL", "detail"),
        "every collective is checked by another one first",
        "unset it or set INFO; it is for looking for faults",
    ),
    Setting(
        "NVTE_FP8_BLOCK_SCALING_FP32_SCALES",
        None,
        "Transformer Engine's own layers round scales to no power of two; moe.fp8 does not listen to it",
        "set moe.fp8.power_of_two_scales to false for the same, or unset it",
    ),
)


def environment(machine: Machine) -> list[Finding]:
    found, hurting = [], set()
    for setting in SETTINGS:
        value = machine.environ.get(setting.name, "")
        if value in setting.values if setting.values is not None else value not in ("", "0"):
            hurting.add(setting.name)
            found.append(Finding("environment", "warning", f"{setting.name}={value}: {setting.sentence}", setting.fix))
    others = sorted(name for name in machine.environ if name.startswith("NVTE_") and name not in hurting)
    if others:
        texts = ", ".join(f"{name}={machine.environ[name]}" for name in others)
        found.append(
            Finding("environment", "ok", f"{texts}: for Transformer Engine's own layers, moe.fp8 is as without")
        )
    return found or [Finding("environment", "ok", "nothing is set that is known to hurt")]
