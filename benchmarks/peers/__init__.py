"""Systems to compare with: adapters to whatever is installed.

Each module has `missing(world)`, a sentence that says why it cannot run here, or None where it can, and a System.
"""

from __future__ import annotations

from collections.abc import Callable

from benchmarks.peers import deep_ep, nccl, plain, torch_symm
from benchmarks.processes import World
from benchmarks.systems import Inputs, System

Missing = Callable[[World], str | None]
PEERS: dict[str, tuple[Missing, Callable[[Inputs], System]]] = {
    "plain": (plain.missing, plain.Plain),
    "nccl": (nccl.missing, nccl.Nccl),
    "torch_symm": (torch_symm.missing, torch_symm.TorchSymm),
    "torch_symm_vdev": (torch_symm.missing_vdev, torch_symm.TorchSymmVdev),
    "deep_ep": (deep_ep.missing, deep_ep.DeepEP),
    "deep_ep+te": (deep_ep.missing_te, deep_ep.DeepEPWithTE),
}
