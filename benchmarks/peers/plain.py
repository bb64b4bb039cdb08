"""The same job written plainly: one count and two payload `all_to_all_single`, index_select, index_add.

Every (token, expert) pair travels as a row of its own, sorted by expert; the weights stay at home. Autograd derives the
rest from two small Functions.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.processes import World
from benchmarks.systems import DTYPES, Case, Inputs, System
from benchmarks.timing import Call


class _AllToAll(torch.autograd.Function):
    """Rows to their ranks; the backward swaps the two lists of counts."""

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, group: dist.ProcessGroup, send_counts: list[int], recv_counts: list[int]
    ) -> Tensor:
        ctx.group, ctx.send_counts, ctx.recv_counts = group, send_counts, recv_counts
        out = rows.new_empty(sum(recv_counts), rows.shape[1])
        dist.all_to_all_single(out, rows.contiguous(), recv_counts, send_counts, group=group)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        out = grad.new_empty(sum(ctx.send_counts), grad.shape[1])
        dist.all_to_all_single(out, grad.contiguous(), ctx.send_counts, ctx.recv_counts, group=ctx.group)
        return out, None, None, None


def dispatch_combine(
    group: dist.ProcessGroup, x_TH: Tensor, topk_idx_TK: Tensor, topk_weights_TK: Tensor, num_experts: int
) -> Tensor:
    """Dispatch to expert-major rows, identity experts, weighted combine: [T, H] -> [T, H]. No -1, E divisible by W."""
    world, num_topk = dist.get_world_size(group), topk_idx_TK.shape[1]
    num_local = num_experts // world
    flat = topk_idx_TK.reshape(-1)
    order = torch.argsort(flat, stable=True)
    token = order // num_topk
    counts_E = torch.bincount(flat, minlength=num_experts)
    received_E = torch.empty_like(counts_E)
    dist.all_to_all_single(received_E, counts_E, group=group)
    send_counts = counts_E.view(world, num_local).sum(1).tolist()
    recv_counts = received_E.view(world, num_local).sum(1).tolist()

    rows = _AllToAll.apply(x_TH.index_select(0, token), group, send_counts, recv_counts)
    expert = torch.arange(num_local, device=flat.device).repeat(world).repeat_interleave(received_E)
    by_expert = torch.argsort(expert, stable=True)
    rows = rows.index_select(0, by_expert)  # what the experts would see

    back = torch.empty_like(by_expert)
    back[by_expert] = torch.arange(by_expert.numel(), device=flat.device)
    home = _AllToAll.apply(rows.index_select(0, back), group, recv_counts, send_counts)
    home = home * topk_weights_TK.reshape(-1).index_select(0, order).unsqueeze(1)
    return torch.zeros_like(x_TH).index_add(0, token, home)


def missing(world: World) -> str | None:
    return "plain needs NCCL, one GPU a rank" if world.device.type == "cuda" and not world.has_nccl else None


class Plain(System):
    """The whole round trip, forward and backward; it has no single operations to time."""

    name = "plain"
    backend = "torch"
    transport = "collectives"
    one_row_a_pair = True

    def __init__(self, inputs: Inputs) -> None:
        self.inputs = inputs

    def call(self, case: Case, dtype: str, registered: bool) -> Call | None:
        if case[0] != "dispatch_combine_fwd_bwd" or registered or dtype not in DTYPES:
            return None
        inputs, world = self.inputs, self.inputs.world
        rows = inputs.rows(dtype)
        assert isinstance(rows, Tensor)
        x, weights = rows.clone().requires_grad_(), inputs.weights_TK.clone().requires_grad_()
        g = torch.Generator(device=world.device).manual_seed(4000 + world.rank)
        dy = torch.randn(x.shape, generator=g, device=x.device).to(x.dtype)

        def run() -> Tensor:
            y = dispatch_combine(world.group, x, inputs.idx_TK, weights, inputs.shape.num_experts)
            return torch.autograd.grad(y, (x, weights), dy)[0]

        return run

    def close(self) -> None:
        pass
