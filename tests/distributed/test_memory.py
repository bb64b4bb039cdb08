"""No tensor of an exchange is larger than its rows: no masks over (tokens, experts, capacity), no padded copies."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import moe_ep
from tests.helpers.ranks import Pools

TOKENS, HIDDEN, NUM_EXPERTS, NUM_TOPK = 64, 128, 16, 4


class _LargestTensor(TorchDispatchMode):
    """Remembers the most elements that any operation returned."""

    def __init__(self) -> None:
        super().__init__()
        self.numel, self.operation = 0, ""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(tensor, Tensor) and tensor.element_size() >= 4 and tensor.numel() > self.numel:
                self.numel, self.operation = tensor.numel(), str(func)
        return result


def _exchange(group: dist.ProcessGroup, layout: str, exact: bool) -> tuple[int, str, int]:
    rank = dist.get_rank(group)
    g = torch.Generator().manual_seed(rank)
    x = torch.randn(TOKENS, HIDDEN, generator=g, requires_grad=True)
    idx = torch.rand(TOKENS, NUM_EXPERTS, generator=g).argsort(1)[:, :NUM_TOPK]
    weights = torch.rand(TOKENS, NUM_TOPK, generator=g, requires_grad=True)
    with moe_ep.Buffer(group, timeout_secs=20) as buffer, _LargestTensor() as largest:
        out = moe_ep.dispatch(buffer, x, idx, weights, num_experts=NUM_EXPERTS, layout=layout)
        used = out.topk_weights if layout == "expert_major" else None
        moe_ep.combine(buffer, out.x, out.handle, used, exact=exact).sum().backward()
    return largest.numel, largest.operation, max(out.x.shape[0], TOKENS * NUM_TOPK if exact else TOKENS)


@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize(("layout", "exact"), [("compact", False), ("expert_major", False), ("expert_major", True)])
def test_no_tensor_is_larger_than_the_rows(ranks: Pools, layout: str, exact: bool, world: int) -> None:
    for numel, operation, num_rows in ranks.run(_exchange, world, layout, exact):
        sent = min(world, NUM_TOPK) * TOKENS  # rows that leave, one a (token, rank) at most
        assert numel <= max(num_rows, sent) * HIDDEN, operation
