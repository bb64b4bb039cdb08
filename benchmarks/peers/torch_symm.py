"""PyTorch's symmetric memory: rows packed into it, a barrier, and each rank copies its share from the others.

`TorchSymm` copies through peer tensors (`get_buffer`), which every build with CUDA has. `TorchSymmVdev` runs
PyTorch's own `all_to_all_vdev`, which needs a build with NVSHMEM and selects it for the whole process; so it is asked
for by name.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable
from types import ModuleType

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.peers.packed import Packing, add_up, joined, pack, split
from benchmarks.processes import World
from benchmarks.systems import Case, Inputs, Rows, System
from benchmarks.timing import Call


def _module() -> ModuleType | None:
    with contextlib.suppress(ImportError):
        return importlib.import_module("torch.distributed._symmetric_memory")
    return None


def missing(world: World) -> str | None:
    if world.device.type != "cuda" or not world.has_nccl:
        return "torch_symm needs CUDA and a GPU for each rank"
    module = _module()
    if module is None or not hasattr(module, "rendezvous") or not hasattr(module, "empty"):
        return "torch_symm not present in this torch"
    return None


def missing_vdev(world: World) -> str | None:
    said = missing(world)
    if said is not None:
        return said.replace("torch_symm", "torch_symm_vdev")
    module = _module()
    available = getattr(module, "is_nvshmem_available", None)
    if available is None or not available() or not hasattr(torch.ops.symm_mem, "all_to_all_vdev"):
        return "torch_symm_vdev needs a torch that was built with NVSHMEM"
    return None


def _elements(rows: Tensor) -> int:
    """As many elements as any rank needs for packed rows: symmetric tensors have one size on all ranks."""
    most = torch.tensor([rows.numel()])
    dist.all_reduce(most, op=dist.ReduceOp.MAX)
    return int(most)


class TorchSymm(System):
    """Pull by peer tensors. The combine sends rows home the same way and adds them in float32."""

    name = "torch_symm"
    backend = "symm_mem"
    transport = "p2p_copy"

    def __init__(self, inputs: Inputs) -> None:
        self.inputs = inputs
        module = _module()
        assert module is not None
        self.module = module
        self.group_name = inputs.world.group.group_name

    def call(self, case: Case, dtype: str, registered: bool) -> Call | None:
        if registered or case[1] != "compact" or case[0] == "dispatch" or (dtype == "fp8" and case[0] == "combine"):
            return None
        x, packing = self.inputs.rows(dtype), pack(self.inputs)
        forward = self._exchange(joined(x).index_select(0, packing.token), packing.send_counts, packing.recv_counts)

        def dispatch() -> Rows:
            return split(forward(joined(x).index_select(0, packing.token)), x)

        if case[0] == "cached_dispatch":
            return dispatch
        rows = dispatch()
        assert isinstance(rows, Tensor)
        home = self._exchange(rows, packing.recv_counts, packing.send_counts)
        return lambda: self._combined(home(rows), packing)

    def close(self) -> None:
        pass

    def _combined(self, rows: Tensor, packing: Packing) -> Tensor:
        return add_up(rows, packing, self.inputs.shape.tokens)

    def _exchange(self, like: Tensor, send: list[int], recv: list[int]) -> Callable[[Tensor], Tensor]:
        return _Pull(self.module, self.inputs.world, self.group_name, like, send, recv)


class _Pull:
    """Packed rows [P, B] -> received rows, in the order of their sources."""

    def __init__(
        self, module: ModuleType, world: World, group_name: str, like: Tensor, send: list[int], recv: list[int]
    ) -> None:
        width = like.shape[1]
        self.staging = module.empty(_elements(like), dtype=like.dtype, device=like.device)
        self.memory = module.rendezvous(self.staging, group_name)
        sends = [torch.empty(world.size, dtype=torch.int64) for _ in range(world.size)]
        dist.all_gather(sends, torch.tensor(send), group=world.group)
        self.width, self.total = width, sum(recv)
        self.pieces = []
        for peer in range(world.size):
            offset = int(sends[peer][: world.rank].sum()) * width
            self.pieces.append(self.memory.get_buffer(peer, (recv[peer], width), like.dtype, offset))
        self.recv = recv

    def __call__(self, packed: Tensor) -> Tensor:
        self.staging[: packed.numel()].view_as(packed).copy_(packed)
        self.memory.barrier()
        received = packed.new_empty(self.total, self.width)
        for part, piece in zip(received.split(self.recv), self.pieces, strict=True):
            part.copy_(piece)
        self.memory.barrier()  # nobody overwrites what another still reads
        return received


class TorchSymmVdev(TorchSymm):
    """`torch.ops.symm_mem.all_to_all_vdev`: PyTorch's kernel, over NVSHMEM."""

    name = "torch_symm_vdev"
    transport = "all_to_all_vdev"

    def __init__(self, inputs: Inputs) -> None:
        super().__init__(inputs)
        self.module.set_backend("NVSHMEM")

    def _exchange(self, like: Tensor, send: list[int], recv: list[int]) -> Callable[[Tensor], Tensor]:
        return _Vdev(self.module, self.group_name, like, send, recv)


class _Vdev:
    """Counts in elements, so that they hold whatever the operator takes for a row."""

    def __init__(self, module: ModuleType, group_name: str, like: Tensor, send: list[int], recv: list[int]) -> None:
        self.width, self.total, self.group_name = like.shape[1], sum(recv), group_name
        received = torch.empty(self.total, self.width, dtype=like.dtype, device="meta")
        self.inp = module.empty(_elements(like), dtype=like.dtype, device=like.device)
        self.out = module.empty(_elements(received), dtype=like.dtype, device=like.device)
        counts = torch.tensor(send, dtype=torch.int64, device=like.device) * self.width
        self.splits = module.empty(len(send), dtype=torch.int64, device=like.device).copy_(counts)
        self.placed = module.empty((2, len(send)), dtype=torch.int64, device=like.device)
        for tensor in (self.inp, self.out, self.splits, self.placed):
            module.rendezvous(tensor, group_name)

    def __call__(self, packed: Tensor) -> Tensor:
        self.inp[: packed.numel()].view_as(packed).copy_(packed)
        torch.ops.symm_mem.all_to_all_vdev(self.inp, self.out, self.splits, self.placed, self.group_name)
        received: Tensor = self.out[: self.total * self.width].view(self.total, self.width).clone()
        return received
