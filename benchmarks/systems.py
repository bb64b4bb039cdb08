"""What a benchmarked system is: named calls on the inputs of a job.

Letters: T tokens of this rank, H hidden, E experts, K slots a token, W ranks, S compact rows received.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from benchmarks.processes import World
from benchmarks.routing import Shape, choose
from benchmarks.timing import Call
from moe_ep.fp8 import quantize_1x128

# (op, layout). dispatch: layout, counts and host wait included. cached_dispatch: a handle is given. combine to compact
# adds rows; from expert_major it also weighs them. The last one is dispatch and weighted combine with their backward.
Case = tuple[str, str]
CASES: dict[str, Case] = {
    "dispatch": ("dispatch", "compact"),
    "cached_dispatch": ("cached_dispatch", "compact"),
    "combine": ("combine", "compact"),
    "dispatch_expert_major": ("dispatch", "expert_major"),
    "cached_dispatch_expert_major": ("cached_dispatch", "expert_major"),
    "combine_expert_major": ("combine", "expert_major"),
    "dispatch_combine_fwd_bwd": ("dispatch_combine_fwd_bwd", "expert_major"),
}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
Rows = Tensor | tuple[Tensor, Tensor]  # [T, H], or FP8 rows with their row-major scales [T, ceil(H / 128)]


@dataclass(frozen=True)
class Inputs:
    """Of this rank, the same for every system."""

    world: World
    shape: Shape

    @cached_property
    def idx_TK(self) -> Tensor:
        return choose(self.shape, self.world.rank).to(self.world.device)

    @cached_property
    def weights_TK(self) -> Tensor:
        g = torch.Generator().manual_seed(2000 + self.world.rank)
        return torch.rand(self.shape.tokens, self.shape.topk, generator=g).to(self.world.device)

    @cached_property
    def _x_TH(self) -> Tensor:
        g = torch.Generator(device=self.world.device).manual_seed(3000 + self.world.rank)
        return torch.randn(self.shape.tokens, self.shape.hidden, generator=g, device=self.world.device)

    def rows(self, dtype: str) -> Rows:
        """x [T, H]; for fp8 cast, with its scales."""
        return quantize_1x128(self._x_TH.bfloat16()) if dtype == "fp8" else self._x_TH.to(DTYPES[dtype])


class System(ABC):
    """One exchange, open on every rank."""

    name: str
    backend: str
    transport: str
    nodes: int = 1
    num_sms: int | None = None
    can_register = False
    one_row_a_pair = False  # sends a row for each (token, expert) instead of each (token, rank)

    @abstractmethod
    def call(self, case: Case, dtype: str, registered: bool) -> Call | None:
        """A call to time, ready to run; it returns the rows. None where the system has no such case. Collective."""

    @abstractmethod
    def close(self) -> None: ...
