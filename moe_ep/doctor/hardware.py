"""GPUs and their driver, whether the kernels were built for them, and how the GPUs reach each other."""

from __future__ import annotations

import inspect
import re
from collections import Counter
from typing import Literal

from moe_ep._native import NativeKernels
from moe_ep._native.exchange import NativeExchange
from moe_ep.doctor.finding import Finding
from moe_ep.doctor.machine import Machine

_BUILD = "MOE_EP_BUILD_CUDA=1 pip install . in the folder of the sources"


def gpu(machine: Machine) -> list[Finding]:
    found, listed = machine.gpus(), _listed(machine)
    if found:
        counts = Counter((each.name, each.capability, round(each.memory_bytes / 2**30)) for each in found)
        kinds = [
            f"{count} x {name}, compute capability {capability[0]}.{capability[1]}, {gib} GiB"
            for (name, capability, gib), count in counts.items()
        ]
        return [Finding("GPU", "ok", f"{'; '.join(kinds)}; driver {_driver(machine)}")]
    if listed == 0:
        fix = "none is needed on CPU; else make nvidia-smi list it (in a container: --gpus all)"
        return [Finding("GPU", "missing", "nvidia-smi lists none: rows travel through gloo, on CPU", fix)]
    if machine.torch_cuda() is None:
        fix = "install PyTorch for CUDA: pytorch.org has the command"
        return [Finding("GPU", "missing", f"the driver lists {listed}, but this PyTorch is built for the CPU", fix)]
    fix = "a driver that serves this CUDA release, or PyTorch for an older one; look at CUDA_VISIBLE_DEVICES"
    reason = machine.cuda_error() or "it sees no device"
    return [Finding("GPU", "broken", f"driver {_driver(machine)} lists {listed}, but PyTorch says: {reason}", fix)]


def kernels(machine: Machine) -> list[Finding]:
    try:
        module = machine.kernels()
    except ImportError as error:
        fix = f"build it again with this Python: {_BUILD}"
        return [Finding("kernels", "broken", f"moe_ep._C does not load: {error}", fix)]
    if module is None:
        sentence = "this install is pure Python, because no nvcc was used: rows travel through torch.distributed"
        return [Finding("kernels", "missing", sentence, f"{_BUILD}, where nvcc is; none are needed on CPU")]
    if lacking := _lacking(module):
        sentence = f"moe_ep._C is older than the Python beside it: it has no {', '.join(lacking)}"
        return [Finding("kernels", "broken", sentence, f"build it again: {_BUILD}")]
    archs = module.cuda_archs.split("+")
    built = f"built for {', '.join(archs)}"
    capabilities = sorted({each.capability for each in machine.gpus()})
    for capability in capabilities:
        serving = how_served(archs, capability)
        if serving == "native":
            continue
        arch = arch_of(capability)
        fix = f"MOE_EP_CUDA_ARCHS={arch} {_BUILD}"
        if serving is None:
            return [Finding("kernels", "broken", f"{built}, but this GPU is {arch}", fix)]
        sentence = f"{built}, and translated by the driver for this GPU, {arch}: slower, without its own instructions"
        return [Finding("kernels", "warning", sentence, fix)]
    return [Finding("kernels", "ok", f"{built}, {'which is this GPU' if capabilities else 'and no GPU to run them'}")]


def peers(machine: Machine) -> list[Finding]:
    """Whether each GPU reads the memory of each other: what the backend `intranode` needs."""
    num_gpus, listed = len(machine.gpus()), _listed(machine)
    if num_gpus == 0:
        return []
    if num_gpus == 1 and listed > 1:
        fix = "let every rank see all GPUs, and choose by LOCAL_RANK"
        sentence = f"this process sees 1 of {listed} GPUs: a rank that sees its own alone cannot reach the others"
        return [Finding("GPU peers", "warning", sentence, fix)]
    pairs = [(i, j) for i in range(num_gpus) for j in range(num_gpus) if i != j]
    apart = [f"{i} to {j}" for i, j in pairs if not machine.reaches(i, j)]
    if apart:
        shown = ", ".join(apart[:4]) + (f" and {len(apart) - 4} more" if len(apart) > 4 else "")
        fix = "take GPUs with NVLink between them (nvidia-smi topo -m); rows go through NCCL else"
        return [Finding("GPU peers", "missing", f"no access to the memory of a peer from GPU {shown}", fix)]
    return [Finding("GPU peers", "ok", "every GPU reaches every other" if pairs else "one GPU, which has none")]


