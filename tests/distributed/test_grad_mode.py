"""A rank under `torch.no_grad` would be missing in the backward of the others: dispatch says so on all of them."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.flop_counter import FlopCounterMode

import moe_ep
from tests.helpers.ranks import Pools
from tests.helpers.scale_experts import caught


def _modes(group: dist.ProcessGroup, way: str) -> list[tuple[type[BaseException] | None, str]]:
    """Rank 1 off and the others on; all off; all on, rank 1 without anything that needs a gradient."""
    rank, seen = dist.get_rank(group), []
    torch._dynamo.reset()
    with moe_ep.Buffer(group, timeout_secs=20) as buffer:

        def exchange(x: torch.Tensor) -> torch.Tensor:
            idx = torch.zeros(x.shape[0], 1, dtype=torch.int64)
            out = moe_ep.dispatch(buffer, x, idx, num_experts=2)
            return moe_ep.combine(buffer, out.x, out.handle)

        call: Any = torch.compile(exchange, backend="aot_eager", fullgraph=True) if way == "compiled" else exchange
        watcher = partial(FlopCounterMode, display=False) if way == "watched" else nullcontext
        for off, needs_grad in (([1], True), ([0, 1, 2], True), ([], rank != 1)):
            x = torch.ones(3, 4, requires_grad=needs_grad)
            with torch.set_grad_enabled(rank not in off), watcher():
                seen.append(caught(lambda x=x: call(x)))  # type: ignore[misc]
    return seen


@pytest.mark.parametrize("way", ["eager", "watched", "compiled"])
def test_one_rank_without_gradients_is_refused_on_all(ranks: Pools, way: str) -> None:  # case P07
    for seen in ranks.run(_modes, 3, way, timeout_secs=100):
        (kind, text), *others = seen
        assert kind is moe_ep.ConfigError, text
        assert "disagree on whether gradients are enabled (torch.no_grad): rank 0 has True, rank 1 has False" in text
        assert others == [(None, "")] * 2
