"""NCCL's all-to-all with packed rows: index_select, `all_to_all_single`, and an addition by rank."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.peers.packed import add_up, joined, pack, split
from benchmarks.processes import World
from benchmarks.systems import Case, Inputs, Rows, System
from benchmarks.timing import Call


def missing(world: World) -> str | None:
    if world.device.type == "cuda" and not world.has_nccl:
        return f"nccl needs a GPU for each rank: {world.size} ranks share {world.gpus}"
    return None


class Nccl(System):
    """Collectives of the process group: NCCL on CUDA, gloo on CPU."""

    name = "nccl"
    backend = "torch"
    transport = "all_to_all_single"

    def __init__(self, inputs: Inputs) -> None:
        self.inputs = inputs
        self.group = inputs.world.group
        if inputs.world.device.type == "cpu":
            self.name = "gloo"

    def call(self, case: Case, dtype: str, registered: bool) -> Call | None:
        if registered or case[1] != "compact" or (dtype == "fp8" and case[0] == "combine"):
            return None
        x = self.inputs.rows(dtype)
        if case[0] == "dispatch":
            return lambda: self._exchange(x, *self._packing())
        token, send, recv = self._packing()
        if case[0] == "cached_dispatch":
            return lambda: self._exchange(x, token, send, recv)
        rows = self._exchange(x, token, send, recv)
        assert isinstance(rows, Tensor)
        packing, num_tokens = pack(self.inputs), self.inputs.shape.tokens

        def combine() -> Tensor:
            home = rows.new_empty(sum(send), rows.shape[1])
            dist.all_to_all_single(home, rows, send, recv, group=self.group)
            return add_up(home, packing, num_tokens)

        return combine

    def close(self) -> None:
        pass

    def _packing(self) -> tuple[Tensor, list[int], list[int]]:
        packing = pack(self.inputs)
        return packing.token, packing.send_counts, packing.recv_counts

    def _exchange(self, x: Rows, token: Tensor, send: list[int], recv: list[int]) -> Rows:
        packed = joined(x).index_select(0, token)
        received = torch.empty(sum(recv), packed.shape[1], dtype=packed.dtype, device=packed.device)
        dist.all_to_all_single(received, packed, recv, send, group=self.group)
        return split(received, x)
