"""Backends, handles and requests for tests of backend `intranode` without a GPU."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from moe_ep.backends.base import DispatchRequest
from moe_ep.backends.intranode import IntranodeBackend
from moe_ep.handle import DispatchHandle, Layout
from moe_ep.placement import ExpertPlacement
from tests.helpers.fake_exchange import FakeExchange, FakeNode, Launch

WORLD, RANK = 2, 1
PATIENCE_SECS = 30.0
NUM_TOKENS, NUM_TOPK, NUM_EXPERTS, NUM_COMPACT, NUM_ROWS = 5, 2, 6, 7, 12
RANK_ROWS = (3, 4, 5, 3)  # from rank i to rank j at [i * W + j]; rank 1 gets 4 + 3


def on_cpu(backend: IntranodeBackend) -> IntranodeBackend:
    """The tensors of these tests lie where there is memory."""
    backend._device = torch.device("cpu")
    return backend


def construct(node: FakeNode) -> list[IntranodeBackend]:
    return node.run(lambda rank: on_cpu(IntranodeBackend(node.group(rank), PATIENCE_SECS)))


def fake_of(backend: IntranodeBackend) -> FakeExchange:
    exchange = backend._exchange
    assert isinstance(exchange, FakeExchange)
    return exchange


def newest(backend: IntranodeBackend) -> Launch:
    return fake_of(backend).launches[-1]


def names(backend: IntranodeBackend) -> list[str]:
    return [launch.name for launch in fake_of(backend).launches]


def make_handle(layout: Layout = "expert_major", **changes: Any) -> DispatchHandle:
    """The handle of rank 1 of 2, with 3 of 6 experts. No kernel reads what is in its tensors."""
    expert_major = layout == "expert_major"
    handle = DispatchHandle(
        ranks=(0, 1),
        rank=RANK,
        uid=77,
        placement=88,
        layout=layout,
        num_tokens=NUM_TOKENS,
        num_topk=NUM_TOPK,
        num_experts=NUM_EXPERTS,
        num_rows=NUM_ROWS if expert_major else NUM_COMPACT,
        alignment=4 if expert_major else 1,
        x_needs_grad=True,
        weights_need_grad=True,
        overflowed=False,
        send_counts=(5, 3),
        recv_counts=(4, 3),
        recv_pairs=(4, 3),
        rank_tokens=(4, NUM_TOKENS),
        rank_rows=RANK_ROWS,
        num_channels=1,
        slot_rank=torch.zeros(NUM_TOKENS, NUM_TOPK, dtype=torch.int64),
        send_token=torch.zeros(8, dtype=torch.int64),
        recv_token=torch.zeros(NUM_COMPACT, dtype=torch.int32),
        row_pair=torch.zeros(NUM_ROWS if expert_major else 0, dtype=torch.int64),
        geometry=torch.zeros(4 + 2 + 4 + 2 * 65 + 2 * 3 + 1, dtype=torch.int32),
        token_row=torch.zeros(NUM_TOKENS, WORLD, dtype=torch.int32),
        pair_row=torch.zeros(NUM_COMPACT if expert_major else 0, NUM_TOPK, dtype=torch.int32),
    )
    return replace(handle, **changes)


def one_rank(handle: DispatchHandle) -> DispatchHandle:
    return replace(
        handle,
        ranks=(0,),
        rank=0,
        rank_tokens=(handle.num_tokens,),
        rank_rows=(handle.num_tokens,),
        recv_counts=(handle.num_tokens,),
        geometry=torch.zeros(4 + 1 + 1 + 65 + 2 * 6 + 1, dtype=torch.int32),
    )


def make_request(num_tokens: int, world: int = 1, hidden: int = 4, **changes: Any) -> DispatchRequest:
    """Two experts a rank, two slots a token."""
    values: dict[str, Any] = {
        "x": torch.ones(num_tokens, hidden),
        "topk_idx": torch.zeros(num_tokens, 2, dtype=torch.int64),
        "topk_weights": None,
        "placement": ExpertPlacement.balanced(2 * world, world),
        "layout": "compact",
        "alignment": 1,
        "max_rows": None,
        "num_channels": 1,
        "x_needs_grad": False,
        "weights_need_grad": False,
    }
    return DispatchRequest(**(values | changes))
