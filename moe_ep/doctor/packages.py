"""Packages that this one works with: Transformer Engine, Megatron-Core, NVSHMEM, DeepEP."""

from __future__ import annotations

from moe_ep.doctor.finding import Finding
from moe_ep.doctor.machine import Machine

_RECIPES = ("blockwise", "current", "delayed", "mxfp8")
_NVSHMEM = ("nvshmem4py-cu13", "nvshmem4py-cu12")
_NVSHMEM_LIBRARY = ("nvidia-nvshmem-cu13", "nvidia-nvshmem-cu12")  # comes with PyTorch for CUDA


def transformer_engine(machine: Machine) -> list[Finding]:
    """Which recipes of `moe.fp8` this release serves on this GPU, and why not the others."""
    subject, version = "Transformer Engine", machine.version("transformer-engine")
    install = 'pip install --no-build-isolation "transformer-engine[pytorch]", where nvcc, cuDNN and NCCL headers are'
    if version is None:
        return [Finding(subject, "missing", "not installed: moe.fp8 has gemm=cublas (Hopper) and gemm=plain", install)]
    obstacles = {recipe: machine.recipe_obstacle(recipe) for recipe in _RECIPES}
    served = [recipe for recipe, obstacle in obstacles.items() if obstacle is None]
    if not served:
        reason = obstacles[_RECIPES[0]]
        if not machine.gpus():
            fix = "run on such a GPU, or set moe.fp8.gemm to plain"
            return [Finding(subject, "missing", f"{version} serves no recipe: {reason}", fix)]
        return [Finding(subject, "broken", f"{version} serves no recipe: {reason}", install)]
    refused: dict[str, list[str]] = {}
    for recipe, obstacle in obstacles.items():
        if obstacle is not None:
            refused.setdefault(obstacle, []).append(recipe)
    but = "".join(f"; not {' and '.join(recipes)}: {obstacle}" for obstacle, recipes in refused.items())
    return [Finding(subject, "ok", f"{version} serves {', '.join(served)}{but}")]


def megatron(machine: Machine) -> list[Finding]:
    """Whether `moe_ep.integrations.megatron` loads: it refuses the releases that it does not know."""
    subject, version = "Megatron-Core", machine.version("megatron-core")
    install = 'pip install "megatron-core>=0.16,<0.20" tqdm'
    if version is None:
        return [Finding(subject, "missing", "not installed", f"{install} (0.17 and later want Python 3.12)")]
    try:
        machine.load("moe_ep.integrations.megatron")
    except ImportError as error:
        return [Finding(subject, "broken", str(error), install)]
    return [Finding(subject, "ok", f"{version}, of 0.16 to 0.19 that are known: --spec and flex both work")]


def nvshmem(machine: Machine) -> list[Finding]:
    """Needed between nodes alone: its Python package starts it, its library is what our extension was linked with."""
    found = {name: version for name in _NVSHMEM + _NVSHMEM_LIBRARY if (version := machine.version(name)) is not None}
    names = " and ".join(f"{name} {version}" for name, version in found.items())
    built = machine.has_module("moe_ep._C_nvshmem")
    if any(name in found for name in _NVSHMEM) and built:
        return [Finding("NVSHMEM", "ok", f"{names}; the kernels between nodes are built")]
    install = "pip install nvshmem4py-cu13 nvidia-nvshmem-cu13 (-cu12 for CUDA 12)"
    if any(name in found for name in _NVSHMEM):
        again = "and then this package again, where nvcc is; nothing inside a node"
        sentence = f"{names}, but this install was made without it: no kernels between nodes"
        return [Finding("NVSHMEM", "missing", sentence, f"{install}, {again}")]
    has = f"{names} without nvshmem4py" if found else "not installed"
    also = "" if built else ", then this package again, where nvcc is"
    sentence = f"{has}; only kernels between nodes need it"
    return [Finding("NVSHMEM", "missing", sentence, f"nothing inside a node; between nodes: {install}{also}")]


def network(machine: Machine) -> list[Finding]:
    """Cards that NVSHMEM can send through."""
    subject, cards = "RDMA", machine.rdma_cards()
    if not machine.gpus():
        return []
    if not cards:
        fix = "none is needed on one machine; between nodes: drivers of the cards (rdma-core), visible in the container"
        return [Finding(subject, "missing", "no card in /sys/class/infiniband: NVSHMEM stays on this machine", fix)]
    level = machine.environ.get("NVSHMEM_IB_SL")
    lane = "service level 0, NVSHMEM_IB_SL sets another" if level is None else f"service level {level}"
    text = f"{len(cards)} cards ({', '.join(cards)}) for {len(machine.gpus())} GPUs, {lane}"
    if len(cards) < len(machine.gpus()):
        return [
            Finding(subject, "warning", f"{text}: GPUs share a card's bandwidth", "one card a GPU is what rails want")
        ]
    return [Finding(subject, "ok", text)]


def deep_ep(machine: Machine) -> list[Finding]:
    """What `moe_ep.integrations.deep_ep.install()` would do in a process that calls it first."""
    version = machine.version("deep_ep")
    if version is None and not machine.has_module("deep_ep"):
        return [Finding("DeepEP", "ok", "not installed; install() gives `import deep_ep` this package")]
    name = f"{version} is installed" if version else "installed, of unknown version"
    return [Finding("DeepEP", "ok", f"{name}; install() hides it, where it is called before the first import")]
