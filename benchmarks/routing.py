"""Routing of a measured job, and the bytes that it sends over the link.

Letters: T tokens of a rank, H hidden, E experts, K experts a token, W ranks.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.processes import World

ROUTINGS = ("uniform", "zipf1.0")
FP8_BLOCK = 128
ELEMENT_BYTES = {"float32": 4, "bfloat16": 2, "fp8": 1}


@dataclass(frozen=True)
class Shape:
    tokens: int
    hidden: int
    num_experts: int
    topk: int
    routing: str


def choose(shape: Shape, rank: int) -> Tensor:
    """[T, K] int64 distinct experts, drawn on the CPU from the rank as seed.

    uniform: every set of K experts is as likely as another. zipf1.0: drawn one after another with weights 1 / (e + 1),
    so the first experts, which share a rank, are the busiest.
    """
    g = torch.Generator().manual_seed(1000 + rank)
    noise_TE = torch.rand(shape.tokens, shape.num_experts, generator=g).clamp_(min=1e-20)
    if shape.routing == "uniform":
        score_TE = noise_TE
    elif shape.routing == "zipf1.0":  # exponential clocks: the K that ring first are such a draw
        score_TE = noise_TE.log() * torch.arange(1, shape.num_experts + 1)
    else:
        raise ValueError(f"routing is {shape.routing!r}; it must be one of {', '.join(ROUTINGS)}.")
    return score_TE.topk(shape.topk, dim=1).indices


def owners(num_experts: int, world: int) -> Tensor:
    """[E] rank of each expert: contiguous, the first ranks one more where E is not divisible."""
    sizes = [num_experts // world + (1 if rank < num_experts % world else 0) for rank in range(world)]
    return torch.repeat_interleave(torch.arange(world), torch.tensor(sizes))


def rows_to_ranks(idx_TK: Tensor, num_experts: int, world: int) -> Tensor:
    """[T, W] bool: the token goes to the rank."""
    owner_TK = owners(num_experts, world)[idx_TK]
    return torch.stack([(owner_TK == rank).any(dim=1) for rank in range(world)], dim=1)


@dataclass(frozen=True)
class Traffic:
    """Rows of the busiest rank: those that cross a link, those that stay, and copies at their destination."""

    remote_rows: int
    own_rows: int
    remote_pairs: int  # one row for each (token, expert), as a sender without deduplication has it
    copies_per_row: float  # (token, expert) pairs for each (token, rank) row: the local stores of expert_major

    def remote_bytes(self, op: str, dtype: str, hidden: int, one_row_a_pair: bool = False) -> int:
        """Bytes over the link; scales of FP8 rows count, ids and weights do not."""
        rows = self.remote_pairs if one_row_a_pair else self.remote_rows
        crossings = 4 if op == "dispatch_combine_fwd_bwd" else 1
        return crossings * rows * row_bytes(dtype, hidden)


def row_bytes(dtype: str, hidden: int) -> int:
    return hidden * ELEMENT_BYTES[dtype] + (-(-hidden // FP8_BLOCK) * 4 if dtype == "fp8" else 0)


def measure_traffic(world: World, shape: Shape, idx_TK: Tensor) -> Traffic:
    """Collective."""
    in_rank_TW = rows_to_ranks(idx_TK, shape.num_experts, world.size)
    owner_TK = owners(shape.num_experts, world.size)[idx_TK]
    mine = torch.stack([in_rank_TW.sum(dim=0), torch.bincount(owner_TK.flatten(), minlength=world.size)])
    every = [torch.empty_like(mine) for _ in range(world.size)]
    dist.all_gather(every, mine, group=world.group)
    rows_WW, pairs_WW = torch.stack(every, dim=1)  # [from, to]

    def busiest(counts_WW: Tensor) -> int:
        remote_WW = counts_WW.clone().fill_diagonal_(0)
        return int(torch.maximum(remote_WW.sum(dim=0), remote_WW.sum(dim=1)).max())

    return Traffic(
        busiest(rows_WW),
        int(rows_WW.diagonal().max()),
        busiest(pairs_WW),
        float(pairs_WW.sum()) / max(1, int(rows_WW.sum())),
    )
