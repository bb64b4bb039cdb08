"""One row for each (token, rank), packed by destination: what a careful user of plain collectives sends.

Rows come out in ascending (source rank, source token), as those of a compact dispatch.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.systems import Inputs, Rows


@dataclass(frozen=True)
class Packing:
    """token [P] of each packed row, and rows sent to and received from each rank."""

    token: Tensor
    send_counts: list[int]
    recv_counts: list[int]


def pack(inputs: Inputs) -> Packing:
    """Counts on the device, exchanges them, waits for them. Collective."""
    world = inputs.world
    num_local = inputs.shape.num_experts // world.size
    owner_TK = inputs.idx_TK // num_local
    in_rank_TW = torch.zeros(inputs.shape.tokens, world.size, dtype=torch.bool, device=world.device)
    in_rank_TW.scatter_(1, owner_TK, True)
    sends = in_rank_TW.sum(dim=0)
    receives = torch.empty_like(sends)
    dist.all_to_all_single(receives, sends, group=world.group)
    both = torch.stack([sends, receives]).tolist()
    return Packing(in_rank_TW.t().nonzero()[:, 1], both[0], both[1])


def joined(rows: Rows) -> Tensor:
    """[T, bytes] uint8: an FP8 row with its scales, so that one exchange carries both; other rows unchanged."""
    if isinstance(rows, Tensor):
        return rows
    return torch.cat([rows[0].view(torch.uint8), rows[1].view(torch.uint8)], dim=1)


def split(rows: Tensor, like: Rows) -> Rows:
    """The reverse of `joined`."""
    if isinstance(like, Tensor):
        return rows
    hidden = like[0].shape[1]
    return rows[:, :hidden].view(like[0].dtype), rows[:, hidden:].contiguous().view(torch.float32)


def add_up(home: Tensor, packing: Packing, num_tokens: int) -> Tensor:
    """[T, H]: rows that came home, in the order of `packing.token`, added in float32 by rank."""
    y_TH = torch.zeros(num_tokens, home.shape[1], dtype=torch.float32, device=home.device)
    for rows, token in zip(home.split(packing.send_counts), packing.token.split(packing.send_counts), strict=True):
        y_TH.index_add_(0, token, rows.float())
    return y_TH.to(home.dtype)