def ipc(machine: Machine) -> list[Finding]:
    """Whether memory of a GPU can be offered to other processes; one small piece is, and freed."""
    if not machine.gpus() or (module := machine.kernels()) is None:
        return []
    try:
        module.Exchange(rank=0, size=1, timeout_secs=1.0).export_control()
    except RuntimeError as error:
        fix = "on virtual GPUs and in WSL there is none: use backend='torch'"
        return [Finding("IPC", "broken", f"memory of this GPU cannot be offered to other processes: {error}", fix)]
    return [Finding("IPC", "ok", "other processes can open memory of this GPU")]


def nvlink(machine: Machine) -> list[Finding]:
    """Links of each GPU, as the driver counts them; nothing where the driver has no such command."""
    num_gpus = len(machine.gpus())
    text = machine.output("nvidia-smi", "nvlink", "-s") if num_gpus else None
    if text is None:
        return []
    speeds = [re.findall(r"Link \d+: ([\d.]+) GB/s", part) for part in re.split(r"^GPU \d+:", text, flags=re.M)[1:]]
    idle = len(re.findall(r"Link \d+: <?inactive", text, flags=re.I))
    widths = [f"{len(links)} x {links[0]} GB/s" if links else "none" for links in speeds]
    seen = "; ".join(f"{count} GPUs with {width}" for width, count in Counter(widths).items())
    if not any(speeds):
        if num_gpus == 1:
            return [Finding("NVLink", "ok", "none, and one GPU that would use it")]
        fix = "take GPUs with NVLink between them (nvidia-smi topo -m)"
        return [Finding("NVLink", "missing", "no GPU has an active link: peers are reached over PCIe, slowly", fix)]
    if idle or len(set(widths)) > 1:
        fix = "look at nvidia-smi nvlink -s and at the fabric manager; a reset of the node may train the links again"
        return [Finding("NVLink", "warning", f"{seen}; {idle} links inactive", fix)]
    total = sum(map(float, speeds[0]))
    return [Finding("NVLink", "ok", f"{widths[0]} in each direction, {total:.0f} GB/s a GPU")]


def how_served(archs: list[str], capability: tuple[int, int]) -> Literal["native", "translated"] | None:
    """How code for `archs` runs on a GPU: as it is, translated by the driver, or not at all.

    sm_90a runs on 9.0 alone; sm_100f and sm_80 on their family from there on. setup.py adds the portable code of the
    first architecture without a letter, which the driver translates for newer GPUs.
    """
    portable = None
    for arch in archs:
        parts = re.fullmatch(r"sm_(\d+)(\d)([af]?)", arch)
        if parts is None:
            continue
        target = (int(parts[1]), int(parts[2]))
        if target == capability or (parts[3] != "a" and target[0] == capability[0] and target[1] <= capability[1]):
            return "native"
        if not parts[3] and portable is None:
            portable = target
    return "translated" if portable is not None and portable <= capability else None


def arch_of(capability: tuple[int, int]) -> str:
    """What to build for a GPU: from 9.0 on with the letter that its own instructions need."""
    return f"sm_{capability[0]}{capability[1]}{'a' if capability >= (9, 0) else ''}"


def _lacking(module: NativeKernels) -> list[str]:
    """Functions that this version calls and the extension does not have."""
    wanted = [(module, NativeKernels), (module.Exchange, NativeExchange)]
    return [
        name
        for there, protocol in wanted
        for name, _ in inspect.getmembers(protocol, inspect.isfunction)
        if not name.startswith("_") and not hasattr(there, name)
    ]


def _listed(machine: Machine) -> int:
    """GPUs that the driver knows, whatever CUDA_VISIBLE_DEVICES says."""
    return len(re.findall(r"^GPU \d+:", machine.output("nvidia-smi", "-L") or "", flags=re.M))


def _driver(machine: Machine) -> str:
    lines = (machine.output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader") or "").split()
    return lines[0] if lines else "unknown (no nvidia-smi)"
