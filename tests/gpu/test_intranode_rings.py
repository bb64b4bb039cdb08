"""Rows that go round the rings in shared memory many times: long ones, many of them, few SMs."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import moe_ep
from moe_ep._native import require
from moe_ep.handle import DispatchHandle
from tests.helpers.ranks import Pools

pytestmark = pytest.mark.gpu
NUM_EXPERTS, NUM_TOPK, NUM_SMS = 32, 8, 2


def _inputs(rank: int, hidden: int, num_tokens: int) -> tuple[Tensor, Tensor, Tensor]:
    """x [T, H], ids [T, K] with some -1, weights [T, K]; T differs between ranks."""
    num_tokens += 90 * rank
    generator = torch.Generator("cuda").manual_seed(rank)
    x = torch.randint(-64, 64, (num_tokens, hidden), generator=generator, device="cuda").bfloat16()
    scores = torch.rand(num_tokens, NUM_EXPERTS, generator=generator, device="cuda")
    ids = scores.topk(NUM_TOPK, dim=1).indices
    ids[torch.rand(ids.shape, generator=generator, device="cuda") < 0.2] = -1
    ids[::50] = -1
    return x, ids, torch.rand(ids.shape, generator=generator, device="cuda")


def _first_dispatch(buffer: moe_ep.Buffer, x: Tensor, ids: Tensor) -> tuple[Tensor, DispatchHandle]:
    per_rank, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(ids, NUM_EXPERTS)
    rows, _, _, _, handle, _ = buffer.dispatch(
        x, num_tokens_per_rank=per_rank, is_token_in_rank=in_rank, num_tokens_per_expert=per_expert, topk_idx=ids,
        topk_weights=torch.ones(ids.shape, device="cuda"),
    )  # fmt: skip
    assert isinstance(rows, Tensor)
    assert handle is not None
    return rows, handle


def _results(
    group: dist.ProcessGroup | None, hidden: int, num_tokens: int, bulk: bool, registered: bool
) -> dict[str, Tensor]:
    rank = 0 if group is None else group.rank()
    x, ids, weights = _inputs(rank, hidden, num_tokens)
    with (
        mock.patch.object(require(), "has_bulk_copies", return_value=bulk),
        moe_ep.Buffer(group, backend="intranode", num_sms=NUM_SMS, timeout_secs=30) as buffer,
    ):
        rows, handle = _first_dispatch(buffer, x, ids)

        def given(tensor: Tensor) -> Tensor:
            return buffer.empty(tensor.shape, tensor.dtype).copy_(tensor) if registered else tensor

        again = buffer.dispatch(given(x), handle=handle)[0]
        y = buffer.combine(given(rows), handle, bias=(x, x))[0]
        numbers = torch.arange(x.shape[0], device="cuda")
        bytes_8 = (numbers % 100).to(torch.uint8).unsqueeze(1).expand(-1, hidden).contiguous()
        scales = numbers.float().unsqueeze(1).expand(-1, hidden // 128).contiguous()
        rows_8, received = buffer.dispatch((given(bytes_8).view(torch.float8_e4m3fn), given(scales)), handle=handle)[0]

        leaf, factors = x.clone().requires_grad_(), weights.clone().requires_grad_()
        out = moe_ep.dispatch(buffer, leaf, ids, factors, num_experts=NUM_EXPERTS, alignment=4)
        z = moe_ep.combine(buffer, out.x * 2, out.handle, out.topk_weights)
        z.backward(x)
        buffer.check()
        assert leaf.grad is not None
        assert factors.grad is not None
        results = {"rows": rows, "again": again, "y": y, "rows_8": rows_8.view(torch.uint8), "scales": received}
        results |= {"major": out.x.detach(), "z": z.detach(), "dx": leaf.grad, "dw": factors.grad}
        torch.cuda.synchronize()
        return {name: value.clone() for name, value in results.items()}


def _check(group: dist.ProcessGroup | None, hidden: int, num_tokens: int, registered: bool) -> None:
    rank, size = (0, 1) if group is None else (group.rank(), group.size())
    x, ids, weights = _inputs(rank, hidden, num_tokens)
    fast, plain = (_results(group, hidden, num_tokens, bulk, registered and bulk) for bulk in (True, False))
    for name in fast:
        if name != "dw":
            assert torch.equal(fast[name], plain[name]), f"{name} of the two paths differ"
    torch.testing.assert_close(fast["dw"], plain["dw"], rtol=1e-5, atol=1e-3)
    # What must come out, without a word of the kernels: a token comes home from each of its ranks.
    owner = torch.where(ids >= 0, ids * size // NUM_EXPERTS, -1)
    num_ranks = torch.stack([(owner == other).any(dim=1) for other in range(size)]).sum(dim=0)
    assert torch.equal(fast["rows"], fast["again"])
    assert torch.equal(fast["y"], (x.float() * (num_ranks + 2).unsqueeze(1)).bfloat16())
    tokens = fast["scales"][:, 0].long()
    assert torch.equal(fast["scales"], tokens.float().unsqueeze(1).expand_as(fast["scales"]))
    assert torch.equal(fast["rows_8"], (tokens % 100).to(torch.uint8).unsqueeze(1).expand_as(fast["rows_8"]))
    total = (weights * (ids >= 0)).double().sum(dim=1, keepdim=True) * 2
    torch.testing.assert_close(fast["z"].double(), x.double() * total, rtol=3e-2, atol=0.5)
    torch.testing.assert_close(fast["dx"].double(), x.double() * total, rtol=3e-2, atol=0.5)
    square = (2 * x.double().square().sum(dim=1, keepdim=True) * (ids >= 0)).float()
    torch.testing.assert_close(fast["dw"], square, rtol=1e-4, atol=1e-2)


@pytest.mark.parametrize("registered", [False, True], ids=["copied", "registered"])
@pytest.mark.parametrize("hidden", [1024, 2048, 7168])
@pytest.mark.parametrize("world", [1, 2, 4])
def test_rings_that_wrap_lose_no_row(ranks: Pools, world: int, hidden: int, registered: bool) -> None:
    ranks.run(_check, world, hidden, 700, registered, timeout_secs=120)


@pytest.mark.parametrize("num_tokens", [4700, 9000])
@pytest.mark.parametrize("world", [2, 4])
def test_a_flag_waits_for_all_warps_that_store_its_part(ranks: Pools, world: int, num_tokens: int) -> None:
    """Above 4096 tokens a rank a part has more rows than a warp stores."""
    ranks.run(_check, world, 1024, num_tokens, False, timeout_secs=120)
