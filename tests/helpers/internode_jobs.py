"""What ranks do with a buffer between nodes, over any hop: compared with torch.distributed, and counted."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import moe_ep
from moe_ep.backends.internode_kernels import InternodeKernelsBackend
from tests.helpers.compare import assert_close, assert_same_bits
from tests.helpers.routing import make_inputs

NUM_TOPK = 4


def _both_ways(buffer: moe_ep.Buffer, inputs: list[Tensor], layout: str, num_experts: int) -> dict[str, Tensor]:
    """A dispatch, its combine and their gradients, of values that no sum holds without rounding."""
    x, idx, weights = (tensor.clone() for tensor in inputs)
    x.requires_grad_()
    weights.requires_grad_()
    out = moe_ep.dispatch(buffer, x, idx, weights, num_experts=num_experts, layout=layout, alignment=4)
    assert out.topk_weights is not None
    y = moe_ep.combine(buffer, out.x * 1.1, out.handle, out.topk_weights if layout == "expert_major" else None)
    scale = torch.linspace(-1, 1, y.shape[1], dtype=torch.float64).to(y.device, y.dtype)
    ((y * scale).sum() + (out.topk_weights * 1.7).sum()).backward()
    assert x.grad is not None
    assert weights.grad is not None
    return {"rows": out.x.detach(), "y": y.detach(), "dx": x.grad, "dw": weights.grad}


def as_torch_does(
    group: dist.ProcessGroup,
    hop: str,
    device: str,
    ranks_per_node: int,
    layout: str,
    num_tokens: int,
    hidden: int,
    num_topk: int = NUM_TOPK,
) -> int:
    """Tokens of another number on every rank. How many (token, other node) pairs there are: so many rows crossed."""
    world, rank = dist.get_world_size(group), dist.get_rank(group)
    g = torch.Generator().manual_seed(7)
    num_experts = 4 * world
    inputs = []
    for other in range(world):
        idx = torch.rand(num_tokens - 7 * other, num_experts, generator=g).argsort(dim=1)[:, :num_topk]
        idx[torch.rand(idx.shape, generator=g) < 0.2] = -1
        x = torch.randn(idx.shape[0], hidden, generator=g).bfloat16()
        inputs.append((x, idx, torch.rand(idx.shape, generator=g)))
    settings: dict[str, Any] = {"backend": "internode", "ranks_per_node": ranks_per_node, "timeout_secs": 20}
    with moe_ep.Buffer(group, hop="torch", **settings) as one:
        expected = _both_ways(one, list(inputs[rank]), layout, num_experts)
    with moe_ep.Buffer(group, hop=hop, **settings) as two:
        backend = two.backend
        assert isinstance(backend, InternodeKernelsBackend)
        mine = [tensor.to(device) for tensor in inputs[rank]]
        for _ in range(3):  # the rail's rounds count on, and the slots of the node alternate
            actual = _both_ways(two, mine, layout, num_experts)
            for name in ("rows", "y", "dx"):
                assert_same_bits(actual[name], expected[name], name)
            assert_close(actual["dw"], expected["dw"], 1e-5, "dw")

        def sent_bytes() -> int:
            return 0 if backend.rail is None else backend.rail.native.sent_bytes()

        assert (backend.rail is None) == (world == ranks_per_node), "one node has no rail"
        before = sent_bytes()
        moe_ep.dispatch(two, mine[0], mine[1], None, num_experts=num_experts, layout=layout)
        crossed = sent_bytes() - before
        two.check()
    node_TK = torch.where(inputs[rank][1] < 0, -1, inputs[rank][1] // 4 // ranks_per_node)
    others = [node for node in range(world // ranks_per_node) if node != rank // ranks_per_node]
    pairs = sum(int((node_TK == node).any(dim=1).sum()) for node in others)
    assert crossed == pairs * hidden * 2
    return pairs


def low_level(group: dist.ProcessGroup, hop: str, device: str, ranks_per_node: int) -> list[Tensor]:
    """FP8 rows with scales, bias, summed weights, an event, a fixed number of rows, one too small, a copied handle."""
    world, rank = dist.get_world_size(group), dist.get_rank(group)
    inputs = make_inputs("holes", "ragged", world, 128, NUM_TOPK, 2 * world, torch.bfloat16)[rank]
    x, idx, weights = (tensor.to(device) for tensor in inputs)
    with moe_ep.Buffer(group, backend="internode", hop=hop, ranks_per_node=ranks_per_node, timeout_secs=20) as buffer:
        per_rank, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(idx, 2 * world)
        layout = {"num_tokens_per_rank": per_rank, "is_token_in_rank": in_rank, "num_tokens_per_expert": per_expert}
        scales = torch.arange(x.shape[0], device=device).float().unsqueeze(1) + rank
        (rows, row_scales), _, row_weights, _, handle, _ = buffer.dispatch(
            (x.to(torch.float8_e4m3fn), scales), topk_idx=idx, topk_weights=weights, **layout
        )
        assert handle is not None
        y, home_weights, event = buffer.combine(
            rows.bfloat16(), handle, topk_weights=row_weights, bias=(x, x / 3), async_finish=device == "cuda"
        )
        if device == "cuda":
            event.current_stream_wait()
        common: dict[str, Any] = {"num_experts": 2 * world, "layout": "expert_major"}
        fixed = moe_ep.dispatch(buffer, x, idx, weights, max_rows=64, **common)
        buffer.check()
        small = moe_ep.dispatch(buffer, x, idx, weights, max_rows=1, **common)
        try:
            buffer.check()
            overflowed = False
        except RuntimeError as error:
            overflowed = "max_rows" in str(error)
        again = buffer.dispatch(x, handle=copy.copy(handle) if rank == 0 else handle)[0]
        assert isinstance(again, Tensor)
        total = buffer.all_reduce(torch.ones(3, dtype=torch.int64, device=device) * rank)
        lost = moe_ep.combine(buffer, small.x, small.handle).isnan()
        results = [rows.float(), row_scales, y, home_weights, fixed.x, fixed.topk_weights, again, total]
        results += [small.x.isnan(), lost, torch.tensor(overflowed)]
    return [tensor.cpu() for tensor in results if tensor is not None]
